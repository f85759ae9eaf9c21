"""The four-bit codec: a signed nibble per element and a scale per block. For differences of parameters.

An eighth of float32's bytes; what it leaves out is at most half a step of 1/7 of the block's largest value. Sharded
one-bit Adam (`onebit/zero/sharded/adam.py`) brings its parameters down in it. Byte layout and rules:
`kernels/int4_reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .. import kernels
from ..kernels import cpu, int4_reference, reference
from .base import Codec, check_whole_blocks


@dataclass(frozen=True)
class Int4Codec(Codec):
    """4 + 16/block bits per element.

    block: elements per scale, a multiple of 32. kernel: "auto" (C++ for host tensors where it was built, else the
    reference), "reference" or "cpu".
    """

    name = "int4"
    block: int = 256
    kernel: str = "auto"

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % 32:
            raise ValueError(f"block must be a positive multiple of 32, got {self.block}")
        if self.kernel not in ("auto", "reference", "cpu"):
            raise ValueError(f'kernel must be "auto", "reference" or "cpu", got {self.kernel!r}')

    def frame_bytes(self, n: int) -> int:
        check_whole_blocks(n, self.block)
        return -(-(n // 2 + 2 * (n // self.block)) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        self._kernel(x_KN.device).int4_encode(x_KN, error_KN, frames_KB, counts_KJ, block=self.block)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        self._kernel(out_KN.device).int4_decode(frames_KB, out_KN, block=self.block, weight=weight, keep=keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        self._kernel(out_N.device).int4_decode_mean(frames_KB, out_N, block=self.block)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return reference.decodes_finite(int4_reference.int4_scales(frames_KB, n, block=self.block), 8.0).all()

    def _kernel(self, device: torch.device) -> ModuleType:
        is_cpu = self.kernel == "cpu" or (self.kernel == "auto" and device.type == "cpu" and cpu.is_built())
        return kernels.select("cpu", device) if is_cpu else int4_reference
