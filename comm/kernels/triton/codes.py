"""Kernels: the only parts in which the encodings of sign, int8, int4 and log4 frames differ, in Triton.

SCALE, everywhere: "rms" or "mean_abs", of a sign frame, "largest", or "octaves" of log4. BITS: of an element's code,
1, 8 or 4.
Rests on `lanes.py`; `encode.py` calls it.

Shape legend: in the kernel, P blocks of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .lanes import from_bfloat16, nearest_bfloat16, octaves, sum_in_halves


class Blocks(NamedTuple):
    """The P blocks of a program. Block b of all is block j of row k of J blocks.

    b, k, j, inside (whether there is such a block): [P]; lane: [1, 16]; mask, inside for each lane: [P, 16].
    inputs: how many tensors or frames c is made of.
    """

    b: tl.tensor
    k: tl.tensor
    j: tl.tensor
    J: tl.tensor
    inputs: tl.tensor
    inside: tl.tensor
    lane: tl.tensor
    mask: tl.tensor


class Outputs(NamedTuple):
    """Addresses of the output of a program's blocks, of the residual carried over, and the counts of real elements.

    error_at, residual_at: [P, 16] or None. count: [P] or None. codes_at: [P] words of sign bits, or [P, 2·BITS] bytes.
    returned: see rule 10; None: the residual is c less the decoded value.
    """

    error_at: tl.tensor
    count: tl.tensor
    codes_at: tl.tensor
    residual_at: tl.tensor
    returned: tl.tensor


@triton.jit
def nothing_measured(P: tl.constexpr, SCALE: tl.constexpr) -> tl.tensor:
    """`measured` of no rows."""
    return tl.zeros([P, 16], tl.int32 if SCALE == "largest" or SCALE == "octaves" else tl.float32)


@triton.jit
def measured(acc: tl.tensor, rows: tl.tuple, ROWS: tl.constexpr, SCALE: tl.constexpr) -> tl.tensor:
    """The measure from which scales are computed, in 16 lanes [P, 16]: sums of squares or of sizes, in row order.

    For "largest" the bits of the largest size: an infinity is above every number, and a NaN above both. For "octaves"
    the same, with the sign bit set once a zero was among them.
    """
    for q in tl.static_range(ROWS):
        c = rows[q]
        if SCALE == "largest":
            acc = tl.maximum(acc, c.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        elif SCALE == "octaves":
            size = c.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            seen_zero = (acc & -2147483648) | tl.where(size == 0, -2147483648, 0)
            acc = tl.maximum(acc & 0x7FFFFFFF, size) | seen_zero
        else:
            acc += tl.abs(c) if SCALE == "mean_abs" else c * c
    return acc


@triton.jit
def scale_of(
    acc: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, P: tl.constexpr, SCALE: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """The bits of bfloat16 scales, int32 [P], from the measure; 0x7FC0 for blocks that travel as NaN."""
    if SCALE == "octaves":
        scale = _octave_scale(acc)
    else:
        scale = _step_of(acc, P, BITS) if SCALE == "largest" else _sign_scale(acc, count, BLOCK, P, SCALE)
    return scale


@triton.jit
def _sign_scale(
    acc: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, P: tl.constexpr, SCALE: tl.constexpr
) -> tl.tensor:
    n = tl.full([P], BLOCK, tl.float32) if count is None else tl.maximum(count, 1).to(tl.float32)
    mean = tl.div_rn(sum_in_halves(acc, P), n)
    exact = (mean if SCALE == "mean_abs" else tl.sqrt_rn(mean)).to(tl.int32, bitcast=True)
    bad = (exact < 0) | (exact >= 0x7F7F8000)
    return tl.where(bad, 0x7FC0, (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16)


@triton.jit
def _step_of(largest: tl.tensor, P: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The largest size over 127 or 7, rounded up to bfloat16."""
    BEYOND: tl.constexpr = 2 ** (BITS - 1)
    bits = tl.max(largest, axis=1)
    exact = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full([P], BEYOND - 1.0, tl.float32))
    not_below = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    farthest = from_bfloat16(not_below) * (BEYOND * 1.0)
    bad = (bits >= 0x7F800000) | (farthest.to(tl.int32, bitcast=True) >= 0x7F800000)
    return tl.where(bad, 0x7FC0, not_below)


@triton.jit
def _octave_scale(acc: tl.tensor) -> tl.tensor:
    """The largest size, rounded up to bfloat16; negative if the block contains a zero and something else."""
    largest = tl.max(acc & 0x7FFFFFFF, axis=1)
    has_zero = (tl.min(acc, axis=1) < 0) & (largest > 0)
    not_below = (largest + 0xFFFF) >> 16
    return tl.where(largest > 0x7F7F0000, 0x7FC0, not_below | tl.where(has_zero, 0x8000, 0))


@triton.jit
def leave_rows(
    rows: tl.tuple,
    out: Outputs,
    blocks: Blocks,
    at: tl.tensor,
    scale: tl.tensor,
    P: tl.constexpr,
    SCALE: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """codes ← those of rows of c [P, 16], from element `at` on; residual ← c less the decoded values.

    Four rows are a word of 64 sign bits; one row is 16 bytes of int8, or 8 of int4 and log4.
    """
    if SCALE == "octaves":
        _leave_octaves(rows[0], out, blocks, at, scale, P)
    elif BITS > 1:
        _leave_steps(rows[0], out, blocks, at, scale, P, BITS)
    else:
        word = tl.zeros([P], tl.int64)
        for q in tl.static_range(4):
            word |= _leave_signs(rows[q], out, blocks, at + 16 * q, scale) << (16 * q)
        tl.store(out.codes_at + at // 64, word, mask=blocks.inside)


@triton.jit
def _leave_signs(c: tl.tensor, out: Outputs, blocks: Blocks, at: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """residual ← c - (±scale), float32 or the bits of bfloat16; the 16 sign bits of each block, int64 [P]."""
    bad = (scale == 0x7FC0)[:, None]
    minus = ((c.to(tl.int32, bitcast=True) < 0) & (bad == 0)).to(tl.int32)
    if out.residual_at is not None:
        value = ((scale << 16)[:, None] | (minus << 31)).to(tl.float32, bitcast=True)
        residual = tl.where(bad, 0.0, c - value)
        mask = blocks.mask
        if out.returned is not None:
            residual += value * out.returned
            if out.count is not None:
                mask = mask & (out.count > 0)[:, None]
        if out.count is not None:
            residual = tl.where(at + blocks.lane < out.count[:, None], residual, 0.0)
        is_wide: tl.constexpr = out.residual_at.dtype.element_ty == tl.float32
        tl.store(out.residual_at + at, residual if is_wide else nearest_bfloat16(residual), mask=mask)
    return tl.sum(minus << blocks.lane, axis=1).to(tl.int64)


@triton.jit
def _leave_steps(
    c: tl.tensor,
    out: Outputs,
    blocks: Blocks,
    at: tl.tensor,
    scale: tl.tensor,
    P: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """codes ← q; residual ← c - q·step."""
    bad = scale == 0x7FC0
    step = tl.where(bad | (scale == 0), 1.0, from_bfloat16(scale))
    c = tl.where(bad[:, None], 0.0, c)
    steps = tl.broadcast_to(step[:, None], (P, 16))
    ratio = tl.div_rn(c, steps)
    # Floats of 1.5·2^23 are a step of 1 apart: adding it rounds. A negative zero loses its sign there: put it back.
    near = ((ratio + 12582912.0) - 12582912.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    q = (near | (ratio.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    _store_codes(q.to(tl.int32), out, blocks, at, P, BITS)
    tl.store(out.residual_at + at, c - q * steps, mask=blocks.mask)


@triton.jit
def _leave_octaves(
    c: tl.tensor, out: Outputs, blocks: Blocks, at: tl.tensor, scale: tl.tensor, P: tl.constexpr
) -> None:
    """codes ← k and the sign; residual ← c - (±2^-k·scale)."""
    bad, has_zero, s = scale == 0x7FC0, (scale & 0x8000) != 0, from_bfloat16(scale & 0x7FFF)
    up = tl.where(s < 2.0**-60, 2.0**64, 1.0)  # exact; no threshold is subnormal
    c = tl.where(bad[:, None], 0.0, c)
    bits = (c * up[:, None] + 0.0).to(tl.int32, bitcast=True)  # -0.0 is no negative number
    size = bits & 0x7FFFFFFF
    k = (((s * up * 0.75).to(tl.int32, bitcast=True) + 0x7FFFFF)[:, None] - size) >> 23
    k = tl.minimum(tl.maximum(k, 0), tl.where(has_zero, 6, 7)[:, None])
    k = tl.where((size == 0) & has_zero[:, None], 7, k)
    code = tl.where((bad | (scale == 0))[:, None], 0, k | ((bits >> 28) & 8))
    _store_codes(code, out, blocks, at, P, 4)
    tl.store(out.residual_at + at, tl.where(bad[:, None], 0.0, c - octaves(code, scale)), mask=blocks.mask)


@triton.jit
def _store_codes(
    code: tl.tensor, out: Outputs, blocks: Blocks, at: tl.tensor, P: tl.constexpr, BITS: tl.constexpr
) -> None:
    """Codes [P, 16] of whole numbers: a byte each, or two in a byte, the even element in its low half."""
    if BITS == 4:
        low, high = tl.split(tl.reshape(code, (P, 8, 2)))
        code = (low & 0xF) | (high << 4)
    byte = tl.arange(0, 2 * BITS)[None, :]
    tl.store(out.codes_at + at * BITS // 8, code.to(tl.int8), mask=blocks.inside[:, None] & (byte < 2 * BITS))
