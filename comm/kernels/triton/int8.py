"""Kernels: the int8 frame in Triton, for CUDA tensors. The same bytes and the same floats as `reference.py`.

Rests on `lanes.py`; `backend.py` offers these functions with the others.

Shape legend: K rows, N elements, J blocks, B bytes. In the kernel: P blocks per program.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import INT8
from . import decode as triton_decode
from .lanes import add_owed, clear_tail, from_bfloat16, launch_encode


def int8_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """`encode` for int8 frames."""
    launch_encode(int8_encode_blocks, INT8, x_KN, error_KN, frames_KB, counts_KJ, block=block)


int8_decode = functools.partial(triton_decode.decode, INT8)
int8_decode_mean = functools.partial(triton_decode.decode_mean, INT8)


@triton.jit(do_not_specialize=["K", "J"])
def int8_encode_blocks(
    x: tl.tensor,
    x_stride: tl.tensor,
    error: tl.tensor,
    error_stride: tl.tensor,
    codes: tl.tensor,
    codes_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    halves_per_row: tl.tensor,
    counts: tl.tensor,
    counts_stride: tl.tensor,
    K: tl.tensor,
    J: tl.tensor,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """P blocks, a row of 16 lanes of each at a time. error: float32, int16 (the bits of bfloat16) or None."""
    b = tl.program_id(0) * P + tl.arange(0, P)
    inside = b < K * J
    k = (b // J).to(tl.int64)
    j = (b % J).to(tl.int64)
    lane = tl.arange(0, 16)[None, :]
    inside_lanes = inside[:, None] & (lane < 16)
    x_at = x + (k * x_stride + j * BLOCK)[:, None] + lane
    error_at = None if error is None else error + (k * error_stride + j * BLOCK)[:, None] + lane
    count = None if counts is None else tl.load(counts + k * counts_stride + j, mask=inside, other=0)

    # 1. c, and the bits of its largest size: an infinity is above every number, and a NaN above both
    largest = tl.zeros([P, 16], tl.int32)
    rows = ()
    if KEEP:
        for i in tl.static_range(BLOCK // 16):
            c = tl.load(x_at + 16 * i, mask=inside_lanes, other=0.0)
            c = add_owed(c, error_at, count, lane, inside_lanes, 16 * i)
            rows += (c,)  # type: ignore[assignment]
            largest = tl.maximum(largest, c.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    else:
        for i in range(BLOCK // 16):
            c = tl.load(x_at + 16 * i, mask=inside_lanes, other=0.0)
            c = add_owed(c, error_at, count, lane, inside_lanes, 16 * i)
            largest = tl.maximum(largest, c.to(tl.int32, bitcast=True) & 0x7FFFFFFF)

    # 2. The scale, rounded up to bfloat16
    bits = tl.max(largest, axis=1)
    exact = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full([P], 127.0, tl.float32))
    not_below = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    farthest = from_bfloat16(not_below) * 128.0
    bad = (bits >= 0x7F800000) | (farthest.to(tl.int32, bitcast=True) >= 0x7F800000)
    scale = tl.where(bad, 0x7FC0, not_below)
    step = tl.where(bad | (scale == 0), 1.0, from_bfloat16(scale))
    tl.store(halves + k * halves_stride + J * (BLOCK // 2) + j, scale.to(tl.int16), mask=inside)

    # 3. Codes and residuals
    codes_at = codes + (k * codes_stride + j * BLOCK)[:, None] + lane
    if KEEP:
        for i in tl.static_range(BLOCK // 16):
            _round_row(rows[i], x_at, codes_at, inside_lanes, 16 * i, step, bad, P)
    else:
        for i in range(BLOCK // 16):
            c = tl.load(x_at + 16 * i, mask=inside_lanes, other=0.0)
            c = add_owed(c, error_at, count, lane, inside_lanes, 16 * i)
            _round_row(c, x_at, codes_at, inside_lanes, 16 * i, step, bad, P)

    # 4. The end of a row
    clear_tail(halves, halves_stride, halves_per_row, J * (BLOCK // 2 + 1), k, inside & (j == J - 1), P)


@triton.jit
def _round_row(
    c: tl.tensor,
    x_at: tl.tensor,
    codes_at: tl.tensor,
    inside: tl.tensor,
    offset: tl.tensor,
    step: tl.tensor,
    bad: tl.tensor,
    P: tl.constexpr,
) -> None:
    """codes ← q; x ← c - q·step."""
    c = tl.where(bad[:, None], 0.0, c)
    steps = tl.broadcast_to(step[:, None], (P, 16))
    ratio = tl.div_rn(c, steps)
    # Floats of 1.5·2^23 are a step of 1 apart: adding it rounds. A negative zero loses its sign there: put it back.
    near = ((ratio + 12582912.0) - 12582912.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    q = (near | (ratio.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    tl.store(codes_at + offset, q.to(tl.int32).to(tl.int8), mask=inside)
    tl.store(x_at + offset, c - q * steps, mask=inside)
