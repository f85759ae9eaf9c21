"""Kernels: the frames in Triton, for CUDA tensors. The same bytes and the same floats as `reference.py`.

One pass over memory each: encode holds a block's c in registers between its sum and its residual (blocks above
`LARGEST_KEPT` are read twice, the second time from a cache), decode reads a frame and writes floats. Here is the sign
frame; what surrounds it in an optimizer's step is in `triton_momentum.py`, `triton_mean.py` and `triton_apply.py`, the
int8 frame in `triton_int8.py`. Rests on Triton, which is imported with this module; arguments are checked in `edge.py`.

What Triton would round otherwise than rule 2 of reference.py: a / b and sqrt are approximate (div_rn and sqrt_rn are
not), -x is 0 - x (a sign is set as a bit here), a·b + c is fused (`enable_fp_fusion=False` at each launch), and a sum
takes any order (lanes are added by hand here). bfloat16 is made of integers: rounding is then the same in all versions.

Shape legend: K rows, N elements, J blocks, B bytes. In the kernels: P blocks or W words of 64 elements per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .edge import SIGN, check_scale
from .triton_apply import apply
from .triton_int8 import int8_decode, int8_decode_mean, int8_encode
from .triton_lanes import (
    EDGE,
    INTERPRETED,
    LARGEST_KEPT,
    OPTIONS,
    add_owed,
    bits_of,
    blocks_per_program,
    clear_tail,
    launching_on,
    leave_residual,
    scale_of,
)
from .triton_mean import encode_mean
from .triton_momentum import encode_momentum

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

WORDS = 16


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
    K, J = EDGE.check_encode(SIGN, x_KN, error_KN, frames_KB, counts_KJ, block=block)
    if K * J == 0:
        return
    error_KN = bits_of(error_KN)
    words, halves = frames_KB.view(torch.int64), frames_KB.view(torch.int16)
    P = blocks_per_program(block)
    with launching_on(x_KN.device):
        encode_blocks[(triton.cdiv(K * J, P),)](
            x_KN,
            x_KN.stride(0),
            error_KN,
            0 if error_KN is None else error_KN.stride(0),
            words,
            words.stride(0),
            halves,
            halves.stride(0),
            halves.shape[1],
            counts_KJ,
            0 if counts_KJ is None else counts_KJ.stride(0),
            K,
            J,
            BLOCK=block,
            P=P,
            MEAN_ABS=scale == "mean_abs",
            KEEP=block <= LARGEST_KEPT,
            **OPTIONS,
        )


def decode(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    """out ← keep·out + weight·values; out float32 [K, N]. With keep = 0 the old content of out is not read."""
    K, J = EDGE.check_decode(SIGN, frames_KB, out_KN, block=block)
    if K * J == 0:
        return
    words, halves = frames_KB.view(torch.int64), frames_KB.view(torch.int16)
    words_per_row = J * block // 64
    with launching_on(out_KN.device):
        decode_words[(triton.cdiv(K * words_per_row, WORDS),)](
            words,
            words.stride(0),
            halves,
            halves.stride(0),
            out_KN,
            out_KN.stride(0),
            K,
            words_per_row,
            float(weight),
            float(keep),
            BLOCK=block,
            W=WORDS,
            WEIGHTED=weight != 1.0,
            READS_OUT=keep != 0.0,
            **OPTIONS,
        )


def decode_mean(frames_KB: Tensor, out_N: Tensor, *, block: int) -> None:
    """out ← mean over the K frames; out float32 [N], written once."""
    K, J = EDGE.check_decode_mean(SIGN, frames_KB, out_N, block=block)
    if J == 0:
        return
    words, halves = frames_KB.view(torch.int64), frames_KB.view(torch.int16)
    words_per_row = J * block // 64
    with launching_on(out_N.device):
        decode_mean_words[(triton.cdiv(words_per_row, WORDS),)](
            words,
            words.stride(0),
            halves,
            halves.stride(0),
            out_N,
            K,
            words_per_row,
            1.0 / K,
            BLOCK=block,
            W=WORDS,
            **OPTIONS,
        )


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
        for g in tl.static_range(BLOCK // 64):
            word = tl.zeros([P], tl.int64)
            for q in tl.static_range(4):
                bits = leave_residual(rows[4 * g + q], x_at, count, lane, inside_lanes, 64 * g + 16 * q, scale)
                word |= bits << (16 * q)
            tl.store(words_at + g, word, mask=inside)
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


@triton.jit
def _signed(word: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The values [W, 64] of words of sign bits, int64 [W], and their scales, int16 [W]."""
    minus = ((word[:, None] >> tl.arange(0, 64)[None, :].to(tl.int64)) & 1).to(tl.int32)
    return ((scale.to(tl.int32) << 16)[:, None] ^ (minus << 31)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["K", "words_per_row"])
def decode_words(
    words: tl.tensor,
    words_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    K: tl.tensor,
    words_per_row: tl.tensor,
    weight: tl.tensor,
    keep: tl.tensor,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    WEIGHTED: tl.constexpr,
    READS_OUT: tl.constexpr,
) -> None:
    """W words of 64 elements each."""
    g = tl.program_id(0) * W + tl.arange(0, W)
    inside = g < K * words_per_row
    k = (g // words_per_row).to(tl.int64)
    w = (g % words_per_row).to(tl.int64)
    word = tl.load(words + k * words_stride + w, mask=inside, other=0)
    scale = tl.load(halves + k * halves_stride + words_per_row * 4 + w // (BLOCK // 64), mask=inside, other=0)
    values = _signed(word, scale)
    if WEIGHTED:
        values = values * weight
    element = tl.arange(0, 64)[None, :]
    out_at = out + (k * out_stride + w * 64)[:, None] + element
    mask = inside[:, None] & (element < 64)
    if READS_OUT:
        values = tl.load(out_at, mask=mask, other=0.0) * keep + values
    tl.store(out_at, values, mask=mask)


@triton.jit(do_not_specialize=["K", "words_per_row"])
def decode_mean_words(
    words: tl.tensor,
    words_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    out: tl.tensor,
    K: tl.tensor,
    words_per_row: tl.tensor,
    share: tl.tensor,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """W words of 64 elements each, their sum over the K rows in registers."""
    w = (tl.program_id(0) * W + tl.arange(0, W)).to(tl.int64)
    inside = w < words_per_row
    words_at = words + w
    halves_at = halves + words_per_row.to(tl.int64) * 4 + w // (BLOCK // 64)
    total = _signed(tl.load(words_at, mask=inside, other=0), tl.load(halves_at, mask=inside, other=0))
    for _ in range(1, K):
        words_at += words_stride
        halves_at += halves_stride
        total += _signed(tl.load(words_at, mask=inside, other=0), tl.load(halves_at, mask=inside, other=0))
    element = tl.arange(0, 64)[None, :]
    tl.store(out + (w * 64)[:, None] + element, total * share, mask=inside[:, None] & (element < 64))
