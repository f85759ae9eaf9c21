"""What happens around a dense optimizer's step (Adam, AdamW, Lamb): the vote on overflow, clipping by the global norm.

Its gradients are averaged before, inside the node by FSDP2 and between nodes by `onebit.dense`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from ...agreement.step_vote import Header, Summary, check_summaries
from ...arithmetic.squares import LARGEST_GRADIENT, bad_gradients, by_device
from ...comm import Transport
from ...comm.messages import gather_bytes
from ...lamb import Lamb
from ...model_parallel import ModelParallelGroup, local
from ..offload.optimizer import Offload


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def prepare(
    optimizer: torch.optim.Optimizer,
    transport: Transport,
    model_parallel_group: ModelParallelGroup,
    step: int,
    scale: float,
    max_norm: float,
) -> tuple[bool, float | None]:
    """Divide the gradients by the loss scale, and clip them by their global norm. All ranks call it.

    Args:
        optimizer: The dense optimizer.
        transport: The transport between all ranks.
        model_parallel_group: The ranks that hold this replica.
        step: The number of this step.
        scale: The loss scale.
        max_norm: The norm to clip to; 0 for no clipping and no norm.

    Returns:
        Whether the step counts, the same on all ranks, and the norm before clipping. It does not count if a gradient is
        not finite on any rank or, without clipping, too large for a variance; nothing has been changed then.

    Raises:
        DesyncError: On all ranks: they are not in the same step with the same options.
    """
    with_grad = [p for p in parameters(optimizer) if p.grad is not None]
    grads = [local(cast(Tensor, p.grad)) for p in with_grad]
    largest = [
        torch.stack([torch.linalg.vector_norm(grads[k], float("inf")).float() for k in those])
        for those in by_device(grads)
    ]
    limit = LARGEST_GRADIENT * scale if max_norm <= 0 else torch.finfo(torch.float32).max
    mine = all(bool((those <= limit).all()) for those in largest)
    if any(message != b"\1" for message in said_in_step(optimizer, transport, step, bytes([mine]))):
        return False, None
    if scale != 1.0 and grads:
        torch._foreach_div_(grads, scale)
    if max_norm <= 0:
        return True, None
    norm = model_parallel_group.global_norm(with_grad, grads)
    if grads:
        torch._foreach_mul_(grads, min(1.0, max_norm / (norm + 1e-6)))
    return True, norm


def said_in_step(optimizer: torch.optim.Optimizer, transport: Transport, step: int, mine: bytes) -> list[bytes]:
    """Gather each rank's message at the beginning of a step, of the same length on all ranks.

    Raises:
        DesyncError: As `prepare`.
    """
    # Pipeline stages may have different groups, but the first group's options must be the same on all ranks.
    header = Header.of(optimizer.param_groups[:1], step, f"{type(optimizer).__name__}, step()")
    messages = gather_bytes(transport, mine + header.summary().to_bytes())
    check_summaries(transport, header, [Summary.from_bytes(message[len(mine) :]) for message in messages])
    return [message[: len(mine)] for message in messages]


@contextmanager
def naming_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say what to do if a step fails because torch has no such operation on DTensors."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" not in str(error) and "placement" not in str(error):
            raise
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() does what torch cannot do with shards: take another optimizer, or "
            f"stage 0 in float32, which has whole parameters ({error})"
        ) from error


def bad_in(model: nn.Module) -> list[str]:
    """The parameters whose gradients on this rank are not finite, or too large for a variance."""
    return bad_gradients((name, local(p.grad)) for name, p in model.named_parameters() if p.grad is not None)


def has_sharded_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's moments are DTensors like its parameters. Our Lamb keeps plain local elements."""
    return not isinstance(stepping(optimizer), Lamb)


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that takes the steps, which may be inside another one that moves its state."""
    return optimizer.inner if isinstance(optimizer, Offload) else optimizer
