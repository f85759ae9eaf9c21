"""Which tokens each token sees: itself, and an interval around it.

Causal sequences, windows, packed documents and padding are all such intervals. The tokens that a node's chunk sees are
one, too, so that of another node's tokens it needs one range of each chunk, which both know without asking. A node is a
rank, unless ranks divide heads (`ranks.py`). With a block layout a token sees a part of its interval, and of another
node's tokens only the blocks travel that some query sees in some head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sparse_attention.layouts import Layout
from .pieces import Pieces

_ROWS = 256
"""Queries for which keys are computed together: of those that only some of the queries see, the others' are wasted."""


@dataclass(frozen=True)
class Tile:
    """Queries and keys that are computed with at once.

    Attributes:
        rows: The queries, among their node's tokens.
        keys: The keys, among those that travel.
        hidden: Which keys each query does not see, bool [b or 1, h or 1, rows, keys]. None: it sees all of them.
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
        layout: Which blocks of keys each block of queries sees, in each head; the same on all ranks. Default None: all.
        rank: This rank, for the message.

    Raises:
        ValueError: A window below 1, documents of another shape, or one whose tokens are no neighbours; a layout for
            another length or not as causal, or by which a rank sees no other's tokens.

    Attributes:
        pieces: How the sequences are cut.
        layout: Which blocks see which, if there is one.
        sequences: For how many sequences it holds, b; 1: for any number.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        is_causal: bool = True,
        window: int | None = None,
        documents: Tensor | None = None,
        layout: Layout | None = None,
        rank: int = 0,
    ):
        n = pieces.length
        if layout is not None and (layout.is_causal != is_causal or layout.rows != -(-n // layout.block)):
            raise ValueError(
                f"rank {rank}: expected a layout of {-(-n // layout.block)} blocks of {layout.block} tokens, "
                f"{'' if is_causal else 'not '}causal, for attention over {n} tokens, got {layout.rows} blocks, "
                f"{'' if layout.is_causal else 'not '}causal; build_layout(config, heads, {n}) makes one"
            )
        if window is not None and window < 1:
            raise ValueError(f"rank {rank}: expected a window of at least 1 token (the token itself), got {window}")
        if documents is not None and (documents.dim() not in (1, 2) or documents.shape[-1] != n):
            raise ValueError(
                f"rank {rank}: expected documents [{n}] or [sequences, {n}], a number for each token of the whole "
                f"sequence, got {tuple(documents.shape)}"
            )
        is_narrowed = window is not None or documents is not None
        if layout is not None and is_narrowed and not bool(layout.tables.diagonal(dim1=1, dim2=2).all()):
            raise ValueError(
                f"rank {rank}: with a window or documents, expected a layout in which each block sees itself; else "
                "some tokens see nothing"
            )
        self.pieces, self.layout = pieces, layout
        self.sequences = 1 if documents is None or documents.dim() == 1 else len(documents)
        places = torch.arange(n, dtype=torch.int64, device=torch.device("cpu")).unsqueeze(0)
        first, end = torch.zeros_like(places), torch.full_like(places, n)
        if documents is not None and n > 0:
            first, end = _runs(documents.detach().cpu().view(-1, n), rank)
        if window is not None:
            first, end = first.maximum(places - window + 1), end.minimum(places + window)
        if is_causal:
            end = end.minimum(places + 1)
        self._first, self._end = first, end
        self._is_triangle = is_causal and documents is None and layout is None and (window is None or window >= n)
        self._ranges = {node: self._of_chunks(node) for node in range(pieces.nodes)}
        self._reach = {} if layout is None else {node: self._of_blocks(layout, node) for node in range(pieces.nodes)}
        if layout is not None:
            self._check_path(rank)

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
        return found if self.layout is None else self._in_blocks(node, self._places(source), found)

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
            if self.layout is not None:
                yield from self._tiles_of_blocks(self.layout, queries[rows], its, slice(low, high), rows, device)
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

    def _tiles_of_blocks(
        self, layout: Layout, queries: Tensor, its: Tensor, among: slice, rows: slice, device: torch.device
    ) -> Iterator[Tile]:
        """A tile for each run of keys that some of these queries see."""
        query_blocks, table = queries // layout.block, layout.tables
        seen_blocks = table[:, query_blocks.unique()].any(1).any(0)
        for keys in _runs_of(seen_blocks[its[among] // layout.block], among.start):
            places = its[keys]
            seen = table[:, query_blocks][:, :, places // layout.block].unsqueeze(0)
            near = places >= self._first[:, queries].unsqueeze(-1)
            near &= places < self._end[:, queries].unsqueeze(-1)
            seen = seen & near.unsqueeze(1)
            yield Tile(rows, keys, hidden=None if bool(seen.all()) else (~seen).to(device))

    def _of_blocks(self, layout: Layout, node: int) -> Tensor:
        """Of each block, the last of a node's queries that sees it in some head; -1: none does."""
        queries = self._places(node)
        last = torch.full((layout.rows,), -1, dtype=torch.int64, device=queries.device)
        last.scatter_reduce_(0, queries // layout.block, queries, "amax")
        return torch.where(layout.tables.any(0), last.unsqueeze(1), -1).amax(0)

    def _in_blocks(self, node: int, places: Tensor, ranges: list[slice]) -> list[slice]:
        """The tokens of these ranges in blocks that queries of a node see; if causal, up to the last such query."""
        assert self.layout is not None
        reach = self._reach[node][places // self.layout.block]
        is_seen = reach >= places if self.layout.is_causal else reach >= 0
        return [run for part in ranges for run in _runs_of(is_seen[part], part.start)]

    def _check_path(self, rank: int) -> None:
        """Raise ValueError if a node sees nothing of others: its part of the sequence would be one of its own."""
        nodes = range(self.pieces.nodes)
        for node in nodes if len(nodes) > 1 else ():
            if len(self._places(node)) > 0 and not any(self.keys(node, source) for source in nodes if source != node):
                raise ValueError(
                    f"rank {rank}: by this layout the tokens of rank {node * self.pieces.ulysses_degree} see none of "
                    f"other ranks, so no path joins them to the rest of {self.pieces.length} tokens; take global "
                    "blocks, a longer window, or fewer ranks"
                )

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


def _runs_of(is_there: Tensor, start: int) -> list[slice]:
    """The runs of True in a vector whose first element is at `start`."""
    edges = torch.nn.functional.pad(is_there.to(torch.int8), (1, 1)).diff().nonzero().flatten() + start
    return [slice(low, high) for low, high in edges.view(-1, 2).tolist()]


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
