"""Codecs: rows of floats to byte frames and back. A codec knows neither ranks nor steps nor where errors are kept.

Here are the two contracts and the lossless member. `__init__.py` registers codecs by name: a new codec is a file and a
line there, and every contract test then covers it. The layout of frames is public and pinned by golden bytes.

Shape legend: K rows (one per receiver), N elements of a row, B bytes of its frame, J blocks of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels import reference
from ..kernels.arguments import SIGN, check_shape
from ..kernels.contract import SignKernel
from ..kernels.operands import EncodeOutput, LocalStep, MomentumInputs, ParamUpdate

if TYPE_CHECKING:
    from typing_extensions import Self


class Witness(NamedTuple):
    """Numbers that stand for the values of some frames: all values are finite exactly if all these numbers are.

    Attributes:
        numbers_KM: The numbers, float [K, M]. May be a view of the frames.
        factor: Multiplied with each number before the check. Default 1.0.
    """

    numbers_KM: Tensor
    factor: float = 1.0

    @classmethod
    def of_scales(cls, frames_KB: Tensor, offset: int, J: int, factor: float = 1.0) -> Witness:
        """The scales of some frames: a view if possible, as a bfloat16 cannot start at an odd address.

        Args:
            frames_KB: The frames, uint8 [K, B].
            offset: Byte of a frame at which its scales start.
            J: Number of scales in a frame.
            factor: The largest number of steps that a scale is multiplied with. Default 1.0.
        """
        is_even = (frames_KB.storage_offset() + offset) % 2 == 0 and frames_KB.stride(0) % 2 == 0
        if not (J and is_even and frames_KB.stride(1) == 1):
            return cls(reference.scales_at(frames_KB, offset, J), factor)
        check_shape(frames_KB, len(frames_KB), offset + 2 * J)
        return cls(frames_KB[:, offset : offset + 2 * J].view(torch.bfloat16), factor)


def all_finite(witnesses: Sequence[Witness]) -> Tensor:
    """Whether all values are finite, over all frames that the witnesses stand for. A few kernels for any number.

    Args:
        witnesses: At least one, from `Codec.witness`; all on one device.

    Returns:
        A bool tensor of no dimensions on that device. Reading it waits for the device.
    """
    alike: dict[tuple[torch.dtype, int, float], list[Tensor]] = {}
    for numbers, factor in witnesses:
        alike.setdefault((numbers.dtype, len(numbers), factor), []).append(numbers)
    verdicts = []
    for (_, _, factor), parts in alike.items():
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        verdicts.append((numbers if factor == 1.0 else numbers.float() * factor).isfinite().all())
    return verdicts[0] if len(verdicts) == 1 else torch.stack(verdicts).all()


class Codec(ABC):
    """Converts K rows of N float32 to K frames of B bytes and back. N is a multiple of `block`.

    `counts_KJ` (int32 [K, J], at most `block` each; None: all blocks are full) is the number of real elements at the
    beginning of each block. The rest is padding: it does not enter a scale, and its residual is zero. Local: a codec
    sends nothing.

    Attributes:
        name: Name in the registry and in checkpoints.
        block: Elements per block.
        leaves_residual: Whether the residual is worth adding to the next input. Default True.
        sends_in_place: Whether frames may share the memory of x. Default False.
    """

    name: ClassVar[str]
    block: int
    leaves_residual: ClassVar[bool] = True
    sends_in_place: ClassVar[bool] = False

    def on_host(self) -> Self:
        """The same codec for host tensors, without a kernel that was chosen for another device."""
        return self

    @abstractmethod
    def frame_bytes(self, n: int) -> int:
        """Bytes of the frame of a row of n elements; a multiple of 16, because NCCL is slow on other sizes.

        Args:
            n: Elements of the row.

        Raises:
            ValueError: n is not a multiple of `block`.
        """

    @abstractmethod
    def encode(self, x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None) -> None:
        """Write the frames of c = x + error, and leave the residual in x: x ← c - decode(frames).

        A block that contains a NaN or an infinity stays non-finite: every receiver decodes non-finite values.

        Args:
            x_KN: float32 [K, N]. Modified in place: becomes the residual.
            error_KN: Residual of earlier exchanges, float32 or bfloat16 [K, N], only read. None: zeros.
            frames_KB: uint8 [K, B], overwritten.
            counts_KJ: int32 [K, J], real elements of each block. None: all are real.
        """

    @abstractmethod
    def decode(self, frames_KB: Tensor, out_KN: Tensor, *, weight: float = 1.0, keep: float = 0.0) -> None:
        """out ← keep·out + weight·values.

        Args:
            frames_KB: uint8 [K, B].
            out_KN: float32 [K, N], modified in place.
            weight: Factor of the decoded values. Default 1.
            keep: Factor of the old content. Default 0: it is not read, so `out` may be uninitialised.
        """

    @abstractmethod
    def decode_mean(self, frames_KB: Tensor, out_N: Tensor) -> None:
        """out ← mean over the K frames, summed in row order.

        Args:
            frames_KB: uint8 [K, B], K at least 1.
            out_N: float32 [N], overwritten.
        """

    def encode_mean(self, received_WB: Tensor, out: EncodeOutput) -> None:
        """Encode the mean of W frames plus the residual carried over: the owner's half of the all-reduce.

        Args:
            received_WB: Frames of one chunk from all ranks, uint8 [W, B].
            out: Buffers of one row: carried error, new frame, new residual.
        """
        residual_1N = out.residual_KN
        c_1N = residual_1N if residual_1N.dtype == torch.float32 else torch.empty_like(residual_1N, dtype=torch.float32)
        self.decode_mean(received_WB, c_1N[0])
        self._send(c_1N, out)

    @abstractmethod
    def is_finite(self, frames_KB: Tensor, n: int) -> Tensor:
        """Whether all values of these frames are finite. A bool tensor of no dimensions, on the device of the frames.

        Args:
            frames_KB: uint8 [K, B].
            n: Elements of each row.
        """

    def witness(self, frames_KB: Tensor, n: int) -> Witness:
        """The numbers that `all_finite` checks for these frames, so that several buckets take one check.

        Args:
            frames_KB: uint8 [K, B].
            n: Elements of each row.
        """
        is_finite = self.is_finite(frames_KB, n)
        return Witness(torch.where(is_finite, 0.0, float("nan")).view(1, 1))

    def _send(self, c_KN: Tensor, out: EncodeOutput) -> None:
        self.encode(c_KN, out.error_KN, out.frames_KB, out.counts_KJ)
        if c_KN is not out.residual_KN:
            out.residual_KN.copy_(c_KN)


class FusedCodec(Codec):
    """A codec in which an optimizer's momentum can travel and be stored between steps.

    It must be idempotent: encoding decoded values gives the same frames and no residual. The methods below are the
    parts of a compressed step that kernels do in one pass; here they are plain torch operations over `Codec`, and a
    codec with kernels overrides them. A packed momentum is frames of the same codec.
    """

    def encode_momentum(self, momentum: MomentumInputs, out: EncodeOutput) -> None:
        """frames ← frames of c = add·g/√(D² + own·g²) + keep·m + error; residual ← c - decode(frames).

        Args:
            momentum: Gradients, denominator, old momentum and weights. Only read.
            out: Carried error, frames and residual, and perhaps sums.
        """
        old_KN = self._unpacked(momentum, out.residual_KN.shape[1])
        self._send(reference.momentum_of(momentum, old_KN), out)
        if out.sums_KJ2 is not None:
            reference.sums_of(momentum, old_KN, out.sums_KJ2)

    def bound_(self, frames: Sequence[tuple[Tensor, int]], largest: float) -> None:
        """Cut values that are farther from zero than `largest` to it. The others stay as they are, NaN too.

        Args:
            frames: Of each bucket its frames, uint8 [K, B], modified in place, and the elements of each row.
            largest: The bound, which the format may round.
        """
        for frames_KB, n in frames:
            values_KN = torch.empty(len(frames_KB), n, device=frames_KB.device, dtype=torch.float32)
            self.decode(frames_KB, values_KN)
            self.encode(values_KN.clamp_(-largest, largest), None, frames_KB, None)

    def apply(self, frames_KB: Tensor, n: int, update: ParamUpdate) -> None:
        """p ← keep·p + weight·value, with the values of these frames.

        Args:
            frames_KB: uint8 [K, B].
            n: Elements of each row.
            update: Parameters, modified in place, and the two factors of each.
        """
        values_KN = torch.empty(len(frames_KB), n, device=frames_KB.device, dtype=torch.float32)
        self.decode(frames_KB, values_KN)
        reference.update_with(values_KN, update)

    def local_step(self, step: LocalStep) -> None:
        """m ← add·y + keep·m, u ← u + weight·m, p ← kept·p - weight·m. Nothing is encoded or sent.

        Args:
            step: Tensors, modified in place as `LocalStep` describes, in blocks of this codec's size.
        """
        self._stepping_kernel(step.momentum.old).local_step(step, block=self.block)
        count_writes(step.params)

    def correct_residual(self, momentum: MomentumInputs, factor: float, residual_KN: Tensor) -> None:
        """Residual ← what it would be if the gradients had been sent with `factor` times their factor.

        So decoded frames + residual is again what `encode_momentum` would have encoded.

        Args:
            momentum: Inputs of `encode_momentum` for frames that were sent. Only read; `old` is not needed.
            factor: Factor of the gradients that they should have had, divided by the one that they had.
            residual_KN: The residual that the frames left, float32 or bfloat16 [K, N], modified in place.
        """
        self._stepping_kernel(residual_KN).correct_residual(momentum, factor, residual_KN, block=self.block)

    def momentum_sums(self, momentum: MomentumInputs, sums_KJ2: Tensor) -> None:
        """Sums ← those of g² and g·(m·D) of each block.

        Args:
            momentum: Gradients g, denominator D and momentum m. Only read.
            sums_KJ2: float32 [K, J, 2], contiguous, overwritten.
        """
        reference.sums_of(momentum, self._unpacked(momentum, sums_KJ2.shape[1] * self.block), sums_KJ2)

    def _unpacked(self, momentum: MomentumInputs, n: int) -> Tensor:
        if not momentum.is_packed:
            return momentum.old
        old_KN = torch.empty(len(momentum.old), n, device=momentum.old.device, dtype=torch.float32)
        self.decode(momentum.old, old_KN)
        return old_KN

    def _stepping_kernel(self, x: Tensor) -> SignKernel:
        """For steps without frames, which are the same for every codec."""
        kernel: SignKernel = kernels.select("reference" if self.block % SIGN.block_multiple else "auto", x.device)
        return kernel


@dataclass(frozen=True)
class IdentityCodec(Codec):
    """Sends float32 unchanged: 32 bits per element, no residual. Warm-up and exact references use it.

    The frame of a row is its float32 values, little-endian. If frames and x share their memory, encode and decode
    copy nothing, and encode leaves x as it is instead of zeroing it: a bucket can then be sent without a copy.

    Args:
        block: The number of elements of a row must be a multiple of this. Default 4.
    """

    name = "fp32"
    block: int = 4
    leaves_residual = False
    sends_in_place = True

    def __post_init__(self) -> None:
        check_block(self.block, 1)

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


# ---------------------------------------------------------------- frames that are plain numbers of one type


def values_in(frames_KB: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The numbers at the beginning of each frame, [K, n]. A view. Raises ValueError for frames of another shape."""
    rows, n = shape
    check_shape(frames_KB, rows, n * dtype.itemsize)
    return frames_KB.view(dtype)[:, :n] if n else frames_KB.new_empty(rows, 0, dtype=dtype)


def mean_into_(out_N: Tensor, values_KN: Tensor) -> None:
    """out ← mean over the K rows, added in float32 in their order."""
    out_N.copy_(values_KN[0])
    for row_N in values_KN[1:]:
        out_N.add_(row_N)
    out_N.mul_(1.0 / len(values_KN))


def count_writes(tensors: Sequence[Tensor | None]) -> None:
    """Tell autograd of tensors that a kernel has written: a graph that needs what they were must not be used."""
    for x in tensors:
        if x is not None:
            torch.autograd.graph.increment_version(x)


def check_block(block: object, multiple: int) -> None:
    """Raise TypeError or ValueError unless a codec's option `block` is a positive multiple of `multiple`."""
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"block must be a whole number, a positive multiple of {multiple}, got {block!r}")
    if block <= 0 or block % multiple:
        raise ValueError(f"block must be a positive multiple of {multiple}, got {block}")


def check_whole_blocks(n: int, block: int) -> None:
    """Raise ValueError unless a row of n elements is a whole number of blocks."""
    if n % block:
        raise ValueError(
            f"a row of {n} elements is not a whole number of blocks of {block}; pad it (see onebit/layout/flat.py)"
        )
