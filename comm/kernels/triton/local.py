"""Kernels: a step by a rank's own gradients, without frames, in one pass, in Triton.

Rule 8 of `reference.py`. Gradients and parameters are used in place. Rests on `momentum.py` and `tensors.py`;
`backend.py` offers this function with the others.

Shape legend: K rows, N elements, J blocks, S segments. In the kernel: W words of 64 elements per program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..gpu_tables import Table, readable, write_back
from ..operands import LocalStep
from .lanes import EDGE, OPTIONS, launching_on
from .momentum import Weights
from .tensors import Tensors, load_where_they_lie, pieces_of, store_where_they_lie, tensors_of

WORDS_PER_PROGRAM = 16
"""W."""


class Flat(NamedTuple):
    """Contiguous operands: D or the variance, the floor of each block, m, u and the anchor."""

    D: tl.tensor
    floor: tl.tensor | None
    m: tl.tensor
    sum: tl.tensor
    anchor: tl.tensor | None


class Numbers(NamedTuple):
    """Numbers of D and of the update of parameters."""

    correction: float
    eps: float
    weight: float
    kept: float


def local_step(step: LocalStep, *, block: int) -> None:
    """Update m, u, anchors and parameters in place by this rank's gradients alone (rule 8).

    One pass over each. Tensors of another type than float32, bfloat16 and float16, or not contiguous, go through a
    copy.
    """
    K, J = EDGE.check_local_step(step, block=block)
    if K * J == 0:
        return
    momentum, W = step.momentum, WORDS_PER_PROGRAM
    device, weights = momentum.old.device, momentum.weights
    D, floor, correction, eps = momentum.divisor
    written = readable(step.params)
    grads = Table(readable(momentum.grads), momentum.segments, K * J, device)
    params = Table(written, momentum.segments, K * J, device)
    words = K * J * (block // 64)
    with launching_on(device):
        local_words[(triton.cdiv(words, W),)](
            tensors_of(grads),
            tensors_of(params),
            Flat(D, floor, momentum.old, step.sum_KN, step.anchor_KN),
            Weights(weights.keep, weights.add, weights.own, weights.unscale),
            Numbers(correction, eps, step.weight, step.kept),
            words,
            len(written),
            BLOCK=block,
            W=W,
            **OPTIONS,
        )
    write_back(step.params, written)


@triton.jit(do_not_specialize=["words", "S"])
def local_words(
    grads: Tensors,
    held: Tensors,
    flat: Flat,
    weights: Weights,
    numbers: Numbers,
    words: tl.tensor,
    S: tl.tensor,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """A program of W words of 64 elements each. held: the parameters; `params` would clash with a name of Triton's."""
    g = tl.program_id(0) * W + tl.arange(0, W)
    inside = g < words
    WORDS: tl.constexpr = BLOCK // 64
    block, offset = g // WORDS, g % WORDS * 64
    element = tl.arange(0, 64)[None, :]
    at = g.to(tl.int64)[:, None] * 64 + element
    mask = inside[:, None] & (element < 64)

    pieces = pieces_of(grads, block, offset, inside, S, BLOCK)
    grad = load_where_they_lie(grads, pieces, 0, element, 64) * weights.unscale
    d = tl.load(flat.D + at, mask=mask, other=1.0)
    if flat.floor is not None:
        least = tl.load(flat.floor + block, mask=inside, other=1.0)[:, None]
        d = tl.sqrt_rn(tl.maximum(d * numbers.correction, least)) + numbers.eps
    y = tl.div_rn(grad, tl.sqrt_rn(d * d + (grad * grad) * weights.own))
    m = y * weights.add + tl.load(flat.m + at, mask=mask, other=0.0) * weights.keep
    tl.store(flat.m + at, m, mask=mask)
    moved = m * numbers.weight
    tl.store(flat.sum + at, tl.load(flat.sum + at, mask=mask, other=0.0) + moved, mask=mask)

    pieces = pieces_of(held, block, offset, inside, S, BLOCK)
    p = load_where_they_lie(held, pieces, 0, element, 64)
    if flat.anchor is not None:
        tl.store(flat.anchor + at, p, mask=mask & (pieces.kind != 0) & (element < pieces.left))
    store_where_they_lie(held, pieces, element, p * numbers.kept - moved, 64)
