"""The bfloat16 codec: half of float32's bytes, no residual. For networks on which more compression gains nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Codec, check_block, check_whole_blocks, mean_into_, values_in


@dataclass(frozen=True)
class Bf16Codec(Codec):
    """16 bits per element: the values, rounded to nearest even, little-endian; then zero bytes up to a multiple of 16.

    A mean is summed in float32.

    Args:
        block: The number of elements of a row must be a multiple of this. Default 8.
    """

    name = "bf16"
    block: int = 8
    leaves_residual = False

    def __post_init__(self) -> None:
        check_block(self.block, 1)

    def frame_bytes(self, n: int) -> int:
        check_whole_blocks(n, self.block)
        return -(-2 * n // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        values = values_in(frames_KB, x_KN.shape, torch.bfloat16)
        if error_KN is not None:
            x_KN.add_(error_KN)
        if counts_KJ is not None:
            real = torch.arange(self.block, device=x_KN.device) < counts_KJ.unsqueeze(-1)
            x_KN.view(*counts_KJ.shape, self.block).masked_fill_(~real, 0.0)
        values.copy_(x_KN)
        frames_KB[:, 2 * x_KN.shape[1] :].zero_()
        x_KN.sub_(values)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        values = values_in(frames_KB, out_KN.shape, torch.bfloat16)
        if keep != 0.0:
            out_KN.mul_(keep).add_(values.float().mul_(weight))
        else:
            out_KN.copy_(values)
            if weight != 1.0:
                out_KN.mul_(weight)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        mean_into_(out_N, values_in(frames_KB, (len(frames_KB), len(out_N)), torch.bfloat16))

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return values_in(frames_KB, (len(frames_KB), n), torch.bfloat16).isfinite().all()
