"""Attention over a sequence that is split over ranks: queries stay, blocks of keys and values travel.

    out = ring_attention(q, k, v, transport, Pieces(length, transport.world_size))

In round t = 1…W-1 of forward, rank r sends its block to rank r + t and gets that of rank r - t, while it computes with
the block of the round before. Ring attention (Liu et al., arXiv 2310.01889) passes blocks on from neighbour to
neighbour; in W - 1 rounds both send (W-1)/W of all keys and values per rank, but on a switched network a pair of ranks
is as near as any other, a block arrives in one hop, and only what is seen there travels (`sight.py`): of a causal
sequence three quarters, of a window its neighbours' ends. Rounds in which nobody sees anything are left out. Backward
gets the blocks again, and sends each one's gradient, in float32, straight to its rank.

Shape legend: b sequences, h query heads, g key-value heads, s tokens of this rank, m of a block, d width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import Codec, Transport, Work
from ...comm.codecs.tensors import decode_, encode, frame_bytes
from ..sparse_attention.layouts import Layout
from .local import Dropout, Score, attend, attend_backward
from .pieces import Pieces
from .ranks import SequenceRanks, to_heads, to_tokens
from .sight import Sight, Tile


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transport: Transport | SequenceRanks,
    pieces: Pieces,
    *,
    is_causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    layout: Layout | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    codec: Codec | None = None,
) -> Tensor:
    """Softmax attention of this rank's queries with the keys of all ranks. All ranks, in the same order.

    Sends 2·b·g·d elements forward for each token and rank that sees it: of a causal sequence all tokens to lower ranks
    and the first chunk to higher ones, three quarters in the mean; of a window of w tokens the last w - 1 of a chunk to
    the next one's rank, whatever the length. Backward sends as many again, and as many gradients in float32.

    Args:
        q: Queries of this rank's piece, [b, h, s, d], floating.
        k: Its keys, [b, g, s, d], q's dtype; g divides h.
        v: Its values, of k's shape.
        transport: Between the ranks of the sequence; or these ranks on two levels, of which those of a node divide the
            heads: they exchange 2·b·(h + g)·d elements for each token of theirs forward, and as many backward.
        pieces: How the sequence is cut, with their ulysses_degree; the same on all ranks.
        is_causal: Whether a token sees only itself and those before it. Default True.
        window: How many tokens a token sees at most, with itself, to each side that it sees; the same on all ranks.
            Default None: all.
        documents: Number of each token's document, integers [length] or [b, length], of the whole sequence and the same
            on all ranks: a token sees its own document alone, whose tokens are neighbours. Default None: all are one.
        layout: Which blocks of keys each block of queries sees, as of `sparse_attention.build_layout(config, h,
            length)`; the same on all ranks. Of others' keys only the blocks travel that some query of the receiver
            sees. If ranks divide heads, all heads have one. Default None: all.
        scale: Factor of the scores. Default None: 1/√d.
        softcap: Bound c of the scores, which become c·tanh(score/c), as in Gemma 2. Default None: none.
        dropout: Probability with which a weight is dropped, 0 <= dropout < 1. A rank draws those of its queries, from
            torch's generator of the host and its rank. Default 0.
        codec: Format in which keys and values travel, such as `Int8Codec(64)`; the same on all ranks. A rank's own keys
            are exact, those of others rounded; gradients are those with respect to the rounded ones, and travel in
            float32. Default None: as they are.

    Returns:
        [b, h, s, d] in q's dtype.

    Raises:
        ValueError: Shapes do not fit the piece of this rank, or each other; a dropout or softcap out of its range; or
            as `Sight`.
        PeerError: Another rank is missing, or gives other shapes.
    """
    sight = Sight(pieces, is_causal=is_causal, window=window, documents=documents, layout=layout, rank=transport.rank)
    ranks = SequenceRanks.of(transport)
    return attention_by_sight(q, k, v, ranks, sight, scale=scale, softcap=softcap, dropout=dropout, codec=codec)


def attention_by_sight(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: SequenceRanks,
    sight: Sight,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    codec: Codec | None = None,
) -> Tensor:
    """As `ring_attention`, for layers that share what tokens see.

    Args:
        q: As there.
        k: As there.
        v: As there.
        ranks: As transport there.
        sight: What tokens see; the same on all ranks.
        scale: As there.
        softcap: As there.
        dropout: As there.
        codec: As there.

    Raises:
        ValueError: As there.
        PeerError: As there.
    """
    rank, pieces, heads = ranks.rank, sight.pieces, ranks.heads
    U = 1 if heads is None else heads.world_size
    if (pieces.world_size, pieces.ulysses_degree) != (ranks.transport.world_size, U):
        raise ValueError(
            f"rank {rank}: pieces for {pieces.world_size} ranks, of which {pieces.ulysses_degree} divide heads, but "
            f"there are {ranks.transport.world_size}, of which {U} do; take the ranks' pieces(length)"
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
    if sight.sequences not in (1, q.shape[0]):
        raise ValueError(
            f"rank {rank}: expected documents of {q.shape[0]} sequences, got {sight.sequences}; give a row for each"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(
            f"rank {rank}: queries, keys and values have {q.dtype}, {k.dtype} and {v.dtype}; give them one"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"rank {rank}: expected a softcap above 0, or none, got {softcap}")
    if sight.layout is not None and (sight.layout.heads != q.shape[1] or (U > 1 and len(sight.layout.tables) > 1)):
        raise ValueError(
            f"rank {rank}: expected a layout of {q.shape[1]} heads, one of all heads if {U} ranks divide them, got "
            f"{len(sight.layout.tables)} of {sight.layout.heads} heads; build it for as many, and set ulysses_degree "
            "to 1 if heads differ"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"rank {rank}: expected a dropout of at least 0 and below 1, got {dropout}")
    # Drawn here, so that a checkpointed layer that is computed again with the same state drops the same weights.
    seed = int(torch.randint(1 << 31, (), dtype=torch.int64, device="cpu")) + rank if dropout else 0
    ring = _Ring(ranks.ring, sight, codec, dropout, seed)
    score = Score(q.shape[3] ** -0.5 if scale is None else scale, softcap)
    if heads is None:
        found: Tensor = _RingAttention.apply(q, k, v, ring, score)  # type: ignore[no-untyped-call]
        return found
    h, g = q.shape[1], math.lcm(k.shape[1], U)
    if h % g:
        raise ValueError(
            f"rank {rank}: {U} ranks cannot divide {h} heads with {k.shape[1]} of keys and values; set ulysses_degree "
            "to a divisor of both, or to 1"
        )
    k, v = (x if x.shape[1] == g else x.repeat_interleave(g // k.shape[1], 1) for x in (k, v))
    sizes = pieces.sizes(rank // U)
    its = to_heads(torch.cat([x.unflatten(1, (U, -1)) for x in (q, k, v)], 2), heads, sizes)
    out = _RingAttention.apply(*its.split([h // U, g // U, g // U], 1), ring, score)  # type: ignore[no-untyped-call]
    return to_tokens(out, heads, sizes).flatten(1, 2)


@dataclass(frozen=True)
class _Ring:
    """Between whom blocks travel, which, and in which format; and which share of the weights is dropped."""

    transport: Transport
    sight: Sight
    codec: Codec | None
    p_dropped: float
    seed: int

    def source(self, round_: int) -> int:
        """The rank whose block comes in this round; its own in round 0."""
        return (self.transport.rank - round_) % self.transport.world_size

    def target(self, round_: int) -> int:
        """The rank to which this rank's block goes in this round."""
        return (self.transport.rank + round_) % self.transport.world_size

    def dropout(self, device: torch.device) -> Dropout | None:
        """At the start of a pass over the tiles."""
        return Dropout(self.p_dropped, torch.Generator(device).manual_seed(self.seed)) if self.p_dropped else None

    def tiles(self, round_: int, device: torch.device) -> Iterator[Tile]:
        return self.sight.tiles(self.transport.rank, self.source(round_), device)


class _Blocks:
    """The blocks of keys and values in the order of their rounds; the next is on its way while one is computed with."""

    def __init__(self, ring: _Ring, k: Tensor, v: Tensor):
        self._ring, self._own = ring, torch.stack([k, v]).contiguous()  # stack keeps heads innermost if they are
        self._rounds = ring.sight.rounds()
        self._coming = self._launch(self._rounds[0]) if self._rounds else None  # at once: others wait for it

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each round with the keys and values that this rank's queries see, [2, b, g, m, d]."""
        yield 0, self._own
        for k, round_ in enumerate(self._rounds, 1):
            assert self._coming is not None
            (block, frame, _, work), self._coming = self._coming, None
            work.wait()
            if self._ring.codec is not None:
                decode_(self._ring.codec, frame, block)
            if k < len(self._rounds):
                self._coming = self._launch(self._rounds[k])
            yield round_, block

    def _launch(self, round_: int) -> tuple[Tensor, Tensor, Tensor, Work]:
        """The block that comes, the bytes in which it comes, those that go, and the operation."""
        ring, (_, b, g, _, d) = self._ring, self._own.shape
        rank = ring.transport.rank
        sent = _take(self._own, ring.sight.keys(ring.target(round_), rank))
        block = self._own.new_empty(2, b, g, _count(ring.sight.keys(rank, ring.source(round_))), d)
        if ring.codec is None:
            return block, _bytes(block), sent, ring.transport.shift(_bytes(block), _bytes(sent), round_)
        frame = block.new_empty(frame_bytes(ring.codec, block.numel()), dtype=torch.uint8)
        sent = encode(ring.codec, sent)
        return block, frame, sent, ring.transport.shift(frame, sent, round_)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, score: Score) -> Tensor:
        if q.stride(-1) != 1:  # the CPU's kernel reads d elements in a row, as blocks have them
            q = q.contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        dropout = ring.dropout(q.device)
        for round_, block in _Blocks(ring, k.detach(), v.detach()):
            its_k, its_v = (_by_heads(x, q) for x in block)
            for tile in ring.tiles(round_, q.device):
                rows, keys = tile.rows, tile.keys
                part, sums = attend(q[:, :, rows], its_k[:, :, keys], its_v[:, :, keys], score, tile, dropout)
                _merge_(out[:, :, rows], lse[:, :, rows], part, sums)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring, ctx.score = ring, score
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        of_own = q.new_empty(0)
        coming: _Gradient | None = None
        dropout = ring.dropout(q.device)
        for round_, block in _Blocks(ring, k, v):
            its_k, its_v = (_by_heads(x, q) for x in block)
            of_block = torch.zeros(block.shape, dtype=lse.dtype, device=k.device)
            for tile in ring.tiles(round_, q.device):
                rows, keys = tile.rows, tile.keys
                known = grad[:, :, rows], q[:, :, rows], its_k[:, :, keys], its_v[:, :, keys], out[:, :, rows]
                parts = attend_backward(*known, lse[:, :, rows], ctx.score, tile, dropout)
                grad_q[:, :, rows] += parts[0]
                for of_its, part in zip(of_block, parts[1:], strict=True):
                    of_its[:, :, keys] += part.to(lse.dtype).unflatten(1, (k.shape[1], -1)).sum(2)
            if round_ == 0:
                of_own = of_block
                continue
            _add_(of_own, coming)
            keys_seen = ring.sight.keys(ring.target(round_), ring.transport.rank)
            received = of_own.new_empty(*of_own.shape[:3], _count(keys_seen), of_own.shape[4])
            back = ring.transport.world_size - round_
            work = ring.transport.shift(_bytes(received), _bytes(of_block), back)
            coming = _Gradient(received, keys_seen, of_block, work)
        _add_(of_own, coming)
        of_k, of_v = of_own.to(k.dtype)
        return grad_q.to(q.dtype), of_k, of_v, None, None


@dataclass(frozen=True)
class _Gradient:
    """That of this rank's block from another rank, on its way.

    Attributes:
        received: Where it comes, [2, b, g, m, d].
        keys: Of which tokens it is.
        sent: The gradient that goes meanwhile, which must be kept.
        work: The operation.
    """

    received: Tensor
    keys: list[slice]
    sent: Tensor
    work: Work


def _merge_(out: Tensor, lse: Tensor, part: Tensor, sums: Tensor) -> None:
    """Add a block's part: outputs weigh by their sums."""
    both = torch.logaddexp(lse, sums)
    out.mul_((lse - both).exp().unsqueeze(-1)).add_(part * (sums - both).exp().unsqueeze(-1))
    lse.copy_(both)


def _add_(total: Tensor, coming: _Gradient | None) -> None:
    """Add the gradient that another rank has computed of this rank's block: in the order of rounds on all ranks."""
    if coming is None:
        return
    coming.work.wait()
    start = 0
    for part in coming.keys:
        total[:, :, :, part] += coming.received[:, :, :, start : start + part.stop - part.start]
        start += part.stop - part.start


def _take(block: Tensor, keys: list[slice]) -> Tensor:
    """Some tokens of a block [2, b, g, m, d], new."""
    return torch.cat([block[:, :, :, part] for part in keys] or [block[:, :, :, :0]], 3)


def _count(keys: list[slice]) -> int:
    return sum(part.stop - part.start for part in keys)


def _by_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [b, g, m, d] for each of q's heads, [b, h, m, d]."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
