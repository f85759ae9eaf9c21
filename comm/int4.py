"""The four-bit codec: a signed nibble per element and a scale per block. For differences of parameters.

An eighth of float32's bytes; what it leaves out is at most half a step of 1/7 of the block's largest value. Sharded
one-bit Adam (`onebit/zero/shard.py`) brings its parameters down in it. Plain torch on every device: the specification,
and so far the only implementation.

Frame of a row of N = J·block elements:

    offset 0      N/2 bytes   q of each element, two's complement; element 2i in the low half of byte i, 2i+1 above
    offset N/2    J·2 bytes   scale s of each block, bfloat16, little-endian
    then          zero bytes up to a multiple of 16

Rules, each operation in float32, rounded once; those of the int8 frame (`kernels/reference.py`) with 7 for 127:
1. c = x + error; padding is +0.0. s = max|c| / 7, a division, rounded *up* to the next bfloat16.
2. q = clamp(round(c / s), -7, 7), a division, ties to even; by 1 instead of s where s = 0. The nibble -8 is never sent.
3. A block with a NaN or an infinity, or so large that 7·s is one, travels as scale 0x7FC0 and zero bytes, and leaves
   residual 0.
4. The residual is c - q·s, where q keeps the sign of a zero: c = -0.0 leaves +0.0.
5. A decoded value is q·s; means and sums as for the other frames.

Shape legend: K rows, N elements of a row, B bytes of its frame, J blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import _check_whole_blocks, average_then_encode
from .kernels import reference

_NAN_BF16 = 0x7FC0


@dataclass(frozen=True)
class Int4Codec:
    """4 + 16/block bits per element. block: elements per scale, a multiple of 32."""

    block: int = 256

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % 32:
            raise ValueError(f"block must be a positive multiple of 32, got {self.block}")

    def frame_bytes(self, n: int) -> int:
        _check_whole_blocks(n, self.block)
        return -(-(n // 2 + 2 * (n // self.block)) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        K, N = x_KN.shape
        J = N // self.block
        if error_KN is not None:
            x_KN.add_(error_KN)
        c_KJn = x_KN.view(K, J, self.block)
        if counts_KJ is not None:
            padding = torch.arange(self.block, device=x_KN.device) >= counts_KJ.unsqueeze(-1)
            c_KJn.masked_fill_(padding, 0.0)
        largest_KJ = torch.linalg.vector_norm(c_KJn, float("inf"), dim=-1)
        # A tensor of its device: a Python divisor becomes a multiplication by its reciprocal on CUDA.
        s_KJ = reference._round_up_to_bfloat16(largest_KJ / x_KN.new_full((), 7.0))
        bad_KJ = ~(s_KJ.to(torch.float32) * 7.0).isfinite()
        c_KJn.masked_fill_(bad_KJ.unsqueeze(-1), 0.0)
        s_KJ1 = s_KJ.to(torch.float32).masked_fill(bad_KJ | (s_KJ == 0), 1.0).unsqueeze(-1)
        q_KJn = torch.div(c_KJn, s_KJ1).round_().clamp_(-7, 7)
        nibbles = q_KJn.to(torch.int8).view(torch.uint8).view(K, N // 2, 2) & 0xF
        frames_KB[:, : N // 2] = nibbles[..., 0] | (nibbles[..., 1] << 4)
        bits_KJ = torch.where(bad_KJ, _NAN_BF16, s_KJ.view(torch.int16)).to(torch.int16)
        frames_KB[:, N // 2 : N // 2 + 2 * J] = bits_KJ.contiguous().view(-1).view(torch.uint8).view(K, 2 * J)
        frames_KB[:, N // 2 + 2 * J :] = 0
        c_KJn.sub_(q_KJn.mul_(s_KJ1))

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        reference._weigh_into_(out_KN, self._values(frames_KB, out_KN.shape[1]), weight, keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        reference._mean_into_(out_N, frames_KB, lambda frame_1B: self._values(frame_1B, out_N.shape[0])[0])

    def encode_mean(
        self, received_WB: Tensor, error_1N: Tensor | None, frame_1B: Tensor, counts_1J: Tensor | None, out_1N: Tensor
    ) -> None:
        average_then_encode(self, received_WB, error_1N, frame_1B, counts_1J, out_1N)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return self._scales(frames_KB, n).isfinite().all()

    def _scales(self, frames_KB: Tensor, n: int) -> Tensor:
        return reference._scales_at(frames_KB, n // 2, n // self.block)

    def _values(self, frames_KB: Tensor, n: int) -> Tensor:
        K, J = frames_KB.shape[0], n // self.block
        packed = frames_KB[:, : n // 2].view(torch.int8)
        # Shifts of int8 keep the sign: the low half goes up to the top first.
        q_KN = torch.stack((packed << 4 >> 4, packed >> 4), dim=-1).view(K, J, self.block)
        return q_KN.to(torch.float32).mul_(self._scales(frames_KB, n).to(torch.float32).unsqueeze(-1)).view(K, n)
