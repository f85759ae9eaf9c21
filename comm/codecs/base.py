"""Codecs: rows of floats to byte frames and back. A codec knows neither ranks nor steps nor where errors are kept.

Here are the contract and the lossless member; `sign.py` holds the one-bit one. `tests/unit/test_codec.py` runs one
contract over all of them. The frames are what travels: their layout is public and pinned by golden bytes.

Shape legend: K rows (one per receiver), N elements of a row, B bytes of its frame, J blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.arguments import check_shape
from ..kernels.operands import Outgoing


class Codec(Protocol):
    """K rows of N float32 <-> K frames of B bytes. N is a multiple of `block`.

    `counts_KJ` (int32, at most `block` each; None: all full) says how many leading elements of each block are real.
    The others are padding: they do not enter a scale, and their residual is zero.
    """

    @property
    def block(self) -> int:
        """Elements per block."""

    def frame_bytes(self, n: int) -> int:
        """Bytes of the frame of a row of n elements; a multiple of 16 (NCCL is slow on anything else)."""

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        """Write the frames of c = x + error, and leave what they do not say: x ← c - decode(frames).

        x: float32, modified in place. error: float32 or bfloat16, only read. frames: uint8, overwritten.
        A block holding a NaN or an infinity travels as a non-finite one: every receiver decodes non-finite values.
        """

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        """out ← keep·out + weight·values. With keep = 0 the old content of out is not read."""

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        """out ← mean over the K frames, summed in row order. The sum over the frames is never materialised K times."""

    def encode_mean(self, received_WB: Tensor, out: Outgoing) -> None:
        """Send the mean of the W frames, and what is owed: one row, whose frame and residual go `out`."""

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        """Whether all values of these frames of n elements are finite. A bool tensor of no dimensions, same device."""


@dataclass(frozen=True)
class IdentityCodec:
    """Sends float32 as it is: 32 bits per element, nothing left over. Warm-up and exact references use it.

    The frame of a row is its float32 values, little-endian. Where frames and x are the same memory, encode and decode
    move nothing (and encode leaves x as it is instead of zeroing it): a bucket can then travel from where it lies.
    """

    block: int = 4

    def frame_bytes(self, n: int) -> int:
        _check_whole_blocks(n, self.block)
        return -(-4 * n // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        values = values_in(frames_KB, x_KN.shape, torch.float32)
        if error_KN is not None:
            x_KN.add_(error_KN)
        if frames_KB.data_ptr() == x_KN.data_ptr():
            return
        frames_KB[:, 4 * x_KN.shape[1] :].zero_()
        values.copy_(x_KN)
        x_KN.zero_()

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        values = values_in(frames_KB, out_KN.shape, torch.float32)
        if keep != 0.0:
            out_KN.mul_(keep).add_(values * weight)
        elif weight != 1.0:
            torch.mul(values, weight, out=out_KN)
        elif values.data_ptr() != out_KN.data_ptr():
            out_KN.copy_(values)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        mean_into_(out_N, values_in(frames_KB, (len(frames_KB), len(out_N)), torch.float32))

    def encode_mean(self, received_WB: Tensor, out: Outgoing) -> None:
        average_then_encode(self, received_WB, out)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        values = values_in(frames_KB, (len(frames_KB), n), torch.float32)
        return torch.linalg.vector_norm(values, float("inf")).isfinite()


def average_then_encode(codec: Codec, received_WB: Tensor, out: Outgoing) -> None:
    """`Codec.encode_mean` in two steps, for codecs without a fused one."""
    residual_1N = out.residual_KN
    c_1N = residual_1N if residual_1N.dtype == torch.float32 else torch.empty_like(residual_1N, dtype=torch.float32)
    codec.decode_mean(received_WB, c_1N[0])
    codec.encode(c_1N, out.error_KN, out.frames_KB, out.counts_KJ)
    if c_1N is not residual_1N:
        residual_1N.copy_(c_1N)


# Frames that are the numbers themselves, of one type.


def values_in(frames_KB: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The numbers in the beginning of each frame, of shape [K, n]. A view. Raises ValueError for frames of another."""
    rows, n = shape
    check_shape(frames_KB, rows, n * dtype.itemsize)
    return frames_KB.view(dtype)[:, :n] if n else frames_KB.new_empty(rows, 0, dtype=dtype)


def mean_into_(out_N: Tensor, values_KN: Tensor) -> None:
    """out ← mean over the K rows, added in float32 in their order."""
    out_N.copy_(values_KN[0])
    for row_N in values_KN[1:]:
        out_N.add_(row_N)
    out_N.mul_(1.0 / len(values_KN))


def _check_whole_blocks(n: int, block: int) -> None:
    if n % block:
        raise ValueError(
            f"a row of {n} elements is not a whole number of blocks of {block}; pad it (see onebit/flat.py)"
        )
