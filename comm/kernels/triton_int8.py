"""Kernels: the int8 frame in Triton, for CUDA tensors. The same bytes and the same floats as `reference.py`.

Rests on `triton_lanes.py`; `triton.py` offers these functions with the others.

Shape legend: K rows, N elements, J blocks, B bytes. In the kernels: P blocks or R rows of 16 elements per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .edge import INT8
from .triton_lanes import (
    EDGE,
    LARGEST_KEPT,
    OPTIONS,
    add_owed,
    bits_of,
    blocks_per_program,
    clear_tail,
    from_bfloat16,
    launching_on,
)

ROWS = 64


def int8_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """`encode` for int8 frames."""
    K, J = EDGE.check_encode(INT8, x_KN, error_KN, frames_KB, counts_KJ, block=block)
    if K * J == 0:
        return
    error_KN = bits_of(error_KN)
    codes, halves = frames_KB.view(torch.int8), frames_KB.view(torch.int16)
    P = blocks_per_program(block)
    with launching_on(x_KN.device):
        int8_encode_blocks[(triton.cdiv(K * J, P),)](
            x_KN,
            x_KN.stride(0),
            error_KN,
            0 if error_KN is None else error_KN.stride(0),
            codes,
            codes.stride(0),
            halves,
            halves.stride(0),
            halves.shape[1],
            counts_KJ,
            0 if counts_KJ is None else counts_KJ.stride(0),
            K,
            J,
            BLOCK=block,
            P=P,
            KEEP=block <= LARGEST_KEPT,
            **OPTIONS,
        )


def int8_decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """`decode` for int8 frames."""
    K, J = EDGE.check_decode(INT8, frames_KB, out_KN, block=block)
    if K * J == 0:
        return
    codes, halves = frames_KB.view(torch.int8), frames_KB.view(torch.int16)
    with launching_on(out_KN.device):
        int8_decode_rows[(triton.cdiv(K * J * (block // 16), ROWS),)](
            codes,
            codes.stride(0),
            halves,
            halves.stride(0),
            out_KN,
            out_KN.stride(0),
            K,
            J * (block // 16),
            float(weight),
            float(keep),
            BLOCK=block,
            R=ROWS,
            WEIGHTED=weight != 1.0,
            READS_OUT=keep != 0.0,
            **OPTIONS,
        )


def int8_decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """`decode_mean` for int8 frames."""
    K, J = EDGE.check_decode_mean(INT8, frames_KB, out_N, block=block)
    if J == 0:
        return
    codes, halves = frames_KB.view(torch.int8), frames_KB.view(torch.int16)
    with launching_on(out_N.device):
        int8_decode_mean_rows[(triton.cdiv(J * (block // 16), ROWS),)](
            codes,
            codes.stride(0),
            halves,
            halves.stride(0),
            out_N,
            K,
            J * (block // 16),
            1.0 / K,
            BLOCK=block,
            R=ROWS,
            **OPTIONS,
        )


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
    bad = bits >= 0x7F800000
    exact = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full([P], 127.0, tl.float32))
    scale = tl.where(bad, 0x7FC0, (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16)
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


@triton.jit(do_not_specialize=["K", "rows_per_row"])
def int8_decode_rows(
    codes: tl.tensor,
    codes_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    K: tl.tensor,
    rows_per_row: tl.tensor,
    weight: tl.tensor,
    keep: tl.tensor,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    WEIGHTED: tl.constexpr,
    READS_OUT: tl.constexpr,
) -> None:
    """R rows of 16 elements each."""
    g = tl.program_id(0) * R + tl.arange(0, R)
    inside = g < K * rows_per_row
    k = (g // rows_per_row).to(tl.int64)
    r = (g % rows_per_row).to(tl.int64)
    lane = tl.arange(0, 16)[None, :]
    mask = inside[:, None] & (lane < 16)
    code = tl.load(codes + (k * codes_stride + r * 16)[:, None] + lane, mask=mask, other=0)
    scale = tl.load(halves + k * halves_stride + rows_per_row * 8 + r // (BLOCK // 16), mask=inside, other=0)
    values = code.to(tl.float32) * from_bfloat16(scale)[:, None]
    if WEIGHTED:
        values = values * weight
    out_at = out + (k * out_stride + r * 16)[:, None] + lane
    if READS_OUT:
        values = tl.load(out_at, mask=mask, other=0.0) * keep + values
    tl.store(out_at, values, mask=mask)


@triton.jit(do_not_specialize=["K", "rows_per_row"])
def int8_decode_mean_rows(
    codes: tl.tensor,
    codes_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    out: tl.tensor,
    K: tl.tensor,
    rows_per_row: tl.tensor,
    share: tl.tensor,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """R rows of 16 elements each, their sum over the K frames in registers."""
    r = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    inside = r < rows_per_row
    lane = tl.arange(0, 16)[None, :]
    mask = inside[:, None] & (lane < 16)
    codes_at = codes + (r * 16)[:, None] + lane
    halves_at = halves + rows_per_row.to(tl.int64) * 8 + r // (BLOCK // 16)
    scale = from_bfloat16(tl.load(halves_at, mask=inside, other=0))
    total = tl.load(codes_at, mask=mask, other=0).to(tl.float32) * scale[:, None]
    for _ in range(1, K):
        codes_at += codes_stride
        halves_at += halves_stride
        scale = from_bfloat16(tl.load(halves_at, mask=inside, other=0))
        total += tl.load(codes_at, mask=mask, other=0).to(tl.float32) * scale[:, None]
    tl.store(out + (r * 16)[:, None] + lane, total * share, mask=mask)
