"""What lies where in a store: parameters one after another, cut into chunks, for each field of their state.

A field (master, exp_avg, ...) is one array of all elements, so a parameter's values of a field lie together and a
checkpoint can show them as one tensor. A chunk is a range of elements: an extent in each field. A piece is what a chunk
holds of a parameter. Pure: no memory.
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
"""Elements at whose multiples chunks begin and parameters are cut: whole pages for fields of any dtype."""
_ALIGNED = 64


def elements_of(chunk_mb: float, fields: Mapping[str, torch.dtype]) -> int:
    """At most, of a chunk with this many MB of these fields: a multiple of UNIT."""
    per_element = max(4, sum(dtype.itemsize for dtype in fields.values()))
    return max(1, int(chunk_mb * 2**20 / per_element) // UNIT) * UNIT


class Piece(NamedTuple):
    """Elements start to stop of a parameter, which lie in its chunk from `at` on."""

    param: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Chunk:
    """Elements start to start + size of every field, at multiples of UNIT."""

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
    """Chunks of at most `limit` elements, a multiple of UNIT; a parameter that may not be split can make a larger one.

    numels: of the parameters, in order, which count from `first`. Every element is in one piece; empty parameters have
    an empty one. may_share: whether a chunk holds several parameters; without, ranks with other shards have as many.
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
    """How many, from the first one, stay where they are, that the others have `ratio` of all elements or a little more.

    The first layers stay: gradients of the last ones come first, and travel while backward goes on.
    """
    if ratio == 1.0:  # not even what is empty
        return 0
    return bisect_right(list(accumulate(numels)), (1.0 - ratio) * sum(numels))


class Field(NamedTuple):
    """An array of all elements in a store."""

    dtype: torch.dtype
    offset: int


class Layout:
    """Chunks, and fields of them in one store. nbytes: of the store. lease_bytes: of the largest chunk's fields."""

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
        """Of a chunk, one for each field."""
        fields = self.fields.values() if names is None else [self.fields[name] for name in names]
        return [Extent(f.offset + chunk.start * f.dtype.itemsize, chunk.size * f.dtype.itemsize) for f in fields]

    def home(self, param: int, name: str) -> tuple[int, int]:
        """(offset, nbytes) of a parameter's values of a field."""
        first, numel = self._homes[param]
        field = self.fields[name]
        return field.offset + first * field.dtype.itemsize, numel * field.dtype.itemsize

    def views(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """What a lease of a chunk gives, by field."""
        fields = self.fields.items()
        return {name: x.view(field.dtype) for (name, field), x in zip(fields, tensors, strict=True)}
