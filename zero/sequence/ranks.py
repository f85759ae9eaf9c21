"""The ranks that share a sequence, on one level or on two.

On one level keys and values go straight from rank to rank. On two, the ranks of a node first exchange tokens for heads
(Ulysses, arXiv 2309.14509): each has its heads of the tokens of the whole node, and gets keys and values of these heads
alone from the rank with the same heads of each other node. So between U ranks of a node a block enters it once, not U
times.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import Transport
from ...comm.messages import gather_texts
from .pieces import Pieces


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share a sequence.

    Attributes:
        transport: Between all of them. A rank's neighbours in it are those of its node.
        ring: Between ranks with the same heads, one of each node; `transport` if each rank has all heads.
        heads: Between the ranks of a node, which divide the heads. None: each rank has all heads.
        parts: Into how many equal parts layers between attention divide a piece: the ranks of a tensor plan that splits
            sequences. Default 1.
    """

    transport: Transport
    ring: Transport
    heads: Transport | None = None
    parts: int = 1

    @classmethod
    def of(cls, transport: Transport | SequenceRanks, ulysses_degree: int = 1, parts: int = 1) -> SequenceRanks:
        """Make the groups. All ranks of the transport, which must stay open.

        Args:
            transport: Between the ranks of the sequence. Ranks made before are returned as they are.
            ulysses_degree: How many neighbouring ranks, those of a node, divide the heads. Default 1: none.
            parts: As the attribute.

        Raises:
            ValueError: It does not divide the ranks.
            PeerError: Another rank does not call it.
        """
        if isinstance(transport, SequenceRanks):
            return transport
        rank, W, U = transport.rank, transport.world_size, ulysses_degree
        if U < 1 or W % U:
            raise ValueError(f"rank {rank}: expected ulysses_degree to divide the {W} ranks of a sequence, got {U}")
        if U == 1:
            return cls(transport, transport, parts=parts)
        heads = transport.split(range(rank // U * U, rank // U * U + U))
        return cls(transport, transport.split(range(rank % U, W, U)), heads, parts)

    @property
    def rank(self) -> int:
        """This rank among all of them."""
        return self.transport.rank

    def pieces(self, length: int) -> Pieces:
        """Return how sequences of a length are cut.

        Args:
            length: Tokens of a sequence, the same on all ranks.

        Raises:
            ValueError: A piece cannot be divided into its parts.
        """
        pieces = Pieces(length, self.transport.world_size, 1 if self.heads is None else self.heads.world_size)
        sizes = [pieces.size(rank) for rank in range(pieces.world_size)]
        if any(size % self.parts for size in sizes):
            raise ValueError(
                f"rank {self.rank}: a tensor plan divides pieces among {self.parts} ranks, and those of {length} "
                f"tokens have {', '.join(map(str, sizes))}; take a multiple of {2 * pieces.world_size * self.parts} "
                "tokens, or a plan without split_sequence"
            )
        return pieces

    def close(self) -> None:
        """Release the groups that `of` has made; `transport` stays open. All ranks; idempotent."""
        if self.heads is not None:
            self.heads.close()
            self.ring.close()


def widest_degree(hosts: Sequence[str], heads: int) -> int:
    """The largest number of neighbouring ranks that share a host, and divide heads evenly.

    Args:
        hosts: The host of each rank, in their order.
        heads: Query heads of a layer, or a common divisor of all layers'.
    """
    W = len(hosts)
    return max(
        U
        for U in range(1, W + 1)
        if W % U == 0 and heads % U == 0 and all(len(set(hosts[k : k + U])) == 1 for k in range(0, W, U))
    )


def check_same(ranks: SequenceRanks, tensors: Iterable[Tensor], words: str) -> None:
    """Check that all ranks of a sequence have the same batch. All of them call it; a few bytes compare checksums.

    Args:
        ranks: The ranks of the sequence.
        tensors: Those of the batch.
        words: What they are, which must be equal, too.

    Raises:
        ValueError: They differ; on all ranks.
    """
    digest = 0
    for x in tensors:
        digest = zlib.crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), digest)
    seen = gather_texts(ranks.transport, f"{words}, checksum {digest:08x}")
    if other := next((its for its in enumerate(seen) if its[1] != seen[0]), None):
        raise ValueError(
            f"rank {ranks.rank}: all ranks of a sequence are called with the same whole batch; rank 0 has {seen[0]}, "
            f"rank {other[0]} has {other[1]}"
        )


def to_heads(x: Tensor, heads: Transport, sizes: list[int]) -> Tensor:
    """Exchange a rank's tokens of all heads for all tokens of its heads. All ranks of a node.

    Sends the largest size·h/U·d elements to each of the U - 1 others, forward and backward.

    Args:
        x: [b, U, h/U, s, d], of the heads of each rank.
        heads: Between them.
        sizes: Tokens of each.

    Returns:
        [b, h/U, tokens of all, d].
    """
    found: Tensor = _Exchange.apply(x, heads, sizes, True)  # type: ignore[no-untyped-call]
    return found


def to_tokens(x: Tensor, heads: Transport, sizes: list[int]) -> Tensor:
    """The inverse of `to_heads`."""
    found: Tensor = _Exchange.apply(x, heads, sizes, False)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Transport, sizes: list[int], is_to_heads: bool) -> Tensor:
        ctx.known = heads, sizes, is_to_heads
        return _exchange(x, heads, sizes, is_to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        heads, sizes, is_to_heads = ctx.known
        return _exchange(grads[0], heads, sizes, not is_to_heads), None, None, None


def _exchange(x: Tensor, heads: Transport, sizes: list[int], is_to_heads: bool) -> Tensor:
    own = sizes[heads.rank]
    parts = x.unbind(1) if is_to_heads else x.split(sizes, 2)  # one for each rank, [b, h/U, its tokens, d]
    b, h, _, d = parts[0].shape
    sent = x.new_zeros(heads.world_size, b, h, max(sizes), d)
    for row, part in zip(sent, parts, strict=True):
        row[:, :, : part.shape[2]] = part
    received = torch.empty_like(sent)
    heads.all_to_all(_rows(received), _rows(sent)).wait()
    if is_to_heads:
        return torch.cat([row[:, :, :size] for row, size in zip(received, sizes, strict=True)], 2)
    return received[:, :, :, :own].movedim(0, 1).contiguous()


def _rows(x: Tensor) -> Tensor:
    return x.view(len(x), -1).view(torch.uint8)
