"""Kernels: the frames in Triton, for CUDA tensors. The same bytes and the same floats as `reference.py`.

One pass over memory each: encode holds a block's c in registers between its sum and its residual (blocks above
`LARGEST_KEPT` are read twice, the second time from a cache), decode reads a frame and writes floats. Here is the
encoding of the sign frame; what surrounds it in an optimizer's step is in `momentum.py`, `mean.py` and `apply.py`, the
int8 frame in `int8.py`, decoding in `decode.py`. Rests on Triton, which is imported with this module; arguments are
checked in `arguments.py`.

What Triton would round otherwise than rule 2 of reference.py: a / b and sqrt are approximate (div_rn and sqrt_rn are
not), -x is 0 - x (a sign is set as a bit here), a·b + c is fused (`enable_fp_fusion=False` at each launch), and a sum
takes any order (lanes are added by hand here). bfloat16 is made of integers: rounding is then the same in all versions.

Shape legend: K rows, N elements, J blocks, B bytes. In the kernel: P blocks per program.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN, check_scale
from . import decode as triton_decode
from .apply import apply
from .int8 import int8_decode, int8_decode_mean, int8_encode
from .lanes import INTERPRETED, add_owed, clear_tail, launch_encode, leave_kept, leave_residual, scale_of
from .mean import encode_mean
from .momentum import encode_momentum

__all__ = [
    "apply",
    "decode",
    "decode_mean",
    "describe",
    "encode",
    "encode_mean",
    "encode_momentum",
    "int8_decode",
    "int8_decode_mean",
    "int8_encode",
]


def describe() -> str:
    """What runs, e.g. "Triton 3.7.1"."""
    return f"Triton {triton.__version__}{', interpreted' if INTERPRETED else ''}"


def encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int, scale: str
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32 in place; error float32/bfloat16, read only.

    Rows may lie apart (a slice of a wider tensor); elements of a row may not. Rows of frames start at multiples of 8
    bytes. Asynchronous, on the current stream of x's device.
    """
    check_scale(scale)
    launch_encode(encode_blocks, SIGN, x_KN, error_KN, frames_KB, counts_KJ, block=block, MEAN_ABS=scale == "mean_abs")


decode = functools.partial(triton_decode.decode, SIGN)
decode_mean = functools.partial(triton_decode.decode_mean, SIGN)


@triton.jit(do_not_specialize=["K", "J"])
def encode_blocks(
    x: tl.tensor,
    x_stride: tl.tensor,
    error: tl.tensor,
    error_stride: tl.tensor,
    words: tl.tensor,
    words_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    halves_per_row: tl.tensor,
    counts: tl.tensor,
    counts_stride: tl.tensor,
    K: tl.tensor,
    J: tl.tensor,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    MEAN_ABS: tl.constexpr,
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

    # 1. c, and its sum in 16 lanes
    acc = tl.zeros([P, 16], tl.float32)
    rows = ()
    if KEEP:
        for i in tl.static_range(BLOCK // 16):
            c = _row(x_at, error_at, count, lane, inside_lanes, 16 * i)
            rows += (c,)  # type: ignore[assignment]
            acc += tl.abs(c) if MEAN_ABS else c * c
    else:
        for i in range(BLOCK // 16):
            c = _row(x_at, error_at, count, lane, inside_lanes, 16 * i)
            acc += tl.abs(c) if MEAN_ABS else c * c

    # 2. The scale
    scale = scale_of(acc, count, BLOCK, P, MEAN_ABS)
    tl.store(halves + k * halves_stride + J * (BLOCK // 16) + j, scale.to(tl.int16), mask=inside)

    # 3. Bits, a word of 64 at a time, and residuals
    words_at = words + k * words_stride + j * (BLOCK // 64)
    if KEEP:
        leave_kept(rows, words_at, x_at, count, lane, inside_lanes, inside, scale, BLOCK, P)
    else:
        for g in range(BLOCK // 64):
            word = tl.zeros([P], tl.int64)
            for q in tl.static_range(4):
                c = _row(x_at, error_at, count, lane, inside_lanes, 64 * g + 16 * q)
                bits = leave_residual(c, x_at, count, lane, inside_lanes, 64 * g + 16 * q, scale)
                word |= bits << (16 * q)
            tl.store(words_at + g, word, mask=inside)

    # 4. The end of a row
    clear_tail(halves, halves_stride, halves_per_row, J * (BLOCK // 16 + 1), k, inside & (j == J - 1), P)


@triton.jit
def _row(
    x_at: tl.tensor, error_at: tl.tensor, count: tl.tensor, lane: tl.tensor, inside: tl.tensor, offset: tl.tensor
) -> tl.tensor:
    """c of 16 lanes [P, 16]."""
    return add_owed(tl.load(x_at + offset, mask=inside, other=0.0), error_at, count, lane, inside, offset)
