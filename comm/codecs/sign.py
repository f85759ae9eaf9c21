"""The one-bit codec: a sign per element and a scale per block, in one frame. Byte layout: `kernels/reference.py`.

Source: the compression operator of 1-bit Adam (Tang et al., arXiv 2102.02888, section 3), with a scale per block of
`block` elements instead of one for the whole tensor; `docs/differences.md` gives the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..kernels.operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
    MomentumInputs,
    OwnerStep,
    ParamUpdate,
)
from .base import FusedCodec, Witness, all_finite, check_block, check_whole_blocks, count_writes


@dataclass(frozen=True)
class SignCodec(FusedCodec):
    """C(c) = s·sgn(c) per block, 1 + 16/block bits per element. Source: 1-bit Adam, arXiv 2102.02888, section 3.

    Args:
        block: Elements per scale, a multiple of 64. Default 256.
        scale: Scale of a block: "rms" (s² = mean c²) or "mean_abs" (s = mean |c|). Default "rms".
        kernel: Name of a backend in `kernels.BACKENDS`. Default "auto": C++ for host tensors if it was built; for CUDA
            tensors CuPy if it is installed, else Triton; else the reference.

    Raises:
        ValueError: block, scale or kernel is not one of these.
        TypeError: block is not an int.
    """

    name = "sign"
    block: int = 256
    scale: str = "rms"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_block(self.block, 64)
        if self.scale not in ("rms", "mean_abs"):
            raise ValueError(f'scale must be "rms" or "mean_abs", got {self.scale!r}')
        kernels.check_name(self.kernel)

    def frame_bytes(self, n: int) -> int:
        check_whole_blocks(n, self.block)
        return -(-(n // 8 + 2 * (n // self.block)) // 16) * 16

    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        kernel = kernels.select(self.kernel, x_KN.device)
        kernel.encode(x_KN, error_KN, frames_KB, counts_KJ, block=self.block, scale=self.scale)

    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        kernel = kernels.select(self.kernel, out_KN.device)
        kernel.decode(frames_KB, out_KN, block=self.block, weight=weight, keep=keep)

    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        kernels.select(self.kernel, out_N.device).decode_mean(frames_KB, out_N, block=self.block)

    def encode_mean(self, received_WB: Tensor, out: EncodeOutput) -> None:
        kernel = kernels.select(self.kernel, out.residual_KN.device)
        kernel.encode_mean(received_WB, out, block=self.block, scale=self.scale)

    def on_host(self) -> SignCodec:
        return replace(self, kernel="auto")

    def encode_momentum(self, momentum: MomentumInputs, out: EncodeOutput) -> None:
        """frames ← frames of c = add·g/√(D² + own·g²) + keep·m + error; residual ← c - decode(frames)."""
        kernel = kernels.select(self.kernel, out.residual_KN.device)
        kernel.encode_momentum(momentum, out, block=self.block, scale=self.scale)

    def bound_(self, frames: Sequence[tuple[Tensor, int]], largest: float) -> None:
        """As `FusedCodec.bound_`, in one operation: all values of a block are as far from zero as its scale."""
        scales = [self.witness(frames_KB, n).numbers_KM for frames_KB, n in frames]
        torch._foreach_clamp_max_(scales, largest)
        for (frames_KB, n), scales_KJ in zip(frames, scales, strict=True):
            if scales_KJ.untyped_storage().data_ptr() != frames_KB.untyped_storage().data_ptr():  # at an odd address
                frames_KB[:, n // 8 : n // 8 + 2 * (n // self.block)] = scales_KJ.view(torch.uint8)

    def apply(self, frames_KB: Tensor, n: int, update: ParamUpdate) -> None:
        """p ← keep·p + weight·value, with the values of frames of rows of n elements."""
        kernels.select(self.kernel, frames_KB.device).apply(frames_KB, n, update, block=self.block)
        count_writes(update.params)

    def local_step(self, step: LocalStep) -> None:
        """m ← add·y + keep·m, u ← u + weight·m, p ← kept·p - weight·m, in blocks of this size; nothing is encoded."""
        kernels.select(self.kernel, step.momentum.old.device).local_step(step, block=self.block)
        count_writes(step.params)

    def correct_residual(self, momentum: MomentumInputs, factor: float, residual_KN: Tensor) -> None:
        """Residual ← what it would be if the gradients had been sent with `factor` times their factor."""
        kernel = kernels.select(self.kernel, residual_KN.device)
        kernel.correct_residual(momentum, factor, residual_KN, block=self.block)

    def momentum_sums(self, momentum: MomentumInputs, sums_KJ2: Tensor) -> None:
        """Sums ← those of g² and g·(m·D) of each block, in one pass."""
        kernels.select(self.kernel, sums_KJ2.device).momentum_sums(momentum, sums_KJ2, block=self.block)

    def encode_gradients(self, step: GradientSum) -> None:
        """frames ← frames of c = add·g + residual; the residual becomes the rest, or stays; see `GradientSum`."""
        kernel = kernels.select(self.kernel, step.owed_KN.device)
        kernel.encode_gradients(step, block=self.block, scale=self.scale)

    def owner_step(self, step: OwnerStep) -> None:
        """Update v and compute m̂/D for the chunk that this rank owns, from frames of this codec; see `OwnerStep`."""
        kernels.select(self.kernel, step.grad_N.device).owner_step(step, block=self.block)

    def step_masters(self, step: MasterStep) -> None:
        """Step the master weights of a chunk, and make the frame of what their replicas then lack; see `MasterStep`."""
        kernels.select(self.kernel, step.frame_1B.device).step_masters(step, block=self.block, scale=self.scale)

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        return all_finite([self.witness(frames_KB, n)])

    def witness(self, frames_KB: Tensor, n: int) -> Witness:
        return Witness.of_scales(frames_KB, n // 8, n // self.block)
