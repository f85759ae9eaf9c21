"""Whether a step is good on this rank: all buckets are asked at once, and of each device one answer is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Transport
from ..comm.codecs import Witness, all_finite
from ..layout.buckets import AnyBucket
from .bucket_step import Arrived, CameDown
from .clip import gradients_are_finite, has_squares


def verdicts(
    buckets: Sequence[AnyBucket], arrived: Sequence[Arrived], *, has_means: bool
) -> dict[torch.device, Tensor]:
    """For each device, whether all that has arrived there is finite: bool, of no dimensions.

    has_means: and whether a variance can take the mean gradients in; those that will be clipped, it can.
    """
    flags: dict[torch.device, Tensor] = {}
    for device in {bucket.device: None for bucket in buckets}:
        said = [each for bucket, each in zip(buckets, arrived, strict=True) if bucket.device == device]
        found = [all_finite([each.witness for each in said if each.witness is not None])]
        if has_means:
            found += [has_squares(each.mean_gradient) for each in said if each.mean_gradient is not None]
        flags[device] = found[0] if len(found) == 1 else torch.stack(found).all()
    return flags


def came_down_finite(buckets: Sequence[AnyBucket], came_down: Sequence[CameDown]) -> dict[torch.device, Tensor]:
    """For each device, whether all that owners have sent there is finite: bool, of no dimensions."""
    witnesses: dict[torch.device, list[Witness]] = {}
    for bucket, said in zip(buckets, came_down, strict=True):
        witnesses.setdefault(bucket.device, []).append(said.witness)
    return {device: all_finite(there) for device, there in witnesses.items()}


def is_good_alone(arrived: Sequence[Arrived]) -> bool:
    """Whether this rank's gradients are finite, in a step without traffic: one wait for each device."""
    asked: dict[tuple[torch.device, float], list[Tensor]] = {}
    for each in arrived:
        for grad in each.grads:
            if grad is not None and grad.numel():
                asked.setdefault((grad.device, each.scale), []).append(grad)
    return all(gradients_are_finite(grads, scale, device) for (device, scale), grads in asked.items())


def reads_late(transport: Transport, device: torch.device) -> bool:
    """Whether votes are read together with the verdict, so that the host waits for the device once in a step.

    Elsewhere they are read before: what travels through host memory is there already, and ranks that are not in the
    same step learn it before they wait for each other's buckets.
    """
    return device.type != "cpu" and transport.reaches(device)
