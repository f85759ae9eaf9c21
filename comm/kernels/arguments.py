"""Checks the arguments of kernels, once: after these checks there are only pointers.

Rests on torch alone. Each compiled kernel has one `Edge`, which describes the memory that it takes.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
    MomentumInputs,
    OwnerStep,
    ParamUpdate,
    Segments,
    Variance,
)

SCALES = ("rms", "mean_abs")


@dataclass(frozen=True)
class Frame:
    """The format of a frame, as far as checks need it. element_bits: bits per element without the scale."""

    name: str
    element_bits: int
    block_multiple: int

    def whole_blocks(self, n: int, block: int) -> int:
        """Blocks in a row of n elements."""
        if block <= 0 or block % self.block_multiple:
            raise ValueError(f"block must be a positive multiple of {self.block_multiple}, got {block}")
        if n % block:
            raise ValueError(f"a row of {n} elements is not a whole number of blocks of {block}; pad it")
        return n // block

    def bytes(self, n: int, blocks: int) -> int:
        return -(-(n * self.element_bits // 8 + 2 * blocks) // 16) * 16


SIGN = Frame("sign", element_bits=1, block_multiple=64)
INT8 = Frame("int8", element_bits=8, block_multiple=16)
INT4 = Frame("int4", element_bits=4, block_multiple=32)
LOG4 = Frame("log4", element_bits=4, block_multiple=32)


def check_shape(frames_KB: Tensor, rows: int, used_bytes: int) -> None:
    """Raise ValueError unless these are `rows` frames of `used_bytes` bytes each, padded to a multiple of 16."""
    expected = rows, -(-used_bytes // 16) * 16
    if tuple(frames_KB.shape) != expected:
        raise ValueError(f"frames must have shape {expected}, got shape {tuple(frames_KB.shape)}")


def check_scale(scale: str) -> None:
    """Raise ValueError unless `scale` is a scale of the sign frame."""
    if scale not in SCALES:
        raise ValueError(f'scale must be "rms" or "mean_abs", got {scale!r}')


@dataclass(frozen=True)
class Edge:
    """The memory that a kernel takes. device: type of its devices. frame_alignment: of the rows of frames, in bytes.

    Each `check_...` returns the numbers of rows and blocks, and raises ValueError or TypeError.
    """

    device: str
    frame_alignment: int = 1

    def check_encode(
        self,
        frame: Frame,
        x_KN: Tensor,
        error_KN: Tensor | None,
        frames_KB: Tensor,
        counts_KJ: Tensor | None,
        *,
        block: int,
    ) -> tuple[int, int]:
        """(K, J)."""
        self._check_rows("x", x_KN, (torch.float32,), written=True)
        K, N = x_KN.shape
        J = frame.whole_blocks(N, block)
        self._check_frames(frames_KB, K, frame.bytes(N, J), written=True)
        if error_KN is not None:
            self._check_rows("error", error_KN, (torch.float32, torch.bfloat16), shape=(K, N))
        if counts_KJ is not None:
            self._check_rows("counts", counts_KJ, (torch.int32,), shape=(K, J))
        self._check_one_device(x_KN, error_KN, frames_KB, counts_KJ)
        return K, J

    def check_decode(self, frame: Frame, frames_KB: Tensor, out_KN: Tensor, *, block: int) -> tuple[int, int]:
        """(K, J)."""
        self._check_rows("out", out_KN, (torch.float32,), written=True)
        K, N = out_KN.shape
        J = frame.whole_blocks(N, block)
        self._check_frames(frames_KB, K, frame.bytes(N, J))
        self._check_one_device(frames_KB, out_KN)
        return K, J

    def check_decode_mean(self, frame: Frame, frames_KB: Tensor, out_N: Tensor, *, block: int) -> tuple[int, int]:
        """(K, J)."""
        if out_N.dim() != 1:
            raise ValueError(f"out must have one dimension [N], got {tuple(out_N.shape)}")
        self._check_rows("out", out_N.unsqueeze(0), (torch.float32,), written=True)
        K, N = frames_KB.shape[0], out_N.shape[0]
        J = frame.whole_blocks(N, block)
        if K == 0:
            raise ValueError("frames has no rows: a mean needs at least one")
        self._check_frames(frames_KB, K, frame.bytes(N, J))
        self._check_one_device(frames_KB, out_N)
        return K, J

    def check_encode_mean(self, frame: Frame, received_WB: Tensor, out: EncodeOutput, *, block: int) -> tuple[int, int]:
        """(W, J)."""
        rows, J = self._check_encode_output(frame, out, block=block)
        W = received_WB.shape[0]
        if W == 0 or rows != 1:
            raise ValueError(f"a mean needs at least one frame and has one row, got {W} frames and {rows} rows")
        self._check_frames(received_WB, W, frame.bytes(J * block, J))
        self._check_one_device(received_WB, out.residual_KN)
        return W, J

    def check_encode_momentum(
        self, frame: Frame, momentum: MomentumInputs, out: EncodeOutput, *, block: int
    ) -> tuple[int, int]:
        """(K, J)."""
        K, J = self._check_encode_output(frame, out, block=block)
        self._check_made_of(momentum, K, J, block)
        self._check_old(frame, momentum, K, J, block)
        if out.sums_KJ2 is not None:
            self._check_sums(out.sums_KJ2, K, J)
        self._check_one_device(momentum.old, out.residual_KN, out.sums_KJ2, *momentum.grads)
        return K, J

    def check_local_step(self, step: LocalStep, *, block: int) -> tuple[int, int]:
        """(K, J)."""
        momentum = step.momentum
        self._check_flat("momentum", momentum.old, (torch.float32,), None)
        K, N = momentum.old.shape
        J = SIGN.whole_blocks(N, block)
        self._check_made_of(momentum, K, J, block)
        self._check_segments("params", step.params, momentum.segments, K * J, block)
        for name, x in (("sum", step.sum_KN), ("anchor", step.anchor_KN)):
            if x is not None:
                self._check_flat(name, x, (torch.float32,), (K, N))
        self._check_one_device(momentum.old, step.sum_KN, step.anchor_KN, *momentum.grads, *step.params)
        return K, J

    def check_correct_residual(self, momentum: MomentumInputs, residual_KN: Tensor, *, block: int) -> tuple[int, int]:
        """(K, J)."""
        self._check_flat("residual", residual_KN, (torch.float32, torch.bfloat16), None)
        K, N = residual_KN.shape
        J = SIGN.whole_blocks(N, block)
        self._check_made_of(momentum, K, J, block)
        self._check_one_device(residual_KN, *momentum.grads)
        return K, J

    def check_momentum_sums(
        self, frame: Frame, momentum: MomentumInputs, sums_KJ2: Tensor, *, block: int
    ) -> tuple[int, int]:
        """(K, J)."""
        K, J, _ = sums_KJ2.shape
        self._check_sums(sums_KJ2, K, J)
        self._check_made_of(momentum, K, J, block)
        self._check_old(frame, momentum, K, J, block)
        self._check_one_device(momentum.old, sums_KJ2, *momentum.grads)
        return K, J

    def check_owner_step(self, step: OwnerStep, *, block: int) -> tuple[int, int]:
        """(W, J)."""
        W, (N,) = len(step.received_WB), step.grad_N.shape
        J = SIGN.whole_blocks(N, block)
        if not 0 <= step.row < W:
            raise ValueError(f"row must be that of one of the {W} frames, got {step.row}")
        self._check_frames(step.received_WB, W, SIGN.bytes(N, J))
        chunk = {"grad": step.grad_N, "variance": step.variance_N, "direction": step.direction_N, "D": step.D_N}
        for name, x in chunk.items():
            if x is not None:
                self._check_flat(name, x.unsqueeze(0), (torch.float32,), (1, N))
        self._check_flat("counts", step.counts_J.unsqueeze(0), (torch.int32,), (1, J))
        self._check_flat("sums", step.sums_J4, (torch.float32,), (J, 4))
        corrections = step.correcting[0]
        if corrections is not None:
            self._check_flat("corrections", corrections, (torch.float32,), (2, J))
        self._check_one_device(step.received_WB, step.counts_J, step.sums_J4, corrections, *chunk.values())
        return W, J

    def check_step_masters(self, frame: Frame, step: MasterStep, *, block: int) -> int:
        """J."""
        (N,) = step.masters_N.shape
        J = frame.whole_blocks(N, block)
        for name, x in (("update", step.update_N), ("masters", step.masters_N)):
            self._check_flat(name, x.unsqueeze(0), (torch.float32,), (1, N))
        self._check_segments("replicas", step.replicas, step.segments, J, block)
        self._check_flat("counts", step.counts_J.unsqueeze(0), (torch.int32,), (1, J))
        self._check_frames(step.frame_1B, 1, frame.bytes(N, J), written=True)
        self._check_one_device(step.masters_N, step.update_N, step.counts_J, step.frame_1B, *step.replicas)
        return J

    def check_encode_gradients(self, frame: Frame, step: GradientSum, *, block: int) -> tuple[int, int]:
        """(K, J)."""
        self._check_flat("owed", step.owed_KN, (torch.float32, torch.bfloat16), None)
        K, N = step.owed_KN.shape
        J = frame.whole_blocks(N, block)
        self._check_frames(step.frames_KB, K, frame.bytes(N, J), written=True)
        self._check_segments("grads", step.grads, step.segments, K * J, block)
        if step.counts_KJ is not None:
            self._check_rows("counts", step.counts_KJ, (torch.int32,), shape=(K, J))
        self._check_one_device(step.owed_KN, step.frames_KB, step.counts_KJ, *step.grads)
        return K, J

    def _check_made_of(self, momentum: MomentumInputs, K: int, J: int, block: int) -> None:
        D = momentum.D_KN
        self._check_segments("grads", momentum.grads, momentum.segments, K * J, block)
        if isinstance(D, Variance):
            self._check_flat("variance", D.v_KN, (torch.float32,), (K, J * block))
            self._check_flat("floor", D.floor_KJ, (torch.float32,), (K, J))
        else:
            self._check_flat("D", D, (torch.float32,), (K, J * block))

    def _check_sums(self, sums_KJ2: Tensor, K: int, J: int) -> None:
        self._check_flat("sums", sums_KJ2.view(K * J, -1), (torch.float32,), (K * J, 2))

    def _check_old(self, frame: Frame, momentum: MomentumInputs, K: int, J: int, block: int) -> None:
        if momentum.is_packed:
            self._check_frames(momentum.old, K, frame.bytes(J * block, J))
        else:
            self._check_flat("momentum", momentum.old, (torch.float32,), (K, J * block))

    def check_apply(
        self, frame: Frame, frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int
    ) -> tuple[int, int]:
        """(K, J)."""
        K, J = frames_KB.shape[0], frame.whole_blocks(n, block)
        self._check_frames(frames_KB, K, frame.bytes(n, J))
        self._check_segments("params", update.params, update.segments, K * J, block)
        for name, x in (("weight", update.weight_S), ("keep", update.keep_S)):
            self._check_flat(name, x.unsqueeze(0), (torch.float32,), (1, len(update.segments.numels)))
        self._check_one_device(frames_KB, update.weight_S, update.keep_S, *update.params)
        return K, J

    def _check_encode_output(self, frame: Frame, out: EncodeOutput, *, block: int) -> tuple[int, int]:
        """(K, J)."""
        floats = (torch.float32, torch.bfloat16)
        self._check_flat("residual", out.residual_KN, floats, None)
        K, N = out.residual_KN.shape
        J = frame.whole_blocks(N, block)
        self._check_frames(out.frames_KB, K, frame.bytes(N, J), written=True)
        if out.error_KN is not None:
            self._check_flat("error", out.error_KN, floats, (K, N))
        if out.counts_KJ is not None:
            self._check_rows("counts", out.counts_KJ, (torch.int32,), shape=(K, J))
        self._check_one_device(out.residual_KN, out.error_KN, out.frames_KB, out.counts_KJ)
        return K, J

    def _check_flat(self, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int] | None) -> None:
        if self._is_plain(x, dtypes, shape):
            return
        self._check_rows(name, x, dtypes, shape=shape)
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}; copy it first")

    @staticmethod
    def _check_segments(
        name: str, tensors: Sequence[Tensor | None], segments: Segments, blocks: int, block: int
    ) -> None:
        if len(tensors) != len(segments.numels):
            raise ValueError(f"{name}: got {len(tensors)} tensors for {len(segments.numels)} segments")
        for s, (tensor, numel) in enumerate(zip(tensors, segments.numels, strict=True)):
            if tensor is not None and tensor.numel() != numel:
                raise ValueError(f"{name}[{s}] has {tensor.numel()} elements, its segment {numel}")
        if segments.block != block or segments.blocks > blocks:
            raise ValueError(
                f"segments are {segments.blocks} blocks of {segments.block}, the rows {blocks} blocks of {block}"
            )

    def _check_frames(self, frames_KB: Tensor, K: int, frame_bytes: int, *, written: bool = False) -> None:
        self._check_rows("frames", frames_KB, (torch.uint8,), shape=(K, frame_bytes), written=written)
        aligned = self.frame_alignment
        is_apart = frames_KB.data_ptr() % aligned or (K > 1 and frames_KB.stride(0) % aligned)
        if is_apart and frames_KB.numel():
            raise ValueError(
                f"the rows of frames must start at multiples of {aligned} bytes, this one starts at "
                f"{frames_KB.data_ptr() % aligned} with strides {frames_KB.stride()}; copy it first"
            )

    def _check_rows(
        self,
        name: str,
        rows: Tensor,
        dtypes: tuple[torch.dtype, ...],
        *,
        shape: tuple[int, int] | None = None,
        written: bool = False,
    ) -> None:
        if self._is_plain(rows, dtypes, shape):
            return
        if rows.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {rows.dtype}")
        if rows.device.type != self.device:
            where = "on the host" if self.device == "cpu" else f"on a {self.device} device"
            raise ValueError(f"{name} must be {where}, got {rows.device}; use the reference kernel there")
        if rows.dim() != 2 or (shape is not None and tuple(rows.shape) != shape):
            expected = "two dimensions (rows first)" if shape is None else f"shape {shape}"
            raise ValueError(f"{name} must have {expected}, got shape {tuple(rows.shape)}")
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ValueError(
                f"the elements of a row of {name} must be contiguous, got strides {rows.stride()}; copy it first"
            )
        if written and rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
            raise ValueError(
                f"the rows of {name} are written and must not overlap, got strides {rows.stride()}; copy it first"
            )
        if rows.data_ptr() % rows.element_size():
            raise ValueError(f"{name} must start at a multiple of {rows.element_size()} bytes; copy it first")

    def _is_plain(self, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int] | None) -> bool:
        """Whether a tensor passes all checks at once. A fast path: a step makes some thirty of them per bucket."""
        return (
            x.is_contiguous()
            and (x.dim() == 2 if shape is None else x.shape == shape)
            and x.dtype in dtypes
            and x.device.type == self.device
            and x.data_ptr() % x.element_size() == 0
        )

    @staticmethod
    def _check_one_device(first: Tensor, *others: Tensor | None) -> None:
        device = first.device
        for x in others:
            if x is not None and x.device != device:
                devices = {str(each.device) for each in (first, *others) if each is not None}
                raise ValueError(f"all tensors must be on one device, got {', '.join(sorted(devices))}")
