"""Masks of a group's parameters ("exp_avg_mask", DeepSpeed's name): 0 where an element may not move.

Rests on `bucket.py`. A mask is the whole parameter's; each rank keeps the part of what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..model_parallel import local
from ..usage.contract import Group
from .bucket import Bucket


class Masks:
    """The masks of all groups, by parameter."""

    def __init__(self) -> None:
        self._of_group: dict[int, dict[Tensor, Tensor]] = {}

    def read(self, rank: int, g: int, group: Group, named: Iterable[tuple[Tensor, str]]) -> None:
        """Take over a group's masks: a tensor for all its parameters, or one for each. Raises ValueError.

        A mask of as many elements as its parameter may be flat, as DeepSpeed's optimizers take it.
        """
        masks = group.get("exp_avg_mask")
        if masks is None:
            self._of_group.pop(g, None)
            return
        named = list(named)
        per_parameter = [masks] * len(named) if isinstance(masks, Tensor) else list(masks)
        if len(per_parameter) != len(named):
            raise ValueError(
                f"rank {rank}: exp_avg_mask of group {g} has {len(per_parameter)} masks for {len(named)} parameters; "
                "give one tensor, or one for each"
            )
        pairs = zip(named, per_parameter, strict=True)
        per_parameter = [m.view(p.shape) if m.dim() == 1 and m.numel() == p.numel() else m for (p, _), m in pairs]
        for (p, name), mask in zip(named, per_parameter, strict=True):
            try:
                fits = torch.broadcast_shapes(mask.shape, p.shape) == p.shape
            except RuntimeError:
                fits = False
            if not fits:
                raise ValueError(
                    f"rank {rank}: exp_avg_mask of {name} has shape {tuple(mask.shape)}, which does not broadcast to "
                    f"the parameter's {tuple(p.shape)}"
                )
        pairs = zip(named, per_parameter, strict=True)
        self._of_group[g] = {p: _local_mask(mask, p).to(p.device, torch.float32) for (p, _), mask in pairs}

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether the bucket's group has masks."""
        return bucket.group_index in self._of_group

    def gradients(self, bucket: Bucket) -> list[Tensor | None]:
        """The bucket's gradients where they lie, or in new tensors where a mask is on them. Raises as `gradients`."""
        grads, masks = bucket.gradients(), self._of_group.get(bucket.group_index)
        if masks is None:
            return grads
        return [None if g is None else g * masks[p] for p, g in zip(bucket.params, grads, strict=True)]

    def apply_(self, bucket: Bucket) -> None:
        """The bucket's buffer ← itself times the masks, one for each parameter, where there are any."""
        masks = self._of_group.get(bucket.group_index)
        if masks is not None:
            for p, view in zip(bucket.params, bucket.views, strict=True):
                view.mul_(masks[p])

    def may_move(self, bucket: Bucket) -> Tensor | None:
        """Flat, 1 where the masks let an element move, else 0; None where there are none."""
        masks = self._of_group.get(bucket.group_index)
        if masks is None:
            return None
        flat = torch.ones(bucket.layout.numel, device=bucket.device, dtype=torch.float32)
        for p, view in zip(bucket.params, bucket.layout.views(flat), strict=True):
            view.copy_(masks[p] != 0)
        return flat


def _local_mask(mask: Tensor, p: Tensor) -> Tensor:
    """The part of a mask that belongs to what this rank holds of p; the mask is the whole parameter's."""
    if not hasattr(p, "to_local"):
        return mask
    from torch.distributed.tensor import distribute_tensor

    whole = mask.expand(p.shape).to(p.device).contiguous()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))
