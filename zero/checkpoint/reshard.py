"""From one layout of a model over ranks to any other: which slices of the old ranks' states a new rank needs.

Every rank saves its optimizer's state as it is, and for each parameter the slice of the whole that it holds: its
`ParamSlice`. A new rank looks in the outlines of the old ones for the pieces that overlap its own (`plan`), reads those
parts of the old model, one at a time, each as the world of its replicas (`onebit.checkpoint.change_world_size`), and
cuts its slices out of them (`recut`). `onebit.checkpoint.portable` splits a state into single parameters. Apart from
reading, everything is pure: no communication; tensor and pipeline axes only mean other slices and other names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ..parallel.stacked import stack_of, unstacked
from .weights import plain

Index = tuple[slice, ...]
Sizes = tuple[int, ...]


class Box(NamedTuple):
    """Elements from `offsets` on in the whole, which a rank holds from `start` on along `dim`, from 0 on otherwise."""

    offsets: Sizes
    sizes: Sizes
    dim: int = 0
    start: int = 0

    def there(self) -> Index:
        """As an index into the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def here(self) -> Index:
        """As an index into what the rank holds."""
        starts = [self.start if dim == self.dim else 0 for dim in range(len(self.sizes))]
        return tuple(slice(o, o + n) for o, n in zip(starts, self.sizes, strict=True))


@dataclass(frozen=True)
class ParamSlice:
    """The slice of a parameter that a rank holds: `sizes` elements from `offsets` on, along each dim of `shape`.

    name: the parameter's name in the model. A shard may be empty; a parameter that is not sharded is one whole slice.
    stack: () or (dim, count) if the parameter stacks `count` equal matrices along `dim`, and the rank holds the same
    slice of each: sizes[dim] has those of all, and offsets[dim] is within a matrix.
    """

    name: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes
    stack: Sizes = ()

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def boxes(self) -> list[Box]:
        """Where the elements are in the whole: one box, or one for each stacked matrix."""
        if not self.stack:
            return [Box(self.offsets, self.sizes)]
        dim, count = self.stack
        apart, width = self.shape[dim] // count, self.sizes[dim] // count
        offsets, sizes = list(self.offsets), list(self.sizes)
        found = []
        for k in range(count):
            offsets[dim], sizes[dim] = self.offsets[dim] + k * apart, width
            found.append(Box(tuple(offsets), tuple(sizes), dim, k * width))
        return found

    def overlaps(self, other: ParamSlice) -> Iterator[tuple[Index, Index]]:
        """The elements that both hold, as indices into this slice and into the other; nothing if there are none."""
        for mine, theirs in itertools.product(self.boxes(), other.boxes()):
            starts = [max(a, b) for a, b in zip(mine.offsets, theirs.offsets, strict=True)]
            stops = [min(a.stop, b.stop) for a, b in zip(mine.there(), theirs.there(), strict=True)]
            if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                yield _within(mine, starts, stops), _within(theirs, starts, stops)


def _within(box: Box, starts: Sequence[int], stops: Sequence[int]) -> Index:
    """Elements of the whole that are in a box, as an index into what its rank holds."""
    return tuple(
        slice(here.start + a - o, here.start + b - o)
        for a, b, o, here in zip(starts, stops, box.offsets, box.here(), strict=True)
    )


def pieces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[ParamSlice]:
    """This rank's slices of the optimizer's parameters, in the order of their numbers in its state.

    A parameter outside of the model has no name. Raises ValueError if a shard is not one slice.
    """
    named = reversed(list(model.named_parameters(remove_duplicate=False)))
    names: dict[Tensor, str] = {p: plain(name) for name, p in named}
    return [_piece(names.get(p, ""), p) for group in optimizer.param_groups for p in group["params"]]


def _piece(name: str, p: Tensor) -> ParamSlice:
    shape, held = tuple(p.shape), tuple(local(p).shape)
    if not hasattr(p, "to_local"):
        return ParamSlice(name, shape, (0,) * len(shape), shape)
    stack = stack_of(p) or ()
    chunks = (unstacked(p) if stack else p).__create_chunk_list__()  # type: ignore[attr-defined]  # as torch reads it
    offsets, sizes = (tuple(chunks[0].offsets), tuple(chunks[0].sizes)) if len(chunks) == 1 else ((), ())
    if stack and sizes:  # a view with one more dimension, for the matrices
        dim, count = stack
        offsets = (*offsets[:dim], *offsets[dim + 1 :])
        sizes = (*sizes[:dim], count * sizes[dim + 1], *sizes[dim + 2 :])
    if sizes != held:
        raise ValueError(f"this rank holds {held} of {name}, which is no one slice of it: {chunks}")
    return ParamSlice(name, shape, offsets, held, stack)


def boxes_of(p: Tensor) -> list[Box]:
    """Where the elements of a parameter that this rank holds are in the whole."""
    return _piece("", p).boxes()


def fill(p: Tensor, whole: Tensor, held: Tensor | None = None) -> None:
    """Copy this rank's elements of a whole tensor into `held`, in place.

    Args:
        p: A parameter, which says which elements these are.
        whole: The whole tensor, in the parameter's shape.
        held: A plain tensor in the shape of p's local elements. Default None: these.
    """
    held = local(p) if held is None else held
    for box in boxes_of(p):
        held[box.here()].copy_(whole[box.there()])


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
            one, other = (piece, mine) if piece.shape == mine.shape else (_in_rows(piece), _in_rows(mine))
            if one.shape != other.shape:
                raise ValueError(f"{mine.name} has shape {piece.shape} there and {mine.shape} here")
            for both in one.overlaps(other):
                cuts[part].append(CopyPlan(number, new, *both))
                covered += math.prod(s.stop - s.start for s in both[1])
        if found and covered != mine.numel:
            raise ValueError(f"the parts that were saved hold {covered} of {mine.numel} elements of {mine.name}")
        if found and covered == 0:  # an empty shard
            part, number = next(iter(found.values()))
            cuts[part].append(CopyPlan(number, new, None, None))
    return cuts


def _in_rows(piece: ParamSlice) -> ParamSlice:
    """A scalar as one row: so the shards of some layouts hold it."""
    return piece if piece.shape else ParamSlice(piece.name, (1,), (0,), (1,))


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
            torch.atleast_1d(mine.elements[name])[cut.here] = torch.atleast_1d(x)[cut.there]


def saved_pieces(packed: Iterable[Sequence[Any]]) -> list[ParamSlice]:
    """The inverse of `packed_pieces`."""
    return [ParamSlice(name, *map(tuple, box)) for name, *box in packed]


def packed_pieces(pieces: Iterable[ParamSlice]) -> list[tuple[Any, ...]]:
    """Slices as plain values for a checkpoint; earlier versions read those without a stack."""
    return [
        (piece.name, piece.shape, piece.offsets, piece.sizes, *([piece.stack] if piece.stack else []))
        for piece in pieces
    ]
