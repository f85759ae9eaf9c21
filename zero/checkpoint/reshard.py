"""From one layout of a model over ranks to any other: which slices of the old ranks' states a new rank needs.

Every rank saves its optimizer's state as it is, and for each parameter the slice of the whole that it holds: its
`ParamSlice`. A new rank looks in the outlines of the old ones for the pieces that overlap its own (`plan`), reads those
parts of the old model, one at a time, each as the world of its replicas (`onebit.checkpoint.change_world_size`), and
cuts its slices out of them (`recut`). `onebit.checkpoint.portable` splits a state into single parameters. Apart from
reading, everything is pure: no communication; tensor and pipeline axes only mean other slices and other names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from ...checkpoint.change_world_size import gather_states
from ...checkpoint.parameter_state import ParameterState
from ...checkpoint.portable import Shared, put_together, take_apart
from ...model_parallel import local
from ...optimizer import CompressedOptimizer
from ..grid import GridShape

Index = tuple[slice, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class ParamSlice:
    """The slice of a parameter that a rank holds: `sizes` elements from `offsets` on, along each dim of `shape`.

    name: the parameter's name in the model. A shard may be empty; a parameter that is not sharded is one whole slice.
    """

    name: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: ParamSlice) -> tuple[Index, Index] | None:
        """The elements that both hold, as indices into this slice and into the other; None if there are none."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        stops = [
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        mine, theirs = (
            tuple(slice(a - o, b - o) for a, b, o in zip(starts, stops, piece.offsets, strict=True))
            for piece in (self, other)
        )
        return mine, theirs


def pieces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[ParamSlice]:
    """This rank's slices of the optimizer's parameters, in the order of their numbers in its state.

    A parameter outside of the model has no name. Raises ValueError if a shard is not one slice.
    """
    names: dict[Tensor, str] = {p: name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    return [_piece(names.get(p, ""), p) for group in optimizer.param_groups for p in group["params"]]


def _piece(name: str, p: Tensor) -> ParamSlice:
    shape, held = tuple(p.shape), tuple(local(p).shape)
    if not hasattr(p, "to_local"):
        return ParamSlice(name, shape, (0,) * len(shape), shape)
    chunks = p.__create_chunk_list__()  # type: ignore[attr-defined]  # as torch.distributed.checkpoint reads it
    if len(chunks) != 1 or tuple(chunks[0].sizes) != held:
        raise ValueError(f"this rank holds {held} of {name}, which is no one slice of it: {chunks}")
    return ParamSlice(name, shape, tuple(chunks[0].offsets), held)


def slice_of(p: Tensor) -> Index:
    """The elements of a parameter that this rank holds, as an index into the whole."""
    piece = _piece("", p)
    return tuple(slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.sizes, strict=True))


def parts_of(shape: GridShape) -> list[list[int]]:
    """The ranks of a grid by the part of the model that they hold: each list has all replicas of one part, in order."""
    firsts = (rank for rank in range(shape.world_size) if shape.coordinates(rank)["replica"] == 0)
    return [shape.along("replica", rank) for rank in firsts]


class CopyPlan(NamedTuple):
    """A copy from old parameter number `old` to new parameter number `new`: elements `there` to `here`.

    None: empty shard; copy whole-parameter scalars only.
    """

    old: int
    new: int
    there: Index | None
    here: Index | None


def plan(parts: Sequence[Sequence[ParamSlice]], here: Sequence[ParamSlice]) -> list[list[CopyPlan]]:
    """The copies from each part that give the slices here.

    parts: the slices of each part of the old model. Slices that are equal in several parts (norms of a tensor axis,
    embeddings tied between stages) are taken from the first. A parameter without slices in any part gets no copy.
    Raises ValueError if shapes differ, or the parts' slices do not cover one of here exactly once.
    """
    cuts: list[list[CopyPlan]] = [[] for _ in parts]
    places: dict[str, dict[ParamSlice, tuple[int, int]]] = {}
    for part, pieces in enumerate(parts):
        for number, piece in enumerate(pieces):
            places.setdefault(piece.name, {}).setdefault(piece, (part, number))
    for new, mine in enumerate(here):
        found = places.get(mine.name, {}) if mine.name else {}
        covered = 0
        for piece, (part, number) in found.items():
            if piece.shape != mine.shape:
                raise ValueError(f"{mine.name} has shape {piece.shape} there and {mine.shape} here")
            if (both := piece.overlap(mine)) is not None:
                cuts[part].append(CopyPlan(number, new, *both))
                covered += math.prod(s.stop - s.start for s in both[1])
        if found and covered != mine.numel:
            raise ValueError(f"the parts that were saved hold {covered} of {mine.numel} elements of {mine.name}")
        if found and covered == 0:  # an empty shard
            part, number = next(iter(found.values()))
            cuts[part].append(CopyPlan(number, new, None, None))
    return cuts


def recut(
    optimizer: torch.optim.Optimizer,
    here: Sequence[ParamSlice],
    cuts: Sequence[Sequence[CopyPlan]],
    read: Callable[[int], Iterable[StateDict]],
) -> StateDict:
    """The state of this rank's optimizer, for its `load_state_dict`, made by the copies of `plan`.

    here: its slices. read: gives the states of all replicas of a part, in order, one at a time. Only one part of the
    old states is in memory at a time, with sums over its replicas. Raises ValueError if the states of a part are not
    complete, or do not have enough for this optimizer.
    """
    states: dict[int, ParameterState] = {}
    shared: Shared | None = None
    for part, wanted in enumerate(cuts):
        if not wanted:
            continue
        old, common = _take_part(optimizer, read(part))
        if shared is None:
            shared = common
        else:
            shared.join(common)
        for cut in wanted:
            if cut.old in old:
                _paste(states, cut, here[cut.new], old[cut.old])
    if shared is None:
        raise ValueError("the checkpoint has nothing of the parameters that this rank trains")
    return put_together(optimizer, states, shared)


def _take_part(
    optimizer: torch.optim.Optimizer, replicas: Iterable[StateDict]
) -> tuple[dict[int, ParameterState], Shared]:
    if isinstance(optimizer, CompressedOptimizer):
        world = gather_states(replicas)
        return take_apart(optimizer, world.state, world.server_errors)
    return take_apart(optimizer, next(iter(replicas)))  # a dense optimizer's state is the same in all replicas


def _paste(states: dict[int, ParameterState], cut: CopyPlan, here: ParamSlice, old: ParameterState) -> None:
    """Copy a cut's elements; for the first cut of a parameter, also its whole-parameter values."""
    if cut.new not in states:
        empty = {name: torch.zeros(here.sizes, dtype=x.dtype, device="cpu") for name, x in old.elements.items()}
        states[cut.new] = ParameterState(old.group, old.phase, empty, dict(old.numbers))
    mine = states[cut.new]
    if mine.elements.keys() != old.elements.keys() or mine.phase != old.phase:
        raise ValueError(
            f"the parts of {here.name} have different state: {sorted(mine.elements)} in phase {mine.phase!r}, "
            f"{sorted(old.elements)} in phase {old.phase!r}"
        )
    if cut.there is not None and cut.here is not None:
        for name, x in old.elements.items():
            mine.elements[name][cut.here] = x[cut.there]


def saved_pieces(packed: Iterable[Sequence[Any]]) -> list[ParamSlice]:
    """The inverse of `packed_pieces`."""
    return [ParamSlice(name, *map(tuple, box)) for name, *box in packed]


def packed_pieces(pieces: Iterable[ParamSlice]) -> list[tuple[str, Sizes, Sizes, Sizes]]:
    """Slices as plain values for a checkpoint."""
    return [(piece.name, piece.shape, piece.offsets, piece.sizes) for piece in pieces]
