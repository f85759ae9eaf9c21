"""Attention between a rank's queries and one block of keys: its part of the output, and the logarithm of its sum.

The parts of several blocks make the whole by their logarithms (Milakov and Gimelshein, arXiv 1805.02867). Backward
takes the logarithm of the whole sum, so that each block's gradients are parts of the gradients of all, without the
others. torch's flash kernel computes them on a CPU; elsewhere, and if weights are dropped, plain operations do, a slice
of the queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .sight import Tile

_HIDDEN = -1e30
"""Score of a key that a query does not see: finite, so that of a tile without one it sees the part weighs nothing."""
_SLICE_ELEMENTS = 1 << 24
"""Scores that plain operations hold at once: 64 MiB in float32."""


@dataclass(frozen=True)
class Score:
    """How a query and a key make a score.

    Attributes:
        scale: Factor of their product.
        softcap: Bound c of the score, which becomes c·tanh(score/c). Default None: none.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Dropout:
    """Which weights are dropped: drawn in the order of tiles, so that backward draws the same ones.

    Attributes:
        p: The share, 0 <= p < 1.
        generator: On the device of the weights.
    """

    p: float
    generator: torch.Generator

    def kept(self, like: Tensor) -> Tensor:
        """Draw factors of weights: 1/(1 - p), or 0 with probability p."""
        return torch.empty_like(like).bernoulli_(1 - self.p, generator=self.generator).div_(1 - self.p)


def attend(
    q: Tensor, k: Tensor, v: Tensor, score: Score, tile: Tile, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax(scale·q·kᵀ)·v, its scores capped if asked for, and the logarithm of the softmax's sum.

    Args:
        q: Queries [b, h, n, d], n > 0. Of q, k and v, elements along the last dimension are neighbours in memory.
        k: Keys [b, h, m, d], m > 0.
        v: Values [b, h, m, e].
        score: Factor and bound of the scores.
        tile: Which of the keys each query sees.
        dropout: Drops weights of the softmax, not of its sum. Default None.

    Returns:
        The output [b, h, n, e] in q's dtype, and the logarithms [b, h, n], float32 (float64 for float64).
    """
    if dropout is None and score.softcap is None and _has_kernel(q, v):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.is_triangle, attn_mask=_mask(tile, q.dtype), scale=score.scale
        )
        return out, lse
    outs, lses = [], []
    for rows in _slices(q, k):
        scores, _ = _scores(q, k, score, rows, tile)
        lse = scores.logsumexp(-1)
        lses.append(lse)
        weights = (scores - lse.unsqueeze(-1)).exp()
        if dropout is not None:
            weights *= dropout.kept(weights)
        outs.append(weights.to(q.dtype) @ v)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    score: Score,
    tile: Tile,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of this block in the gradients of q, k and v, in q's dtype or wider.

    Args:
        grad: Gradient of the whole output, [b, h, n, e].
        q: As in `attend`.
        k: As in `attend`.
        v: As in `attend`.
        out: The whole output, of all blocks.
        lse: The logarithms of the whole sums.
        score: As in `attend`.
        tile: As in `attend`.
        dropout: As in `attend`, with a generator in the state in which it was there.
    """
    if dropout is None and score.softcap is None and _has_kernel(q, v):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: tuple[Tensor, Tensor, Tensor] = backward(
            grad, q, k, v, out, lse, 0.0, tile.is_triangle, attn_mask=_mask(tile, q.dtype), scale=score.scale
        )
        return grads
    wide = lse.dtype
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    for rows in _slices(q, k):
        scores, slope = _scores(q, k, score, rows, tile)
        weights = (scores - lse[:, :, rows].unsqueeze(-1)).exp()
        given = grad[:, :, rows].to(wide)
        of_weights = given @ v.to(wide).mT
        if dropout is None:
            grad_v += weights.mT @ given
        else:
            kept = dropout.kept(weights)
            of_weights *= kept
            grad_v += (weights * kept).mT @ given
        of_scores = weights * (of_weights - delta[:, :, rows]) * slope
        grad_q[:, :, rows] = of_scores @ k.to(wide)
        grad_k += of_scores.mT @ q[:, :, rows].to(wide)
    return grad_q, grad_k, grad_v


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    b, h, n, _ = q.shape
    step = max(1, _SLICE_ELEMENTS // max(1, b * h * k.shape[2]))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _mask(tile: Tile, dtype: torch.dtype) -> Tensor | None:
    """What the kernel adds to scores; it takes no booleans."""
    if tile.hidden is None:
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.zeros(tile.hidden.shape, dtype=wide, device=tile.hidden.device).masked_fill_(tile.hidden, _HIDDEN)


def _scores(q: Tensor, k: Tensor, score: Score, rows: slice, tile: Tile) -> tuple[Tensor, Tensor | float]:
    """The scores of some queries, and their derivative with respect to the products q·kᵀ."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q[:, :, rows].to(wide) @ k.to(wide).mT * score.scale
    slope: Tensor | float = score.scale
    if score.softcap is not None:
        bounded = (scores / score.softcap).tanh()
        scores, slope = score.softcap * bounded, score.scale * (1 - bounded.square())
    if tile.is_triangle:
        places = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=q.device)
        later = torch.arange(k.shape[2], dtype=torch.int64, device=q.device) > places.unsqueeze(-1)
        scores = scores.masked_fill(later, float("-inf"))
    if tile.hidden is not None:
        scores = scores.masked_fill(tile.hidden[:, :, rows], _HIDDEN)
    return scores, slope
