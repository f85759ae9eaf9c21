"""What the engine does around a dense optimizer (Adam, AdamW, Lamb): the vote on overflow, clipping, its state.

Its gradients come averaged, inside the node by FSDP2 and between nodes by `onebit.dense`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ..comm import Transport
from ..lamb import Lamb
from ..replicas import gather_bytes
from ..shards import local

log = logging.getLogger(__name__)

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def prepare(optimizer: torch.optim.Optimizer, link: Transport, scale: float, max_norm: float) -> float | None:
    """Take the loss scale out of the gradients and clip them by their global norm; the norm before clipping.

    None, on all ranks, where a gradient is not finite on any: then nothing has been changed. All ranks; link: between
    all of them. max_norm: 0: no clipping, and the norm is 0.
    """
    with_grad = [p for p in parameters(optimizer) if p.grad is not None]
    largest = [
        torch.linalg.vector_norm(g, float("inf")).float()
        for g in (local(cast(Tensor, p.grad)) for p in with_grad)
        if g.numel() > 0
    ]
    mine = not largest or bool(torch.stack(largest).isfinite().all())
    if any(said != b"\1" for said in gather_bytes(link, bytes([mine]))):
        if link.rank == 0:
            log.warning("a gradient is not finite; all ranks skip the step")
        return None
    if scale != 1.0:
        for p in with_grad:
            cast(Tensor, p.grad).div_(scale)
    if max_norm <= 0 or not with_grad:
        return 0.0
    norm = nn.utils.clip_grad_norm_(with_grad, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def has_sharded_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its moments are DTensors as its parameters are. Our Lamb keeps the local elements, plain."""
    return not isinstance(optimizer, Lamb)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict]:
    """(tensors by name, sharded as the parameters are; everything else). Loads into any other sharding."""
    flat: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in flat.items() if name not in tensors}


def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, object]
) -> None:
    """Take back what `state_of` gave, and a checkpoint has filled."""
    flat: dict[str, Any] = {**rest, **tensors}
    set_optimizer_state_dict(model, optimizer, flat, options=_FLAT)
