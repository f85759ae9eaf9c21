"""The gather executor: each query block gathers the key blocks that it sees, and attends only to these.

Works on any device and in any floating-point type; computes in float32 (float64 for float64). It works on a few query
blocks at a time, so that the gathered blocks stay in the cache. The backward pass gathers and computes the weights
again, so only inputs and output are saved. All keys of a query block are gathered together, so no softmax is merged.
Shape legend: T tasks (`plan.py`), b tokens of a block, Q queries and K keys of a task, D features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .plan import Bucket, minus_infinity_where

# Floats of keys, values and weights to work on at a time. Measured on 2 cores with 1 to 2 MB of cache each.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class GatherCall:
    """The arguments of a call other than tensors to differentiate.

    Attributes:
        buckets: The tasks, from `plan`.
        is_causal: Whether no token sees a later one.
        scale: The factor of the scores.
        visible: bool [sequences, N, b], false for padding; None without padding.
        dropout: The share of the weights that are dropped.
        seed: Seed of the dropout; the backward pass draws the same mask again.
    """

    buckets: tuple[Bucket, ...]
    is_causal: bool
    scale: float
    visible: Tensor | None
    dropout: float
    seed: int

    def chunks(self, b: int, D: int) -> Iterator[tuple[int, Bucket]]:
        """The tasks in chunks that fit the cache, each with its number."""
        place = 0
        for bucket in self.buckets:
            Q, K = bucket.rows_TR.shape[1] * b, bucket.columns_TC.shape[1] * b
            for chunk in bucket.chunks(max(1, _CHUNK // (2 * K * (D + Q)))):
                yield place, chunk
                place += 1


def gather_attention(
    query_BHNbD: Tensor, key_BGNbD: Tensor, value_BGNbD: Tensor, bias: Tensor | None, call: GatherCall
) -> Tensor:
    """Attention, [B, H, N, b, D]. bias: added to the scores, of shape [B or 1, H or 1, N·b or 1, N·b or 1].

    A query whose keys are all hidden by padding gets zeros and no gradient.
    """
    out: Tensor = _Gather.apply(query_BHNbD, key_BGNbD, value_BGNbD, bias, call)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: GatherCall) -> Tensor:
        q, k, v = (x.flatten(0, 2) for x in (query, key, value))
        out = torch.empty_like(q)
        for place, chunk in call.chunks(*q.shape[1:]):
            taken = _Taken.of(chunk, q, k, v)
            weights, _ = _dropped(_weights(taken, bias, call), call, place)
            out.index_copy_(
                0, chunk.rows_TR.flatten(), torch.bmm(weights, taken.v_TKD).to(out.dtype).view(-1, *out.shape[1:])
            )
        ctx.save_for_backward(query, key, value, bias, out)
        ctx.call = call
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out = ctx.saved_tensors
        q, k, v, grad = (x.flatten(0, 2) for x in (query, key, value, grads[0]))
        call: GatherCall = ctx.call
        dtype = _computed_in(q)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        d_bias = None if bias is None or not ctx.needs_input_grad[3] else torch.zeros_like(bias, dtype=dtype)
        for place, chunk in call.chunks(*q.shape[1:]):
            taken = _Taken.of(chunk, q, k, v)
            weights = _weights(taken, bias, call)
            d_out, its_out = (taken.queries(x) for x in (grad, out))
            dropped, factor = _dropped(weights, call, place)
            _add_blocks(dv, chunk, torch.bmm(dropped.transpose(1, 2), d_out))
            d_scores = torch.bmm(d_out, taken.v_TKD.transpose(1, 2))
            if factor is not None:
                d_scores *= factor
            d_scores -= (d_out * its_out).sum(2, keepdim=True)
            d_scores *= weights
            d_query = torch.bmm(d_scores, taken.k_TKD).mul_(call.scale)
            dq.index_copy_(0, chunk.rows_TR.flatten(), d_query.to(dq.dtype).view(-1, *dq.shape[1:]))
            _add_blocks(dk, chunk, torch.bmm(d_scores.transpose(1, 2), taken.q_TQD))  # q is scaled already
            if d_bias is not None:
                d_bias.index_put_(_places(d_bias, chunk, q.shape[1]), d_scores, accumulate=True)
        return (
            dq.view(query.shape),
            dk.to(k.dtype).view(key.shape),
            dv.to(v.dtype).view(value.shape),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
        )


@dataclass(frozen=True)
class _Taken:
    """A chunk's queries, keys and values in the computing type. `_weights` scales the queries in place."""

    chunk: Bucket
    q_TQD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor

    @classmethod
    def of(cls, chunk: Bucket, q: Tensor, k: Tensor, v: Tensor) -> _Taken:
        columns_TC = chunk.columns_TC
        return cls(chunk, _take(q, chunk.rows_TR), _take(k, columns_TC), _take(v, columns_TC))

    def queries(self, x: Tensor) -> Tensor:
        """The rows of another tensor of the queries' shape that belong to this chunk's queries."""
        return _take(x, self.chunk.rows_TR)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The blocks at places [T, n] as [T, n·b, D], in the computing type."""
    return x.index_select(0, places.flatten()).to(_computed_in(x)).view(len(places), -1, x.shape[2])


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _weights(taken: _Taken, bias: Tensor | None, call: GatherCall) -> Tensor:
    """Softmax of the scores, [T, Q, K]; zeros in rows that see nothing. Scales `taken`'s queries in place."""
    chunk, Q = taken.chunk, taken.q_TQD.shape[1]
    T, R = chunk.rows_TR.shape
    scores_TQK = torch.bmm(taken.q_TQD.mul_(call.scale), taken.k_TKD.transpose(1, 2))
    if bias is not None:
        scores_TQK += bias[_places(bias, chunk, Q // R)].to(scores_TQK.dtype)
    if call.is_causal:
        later = torch.ones(Q, Q, dtype=torch.bool, device=scores_TQK.device).triu(1)
        scores_TQK[:, :, :Q] += minus_infinity_where(later)
    if chunk.hidden_TRC is not None:
        scores_TQK.view(T, R, Q // R, -1, Q // R).add_(chunk.hidden_TRC[:, :, None, :, None])
    if call.visible is not None:
        keys_TK = call.visible[chunk.sequences_T[:, None], chunk.key_blocks_TC].flatten(1)
        scores_TQK += minus_infinity_where(~keys_TK)[:, None]
    if call.visible is None and bias is None:
        return torch.softmax(scores_TQK, 2)
    sees_nothing = scores_TQK.amax(2, keepdim=True) == float("-inf")
    return torch.softmax(scores_TQK, 2).masked_fill_(sees_nothing, 0)


def _dropped(weights_TQK: Tensor, call: GatherCall, place: int) -> tuple[Tensor, Tensor | None]:
    """The weights after dropout, and the factor applied. The same seed and place give the same mask."""
    if call.dropout == 0:
        return weights_TQK, None
    generator = torch.Generator(weights_TQK.device).manual_seed(call.seed + place)
    keep = 1 - call.dropout
    factor = torch.empty_like(weights_TQK).bernoulli_(keep, generator=generator).div_(keep)
    return weights_TQK * factor, factor


def _add_blocks(to: Tensor, chunk: Bucket, from_TKD: Tensor) -> None:
    """Add the gradients of gathered keys at the keys' places."""
    to.view(len(to), -1).index_add_(0, chunk.columns_TC.flatten(), from_TKD.reshape(-1, to[0].numel()))


def _places(bias: Tensor, chunk: Bucket, b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The index of each score's bias, [T, Q, K]; an axis of size one is broadcast."""
    within = torch.arange(b, device=bias.device)
    queries_TQ, keys_TK = (
        (x[:, :, None] * b + within).flatten(1) for x in (chunk.query_blocks_TR, chunk.key_blocks_TC)
    )
    places = [chunk.sequences_T[:, None, None], chunk.heads_T[:, None, None], queries_TQ[:, :, None], keys_TK[:, None]]
    s, h, q, k = (
        place if size > 1 else torch.zeros_like(place) for place, size in zip(places, bias.shape, strict=True)
    )
    return s, h, q, k
