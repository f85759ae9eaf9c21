"""Layouts: which blocks of keys each block of queries sees, for each head, as a table of 0 and 1.

`build_layout` makes one from a `SparsityConfig`; a `Layout` can also be made from any table. A layout is a function of
its configuration, the number of heads and the length, so all ranks and resumed runs have the same one. A unidirectional
layout for a longer sequence begins with the one for a shorter sequence.
Shape legend: H heads, N blocks of a sequence, S tokens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import SparsityConfig


@dataclass(frozen=True, eq=False)
class Layout:
    """Which key blocks each query block sees.

    Args:
        blocks_HNN: A table [heads, N, N], kept as bool on the CPU: whether in head h the queries of block i see the
            keys of block j. Blocks above the diagonal of a causal layout are dropped.
        block: Tokens in a block.
        is_causal: Whether no token sees a later one, also within a block.

    Raises:
        ValueError: The table has another shape, or a row of blocks sees none.
    """

    blocks_HNN: Tensor
    block: int
    is_causal: bool

    def __post_init__(self) -> None:
        blocks = self.blocks_HNN.bool().cpu()
        if blocks.dim() != 3 or blocks.shape[1] != blocks.shape[2] or blocks.numel() == 0:
            raise ValueError(f"expected a layout of shape [heads, blocks, blocks], got {tuple(blocks.shape)}")
        if self.block < 1:
            raise ValueError(f"expected blocks of at least one token, got {self.block}")
        if self.is_causal:  # heads that share one table must still share it afterwards
            blocks = blocks[:1].tril().expand_as(blocks) if _is_shared(blocks) else blocks.tril()
        hidden = (~blocks.any(2)).nonzero()
        if len(hidden):
            head, row = hidden[0].tolist()
            seen = "no block of its past or itself" if self.is_causal else "no block"
            raise ValueError(
                f"the layout hides everything from row {row} of head {head} (tokens {row * self.block} to "
                f"{(row + 1) * self.block - 1}), which sees {seen}; let each row see at least one, for example itself"
            )
        object.__setattr__(self, "blocks_HNN", blocks)

    @property
    def tables(self) -> Tensor:
        """bool [H, N, N] as blocks_HNN, or [1, N, N] if all heads share one table."""
        return self.blocks_HNN[:1] if _is_shared(self.blocks_HNN) else self.blocks_HNN

    @property
    def heads(self) -> int:
        return self.blocks_HNN.shape[0]

    @property
    def rows(self) -> int:
        """Blocks in a sequence."""
        return self.blocks_HNN.shape[1]

    @property
    def density(self) -> float:
        """The share of all blocks that are seen: 1 for dense attention, about one half for dense causal attention."""
        return self.tables.count_nonzero().item() / self.tables.numel()

    def visible(self, length: int) -> Tensor:
        """Which tokens see which, bool [H, S, S]. Large: meant for tests, pictures and dense attention with a mask."""
        tokens = torch.arange(length, device="cpu")
        seen = self.blocks_HNN[:, tokens // self.block][:, :, tokens // self.block]
        return seen & (tokens[:, None] >= tokens) if self.is_causal else seen

    def of_heads(self, first: int, count: int) -> Layout:
        """The layout of `count` heads from `first` on, for a tensor-parallel rank.

        Raises:
            ValueError: The layout does not have these heads.
        """
        if count == self.heads:
            return self
        if not 0 <= first <= self.heads - count:
            raise ValueError(f"the layout has {self.heads} heads, and no heads {first} to {first + count - 1}")
        return _heads_of(self, first, count)


def _is_shared(blocks_HNN: Tensor) -> bool:
    return blocks_HNN.stride(0) == 0


@functools.lru_cache(maxsize=64)
def _heads_of(layout: Layout, first: int, count: int) -> Layout:
    return Layout(layout.blocks_HNN[first : first + count], layout.block, layout.is_causal)


def build_layout(config: SparsityConfig, heads: int, length: int) -> Layout:
    """Build the layout of a configuration. Layouts are cached: the same arguments give the same object.

    Args:
        config: The configuration, with a mode.
        heads: The query heads of the model.
        length: Tokens in a sequence. The last block may be shorter.

    Raises:
        ValueError: The configuration has no mode, or there is no head or no token.
    """
    if heads < 1 or length < 1:
        raise ValueError(f"expected at least one head and one token, got {heads} and {length}")
    if config.mode is None:
        raise ValueError(f"the configuration has no mode; expected one of {', '.join(_BUILDERS)}")
    return _build(config, heads, -(-length // config.block))


@functools.lru_cache(maxsize=64)
def _build(config: SparsityConfig, heads: int, rows: int) -> Layout:
    make = _BUILDERS[config.mode or ""]
    count = heads if config.different_layout_per_head else 1
    tables = torch.stack([make(config, rows, head) for head in range(count)])
    return Layout(tables.expand(heads, rows, rows), config.block, config.is_causal)


def _dense(config: SparsityConfig, N: int, head: int) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool, device="cpu")


def _fixed(config: SparsityConfig, N: int, head: int) -> Tensor:
    """Sparse Transformers' fixed pattern (Child et al., 2019): local windows, and summaries that all later rows see."""
    local, shared = config.num_local_blocks, config.num_global_blocks
    window = torch.arange(N, device="cpu") // local
    seen = window[:, None] == window
    if shared == 0:
        return seen
    first, whole = local - (1 + head % config.num_different_global_patterns) * shared, N - N % local
    starts = list(range(first, whole, local))
    if whole < N:  # the last window is short: its summaries are its last blocks
        starts.append(max(0, min(whole + first, N - shared)))
    return _with_global(seen, [(start, start + shared) for start in starts], rows=config.horizontal_global_attention)


def _variable(config: SparsityConfig, N: int, head: int) -> Tensor:
    """Windows of the listed sizes in sequence, the last of which repeats; random and global blocks."""
    sizes, window = config.local_window_blocks, torch.zeros(N, dtype=torch.long, device="cpu")
    start = k = 0
    while start < N:
        size = sizes[min(k, len(sizes) - 1)]
        window[start : start + size] = k
        start, k = start + size, k + 1
    seen = (window[:, None] == window) | _random(config, N, head)
    return _with_global(seen, config.global_ranges, rows=config.horizontal_global_attention)


def _bigbird(config: SparsityConfig, N: int, head: int) -> Tensor:
    """BigBird's internal transformer construction (Zaheer et al., 2020): random, window and global blocks."""
    seen = _sliding(config, N) | _random(config, N, head)
    return _with_global(seen, [(0, config.num_global_blocks)], rows=True)


def _bslongformer(config: SparsityConfig, N: int, head: int) -> Tensor:
    """Longformer's window with global tokens (Beltagy et al., 2020), in blocks."""
    return _with_global(_sliding(config, N), config.global_ranges, rows=True)


def _local_sliding_window(config: SparsityConfig, N: int, head: int) -> Tensor:
    return _sliding(config, N)


_BUILDERS: Mapping[str, Callable[[SparsityConfig, int, int], Tensor]] = {
    "dense": _dense,
    "fixed": _fixed,
    "variable": _variable,
    "bigbird": _bigbird,
    "bslongformer": _bslongformer,
    "local_sliding_window": _local_sliding_window,
}


def _sliding(config: SparsityConfig, N: int) -> Tensor:
    """num_sliding_window_blocks around the diagonal: half of them on each side."""
    rows = torch.arange(N, device="cpu")
    return (rows[:, None] - rows).abs() <= config.num_sliding_window_blocks // 2


def _with_global(seen_NN: Tensor, ranges: tuple[tuple[int, int], ...] | list[tuple[int, int]], *, rows: bool) -> Tensor:
    """The table in which all rows also see the columns of `ranges`; with `rows`, these rows also see all columns."""
    seen_NN = seen_NN.clone()
    for first, end in ranges:
        seen_NN[:, first:end] = True
        if rows:
            seen_NN[first:end] = True
    return seen_NN


def _random(config: SparsityConfig, N: int, head: int) -> Tensor:
    """config.random_blocks random blocks in each row; in a causal layout, from the row's past and itself."""
    seen = torch.zeros(N, N, dtype=torch.bool, device="cpu")
    for row in range(N) if config.random_blocks else ():
        digest = hashlib.sha256(f"{config.seed}/{head}/{row}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        among = row + 1 if config.is_causal else N
        seen[row, torch.randperm(among, generator=generator, device="cpu")[: config.random_blocks]] = True
    return seen
