"""Parameters that stack matrices along a dimension, of each of which a rank holds a part: their placement and pieces.

An example are gate and up projections of experts, [E, 2·N, K]: a rank holds its rows of both. torch's placement for
that is `_StridedShard`, which gathers and distributes them; but a rank's part is no one slice of the whole, which
checkpoints have to know. torch uses the same placement on FSDP's axis with another meaning, so only the tensor axis
counts here. Pure: nothing is sent.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ...model_parallel import TENSOR_AXIS


def stack_placement(dim: int, count: int) -> Any:
    """The placement of a parameter that stacks `count` equal matrices along `dim`, each divided."""
    return _StridedShard(dim, split_factor=count)


def by_stack(x: Tensor, dim: int, count: int, ranks: int, rank: int) -> Tensor:
    """A rank's part of each of `count` matrices that x stacks along `dim`, as one tensor."""
    return torch.cat([matrix.tensor_split(ranks, dim)[rank] for matrix in x.chunk(count, dim)], dim)


def stack_of(p: Tensor) -> tuple[int, int] | None:
    """(dimension, number of matrices) of a DTensor with `stack_placement` on the tensor axis; None of any other."""
    if not isinstance(p, DTensor):
        return None
    for axis, place in zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=False):
        if axis == TENSOR_AXIS and isinstance(place, _StridedShard):
            return place.dim, int(place.split_factor)
    return None


def unstacked(p: Tensor) -> DTensor:
    """A view of such a DTensor with a separate dimension for the matrices, so that a rank holds one slice of it."""
    held = cast(DTensor, p)
    dim, count = cast("tuple[int, int]", stack_of(held))
    placements: list[Any] = []
    for place in held.placements:
        at = getattr(place, "dim", -1)
        placements.append(place if at < dim else Shard(at + 1))
    shape = torch.Size((*p.shape[:dim], count, p.shape[dim] // count, *p.shape[dim + 1 :]))
    return DTensor.from_local(
        held.to_local().detach().unflatten(dim, (count, -1)),
        held.device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta", dtype=torch.float32).stride(),
    )
