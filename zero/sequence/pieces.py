"""How a sequence is cut into pieces for its ranks: two chunks each, so that all of them have the same work.

In causal attention a token sees those before it, so the last of W equal pieces would cost 2·W - 1 times as much as the
first. The sequence is cut into 2·W chunks instead; rank r holds chunks r and 2·W - 1 - r ("zigzag"). Every rank then
computes the same number of pairs, and what it computes with another rank's piece is a rectangle without a mask.

If the ranks of a node divide heads (`ranks.py`), nodes take the places of ranks, and each rank of a node has a part of
the node's tokens, of equal size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """The pieces of sequences of one length.

    Attributes:
        length: Tokens of the sequence. If it does not divide, the first chunks have one token more.
        world_size: Number of ranks, W.
        ulysses_degree: How many neighbouring ranks divide heads; they are the ranks of a node. Default 1.
    """

    length: int
    world_size: int
    ulysses_degree: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes, each of `ulysses_degree` ranks."""
        return self.world_size // self.ulysses_degree

    def chunk(self, k: int) -> range:
        """Return the tokens of chunk k, 0 to 2·nodes - 1."""
        size, more = divmod(self.length, 2 * self.nodes)
        start = k * size + min(k, more)
        return range(start, start + size + (k < more))

    def chunks(self, node: int) -> tuple[range, range]:
        """Return the tokens of a node's first and second chunk; a rank is a node if none divide heads."""
        return self.chunk(node), self.chunk(2 * self.nodes - 1 - node)

    def sizes(self, node: int) -> list[int]:
        """Return the number of tokens of each rank of a node."""
        size, more = divmod(sum(map(len, self.chunks(node))), self.ulysses_degree)
        return [size + (k < more) for k in range(self.ulysses_degree)]

    def size(self, rank: int) -> int:
        """Return the number of a rank's tokens."""
        return self.sizes(rank // self.ulysses_degree)[rank % self.ulysses_degree]

    def check_length(self, rank: int) -> None:
        """Raise ValueError if a rank has no token.

        Args:
            rank: This rank, for the message.
        """
        if min(map(self.size, range(self.world_size))) == 0:
            raise ValueError(
                f"rank {rank}: a sequence of {self.length} tokens is too short for {self.world_size} ranks"
            )

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Return the places of a rank's tokens in the sequence, int64 [size], ascending.

        Args:
            rank: The rank.
            device: Device of the result. Default None: the host.
        """
        node, part = divmod(rank, self.ulysses_degree)
        first, second = self.chunks(node)
        start = sum(self.sizes(node)[:part])
        its = [*first, *second][start : start + self.size(rank)]
        return torch.tensor(its, dtype=torch.int64, device=torch.device("cpu") if device is None else device)

    def cut(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's piece of a tensor, new.

        Args:
            x: A tensor whose dimension `dim` has the sequence's length.
            rank: The rank.
            dim: That dimension. Default 1.
        """
        return x.index_select(dim, self.positions(rank, x.device))

    def join(self, pieces: list[Tensor], dim: int = 1) -> Tensor:
        """Return the whole of all ranks' pieces; the inverse of `cut`.

        Args:
            pieces: The pieces, in rank order.
            dim: Their dimension of tokens. Default 1.
        """
        places = torch.cat([self.positions(rank) for rank in range(self.world_size)])
        return torch.cat(pieces, dim).index_select(dim, places.argsort().to(pieces[0].device))
