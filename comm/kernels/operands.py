"""Operands of the fused kernels: the inputs of a momentum, the buffers of its frames, an update of parameters.

Rests on torch alone; `kernels/reference.py` specifies what is computed with them. Shape legend: K rows, N elements of a
row, J blocks of a row, B bytes of a frame, S segments, W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where the tensors of a bucket are in its flat memory. Each starts at a block; the rest is padding.

    Attributes:
        first: Block at which each tensor starts; ascending, without overlap.
        numels: Elements of each tensor.
        block: Elements per block.
    """

    first: tuple[int, ...]
    numels: tuple[int, ...]
    block: int

    def __post_init__(self) -> None:
        ends = [first + -(-numel // self.block) for first, numel in zip(self.first, self.numels, strict=True)]
        if any(end > first for end, first in zip(ends, self.first[1:], strict=False)):
            raise ValueError(f"segments overlap or are out of order: first {self.first}, numels {self.numels}")

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks up to the end of the last segment."""
        return self.first[-1] + -(-self.numels[-1] // self.block) if self.first else 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of the segments of a flat tensor, each of one dimension.

        Args:
            flat: Tensor of one dimension that holds all the blocks.
        """
        starts = [first * self.block for first in self.first]
        return [flat[start : start + numel] for start, numel in zip(starts, self.numels, strict=True)]

    @functools.cached_property
    def table(self) -> Tensor:
        """int64 [2, S] on the host: first, numels. For kernels."""
        return torch.tensor([self.first, self.numels], dtype=torch.int64, device="cpu")

    @functools.cached_property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the two rows of `table`."""
        first, numels = self.table
        return first.data_ptr(), numels.data_ptr()

    def of_blocks(self, blocks: int, device: torch.device) -> Tensor:
        """The segment of each block, int32 [blocks]; -1: none. Cached per device.

        Args:
            blocks: Number of blocks.
            device: Device of the result.
        """
        return _of_blocks(self, blocks, device)


@functools.lru_cache(maxsize=1024)
def _of_blocks(segments: Segments, blocks: int, device: torch.device) -> Tensor:
    owners = torch.full((blocks,), -1, dtype=torch.int32, device="cpu")
    for s, (first, numel) in enumerate(zip(segments.first, segments.numels, strict=True)):
        owners[first : first + -(-numel // segments.block)] = s
    return owners.to(device)


@dataclass(frozen=True)
class MomentumWeights:
    """Weights of c = (y·add + m·keep) + error with y = (g·unscale)/√(D² + own·(g·unscale)²).

    See rule 6 of `kernels/reference.py`.

    Attributes:
        keep: Weight of the old momentum m.
        add: Weight of this rank's normalised gradient y.
        own: Weight of the gradient's own square beside D².
        unscale: Factor of the gradient. Default 1.
    """

    keep: float
    add: float
    own: float
    unscale: float = 1.0


@dataclass(frozen=True)
class Variance:
    """A denominator that kernels compute themselves: D = √max(v·correction, floor) + eps.

    Attributes:
        v_KN: Variance, float32 [K, N].
        floor_KJ: Least value of v·correction in each block, float32 [K, J].
        correction: Bias correction of the variance.
        eps: Added to the root.
    """

    v_KN: Tensor
    floor_KJ: Tensor
    correction: float
    eps: float

    def rows(self, own: slice) -> Variance:
        """The same for some of the rows. Views.

        Args:
            own: Rows.
        """
        return replace(self, v_KN=self.v_KN[own], floor_KJ=self.floor_KJ[own])

    def denominator(self, sqrt: Callable[[Tensor], Tensor] = torch.sqrt) -> Tensor:
        """D, in a new tensor [K, N].

        Args:
            sqrt: Square root to use. Default `torch.sqrt`.
        """
        v_KJn = (self.v_KN * self.correction).view(*self.floor_KJ.shape, -1)
        return sqrt(torch.maximum(v_KJn, self.floor_KJ.unsqueeze(-1)).view(self.v_KN.shape)) + self.eps


@dataclass(frozen=True)
class MomentumInputs:
    """Inputs of c, the momentum of this step, by rule 6 of `kernels/reference.py`. Only read.

    Attributes:
        grads: This rank's gradients, one per segment of the K·J blocks, of any float type; None: zeros.
        segments: Where they are in the bucket.
        D_KN: Denominator, float32 [K, N], above 1e-18; or a `Variance`, from which it is computed.
        old: Momentum of the last step, sign frames [K, B] or float32 [K, N].
        weights: Factors of the terms.
    """

    grads: Sequence[Tensor | None]
    segments: Segments
    D_KN: Tensor | Variance
    old: Tensor
    weights: MomentumWeights

    @property
    def is_packed(self) -> bool:
        """Whether the old momentum is frames."""
        return self.old.dtype == torch.uint8

    @property
    def divisor(self) -> tuple[Tensor, Tensor | None, float, float]:
        """For kernels: (D, None, 0, 0), or (v, floor, correction, eps), from which they compute D."""
        D = self.D_KN
        return (D.v_KN, D.floor_KJ, D.correction, D.eps) if isinstance(D, Variance) else (D, None, 0.0, 0.0)


@dataclass(frozen=True)
class EncodeOutput:
    """Buffers of a fused encode: frames ← frames of c + error; residual ← (c + error) - decode(frames).

    Attributes:
        error_KN: Residual carried over, float32 or bfloat16 [K, N], only read. None: zeros.
        frames_KB: uint8 [K, B], overwritten.
        counts_KJ: int32 [K, J], real elements of each block. None: all are real.
        residual_KN: New residual, float32 or bfloat16 [K, N], overwritten; may be the memory of error_KN.
        sums_KJ2: Of a momentum, what `momentum_sums` computes from the same inputs, float32 [K, J, 2], overwritten.
            Default None: not needed.
    """

    error_KN: Tensor | None
    frames_KB: Tensor
    counts_KJ: Tensor | None
    residual_KN: Tensor
    sums_KJ2: Tensor | None = None


@dataclass(frozen=True)
class ParamUpdate:
    """An update of parameters from frames: p ← keep·p + weight·value.

    Attributes:
        params: Parameters, one per segment of the frames' blocks, of any float type; modified in place. None: skipped.
        segments: Where they are in the bucket.
        weight_S: float32 [S], on the device of the frames.
        keep_S: float32 [S], on the device of the frames.
    """

    params: Sequence[Tensor | None]
    segments: Segments
    weight_S: Tensor
    keep_S: Tensor


@dataclass(frozen=True)
class LocalStep:
    """A step by this rank's gradients alone: m ← add·y + keep·m, u ← u + weight·m, p ← kept·p - weight·m.

    See rule 8 of `kernels/reference.py`.

    Attributes:
        momentum: Inputs of the new m. Its `old`, float32 [K, N], is m, and is overwritten.
        sum_KN: u, float32 [K, N], modified in place.
        anchor_KN: float32 [K, N], overwritten with the parameters before the step. None: not kept.
        params: Parameters, one per segment, of any float type; modified in place. None: it and its anchor stay.
        weight: Factor of m in u and in the parameters.
        kept: Factor of the old parameters.
    """

    momentum: MomentumInputs
    sum_KN: Tensor
    anchor_KN: Tensor | None
    params: Sequence[Tensor | None]
    weight: float
    kept: float


@dataclass(frozen=True)
class OwnerStep:
    """A step of the owner of a chunk, from the frames of all ranks: its variance, and the direction m̂/D.

    See rule 9 of `kernels/reference.py`, also for the numbers at the end.

    Attributes:
        received_WB: Sign frames, uint8 [W, B].
        row: The row of the owner's own frame.
        grad_N: The owner's gradient g, float32 [N].
        counts_J: int32 [J], real elements of each block; 0: the block stays as it is.
        variance_N: float32 [N], modified in place.
        direction_N: float32 [N], overwritten with m̂/D.
        D_N: float32 [N], overwritten with D. None: not needed.
        sums_J4: float32 [J, 4], overwritten with the sums of g², q², g·q̂ and g·m̂ of each block.
        corrections: Bias corrections of momentum and variance: two numbers, or float32 [2, J] for each block.
        weight: Weight of the new square in the variance.
        own: Weight of the owner's gradient in it.
        common: Weight of the mean momentum in it.
        eps: Added to the root of the variance.
        floor: Least variance of an element, as a part of the block's mean.
        inverse_limit: Least root of the variance, in units of the mean scale.
    """

    received_WB: Tensor
    row: int
    grad_N: Tensor
    counts_J: Tensor
    variance_N: Tensor
    direction_N: Tensor
    D_N: Tensor | None
    sums_J4: Tensor
    corrections: Sequence[float] | Tensor
    weight: float
    own: float
    common: float
    eps: float
    floor: float
    inverse_limit: float

    @property
    def correcting(self) -> tuple[Tensor | None, float, float]:
        """For kernels: (corrections of each block, 0, 0), or (None, correction 1, correction 2)."""
        each = self.corrections
        return (each, 0.0, 0.0) if isinstance(each, Tensor) else (None, each[0], each[1])


@dataclass(frozen=True)
class MasterStep:
    """A step of the master weights of a chunk, and the frame of what its replicas then lack.

    See rule 13 of `kernels/reference.py`.

    Attributes:
        update_N: u, float32 [N], only read.
        masters_N: float32 [N], modified in place.
        replicas: The replicas in the chunk, one per segment, of any float type, only read.
        segments: Where they are in the chunk.
        counts_J: int32 [J], real elements of each block, all of them in segments; 0: its masters stay, and its frame is
            of zeros.
        frame_1B: uint8 [1, B], overwritten.
        weight: Factor of u.
        keep: Factor of the masters.
    """

    update_N: Tensor
    masters_N: Tensor
    replicas: Sequence[Tensor]
    segments: Segments
    counts_J: Tensor
    frame_1B: Tensor
    weight: float
    keep: float


@dataclass(frozen=True)
class GradientSum:
    """Frames of c = (g·unscale)·add + residual, by rule 10 of `kernels/reference.py`.

    Attributes:
        grads: This rank's gradients, one per segment of the K·J blocks, of any float type; None: zeros.
        segments: Where they are in the bucket.
        owed_KN: Residual carried over, float32 or bfloat16 [K, N]; see `returned`.
        frames_KB: uint8 [K, B], overwritten.
        counts_KJ: int32 [K, J], real elements of each block. None: all are real.
        add: Factor of the gradients.
        unscale: First factor of the gradients. Default 1.
        returned: The residual becomes the rest, plus this share of the decoded values. Default None: it is only read.
    """

    grads: Sequence[Tensor | None]
    segments: Segments
    owed_KN: Tensor
    frames_KB: Tensor
    counts_KJ: Tensor | None
    add: float
    unscale: float = 1.0
    returned: float | None = None
