"""The eight-bit codec: a signed byte per element and a scale per block. For data that one bit is too coarse for.

Warm-up gradients and variance rounds travel in it: a quarter of float32's bytes, an error of at most half a step of
1/127 of the block's largest value, which error feedback can carry over. Byte layout and rules: `kernels/reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import kernels
from .base import Codec, Witness, all_finite, check_block, check_whole_blocks


@dataclass(frozen=True)
class Int8Codec(Codec):
    """8 + 16/block bits per element.

    Args:
        block: Elements per scale, a multiple of 16. Default 256.
        kernel: As in `SignCodec`. Default "auto".
    """

    name = "int8"
    block: int = 256
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_block(self.block, 16)
        kernels.check_name(self.kernel, "int8")

    def frame_bytes(self, n: int) -> int:
        check_whole_blocks(n, self.block)
        return -(-(n + 2 * (n // self.block)) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        kernel = kernels.select(self.kernel, x_KN.device, "int8")
        kernel.int8_encode(x_KN, error_KN, frames_KB, counts_KJ, block=self.block)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        kernel = kernels.select(self.kernel, out_KN.device, "int8")
        kernel.int8_decode(frames_KB, out_KN, block=self.block, weight=weight, keep=keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        kernels.select(self.kernel, out_N.device, "int8").int8_decode_mean(frames_KB, out_N, block=self.block)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return all_finite([self.witness(frames_KB, n)])

    def witness(self, frames_KB: Tensor, n: int) -> Witness:
        return Witness.of_scales(frames_KB, n, n // self.block, 128.0)
