"""Kernels: what those in Triton share: where they run, how they are launched, and the operations of rule 2.

Rests on Triton, which is imported with this module. `backend.py` says how these operations differ from Triton's own.

Shape legend: P blocks of a program.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN, Edge, Frame

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether this process runs the kernels in Triton's interpreter, on host tensors: TRITON_INTERPRET=1 at the import."""

EDGE = Edge("cpu" if INTERPRETED else "cuda", frame_alignment=8)
LARGEST_KEPT = 512  # elements of a block; 1024 compile for 24 s (Triton 3.7.1, 2026-11), 256 for 1 s
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

# Ranks may be threads (`SimTransport`); Triton's launch cache and its interpreter were not made for that.
_launch_lock = threading.Lock()


def blocks_per_program(block: int) -> int:
    """P: a row of lanes gives 128 threads 16 bytes each to load, or 8 where c would else not fit their registers."""
    return 16 if 256 < block <= LARGEST_KEPT else 32


@contextlib.contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    with _launch_lock, torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def bits_of(x: Tensor | None) -> Tensor | None:
    """bfloat16 as its bits, int16, which the kernels make floats of themselves."""
    return x.view(torch.int16) if x is not None and x.dtype == torch.bfloat16 else x


def codes_of(frame: Frame, frames_KB: Tensor) -> Tensor:
    """Frames as the kernels write and read their codes: words of 64 sign bits, int64, or int8. A view."""
    return frames_KB.view(torch.int64 if frame == SIGN else torch.int8)


def launch_encode(
    kernel: triton.JITFunction, frame: Frame, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor,
    counts_KJ: Tensor | None, *, block: int, **constants: object,
) -> None:  # fmt: skip
    """Check the arguments of an encode and launch its kernel over all blocks; both frames' take the same."""
    K, J = EDGE.check_encode(frame, x_KN, error_KN, frames_KB, counts_KJ, block=block)
    if K * J == 0:
        return
    error_KN = bits_of(error_KN)
    codes, halves = codes_of(frame, frames_KB), frames_KB.view(torch.int16)
    P = blocks_per_program(block)
    with launching_on(x_KN.device):
        kernel[(triton.cdiv(K * J, P),)](
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
            **constants,
            **OPTIONS,
        )


@triton.jit
def sum_in_halves(acc: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """[P, 16] -> [P]: l + (l+8), l + (l+4), l + (l+2), l + (l+1)."""
    a, b = tl.split(tl.permute(tl.reshape(acc, (P, 2, 8)), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (P, 2, 4)), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(a + b, (P, 2, 2)), (0, 2, 1)))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def nearest_bfloat16(x: tl.tensor) -> tl.tensor:
    """Its bits, int16; a NaN becomes 0x7FC0."""
    exact = x.to(tl.int32, bitcast=True)
    near = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, near).to(tl.int16)


@triton.jit
def from_bfloat16(bits: tl.tensor) -> tl.tensor:
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(
    acc: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, P: tl.constexpr, MEAN_ABS: tl.constexpr
) -> tl.tensor:
    """bfloat16 scales, int32 [P], of sums of squares or sizes [P, 16]; 0x7FC0 where they would not be finite."""
    n = tl.full([P], BLOCK, tl.float32) if count is None else tl.maximum(count, 1).to(tl.float32)
    mean = tl.div_rn(sum_in_halves(acc, P), n)
    exact = (mean if MEAN_ABS else tl.sqrt_rn(mean)).to(tl.int32, bitcast=True)
    bad = (exact < 0) | (exact >= 0x7F7F8000)
    return tl.where(bad, 0x7FC0, (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16)


@triton.jit
def add_owed(
    c: tl.tensor, error_at: tl.tensor, count: tl.tensor, lane: tl.tensor, inside: tl.tensor, offset: tl.tensor
) -> tl.tensor:
    """c + error of 16 lanes [P, 16]; +0.0 in padding, which is read whole (a mask by element would read it one by one).

    error: float32, int16 (the bits of bfloat16) or None.
    """
    if error_at is not None:
        e = tl.load(error_at + offset, mask=inside, other=0)
        c += e if e.dtype == tl.float32 else from_bfloat16(e)
    if count is not None:
        c = tl.where(offset + lane < count[:, None], c, 0.0)
    return c


@triton.jit
def leave_residual(
    c: tl.tensor,
    residual_at: tl.tensor,
    count: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    offset: tl.tensor,
    scale: tl.tensor,
) -> tl.tensor:
    """residual ← c - (±scale), float32 or the bits of bfloat16; the 16 sign bits of each block, int64 [P]."""
    bad = (scale == 0x7FC0)[:, None]
    minus = ((c.to(tl.int32, bitcast=True) < 0) & (bad == 0)).to(tl.int32)
    residual = c - ((scale << 16)[:, None] | (minus << 31)).to(tl.float32, bitcast=True)
    residual = tl.where(bad, 0.0, residual)
    if count is not None:
        residual = tl.where(offset + lane < count[:, None], residual, 0.0)
    is_wide: tl.constexpr = residual_at.dtype.element_ty == tl.float32
    tl.store(residual_at + offset, residual if is_wide else nearest_bfloat16(residual), mask=inside)
    return tl.sum(minus << lane, axis=1).to(tl.int64)


@triton.jit
def leave_kept(
    rows: tl.tuple,
    words_at: tl.tensor,
    residual_at: tl.tensor,
    count: tl.tensor,
    lane: tl.tensor,
    inside_lanes: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """`leave_residual` for all rows of a block, each c [P, 16] in registers; their bits go to words_at [P]."""
    for g in tl.static_range(BLOCK // 64):
        word = tl.zeros([P], tl.int64)
        for q in tl.static_range(4):
            at = 64 * g + 16 * q
            bits = leave_residual(rows[4 * g + q], residual_at, count, lane, inside_lanes, at, scale)
            word |= bits << (16 * q)
        tl.store(words_at + g, word, mask=inside)


@triton.jit
def clear_tail(
    halves: tl.tensor,
    halves_stride: tl.tensor,
    halves_per_row: tl.tensor,
    used: tl.tensor,
    k: tl.tensor,
    is_last: tl.tensor,
    P: tl.constexpr,
) -> None:
    """The zeros behind the last scale of a row, less than 16 bytes, where `is_last` [P]."""
    tail = used + tl.arange(0, 8)[None, :]
    last = is_last[:, None] & (tail < halves_per_row)
    tl.store(halves + (k * halves_stride)[:, None] + tail, tl.zeros([P, 8], tl.int16), mask=last)


@triton.jit
def signed_row(word: tl.tensor, scale: tl.tensor, lane: tl.tensor, q: tl.constexpr) -> tl.tensor:
    """Values [P, 16] of the sign bits 16·q .. 16·q + 15 of words, int64 [P], and the bits of scales, int16 [P]."""
    half = (word >> (32 * (q // 2))).to(tl.int32)
    minus = (half[:, None] << (31 - 16 * (q % 2) - lane)) & -2147483648
    return ((scale.to(tl.int32) << 16)[:, None] ^ minus).to(tl.float32, bitcast=True)
