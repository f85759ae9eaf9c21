"""The four-bit logarithmic codec: a sign and one of eight powers of two below the block's largest, per element.

Values that spread over several orders of magnitude, as moments and gradients do, keep their relative size; four bits in
equal steps would round most of a block to zero. Byte layout and rules: `kernels/log4_reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .. import kernels
from ..kernels import reference
from .base import FusedCodec, Witness, all_finite, check_block, check_whole_blocks


@dataclass(frozen=True)
class Log4Codec(FusedCodec):
    """4 + 16/block bits per element: a sign and one of eight powers of two.

    Args:
        block: Elements per scale, a multiple of 32. Default 256.
        kernel: As in `SignCodec`, of the backends that have this frame. Default "auto".
    """

    name = "log4"
    block: int = 256
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_block(self.block, 32)
        kernels.check_name(self.kernel, "log4")

    def frame_bytes(self, n: int) -> int:
        check_whole_blocks(n, self.block)
        return -(-(n // 2 + 2 * (n // self.block)) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        kernel = kernels.select(self.kernel, x_KN.device, "log4")
        kernel.log4_encode(x_KN, error_KN, frames_KB, counts_KJ, block=self.block)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        kernel = kernels.select(self.kernel, out_KN.device, "log4")
        kernel.log4_decode(frames_KB, out_KN, block=self.block, weight=weight, keep=keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        kernels.select(self.kernel, out_N.device, "log4").log4_decode_mean(frames_KB, out_N, block=self.block)

    def bound_(self, frames: Sequence[tuple[Tensor, int]], largest: float) -> None:
        """As `FusedCodec.bound_`. Waits for the device: frames whose scales are no larger are not decoded."""
        for frames_KB, n in frames:
            if bool((reference.scales_at(frames_KB, n // 2, n // self.block).abs() > largest).any()):
                super().bound_([(frames_KB, n)], largest)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return all_finite([self.witness(frames_KB, n)])

    def witness(self, frames_KB: Tensor, n: int) -> Witness:
        return Witness.of_scales(frames_KB, n // 2, n // self.block)
