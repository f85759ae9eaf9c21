"""Which tokens each token sees: itself, and an interval around it.

Causal sequences, windows, packed documents and padding are all such intervals. The tokens that a node's chunk sees are
one, too, so that of another node's tokens it needs one range of each chunk, which both know without asking. A node is a
rank, unless ranks divide heads (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .pieces import Pieces

_ROWS = 256
"""Queries for which keys are computed together: of those that only some of the queries see, the others' are wasted."""


@dataclass(frozen=True)
class Tile:
    """Queries and keys that are computed with at once.

    Attributes:
        rows: The queries, among their node's tokens.
        keys: The keys, among those that travel.
        hidden: Which keys each query does not see, bool [b or 1, 1, rows, keys]. None: it sees all of them.
        is_triangle: Whether query i of the tile sees its keys 0 to i alone; then `hidden` is None.
    """

    rows: slice
    keys: slice
    hidden: Tensor | None = None
    is_triangle: bool = False


class Sight:
    """What the tokens of a batch of sequences see.

    Args:
        pieces: How the sequences are cut.
        is_causal: Whether a token sees only itself and those before it. Default True.
        window: How many tokens it sees at most, with itself, to each side that it sees. Default None: all.
        documents: Number of each token's document, integers [length] or [b, length]: a token sees its own alone. Those
            of one document are neighbours; padding is one more. Default None: all are one.
        rank: This rank, for the message.

    Raises:
        ValueError: A window below 1, documents of another shape, or one whose tokens are no neighbours.

    Attributes:
        pieces: How the sequences are cut.
        sequences: For how many sequences it holds, b; 1: for any number.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        is_causal: bool = True,
        window: int | None = None,
        documents: Tensor | None = None,
        rank: int = 0,
    ):
        n = pieces.length
        if window is not None and window < 1:
            raise ValueError(f"rank {rank}: expected a window of at least 1 token (the token itself), got {window}")
        if documents is not None and (documents.dim() not in (1, 2) or documents.shape[-1] != n):
            raise ValueError(
                f"rank {rank}: expected documents [{n}] or [sequences, {n}], a number for each token of the whole "
                f"sequence, got {tuple(documents.shape)}"
            )
        self.pieces, self.sequences = pieces, 1 if documents is None or documents.dim() == 1 else len(documents)
        places = torch.arange(n, dtype=torch.int64, device=torch.device("cpu")).unsqueeze(0)
        first, end = torch.zeros_like(places), torch.full_like(places, n)
        if documents is not None and n > 0:
            first, end = _runs(documents.detach().cpu().view(-1, n), rank)
        if window is not None:
            first, end = first.maximum(places - window + 1), end.minimum(places + window)
        if is_causal:
            end = end.minimum(places + 1)
        self._first, self._end = first, end
        self._is_triangle = is_causal and documents is None and (window is None or window >= n)
        self._ranges = {node: self._of_chunks(node) for node in range(pieces.nodes)}

    def keys(self, node: int, source: int) -> list[slice]:
        """Return the ranges of one node's tokens that queries of another see; of its own it has all.

        Args:
            node: The node of the queries: a rank, if none divide heads.
            source: The node of the keys.
        """
        if node == source:
            return [slice(0, sum(self.pieces.sizes(node)))]
        found, before = [], 0
        for chunk in self.pieces.chunks(source):
            cut = [(max(low, chunk.start), min(high, chunk.stop)) for low, high in self._ranges[node]]
            cut = [(low, high) for low, high in cut if low < high]
            if cut:
                shift = before - chunk.start
                found.append(slice(min(low for low, _ in cut) + shift, max(high for _, high in cut) + shift))
            before += len(chunk)
        return found

    def rounds(self) -> list[int]:
        """Return the distances over which a node sees keys of another: of windows, neighbours' alone."""
        N = self.pieces.nodes
        return [t for t in range(1, N) if any(self.keys(node, (node - t) % N) for node in range(N))]

    def tiles(self, node: int, source: int, device: torch.device) -> Iterator[Tile]:
        """Yield the parts of attention between one node's queries and the `keys` of another.

        Args:
            node: The node of the queries.
            source: The node of the keys.
            device: Of `Tile.hidden`.
        """
        size = sum(self.pieces.sizes(node))
        if node == source and self._is_triangle and size > 0:
            yield Tile(slice(0, size), slice(0, size), is_triangle=True)
            return
        queries, of_source = self._places(node), self._places(source)
        its = torch.cat([of_source[part] for part in self.keys(node, source)] or [of_source[:0]])
        first, end = self._first[:, queries], self._end[:, queries]
        whole: Tile | None = None
        for rows in self._rows(node):
            firsts, ends = first[:, rows], end[:, rows]
            low, high = torch.searchsorted(its, torch.stack([firsts.min(), ends.max()])).tolist()
            if low == high:
                continue
            if its[low] >= firsts.max() and its[high - 1] < ends.min():
                if whole is not None and whole.keys == slice(low, high) and whole.rows.stop == rows.start:
                    whole = Tile(slice(whole.rows.start, rows.stop), whole.keys)
                    continue
                if whole is not None:
                    yield whole
                whole = Tile(rows, slice(low, high))
                continue
            seen = (its[low:high] >= firsts.unsqueeze(-1)) & (its[low:high] < ends.unsqueeze(-1))
            yield Tile(rows, slice(low, high), hidden=~seen.unsqueeze(1).to(device))
        if whole is not None:
            yield whole

    def _places(self, node: int) -> Tensor:
        first, second = self.pieces.chunks(node)
        return torch.tensor([*first, *second], dtype=torch.int64, device=self._first.device)

    def _rows(self, node: int) -> Iterator[slice]:
        """A node's queries, up to _ROWS of a chunk at a time."""
        before = 0
        for chunk in self.pieces.chunks(node):
            for start in range(0, len(chunk), _ROWS):
                yield slice(before + start, before + min(start + _ROWS, len(chunk)))
            before += len(chunk)

    def _of_chunks(self, node: int) -> list[tuple[int, int]]:
        """The tokens that those of each of a node's chunks see, from the first to before the last."""
        return [
            (int(self._first[:, chunk.start : chunk.stop].min()), int(self._end[:, chunk.start : chunk.stop].max()))
            for chunk in self.pieces.chunks(node)
            if len(chunk) > 0
        ]


def _runs(documents: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Where each token's run of equal numbers begins and ends, [b, length] each."""
    n = documents.shape[1]
    places = torch.arange(n, dtype=torch.int64, device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    for row, (numbers, is_first) in enumerate(zip(documents, begins, strict=True)):
        if numbers[is_first].unique().numel() < int(is_first.sum()):
            raise ValueError(
                f"rank {rank}: a document of row {row} is not in one piece; give its tokens places next to each other, "
                "or the parts numbers of their own"
            )
    first = torch.where(begins, places, 0).cummax(1).values
    next_begin = torch.where(begins, places, n).roll(-1, 1)
    next_begin[:, -1] = n
    return first, next_begin.flip(1).cummin(1).values.flip(1)
