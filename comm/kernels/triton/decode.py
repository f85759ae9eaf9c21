"""Kernels: decoding in Triton. The frames differ only in how a code becomes a value.

BITS, everywhere: of an element's code, 1, 8 or 4. OCTAVES: whether a code is one of log4. Rests on `lanes.py`;
`backend.py` offers these functions for every frame.

Shape legend: K rows, N elements, J blocks, B bytes. In the kernels: U units per program, words of 64 sign bits, or 16
elements of int8, int4 or log4.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import LOG4, Frame
from .lanes import EDGE, OPTIONS, Frames, Rows, frames_of, from_bfloat16, launching_on, octaves, rows_of

UNITS = {"sign": 16, "int8": 64, "int4": 64, "log4": 64}
"""U."""

ELEMENTS = {"sign": 64, "int8": 16, "int4": 16, "log4": 16}
"""Of a unit."""


class Weights(NamedTuple):
    """out ← keep·out + weight·values."""

    weight: float
    keep: float


def decode(frame: Frame, frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """out ← keep·out + weight·values; out float32 [K, N]. With keep = 0 the old content of out is not read."""
    K, J = EDGE.check_decode(frame, frames_KB, out_KN, block=block)
    if K * J == 0:
        return
    units_per_row, U = J * block // ELEMENTS[frame.name], UNITS[frame.name]
    with launching_on(out_KN.device):
        decode_units[(triton.cdiv(K * units_per_row, U),)](
            frames_of(frame, frames_KB),
            rows_of(out_KN),
            Weights(float(weight), float(keep)),
            K,
            units_per_row,
            BLOCK=block,
            U=U,
            BITS=frame.element_bits,
            OCTAVES=frame == LOG4,
            WEIGHTED=weight != 1.0,
            READS_OUT=keep != 0.0,
            **OPTIONS,
        )


def decode_mean(frame: Frame, frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """out ← mean over the K frames; out float32 [N], written once."""
    K, J = EDGE.check_decode_mean(frame, frames_KB, out_N, block=block)
    if J == 0:
        return
    units_per_row, U = J * block // ELEMENTS[frame.name], UNITS[frame.name]
    with launching_on(out_N.device):
        decode_mean_units[(triton.cdiv(units_per_row, U),)](
            frames_of(frame, frames_KB),
            out_N,
            1.0 / K,
            K,
            units_per_row,
            BLOCK=block,
            U=U,
            BITS=frame.element_bits,
            OCTAVES=frame == LOG4,
            **OPTIONS,
        )


class Units(NamedTuple):
    """Addresses of the codes of units, and the scales of their blocks: [U]."""

    codes_at: tl.tensor
    scale_at: tl.tensor


@triton.jit
def units_of(
    frames: Frames, k: tl.tensor, u: tl.tensor, units_per_row: tl.tensor, BLOCK: tl.constexpr, BITS: tl.constexpr
) -> Units:
    """Units u of rows k."""
    UNIT: tl.constexpr = 64 if BITS == 1 else 16
    CODES: tl.constexpr = 1 if BITS == 1 else 2 * BITS
    HALVES: tl.constexpr = UNIT * BITS // 16
    return Units(
        codes_at=frames.codes + k * frames.codes_stride + u * CODES,
        scale_at=frames.halves + k * frames.halves_stride + units_per_row.to(tl.int64) * HALVES + u // (BLOCK // UNIT),
    )


@triton.jit
def values_at(
    codes_at: tl.tensor, scale_at: tl.tensor, inside: tl.tensor, BITS: tl.constexpr, OCTAVES: tl.constexpr
) -> tl.tensor:
    """The values [U, 64] of words of sign bits, or [U, 16] of bytes, each times the scale of its block."""
    scale = tl.load(scale_at, mask=inside, other=0)
    if BITS == 1:
        word = tl.load(codes_at, mask=inside, other=0)
        minus = ((word[:, None] >> tl.arange(0, 64)[None, :].to(tl.int64)) & 1).to(tl.int32)
        values = ((scale.to(tl.int32) << 16)[:, None] ^ (minus << 31)).to(tl.float32, bitcast=True)
    else:
        byte = tl.arange(0, 2 * BITS)[None, :]
        code = tl.load(codes_at[:, None] + byte, mask=inside[:, None] & (byte < 2 * BITS), other=0)
        if BITS == 4:
            wide = code.to(tl.int32)
            code = tl.interleave(wide << 28 >> 28, wide >> 4)
        values = octaves(code, scale.to(tl.int32)) if OCTAVES else code.to(tl.float32) * from_bfloat16(scale)[:, None]
    return values


@triton.jit(do_not_specialize=["K", "units_per_row"])
def decode_units(
    frames: Frames,
    out: Rows,
    weights: Weights,
    K: tl.tensor,
    units_per_row: tl.tensor,
    BLOCK: tl.constexpr,
    U: tl.constexpr,
    BITS: tl.constexpr,
    OCTAVES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    READS_OUT: tl.constexpr,
) -> None:
    """A program of U units."""
    UNIT: tl.constexpr = 64 if BITS == 1 else 16
    g = tl.program_id(0) * U + tl.arange(0, U)
    inside = g < K * units_per_row
    k = (g // units_per_row).to(tl.int64)
    u = (g % units_per_row).to(tl.int64)
    units = units_of(frames, k, u, units_per_row, BLOCK, BITS)
    values = values_at(units.codes_at, units.scale_at, inside, BITS, OCTAVES)
    if WEIGHTED:
        values = values * weights.weight
    element = tl.arange(0, UNIT)[None, :]
    out_at = out.at + (k * out.stride + u * UNIT)[:, None] + element
    mask = inside[:, None] & (element < UNIT)
    if READS_OUT:
        values = tl.load(out_at, mask=mask, other=0.0) * weights.keep + values
    tl.store(out_at, values, mask=mask)


@triton.jit(do_not_specialize=["K", "units_per_row"])
def decode_mean_units(
    frames: Frames,
    out: tl.tensor,
    share: tl.tensor,
    K: tl.tensor,
    units_per_row: tl.tensor,
    BLOCK: tl.constexpr,
    U: tl.constexpr,
    BITS: tl.constexpr,
    OCTAVES: tl.constexpr,
) -> None:
    """A program of U units, with their sum over the K rows in registers."""
    UNIT: tl.constexpr = 64 if BITS == 1 else 16
    u = (tl.program_id(0) * U + tl.arange(0, U)).to(tl.int64)
    inside = u < units_per_row
    units = units_of(frames, 0, u, units_per_row, BLOCK, BITS)
    codes_at, scale_at = units.codes_at, units.scale_at
    total = values_at(codes_at, scale_at, inside, BITS, OCTAVES)
    for _ in range(1, K):
        codes_at += frames.codes_stride
        scale_at += frames.halves_stride
        total += values_at(codes_at, scale_at, inside, BITS, OCTAVES)
    element = tl.arange(0, UNIT)[None, :]
    tl.store(out + (u * UNIT)[:, None] + element, total * share, mask=inside[:, None] & (element < UNIT))
