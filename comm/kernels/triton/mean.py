"""Kernels: the mean of sign frames and its own frame in one pass, in Triton.

Rule 6 of `reference.py`. Rests on `lanes.py`; `backend.py` offers this function with the others.

Shape legend: W and K rows, N elements, J blocks, B bytes. In the kernel: P blocks per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN, check_scale
from ..operands import EncodeOutput
from .lanes import (
    EDGE,
    LARGEST_KEPT,
    OPTIONS,
    add_owed,
    bits_of,
    blocks_per_program,
    clear_tail,
    launching_on,
    leave_kept,
    leave_residual,
    scale_of,
    signed_row,
)


def encode_mean(received_WB: Tensor, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frame ← frame of the mean of the W frames + error; residual ← what it does not say. Reads each frame once."""
    check_scale(scale)
    W, J = EDGE.check_encode_mean(SIGN, received_WB, out, block=block)
    if J == 0:
        return
    received, received_halves = received_WB.view(torch.int64), received_WB.view(torch.int16)
    P = blocks_per_program(block)
    with launching_on(out.residual_KN.device):
        encode_mean_blocks[(triton.cdiv(J, P),)](
            received,
            received.stride(0),
            received_halves,
            received_halves.stride(0),
            W,
            1.0 / W,
            bits_of(out.error_KN),
            out.frames_KB.view(torch.int64),
            out.frames_KB.view(torch.int16),
            out.frames_KB.shape[1] // 2,
            out.counts_KJ,
            bits_of(out.residual_KN),
            J,
            BLOCK=block,
            P=P,
            MEAN_ABS=scale == "mean_abs",
            KEEP=block <= LARGEST_KEPT,
            **OPTIONS,
        )


@triton.jit
def _mean_rows(
    received: tl.tensor,
    received_stride: tl.tensor,
    scales: tl.tensor,
    scales_stride: tl.tensor,
    K: tl.tensor,
    share: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The mean of four rows of 16 elements [P, 16], those of one word of each of K frames."""
    word = tl.load(received, mask=inside, other=0)
    scale = tl.load(scales, mask=inside, other=0)
    c0 = signed_row(word, scale, lane, 0)
    c1 = signed_row(word, scale, lane, 1)
    c2 = signed_row(word, scale, lane, 2)
    c3 = signed_row(word, scale, lane, 3)
    for _ in range(1, K):
        received += received_stride
        scales += scales_stride
        word = tl.load(received, mask=inside, other=0)
        scale = tl.load(scales, mask=inside, other=0)
        c0 += signed_row(word, scale, lane, 0)
        c1 += signed_row(word, scale, lane, 1)
        c2 += signed_row(word, scale, lane, 2)
        c3 += signed_row(word, scale, lane, 3)
    return c0 * share, c1 * share, c2 * share, c3 * share


@triton.jit(do_not_specialize=["K", "J"])
def encode_mean_blocks(
    received: tl.tensor,
    received_stride: tl.tensor,
    received_halves: tl.tensor,
    received_halves_stride: tl.tensor,
    K: tl.tensor,
    share: tl.tensor,
    error: tl.tensor,
    words: tl.tensor,
    halves: tl.tensor,
    halves_per_row: tl.tensor,
    counts: tl.tensor,
    residual: tl.tensor,
    J: tl.tensor,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    MEAN_ABS: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """P blocks, a word of 64 elements of each at a time. error, residual: float32, or int16 (the bits of bfloat16)."""
    j = (tl.program_id(0) * P + tl.arange(0, P)).to(tl.int64)
    inside = j < J
    lane = tl.arange(0, 16)[None, :]
    inside_lanes = inside[:, None] & (lane < 16)
    error_at = None if error is None else error + (j * BLOCK)[:, None] + lane
    residual_at = residual + (j * BLOCK)[:, None] + lane
    count = None if counts is None else tl.load(counts + j, mask=inside, other=0)
    received_at = received + j * (BLOCK // 64)
    scales_at = received_halves + J * (BLOCK // 16) + j

    acc = tl.zeros([P, 16], tl.float32)
    rows = ()
    if KEEP:
        for g in tl.static_range(BLOCK // 64):
            means = _mean_rows(
                received_at + g, received_stride, scales_at, received_halves_stride, K, share, lane, inside
            )
            for q in tl.static_range(4):
                c = add_owed(means[q], error_at, count, lane, inside_lanes, 64 * g + 16 * q)
                rows += (c,)  # type: ignore[assignment]
                acc += tl.abs(c) if MEAN_ABS else c * c
    else:
        for g in range(BLOCK // 64):
            means = _mean_rows(
                received_at + g, received_stride, scales_at, received_halves_stride, K, share, lane, inside
            )
            for q in tl.static_range(4):
                c = add_owed(means[q], error_at, count, lane, inside_lanes, 64 * g + 16 * q)
                acc += tl.abs(c) if MEAN_ABS else c * c

    scale = scale_of(acc, count, BLOCK, P, MEAN_ABS)
    tl.store(halves + J * (BLOCK // 16) + j, scale.to(tl.int16), mask=inside)

    words_at = words + j * (BLOCK // 64)
    if KEEP:
        leave_kept(rows, words_at, residual_at, count, lane, inside_lanes, inside, scale, BLOCK, P)
    else:
        for g in range(BLOCK // 64):
            means = _mean_rows(
                received_at + g, received_stride, scales_at, received_halves_stride, K, share, lane, inside
            )
            word = tl.zeros([P], tl.int64)
            for q in tl.static_range(4):
                at = 64 * g + 16 * q
                c = add_owed(means[q], error_at, count, lane, inside_lanes, at)
                word |= leave_residual(c, residual_at, count, lane, inside_lanes, at, scale) << (16 * q)
            tl.store(words_at + g, word, mask=inside)
    clear_tail(halves, 0, halves_per_row, J * (BLOCK // 16 + 1), j, inside & (j == J - 1), P)
