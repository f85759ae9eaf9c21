"""Attention over a sequence that is split over ranks: queries stay, blocks of keys and values travel.

    out = ring_attention(q, k, v, transport, Pieces(length, transport.world_size))

In round t = 1…W-1 of forward, rank r sends its block to rank r + t and gets that of rank r - t, while it computes with
the block of the round before. Ring attention (Liu et al., arXiv 2310.01889) passes blocks on from neighbour to
neighbour; in W - 1 rounds both send (W-1)/W of all keys and values per rank, but on a switched network a pair of ranks
is as near as any other, a block arrives in one hop, and only what is seen there travels: of a causal sequence three
quarters. Backward gets the blocks again, and sends each one's gradient, in float32, straight to its rank.

Shape legend: b sequences, h query heads, g key-value heads, s tokens of this rank, m of the largest piece, d width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import Codec, Transport, Work
from ...comm.codecs.tensors import decode_, encode, frame_bytes
from .local import attend, attend_backward
from .pieces import Pieces


@dataclass(frozen=True)
class Ring:
    """What all calls of one model's attention share.

    Attributes:
        transport: Between the ranks of the sequence.
        pieces: How the sequence is cut.
        is_causal: Whether a token sees only itself and those before it. Default True.
        codec: Format of keys and values that travel. Default None: they travel as they are.
    """

    transport: Transport
    pieces: Pieces
    is_causal: bool = True
    codec: Codec | None = None

    def source(self, round_: int) -> int:
        """Return the rank whose block comes in this round; its own in round 0."""
        return (self.transport.rank - round_) % self.transport.world_size

    def seen(self, rank: int, source: int) -> tuple[slice, int]:
        """Return which queries of one rank see keys of another, and how many of these, from the first on.

        All of these queries see all of these keys; of its own a rank's queries see a triangle.
        """
        rows, keys = slice(0, self.pieces.size(rank)), self.pieces.size(source)
        if self.is_causal and source < rank:  # both chunks come after the source's first, and before its second
            keys = len(self.pieces.chunks(source)[0])
        elif self.is_causal and source > rank:
            rows = slice(len(self.pieces.chunks(rank)[0]), rows.stop)
        return rows, keys if rows.start < rows.stop else 0


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport,
    pieces: Pieces,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    codec: Codec | None = None,
) -> Tensor:
    """Softmax attention of this rank's queries with the keys of all ranks. All ranks, in the same order.

    Sends 2·b·g·d elements forward for each token and rank that sees it: of a causal sequence all tokens to lower ranks
    and the first chunk to higher ones, three quarters in the mean. Backward sends as many again, and as many gradients
    in float32.

    Args:
        q: Queries of this rank's piece, [b, h, s, d], floating.
        k: Its keys, [b, g, s, d], q's dtype; g divides h.
        v: Its values, of k's shape.
        transport: Between the ranks of the sequence.
        pieces: How the sequence is cut; the same on all ranks.
        is_causal: Whether a token sees only itself and those before it. Default True.
        scale: Factor of the scores. Default None: 1/√d.
        codec: Format in which keys and values travel, such as `Int8Codec(64)`; the same on all ranks. A rank's own keys
            are exact, those of others rounded; gradients are those with respect to the rounded ones, and travel in
            float32. Default None: as they are.

    Returns:
        [b, h, s, d] in q's dtype.

    Raises:
        ValueError: Shapes do not fit the piece of this rank, or each other.
        PeerError: Another rank is missing, or gives other shapes.
    """
    ring, rank = Ring(transport, pieces, is_causal, codec), transport.rank
    if pieces.world_size != transport.world_size:
        raise ValueError(
            f"rank {rank}: pieces for {pieces.world_size} ranks, and the transport has {transport.world_size}"
        )
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] != pieces.size(rank) or k.shape[2] != pieces.size(rank):
        raise ValueError(
            f"rank {rank}: expected queries and keys [b, heads, {pieces.size(rank)}, d], this rank's piece of "
            f"{pieces.length} tokens, got {tuple(q.shape)} and {tuple(k.shape)}; cut them by Pieces.cut"
        )
    if k.shape != v.shape or q.shape[1] % k.shape[1] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"rank {rank}: expected keys and values [b, g, s, d] of one shape, with g a divisor of the {q.shape[1]} "
            f"query heads, got queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(
            f"rank {rank}: queries, keys and values have {q.dtype}, {k.dtype} and {v.dtype}; give them one"
        )
    found: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, ring, q.shape[3] ** -0.5 if scale is None else scale
    )
    return found


class _Blocks:
    """The blocks of keys and values in the order of their rounds; the next is on its way while one is computed with."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor):
        self._ring, self._own = ring, torch.stack([k, v])
        self._coming = None if ring.transport.world_size == 1 else self._launch(1)

    def _launch(self, round_: int) -> tuple[Tensor, Tensor, Tensor, Work]:
        """The block that comes, the bytes in which it comes, those that go, and the operation."""
        ring, (_, b, g, _, d) = self._ring, self._own.shape
        rank, W = ring.transport.rank, ring.transport.world_size
        sent = self._own[:, :, :, : ring.seen((rank + round_) % W, rank)[1]].contiguous()
        block = self._own.new_empty(2, b, g, ring.seen(rank, ring.source(round_))[1], d)
        if ring.codec is None:
            return block, _bytes(block), sent, ring.transport.shift(_bytes(block), _bytes(sent), round_)
        frame = block.new_empty(frame_bytes(ring.codec, block.numel()), dtype=torch.uint8)
        sent = encode(ring.codec, sent)
        return block, frame, sent, ring.transport.shift(frame, sent, round_)

    def take(self, round_: int) -> Tensor:
        """This round's keys and values that this rank's queries see, [2, b, g, m, d]; the next ones are launched."""
        if round_ == 0:
            return self._own
        assert self._coming is not None
        (block, frame, _, work), self._coming = self._coming, None
        work.wait()
        if self._ring.codec is not None:
            decode_(self._ring.codec, frame, block)
        if round_ + 1 < self._ring.transport.world_size:
            self._coming = self._launch(round_ + 1)
        return block


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float) -> Tensor:
        blocks = _Blocks(ring, k.detach(), v.detach())
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        for round_ in range(ring.transport.world_size):
            block, (rows, keys) = blocks.take(round_), ring.seen(ring.transport.rank, ring.source(round_))
            if keys > 0:
                its_k, its_v = (_by_heads(x, q) for x in block)
                part, sums = attend(q[:, :, rows], its_k, its_v, scale, is_causal=ring.is_causal and not round_)
                _merge_(out[:, :, rows], lse[:, :, rows], part, sums)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring, ctx.scale = ring, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        ring, W = ctx.ring, ctx.ring.transport.world_size
        blocks = _Blocks(ring, k, v)
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        of_own = q.new_empty(0)
        coming: tuple[Tensor, Tensor, Work] | None = None
        for round_ in range(W):
            block, (rows, keys) = blocks.take(round_), ring.seen(ring.transport.rank, ring.source(round_))
            of_block = torch.zeros(block.shape, dtype=lse.dtype, device=k.device)
            if keys > 0:
                its_k, its_v = (_by_heads(x, q) for x in block)
                known = grad[:, :, rows], q[:, :, rows], its_k, its_v, out[:, :, rows], lse[:, :, rows]
                parts = attend_backward(*known, ctx.scale, is_causal=ring.is_causal and not round_)
                grad_q[:, :, rows] += parts[0]
                for of_its, part in zip(of_block, parts[1:], strict=True):
                    of_its += part.to(lse.dtype).unflatten(1, (k.shape[1], -1)).sum(2)
            if round_ == 0:
                of_own = of_block
                continue
            _add_(of_own, coming)
            seen = ring.seen((ring.transport.rank + round_) % W, ring.transport.rank)[1]
            received = of_own.new_empty(*of_own.shape[:3], seen, of_own.shape[4])
            coming = received, of_block, ring.transport.shift(_bytes(received), _bytes(of_block), W - round_)
        _add_(of_own, coming)
        of_k, of_v = of_own.to(k.dtype)
        return grad_q.to(q.dtype), of_k, of_v, None, None


def _merge_(out: Tensor, lse: Tensor, part: Tensor, sums: Tensor) -> None:
    """Add a block's part: outputs weigh by their sums."""
    both = torch.logaddexp(lse, sums)
    out.mul_((lse - both).exp().unsqueeze(-1)).add_(part * (sums - both).exp().unsqueeze(-1))
    lse.copy_(both)


def _add_(total: Tensor, coming: tuple[Tensor, Tensor, Work] | None) -> None:
    """Add the gradient that another rank has computed of this rank's block: in the order of rounds on all ranks."""
    if coming is not None:
        received, _, work = coming
        work.wait()
        total[:, :, :, : received.shape[3]] += received


def _by_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [b, g, m, d] for each of q's heads, [b, h, m, d]."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
