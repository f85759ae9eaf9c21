"""The layout of a store: all parameters in sequence, cut into chunks, for each field of their state.

A field (master, exp_avg, ...) is one array of all elements, so a parameter's values of a field are contiguous, and a
checkpoint can show them as one tensor. A chunk is a range of elements: one extent in each field. A piece is the part of
a parameter in a chunk. Pure functions: no memory is allocated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .store import PAGE, Extent, rounded

UNIT = PAGE
"""Chunks begin, and parameters are cut, at multiples of this many elements: whole pages for fields of any dtype."""
_ALIGNED = 64


def elements_of(chunk_mb: float, fields: Mapping[str, torch.dtype]) -> int:
    """The most elements in a chunk of `chunk_mb` MB with these fields, a multiple of UNIT."""
    per_element = max(4, sum(dtype.itemsize for dtype in fields.values()))
    return max(1, int(chunk_mb * 2**20 / per_element) // UNIT) * UNIT


class Piece(NamedTuple):
    """Elements start to stop of a parameter, which begin at `at` in their chunk."""

    param: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Chunk:
    """Elements start to start + size of every field; both are multiples of UNIT."""

    start: int
    size: int
    pieces: tuple[Piece, ...]


def cut(
    numels: Sequence[int],
    limit: int,
    *,
    may_split: bool | Sequence[bool],
    may_share: bool = True,
    first: int = 0,
) -> list[Chunk]:
    """Cut parameters into chunks of at most `limit` elements, a multiple of UNIT.

    A parameter that may not be split can make a larger chunk. Every element is in one piece; an empty parameter has an
    empty piece.

    Args:
        numels: The parameters' elements, in order.
        limit: The most elements in a chunk.
        may_split: Whether parameters may be split, for all or for each.
        may_share: Whether a chunk may hold several parameters, True by default. False makes ranks with different
            shards have equally many chunks.
        first: The number of the first parameter, 0 by default.

    Raises:
        ValueError: `limit` is no multiple of UNIT.
    """
    if limit < UNIT or limit % UNIT:
        raise ValueError(f"expected a limit at a multiple of {UNIT} elements, got {limit}")
    splits = [may_split] * len(numels) if isinstance(may_split, bool) else may_split
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, filled
        if pieces:
            start = chunks[-1].start + chunks[-1].size if chunks else 0
            chunks.append(Chunk(start, -(-filled // UNIT) * UNIT, tuple(pieces)))
        pieces, filled = [], 0

    for param, numel in enumerate(numels):
        filled = -(-filled // _ALIGNED) * _ALIGNED
        if pieces and (filled + numel > limit or not may_share):
            close()
        start = 0
        while splits[param] and numel - start > limit:
            pieces, filled = [Piece(first + param, start, start + limit, 0)], limit
            close()
            start += limit
        pieces.append(Piece(first + param, start, numel, filled))
        filled += numel - start
    close()
    return chunks


def kept(numels: Sequence[int], ratio: float) -> int:
    """How many of the first parameters keep their state, so that the others have `ratio` of all elements or a bit more.

    The first layers keep it: gradients of the last ones are ready first, and can travel while backward goes on.
    """
    if ratio == 1.0:  # not even what is empty
        return 0
    return bisect_right(list(accumulate(numels)), (1.0 - ratio) * sum(numels))


class Field(NamedTuple):
    """One array of all elements in a store."""

    dtype: torch.dtype
    offset: int


class Layout:
    """Chunks and their fields in one store of `nbytes` bytes; the largest chunk's fields have `lease_bytes`."""

    def __init__(self, chunks: Sequence[Chunk], dtypes: Mapping[str, torch.dtype]):
        self.chunks = list(chunks)
        self.elements = chunks[-1].start + chunks[-1].size if chunks else 0
        self.fields: dict[str, Field] = {}
        self.nbytes = 0
        for name, dtype in dtypes.items():
            self.fields[name] = Field(dtype, self.nbytes)
            self.nbytes += rounded(self.elements * dtype.itemsize)
        self.bytes_per_element = sum(dtype.itemsize for dtype in dtypes.values())
        self.lease_bytes = max((c.size for c in chunks), default=0) * self.bytes_per_element
        self._homes: dict[int, tuple[int, int]] = {}
        for chunk in chunks:
            for piece in chunk.pieces:
                first, numel = self._homes.get(piece.param, (chunk.start + piece.at, 0))
                assert first + piece.start == chunk.start + piece.at, "a parameter's pieces lie together"
                self._homes[piece.param] = (first, numel + piece.stop - piece.start)

    def extents(self, chunk: Chunk, names: Iterable[str] | None = None) -> list[Extent]:
        """A chunk's extents, one for each field."""
        fields = self.fields.values() if names is None else [self.fields[name] for name in names]
        return [Extent(f.offset + chunk.start * f.dtype.itemsize, chunk.size * f.dtype.itemsize) for f in fields]

    def home(self, param: int, name: str) -> tuple[int, int]:
        """The offset and length in bytes of a parameter's values of a field."""
        first, numel = self._homes[param]
        field = self.fields[name]
        return field.offset + first * field.dtype.itemsize, numel * field.dtype.itemsize

    def views(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors of a chunk's lease by field."""
        fields = self.fields.items()
        return {name: x.view(field.dtype) for (name, field), x in zip(fields, tensors, strict=True)}
