"""Kernels: the residual of a step that is clipped after it was sent, in one pass, in Triton.

Rule 11 of `reference.py`. Gradients are read in place. Rests on `tensors.py`; `backend.py` offers this function with
the others.

Shape legend: K rows, N elements, S segments. In the kernel: W words of 64 elements a program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..gpu_tables import Table, readable
from ..operands import MomentumInputs
from .lanes import EDGE, OPTIONS, from_bfloat16, launching_on, nearest_bfloat16, rows_of
from .tensors import Tensors, load_where_they_lie, pieces_of, tensors_of

WORDS_PER_PROGRAM = 16
"""W."""


class Flat(NamedTuple):
    """Contiguous operands: D or the variance, the floor of each block, and the residual, float32 or bfloat16's bits."""

    D: tl.tensor
    floor: tl.tensor | None
    residual: tl.tensor


class Numbers(NamedTuple):
    """Numbers of D, as `MomentumWeights`, and the factor that gradients should have had."""

    correction: float
    eps: float
    add: float
    own: float
    unscale: float
    again: float


def correct_residual(momentum: MomentumInputs, factor: float, residual_KN: Tensor, *, block: int) -> None:
    """Residual ← what it would be if the gradients had been sent with `factor` times theirs (rule 11). One pass."""
    K, J = EDGE.check_correct_residual(momentum, residual_KN, block=block)
    if K * J == 0:
        return
    D, floor, correction, eps = momentum.divisor
    weights, words = momentum.weights, K * J * (block // 64)
    table = Table(readable(momentum.grads), momentum.segments, K * J, residual_KN.device)
    with launching_on(residual_KN.device):
        correct_words[(triton.cdiv(words, WORDS_PER_PROGRAM),)](
            tensors_of(table),
            Flat(D, floor, rows_of(residual_KN).at),
            Numbers(correction, eps, weights.add, weights.own, weights.unscale, weights.unscale * factor),
            words,
            len(momentum.grads),
            BLOCK=block,
            W=WORDS_PER_PROGRAM,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=["words", "S"])
def correct_words(
    grads: Tensors, flat: Flat, numbers: Numbers, words: tl.tensor, S: tl.tensor, BLOCK: tl.constexpr, W: tl.constexpr
) -> None:
    """A program of W words of 64 elements each."""
    g = tl.program_id(0) * W + tl.arange(0, W)
    inside = g < words
    WORDS: tl.constexpr = BLOCK // 64
    block, offset = g // WORDS, g % WORDS * 64
    element = tl.arange(0, 64)[None, :]
    at = g.to(tl.int64)[:, None] * 64 + element

    pieces = pieces_of(grads, block, offset, inside, S, BLOCK)
    mask = inside[:, None] & (pieces.kind != 0) & (element < 64)
    grad = load_where_they_lie(grads, pieces, 0, element, 64)
    d = tl.load(flat.D + at, mask=mask, other=1.0)
    if flat.floor is not None:
        least = tl.load(flat.floor + block, mask=inside, other=1.0)[:, None]
        d = tl.sqrt_rn(tl.maximum(d * numbers.correction, least)) + numbers.eps
    more = _normalised(grad * numbers.again, d, numbers.own) - _normalised(grad * numbers.unscale, d, numbers.own)
    held = tl.load(flat.residual + at, mask=mask, other=0)
    is_wide: tl.constexpr = held.dtype == tl.float32
    residual = (held if is_wide else from_bfloat16(held)) + more * numbers.add
    tl.store(flat.residual + at, residual if is_wide else nearest_bfloat16(residual), mask=mask)


@triton.jit
def _normalised(g: tl.tensor, d: tl.tensor, own: tl.tensor) -> tl.tensor:
    return tl.div_rn(g, tl.sqrt_rn(d * d + (g * g) * own))
