"""The four-bit codec: a signed nibble per element and a scale per block. For differences of parameters.

An eighth of float32's bytes; its error is at most half a step of 1/7 of the block's largest value. Sharded one-bit Adam
(`onebit/zero/sharded/adam.py`) sends its parameters in it. Byte layout and rules: `kernels/int4_reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import kernels
from ..kernels.operands import MasterStep, ParamUpdate
from .base import Codec, Witness, all_finite, check_block, check_whole_blocks, count_writes


@dataclass(frozen=True)
class Int4Codec(Codec):
    """4 + 16/block bits per element.

    Args:
        block: Elements per scale, a multiple of 32. Default 256.
        kernel: As in `SignCodec`, of the backends that have this frame. Default "auto".
    """

    name = "int4"
    block: int = 256
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_block(self.block, 32)
        kernels.check_name(self.kernel, "int4")

    def frame_bytes(self, n: int) -> int:
        check_whole_blocks(n, self.block)
        return -(-(n // 2 + 2 * (n // self.block)) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        kernel = kernels.select(self.kernel, x_KN.device, "int4")
        kernel.int4_encode(x_KN, error_KN, frames_KB, counts_KJ, block=self.block)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        kernel = kernels.select(self.kernel, out_KN.device, "int4")
        kernel.int4_decode(frames_KB, out_KN, block=self.block, weight=weight, keep=keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        kernels.select(self.kernel, out_N.device, "int4").int4_decode_mean(frames_KB, out_N, block=self.block)

    def apply(self, frames_KB: Tensor, n: int, update: ParamUpdate) -> None:
        """p ← keep·p + weight·value, with the values of frames of rows of n elements, in one pass."""
        kernels.select(self.kernel, frames_KB.device, "int4").int4_apply(frames_KB, n, update, block=self.block)
        count_writes(update.params)

    def step_masters(self, step: MasterStep) -> None:
        """Step the master weights of a chunk, and make the frame of what their replicas then lack."""
        kernels.select(self.kernel, step.frame_1B.device, "int4").int4_step_masters(step, block=self.block)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return all_finite([self.witness(frames_KB, n)])

    def witness(self, frames_KB: Tensor, n: int) -> Witness:
        return Witness.of_scales(frames_KB, n // 2, n // self.block, 8.0)
