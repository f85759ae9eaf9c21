"""Kernels: decode and update of parameters in one pass, in Triton.

Rule 7 of `reference.py`. Parameters stay where they lie. Rests on `lanes.py` and `tensors.py`;
`__init__.py` offers this function with the others.

Shape legend: K rows, J blocks, B bytes, S segments. In the kernel: W words of 64 elements per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN
from ..gpu_tables import Table, readable, write_back
from ..operands import ParamUpdate
from .decode import UNITS, values_at
from .lanes import EDGE, OPTIONS, launching_on
from .tensors import are_aligned, kinds_of, load_where_they_lie, store_where_they_lie


def apply(frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None:
    """p ← keep·p + weight·value for the parameters where they lie, frames of rows of n elements (rule 7).

    One pass over each. A parameter of another type than float32, bfloat16 and float16, or not contiguous, goes through
    a copy.
    """
    K, J = EDGE.check_apply(SIGN, frames_KB, n, update, block=block)
    if K * J == 0 or all(p is None for p in update.params):
        return
    written = readable(update.params)
    words, halves = frames_KB.view(torch.int64), frames_KB.view(torch.int16)
    words_per_row = J * block // 64
    table = Table(written, update.segments, K * J, frames_KB.device)
    with launching_on(frames_KB.device):
        apply_words[(triton.cdiv(K * words_per_row, UNITS["sign"]),)](
            words,
            words.stride(0),
            halves,
            halves.stride(0),
            table.owners,
            table.pointers,
            table.layout,
            len(written),
            update.weight_S,
            update.keep_S,
            K,
            words_per_row,
            BLOCK=block,
            W=UNITS["sign"],
            KINDS=kinds_of(written),
            ALIGNED=are_aligned(written),
            **OPTIONS,
        )
    write_back(update.params, written)


@triton.jit(do_not_specialize=["S", "K", "words_per_row"])
def apply_words(
    words: tl.tensor,
    words_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    owners: tl.tensor,
    params: tl.tensor,
    layout: tl.tensor,
    S: tl.tensor,
    weight: tl.tensor,
    keep: tl.tensor,
    K: tl.tensor,
    words_per_row: tl.tensor,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    KINDS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """W words of 64 elements each. params, layout, owners: as in `encode_momentum_blocks`."""
    g = tl.program_id(0) * W + tl.arange(0, W)
    inside = g < K * words_per_row
    k = (g // words_per_row).to(tl.int64)
    w = (g % words_per_row).to(tl.int64)
    scale_at = halves + k * halves_stride + words_per_row * 4 + w // (BLOCK // 64)
    values = values_at(words + k * words_stride + w, scale_at, inside, True)

    s = tl.load(owners + g // (BLOCK // 64), mask=inside, other=-1)
    owned = s >= 0
    kind = tl.load(params + S + s, mask=owned, other=0)[:, None]
    start = g.to(tl.int64) * 64 - tl.load(layout + s, mask=owned, other=0) * BLOCK
    left = (tl.load(layout + S + s, mask=owned, other=0) - start)[:, None]
    address = (tl.load(params + s, mask=owned, other=0))[:, None] + start[:, None] * tl.where(kind == 1, 4, 2)

    element = tl.arange(0, 64)[None, :]
    p = load_where_they_lie(address, kind, left, 0, element, 64, KINDS, ALIGNED)
    p = p * tl.load(keep + s, mask=owned, other=0.0)[:, None]
    p += values * tl.load(weight + s, mask=owned, other=0.0)[:, None]
    store_where_they_lie(address, kind, left, element, p, 64, KINDS, ALIGNED)
