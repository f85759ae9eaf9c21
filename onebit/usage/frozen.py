"""Parameters that are frozen (requires_grad=False), at construction or later, and those whose data has moved since."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model_parallel import local


def gradient_of(p: Tensor) -> Tensor | None:
    """p's gradient; None while p is frozen, whatever has been left in p.grad."""
    return p.grad if p.requires_grad else None


def refuse_unfrozen(rank: int, names: Sequence[str], present_by_rank: Sequence[Sequence[bool]]) -> None:
    """Raise RuntimeError where any rank has a gradient for one of these, which were frozen at construction.

    present_by_rank: by rank and parameter; the same on all ranks, so that all of them raise. rank: this one's.
    """
    for name, column in zip(names, zip(*present_by_rank, strict=True), strict=True):
        if any(column):
            ranks = [k for k, is_present in enumerate(column) if is_present]
            raise RuntimeError(
                f"rank {rank}: {name} has a gradient on rank {ranks}, but was frozen when the optimizer was "
                "constructed, and has no state. Leave it out of the groups until it is to be trained, and "
                "add_param_group it then, on all ranks before the same step; or construct with requires_grad=True and "
                "freeze it afterwards"
            )


def check_place(rank: int, p: Tensor, name: str, shape: torch.Size, device: torch.device) -> None:
    """Raise RuntimeError where p is not where and what it was when the optimizer was constructed."""
    held = local(p)
    if held.shape != shape or held.device != device:
        raise RuntimeError(
            f"rank {rank}: {name} is now {tuple(held.shape)} on {held.device}, at construction it was {tuple(shape)} "
            f"on {device}; move and resize a model before its optimizer is constructed, or construct another one"
        )
