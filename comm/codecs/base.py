"""Codecs: rows of floats to byte frames and back. A codec knows neither ranks nor steps nor where errors are kept.

Here are the two contracts and the lossless member. `__init__.py` registers codecs by name: an addition is a file and a
line there, which joins every contract test. Frames are what travels: their layout is public, pinned by golden bytes.

Shape legend: K rows (one per receiver), N elements of a row, B bytes of its frame, J blocks of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import reference
from ..kernels.arguments import SIGN, check_shape
from ..kernels.operands import EncodeOutput, LocalStep, MomentumInputs, ParamUpdate


class Witness(NamedTuple):
    """Numbers of some frames, [K, M]: `factor` times each is finite exactly where all values of the frames are."""

    numbers_KM: Tensor
    factor: float = 1.0


def all_finite(witnesses: Sequence[Witness]) -> Tensor:
    """Whether all values are of all frames that these speak for. A bool tensor of no dimensions; all on one device.

    A handful of operations, however many frames.
    """
    alike: dict[tuple[torch.dtype, int, float], list[Tensor]] = {}
    for numbers, factor in witnesses:
        alike.setdefault((numbers.dtype, len(numbers), factor), []).append(numbers)
    verdicts = []
    for (_, _, factor), parts in alike.items():
        numbers = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).float()
        verdicts.append((numbers if factor == 1.0 else numbers * factor).isfinite().all())
    return verdicts[0] if len(verdicts) == 1 else torch.stack(verdicts).all()


class Codec(ABC):
    """K rows of N float32 <-> K frames of B bytes. N is a multiple of `block`.

    `counts_KJ` (int32, at most `block` each; None: all full) says how many leading elements of each block are real.
    The others are padding: they do not enter a scale, and their residual is zero.

    name: in the registry, and in checkpoints. block: elements per block. leaves_residual: whether frames leave out
    anything worth returning. sends_in_place: whether frames may lie in the memory of x.
    """

    name: ClassVar[str]
    block: int
    leaves_residual: ClassVar[bool] = True
    sends_in_place: ClassVar[bool] = False

    @abstractmethod
    def frame_bytes(self, n: int) -> int:
        """Bytes of the frame of a row of n elements; a multiple of 16 (NCCL is slow on anything else)."""

    @abstractmethod
    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        """Write the frames of c = x + error, and leave what they do not say: x ← c - decode(frames).

        x: float32, modified in place. error: float32 or bfloat16, only read. frames: uint8, overwritten.
        A block holding a NaN or an infinity travels as a non-finite one: every receiver decodes non-finite values.
        """

    @abstractmethod
    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        """out ← keep·out + weight·values. With keep = 0 the old content of out is not read."""

    @abstractmethod
    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        """out ← mean over the K frames, summed in row order. The sum over the frames is never materialised K times."""

    def encode_mean(self, received_WB: Tensor, out: EncodeOutput) -> None:
        """Send the mean of the W frames, and what is owed: one row, whose frame and residual go `out`."""
        residual_1N = out.residual_KN
        c_1N = residual_1N if residual_1N.dtype == torch.float32 else torch.empty_like(residual_1N, dtype=torch.float32)
        self.decode_mean(received_WB, c_1N[0])
        self._send(c_1N, out)

    @abstractmethod
    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        """Whether all values of these frames of n elements are finite. A bool tensor of no dimensions, same device."""

    def witness(self, frames_KB: Tensor, n: int) -> Witness:
        """What `all_finite` asks of these frames: of those of several buckets it asks once. May be a view of them."""
        is_finite = self.is_finite(frames_KB, n)
        return Witness(torch.where(is_finite, 0.0, float("nan")).view(1, 1))

    def _send(self, c_KN: Tensor, out: EncodeOutput) -> None:
        self.encode(c_KN, out.error_KN, out.frames_KB, out.counts_KJ)
        if c_KN is not out.residual_KN:
            out.residual_KN.copy_(c_KN)


class FusedCodec(Codec):
    """A codec in which an optimizer's momentum can travel, and is kept: what its compressed step does in one pass.

    What its frames say is encoded into the same frames again, and leaves nothing. Here both methods are plain torch
    operations over the others; a codec with kernels overrides them. Packed momenta are frames of the same codec.
    """

    def on_host(self) -> FusedCodec:
        """The same for host tensors, whatever kernel was chosen for those of another device."""
        return self

    def encode_momentum(self, momentum: MomentumInputs, out: EncodeOutput) -> None:
        """frames ← frames of c = add·g/√(D² + own·g²) + keep·m + error; residual ← c - decode(frames)."""
        old_KN = momentum.old
        if momentum.is_packed:
            old_KN = torch.empty(out.residual_KN.shape, device=momentum.old.device, dtype=torch.float32)
            self.decode(momentum.old, old_KN)
        self._send(reference.momentum_of(momentum, old_KN), out)

    def apply(self, frames_KB: Tensor, n: int, update: ParamUpdate) -> None:
        """p ← keep·p + weight·value, the values those of frames of rows of n elements."""
        values_KN = torch.empty(len(frames_KB), n, device=frames_KB.device, dtype=torch.float32)
        self.decode(frames_KB, values_KN)
        reference.update_with(values_KN, update)

    def local_step(self, step: LocalStep) -> None:
        """m ← add·y + keep·m, u ← u + weight·m, p ← kept·p - weight·m, in blocks of this size; nothing is encoded."""
        name = "reference" if self.block % SIGN.block_multiple else "auto"
        kernels.select(name, step.momentum.old.device).local_step(step, block=self.block)


@dataclass(frozen=True)
class IdentityCodec(Codec):
    """Sends float32 as it is: 32 bits per element, nothing left over. Warm-up and exact references use it.

    The frame of a row is its float32 values, little-endian. Where frames and x are the same memory, encode and decode
    move nothing (and encode leaves x as it is instead of zeroing it): a bucket can then travel from where it lies.
    """

    name = "fp32"
    block: int = 4
    leaves_residual = False
    sends_in_place = True

    def frame_bytes(self, n: int) -> int:
        check_whole_blocks(n, self.block)
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

    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        values = values_in(frames_KB, (len(frames_KB), n), torch.float32)
        largest: Tensor = torch.linalg.vector_norm(values, float("inf"))
        return largest.isfinite()


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


def check_block(block: object, multiple: int) -> None:
    """Raise TypeError or ValueError unless a codec's option `block` is a positive multiple of this."""
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"block must be a whole number, a positive multiple of {multiple}, got {block!r}")
    if block <= 0 or block % multiple:
        raise ValueError(f"block must be a positive multiple of {multiple}, got {block}")


def check_whole_blocks(n: int, block: int) -> None:
    if n % block:
        raise ValueError(
            f"a row of {n} elements is not a whole number of blocks of {block}; pad it (see onebit/layout/flat.py)"
        )
