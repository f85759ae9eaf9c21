"""The eight-bit codec: a signed byte per element and a scale per block. For what one bit is too coarse for.

Warm-up gradients and variance rounds travel in it: a quarter of float32's bytes, an error of at most half a step of
1/127 of the block's largest value, which error feedback can return. Layout and rules below; pure torch, any device.

Frame of a row of N = J·block elements:

    offset 0    N bytes      two's complement, clamp(round(c/s), -127, 127), ties to even
    offset N    J·2 bytes    scale s of each block, bfloat16, little-endian: max|c|/127, rounded up to the next bfloat16
    then        zero bytes up to a multiple of 16

A block with a NaN or an infinity travels as scale 0x7FC0 and zero bytes. Shape legend: K rows, N elements, J blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import _check_whole_blocks

_NAN_BF16 = 0x7FC0


@dataclass(frozen=True)
class Int8Codec:
    """8 + 16/block bits per element. block: elements per scale, a multiple of 16."""

    block: int = 256

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % 16:
            raise ValueError(f"block must be a positive multiple of 16, got {self.block}")

    def frame_bytes(self, n: int) -> int:
        _check_whole_blocks(n, self.block)
        return -(-(n + 2 * (n // self.block)) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        K, N = x_KN.shape
        J = N // self.block
        if error_KN is not None:
            x_KN.add_(error_KN)
        c_KJn = x_KN.view(K, J, self.block)
        if counts_KJ is not None:
            padding = torch.arange(self.block, device=x_KN.device) >= counts_KJ.unsqueeze(-1)
            c_KJn.masked_fill_(padding, 0.0)
        s_KJ = _round_up_to_bfloat16(torch.linalg.vector_norm(c_KJn, float("inf"), dim=-1) / 127.0)
        bad_KJ = ~s_KJ.isfinite()
        c_KJn.masked_fill_(bad_KJ.unsqueeze(-1), 0.0)
        s_KJ1 = s_KJ.to(torch.float32).masked_fill(bad_KJ | (s_KJ == 0), 1.0).unsqueeze(-1)
        q_KJn = torch.div(c_KJn, s_KJ1).round_().clamp_(-127, 127)
        frames_KB[:, :N] = q_KJn.to(torch.int8).view(K, N).view(torch.uint8)
        bits_KJ = torch.where(bad_KJ, _NAN_BF16, s_KJ.view(torch.int16)).to(torch.int16)
        frames_KB[:, N : N + 2 * J] = bits_KJ.contiguous().view(-1).view(torch.uint8).view(K, 2 * J)
        frames_KB[:, N + 2 * J :] = 0
        c_KJn.sub_(q_KJn.mul_(s_KJ1))

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        values = self._values(frames_KB, out_KN.shape[1])
        if weight != 1.0:
            values.mul_(weight)
        if keep == 0.0:
            out_KN.copy_(values)
        else:
            out_KN.mul_(keep).add_(values)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        out_N.copy_(self._values(frames_KB[:1], len(out_N))[0])
        for k in range(1, len(frames_KB)):
            out_N.add_(self._values(frames_KB[k : k + 1], len(out_N))[0])
        out_N.mul_(1.0 / len(frames_KB))

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return self._scales(frames_KB, n).isfinite().all()

    def _values(self, frames_KB: Tensor, n: int) -> Tensor:
        q_KN = frames_KB[:, :n].view(torch.int8).to(torch.float32)
        q_KJn = q_KN.view(len(frames_KB), n // self.block, self.block)
        return q_KJn.mul_(self._scales(frames_KB, n).to(torch.float32).unsqueeze(-1)).view(len(frames_KB), n)

    def _scales(self, frames_KB: Tensor, n: int) -> Tensor:
        J = n // self.block
        return (
            frames_KB[:, n : n + 2 * J]
            .clone(memory_format=torch.contiguous_format)
            .view(-1)
            .view(torch.bfloat16)
            .view(len(frames_KB), J)
        )


def _round_up_to_bfloat16(x: Tensor) -> Tensor:
    """The least bfloat16 not below x (x >= 0), so that the largest element is within 127 steps."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
