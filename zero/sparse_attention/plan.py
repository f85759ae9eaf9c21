"""The gather executor's plan: query blocks grouped by how many key blocks they see, so that cost follows density.

A task is a query block of one head of one sequence, or several neighbours that see almost the same keys and gather them
once. Tasks with nearly equal numbers of key blocks are computed together, padded to the largest. So a global row, which
sees all blocks, does not make the other rows more expensive.
Shape legend: H heads, N blocks of a sequence, T tasks, R query blocks of a task, C key blocks of a task.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .layouts import Layout

# Tasks with at least this share of the largest task's key blocks are padded to it. Bounds the cost of padding.
LEAST_SHARE = 0.9
# The most queries in a task of joined blocks.
_MOST_QUERIES = 256
# Gathering a key and scattering its gradient takes as long as this many queries' work with it. Fitted to one CPU core.
_GATHERING = 20


@dataclass(frozen=True)
class Bucket:
    """Tasks that are computed together. In a causal layout a task's first R key blocks are its own query blocks.

    Attributes:
        rows_TR: The query blocks' places in the flattened [sequences, heads, N].
        columns_TC: The key blocks' places in the flattened [sequences, key heads, N].
        hidden_TRC: Added to scores: minus infinity if a query block does not see a key block, else zero; None if all
            see all.
        sequences_T: The sequence of each task; this and the next three locate padding and bias.
        heads_T: The query head of each task.
        query_blocks_TR: The query blocks' numbers within the sequence.
        key_blocks_TC: The key blocks' numbers within the sequence.
    """

    rows_TR: Tensor
    columns_TC: Tensor
    hidden_TRC: Tensor | None
    sequences_T: Tensor
    heads_T: Tensor
    query_blocks_TR: Tensor
    key_blocks_TC: Tensor

    def chunks(self, tasks: int) -> Iterator[Bucket]:
        """The same in pieces of at most `tasks` tasks."""
        for start in range(0, len(self.rows_TR), tasks):
            here = slice(start, start + tasks)
            yield Bucket(
                self.rows_TR[here],
                self.columns_TC[here],
                None if self.hidden_TRC is None else self.hidden_TRC[here],
                self.sequences_T[here],
                self.heads_T[here],
                self.query_blocks_TR[here],
                self.key_blocks_TC[here],
            )


def minus_infinity_where(hidden: Tensor) -> Tensor:
    """float32 to add to scores: six times as fast as masked_fill_ on the scores."""
    return torch.zeros(hidden.shape, device=hidden.device, dtype=torch.float32).masked_fill_(hidden, float("-inf"))


def cost(query_blocks: int, key_blocks: Tensor | int, block: int) -> Tensor | int:
    """The cost of tasks, in queries times keys; see `_GATHERING`."""
    return key_blocks * block * (query_blocks * block + _GATHERING)


@functools.lru_cache(maxsize=64)
def plan(layout: Layout, sequences: int, key_heads: int, device: torch.device) -> tuple[Bucket, ...]:
    """The buckets of a layout for this many sequences. Cached."""
    made = []
    for joined, tasks in _tasks(layout).items():
        seen_HMN = _joined(layout, joined)
        counts = seen_HMN.sum(2)[tasks[:, 0], tasks[:, 1]]
        order = counts.sort(descending=True, stable=True).indices
        while len(order):
            C = int(counts[order[0]])
            taken = int((counts[order] >= LEAST_SHARE * C).sum())
            here = tasks[order[:taken].sort().values]
            made.append(_bucket(layout, seen_HMN, joined, here, C, sequences, key_heads, device))
            order = order[taken:]
    return tuple(made)


def _joined(layout: Layout, joined: int) -> Tensor:
    """The key blocks that `joined` neighbouring query blocks see together, [H, M, N]; if causal, also themselves."""
    H, N, M = layout.heads, layout.rows, layout.rows // joined
    seen = layout.blocks_HNN[:, : M * joined].view(H, M, joined, N).any(2)
    if layout.is_causal:
        own = torch.arange(M, device="cpu")[:, None] == torch.arange(N, device="cpu") // joined
        seen = seen | own
    return seen


def _tasks(layout: Layout) -> dict[int, Tensor]:
    """(head, number) of the tasks, by how many neighbouring query blocks they join (1, 2, 4, ...), at the least cost.

    From pairs upwards: neighbours are joined if their joint task costs no more than the best of them apart.
    """
    sizes = [1]
    while 2 * sizes[-1] <= layout.rows and 2 * sizes[-1] * layout.block <= _MOST_QUERIES:
        sizes.append(2 * sizes[-1])
    best = cost(1, _joined(layout, 1).sum(2), layout.block)
    chosen = [torch.ones(layout.heads, layout.rows, dtype=torch.bool, device="cpu")]
    assert isinstance(best, Tensor)
    for joined in sizes[1:]:
        M = layout.rows // joined
        together = cost(joined, _joined(layout, joined).sum(2), layout.block)
        apart = best[:, : 2 * M].view(layout.heads, M, 2).sum(2)
        chosen.append(torch.as_tensor(together <= apart, device="cpu"))
        best = torch.minimum(torch.as_tensor(together, device="cpu"), apart)
    made, is_free = {}, torch.ones(layout.heads, layout.rows, dtype=torch.bool, device="cpu")
    for joined, here in zip(reversed(sizes), reversed(chosen), strict=True):
        M = here.shape[1]
        taken = here & is_free[:, : M * joined].view(layout.heads, M, joined).all(2)
        is_free[:, : M * joined] &= ~taken.repeat_interleave(joined, 1)
        if bool(taken.any()):
            made[joined] = taken.nonzero()
    assert not is_free.any()
    return made


def _bucket(
    layout: Layout,
    seen_HMN: Tensor,
    joined: int,
    tasks: Tensor,
    C: int,
    sequences: int,
    key_heads: int,
    device: torch.device,
) -> Bucket:
    """One bucket for all sequences. tasks: (head, number) of each task within one sequence."""
    H, N = layout.heads, layout.rows
    heads, rows_TR = tasks[:, 0], tasks[:, 1:] * joined + torch.arange(joined, device="cpu")
    others, own = seen_HMN[heads, tasks[:, 1]], rows_TR if layout.is_causal else rows_TR[:, :0]
    others.scatter_(1, own, False)
    which, columns = others.nonzero(as_tuple=True)
    counts = others.sum(1)
    place = own.shape[1] + torch.arange(len(which), device="cpu") - (counts.cumsum(0) - counts)[which]
    blocks = torch.zeros(len(heads), C, dtype=torch.long, device="cpu")
    is_there = torch.zeros(len(heads), C, dtype=torch.bool, device="cpu")
    blocks[:, : own.shape[1]], is_there[:, : own.shape[1]] = own, True
    blocks[which, place], is_there[which, place] = columns, True
    seen = layout.blocks_HNN[heads[:, None, None], rows_TR[:, :, None], blocks[:, None]]
    hidden = ~seen | ~is_there[:, None]
    of_key_head = (heads // (H // key_heads)).repeat(sequences)
    sequence = torch.arange(sequences, device="cpu").repeat_interleave(len(heads))
    heads, rows_TR, blocks = heads.repeat(sequences), rows_TR.repeat(sequences, 1), blocks.repeat(sequences, 1)
    if layout.is_causal:  # in own blocks, later tokens are hidden token by token instead
        own = torch.arange(joined, device="cpu")
        hidden[:, own[:, None], own] &= own[:, None] >= own
    return Bucket(
        (((sequence * H + heads) * N)[:, None] + rows_TR).to(device),
        (((sequence * key_heads + of_key_head) * N)[:, None] + blocks).to(device),
        minus_infinity_where(hidden).repeat(sequences, 1, 1).to(device) if bool(hidden.any()) else None,
        sequence.to(device),
        heads.to(device),
        rows_TR.to(device),
        blocks.to(device),
    )
