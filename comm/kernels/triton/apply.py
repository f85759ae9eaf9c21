"""Kernels: decode and update of parameters in one pass, in Triton.

Rule 7 of `reference.py`. Parameters are updated in place. Rests on `decode.py` and `tensors.py`; `backend.py` offers
this function with the others.

Shape legend: K rows, J blocks, B bytes, S segments. In the kernel: W words of 64 elements per program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN
from ..gpu_tables import Table, readable, write_back
from ..operands import ParamUpdate
from .decode import UNITS, units_of, values_at
from .lanes import EDGE, OPTIONS, Frames, frames_of, launching_on
from .tensors import Tensors, load_where_they_lie, pieces_of, store_where_they_lie, tensors_of


def apply(frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None:
    """p ← keep·p + weight·value, parameters in place, with the values of frames of rows of n elements (rule 7).

    One pass over each. A parameter of another type than float32, bfloat16 and float16, or not contiguous, goes through
    a copy.
    """
    K, J = EDGE.check_apply(SIGN, frames_KB, n, update, block=block)
    if K * J == 0 or all(p is None for p in update.params):
        return
    written, W = readable(update.params), UNITS["sign"]
    table = Table(written, update.segments, K * J, frames_KB.device)
    words_per_row = J * block // 64
    with launching_on(frames_KB.device):
        apply_words[(triton.cdiv(K * words_per_row, W),)](
            frames_of(SIGN, frames_KB),
            tensors_of(table),
            update.weight_S,
            update.keep_S,
            K,
            words_per_row,
            len(written),
            BLOCK=block,
            W=W,
            **OPTIONS,
        )
    write_back(update.params, written)


@triton.jit(do_not_specialize=["K", "words_per_row", "S"])
def apply_words(
    frames: Frames,
    tensors: Tensors,
    weight: tl.tensor,
    keep: tl.tensor,
    K: tl.tensor,
    words_per_row: tl.tensor,
    S: tl.tensor,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """A program of W words of 64 elements each. weight, keep: float32 [S]."""
    g = tl.program_id(0) * W + tl.arange(0, W)
    inside = g < K * words_per_row
    k = (g // words_per_row).to(tl.int64)
    units = units_of(frames, k, (g % words_per_row).to(tl.int64), words_per_row, BLOCK, 1)
    values = values_at(units.codes_at, units.scale_at, inside, 1)

    WORDS: tl.constexpr = BLOCK // 64
    pieces = pieces_of(tensors, g // WORDS, g % WORDS * 64, inside, S, BLOCK)
    element = tl.arange(0, 64)[None, :]
    owned = pieces.s >= 0
    p = load_where_they_lie(tensors, pieces, 0, element, 64)
    p = p * tl.load(keep + pieces.s, mask=owned, other=0.0)[:, None]
    p += values * tl.load(weight + pieces.s, mask=owned, other=0.0)[:, None]
    store_where_they_lie(tensors, pieces, element, p, 64)
