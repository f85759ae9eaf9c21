"""How a sequence is cut into pieces for its ranks: two chunks each, so that all of them have the same work.

In causal attention a token sees those before it, so the last of W equal pieces would cost 2·W - 1 times as much as the
first. The sequence is cut into 2·W chunks instead; rank r holds chunks r and 2·W - 1 - r ("zigzag"). Every rank then
computes the same number of pairs, and what it computes with another rank's piece is a rectangle without a mask.
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
    """

    length: int
    world_size: int

    def chunk(self, k: int) -> range:
        """Return the tokens of chunk k, 0 to 2·W - 1."""
        size, more = divmod(self.length, 2 * self.world_size)
        start = k * size + min(k, more)
        return range(start, start + size + (k < more))

    def chunks(self, rank: int) -> tuple[range, range]:
        """Return the tokens of a rank's first and second chunk."""
        return self.chunk(rank), self.chunk(2 * self.world_size - 1 - rank)

    def size(self, rank: int) -> int:
        """Return the number of a rank's tokens."""
        return sum(map(len, self.chunks(rank)))

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Return the places of a rank's tokens in the sequence, int64 [size], ascending.

        Args:
            rank: The rank.
            device: Device of the result. Default None: the host.
        """
        first, second = self.chunks(rank)
        device = torch.device("cpu") if device is None else device
        return torch.tensor([*first, *second], dtype=torch.int64, device=device)

    def cut(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's piece of a tensor, new.

        Args:
            x: A tensor whose dimension `dim` has the sequence's length.
            rank: The rank.
            dim: That dimension. Default 1.
        """
        first, second = (x.narrow(dim, chunk.start, len(chunk)) for chunk in self.chunks(rank))
        return torch.cat([first, second], dim)

    def join(self, pieces: list[Tensor], dim: int = 1) -> Tensor:
        """Return the whole of all ranks' pieces; the inverse of `cut`.

        Args:
            pieces: The pieces, in rank order.
            dim: Their dimension of tokens. Default 1.
        """
        chunks: list[Tensor] = [piece.narrow(dim, 0, 0) for piece in pieces for _ in range(2)]
        for rank, piece in enumerate(pieces):
            sizes = [len(chunk) for chunk in self.chunks(rank)]
            chunks[rank], chunks[2 * self.world_size - 1 - rank] = piece.split(sizes, dim)
        return torch.cat(chunks, dim)
