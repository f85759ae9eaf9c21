"""Kernels: shared parts of those in Triton: the launch, the description of tensors, and the operations of rule 2.

Arguments are named tuples of tensors and integers, which in a kernel are pointers and scalars. Rests on Triton, which
is imported with this module. `backend.py` describes how these operations differ from Triton's own.

Shape legend: K rows, J blocks, B bytes. In the kernel: P blocks of a program.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN, Edge, Frame

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether this process runs the kernels in Triton's interpreter, on host tensors: TRITON_INTERPRET=1 at the import."""

VERSION: str = triton.__version__

EDGE = Edge("cpu" if INTERPRETED else "cuda", frame_alignment=8)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

# Ranks may be threads (`SimTransport`); Triton's launch cache and its interpreter are not thread-safe.
_launch_lock = threading.Lock()


@contextlib.contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    with _launch_lock, torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


class Rows(NamedTuple):
    """Rows with contiguous elements, perhaps with gaps between them. stride: from row to row, in elements."""

    at: tl.tensor
    stride: tl.tensor


class Frames(NamedTuple):
    """Frames, in two views. codes: words of 64 sign bits, int64, or int8; halves: int16, the scales after the codes.

    Strides are from frame to frame, each in its elements. halves_per_row: of a frame.
    """

    codes: tl.tensor
    codes_stride: tl.tensor
    halves: tl.tensor
    halves_stride: tl.tensor
    halves_per_row: tl.tensor


def rows_of(x: Tensor) -> Rows:
    """Rows for a kernel. bfloat16 is passed as its bits, int16, which the kernels convert themselves."""
    x = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    return Rows(x, x.stride(0))


def frames_of(frame: Frame, frames_KB: Tensor) -> Frames:
    codes, halves = frames_KB.view(torch.int64 if frame == SIGN else torch.int8), frames_KB.view(torch.int16)
    return Frames(codes, codes.stride(0), halves, halves.stride(0), halves.shape[1])


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
def octaves(code: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Values [P, 16] of codes of log4, int32 [P, 16], and the bits of their blocks' scales, int32 [P]."""
    k = code & 7
    power = ((127 - k) << 23) | ((code & 8) << 28)
    is_zero = (k == 7) & ((scale & 0x8000) != 0)[:, None]
    return tl.where(is_zero, 0, power).to(tl.float32, bitcast=True) * from_bfloat16(scale & 0x7FFF)[:, None]


@triton.jit
def signed_row(word: tl.tensor, scale: tl.tensor, lane: tl.tensor, q: tl.constexpr) -> tl.tensor:
    """Values [P, 16] of the sign bits 16·q .. 16·q + 15 of words, int64 [P], and the bits of scales, int16 [P]."""
    half = (word >> (32 * (q // 2))).to(tl.int32)
    minus = (half[:, None] << (31 - 16 * (q % 2) - lane)) & -2147483648
    return ((scale.to(tl.int32) << 16)[:, None] ^ minus).to(tl.float32, bitcast=True)
