"""The verdict on a step: this rank checks all buckets at once, and reads one answer from each device.

Then the parts of the model agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..agreement.step_vote import Ballot, DesyncError
from ..arithmetic.squares import gradients_are_finite, has_squares
from ..comm import Transport
from ..comm.codecs import Witness, all_finite
from ..layout.buckets import AnyBucket, B, Buckets
from ..model_parallel import ModelParallelGroup
from .bucket_step import Arrived, OwnersReplied


def verdicts(
    buckets: Sequence[AnyBucket], arrived: Sequence[Arrived], *, has_means: bool
) -> dict[torch.device, Tensor]:
    """For each device, whether everything that has arrived there is finite: bool, of no dimensions.

    Args:
        buckets: All buckets.
        arrived: Their meetings.
        has_means: Whether to check as well that a variance can take in the squares of the mean gradients. False if
            these will be clipped: then it can.
    """
    flags: dict[torch.device, Tensor] = {}
    for device in {bucket.device: None for bucket in buckets}:
        here = [each for bucket, each in zip(buckets, arrived, strict=True) if bucket.device == device]
        found = [all_finite([each.witness for each in here if each.witness is not None])]
        if has_means:
            found += [has_squares(each.mean_gradient) for each in here if each.mean_gradient is not None]
        flags[device] = found[0] if len(found) == 1 else torch.stack(found).all()
    return flags


def replies_are_finite(buckets: Sequence[AnyBucket], replies: Sequence[OwnersReplied]) -> dict[torch.device, Tensor]:
    """For each device, whether everything that owners have sent there is finite: bool, of no dimensions.

    Args:
        buckets: Buckets that wait for their owners' replies.
        replies: Their meetings.
    """
    witnesses: dict[torch.device, list[Witness]] = {}
    for bucket, reply in zip(buckets, replies, strict=True):
        witnesses.setdefault(bucket.device, []).append(reply.witness)
    return {device: all_finite(there) for device, there in witnesses.items()}


def all_parts_agree(parts: ModelParallelGroup, ballot: Ballot, is_good: bool, buckets: Buckets[B]) -> bool:
    """Whether the step is good on all parts of the model. All ranks that hold them.

    Args:
        parts: The ranks that hold the parts of this replica.
        ballot: The vote on the step, read.
        is_good: Whether the step is good on this part.
        buckets: All buckets.

    Raises:
        DesyncError: The parts are not in the same step, or have different learning rates.
        RuntimeError: A rank trains a parameter for which there is no state. On all ranks.
    """
    header, rank = ballot.header, ballot.transport.rank
    unfrozen = [vote.present[len(buckets.params) :] for vote in ballot.votes]
    numbers_of = parts.gather(float(is_good), float(any(map(any, unfrozen))), float(header.step), header.numbers[0])
    if any(is_unfrozen for _, is_unfrozen, *_ in numbers_of):
        parts.raise_on_all_ranks(RuntimeError, lambda: buckets.refuse_unfrozen(unfrozen))
    if len({numbers[2:] for numbers in numbers_of}) > 1:
        steps = ", ".join(f"step {step:g} with lr {lr:g} on part {k}" for k, (_, _, step, lr) in enumerate(numbers_of))
        raise DesyncError(
            f"rank {rank}: the parts of the model are not in the same step: {steps}; every rank must call step() "
            "equally often, with the same learning rate"
        )
    return all(good for good, *_ in numbers_of)


def is_good_alone(arrived: Sequence[Arrived]) -> bool:
    """Whether this rank's gradients are finite, in a step without traffic. Waits once for each device."""
    asked: dict[tuple[torch.device, float], list[Tensor]] = {}
    for each in arrived:
        for grad in each.grads:
            if grad is not None and grad.numel():
                asked.setdefault((grad.device, each.scale), []).append(grad)
    return all(gradients_are_finite(grads, scale, device) for (device, scale), grads in asked.items())


def reads_late(transport: Transport, device: torch.device) -> bool:
    """Whether votes are read together with the verdict, so that the host waits for the device once per step.

    If not, they are read before: over host memory they have arrived anyway, and ranks in different steps find out
    before they wait for each other's buckets.
    """
    return device.type != "cpu" and transport.reaches(device)
