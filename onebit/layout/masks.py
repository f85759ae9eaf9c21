"""Masks of a group's parameters ("exp_avg_mask", DeepSpeed's name): 0 for elements that may not move.

A mask covers the whole parameter; each rank keeps the part for its elements, in its buckets (`Bucket.masks`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..comm import torch_versions
from ..model_parallel import local
from ..usage.contract import Group


def read_masks(rank: int, g: int, group: Group, named: Iterable[tuple[Tensor, str]]) -> dict[Tensor, Tensor] | None:
    """The local mask of each parameter of group g, float32 on its device; None if the group has no masks.

    The group has one mask for all its parameters, or one for each. A mask with as many elements as its parameter may be
    flat, as DeepSpeed's optimizers accept it.

    Args:
        rank: This rank, for messages.
        g: Index of the group, for messages.
        group: The param group.
        named: Its (parameter, name) pairs.

    Raises:
        ValueError: A mask does not fit.
    """
    masks = group.get("exp_avg_mask")
    if masks is None:
        return None
    named = list(named)
    per_parameter = [masks] * len(named) if isinstance(masks, Tensor) else list(masks)
    if len(per_parameter) != len(named):
        raise ValueError(
            f"rank {rank}: exp_avg_mask of group {g} has {len(per_parameter)} masks for {len(named)} parameters; "
            "give one tensor, or one for each"
        )
    found = {}
    for (p, name), mask in zip(named, per_parameter, strict=True):
        if mask.dim() == 1 and mask.numel() == p.numel():
            mask = mask.view(p.shape)
        try:
            fits = torch.broadcast_shapes(mask.shape, p.shape) == p.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"rank {rank}: exp_avg_mask of {name} has shape {tuple(mask.shape)}, which does not broadcast to "
                f"the parameter's {tuple(p.shape)}"
            )
        found[p] = _local_mask(mask, p).to(p.device, torch.float32)
    return found


def _local_mask(mask: Tensor, p: Tensor) -> Tensor:
    """The part of a whole parameter's mask that belongs to this rank's elements."""
    if not hasattr(p, "to_local"):
        return mask
    whole = mask.expand(p.shape).to(p.device).contiguous()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return local(torch_versions.distribute(whole, mesh, placements, source=None))
