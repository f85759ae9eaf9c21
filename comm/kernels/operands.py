"""What the fused kernels take: a momentum and what it is made of, where its frames go, an update of parameters.

Rests on torch alone; `kernels/reference.py` says what is computed with them. Shape legend: K rows, N elements of a row,
J blocks of a row, S segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Tensor s has numels[s] elements, of which the first lies at the start of block first[s].

    In ascending order, without overlap; what lies between them or after the last is padding. block: elements of one.
    """

    first: tuple[int, ...]
    numels: tuple[int, ...]
    block: int

    def __post_init__(self) -> None:
        ends = [first + -(-numel // self.block) for first, numel in zip(self.first, self.numels, strict=True)]
        if any(end > first for end, first in zip(ends, self.first[1:], strict=False)):
            raise ValueError(f"segments overlap or are out of order: first {self.first}, numels {self.numels}")

    def __len__(self) -> int:
        return len(self.first)

    @property
    def blocks(self) -> int:
        """Blocks up to the end of the last segment."""
        return self.first[-1] + -(-self.numels[-1] // self.block) if self.first else 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """The segments of a flat tensor, each of one dimension."""
        starts = [first * self.block for first in self.first]
        return [flat[start : start + numel] for start, numel in zip(starts, self.numels, strict=True)]

    @functools.cached_property
    def table(self) -> Tensor:
        """int64 [2, S] on the host: first, numels. For kernels."""
        return torch.tensor([self.first, self.numels], dtype=torch.int64, device="cpu")

    @functools.cached_property
    def addresses(self) -> tuple[int, int]:
        """Of the rows of `table`."""
        first, numels = self.table
        return first.data_ptr(), numels.data_ptr()

    def of_blocks(self, blocks: int, device: torch.device) -> Tensor:
        """Which segment each of `blocks` blocks belongs to, int32; -1: none. Made once per device."""
        return _of_blocks(self, blocks, device)


@functools.lru_cache(maxsize=1024)
def _of_blocks(segments: Segments, blocks: int, device: torch.device) -> Tensor:
    owners = torch.full((blocks,), -1, dtype=torch.int32, device="cpu")
    for s, (first, numel) in enumerate(zip(segments.first, segments.numels, strict=True)):
        owners[first : first + -(-numel // segments.block)] = s
    return owners.to(device)


@dataclass(frozen=True)
class MomentumWeights:
    """c = (y·add + m·keep) + error with y = (g·unscale)/√(D² + own·(g·unscale)²); see rule 6 of the reference."""

    keep: float
    add: float
    own: float
    unscale: float = 1.0


@dataclass(frozen=True)
class Variance:
    """What D is made of: D = √max(v·correction, floor) + eps. v: float32 [K, N]; floor: float32 [K, J], per block."""

    v_KN: Tensor
    floor_KJ: Tensor
    correction: float
    eps: float

    def rows(self, own: slice) -> Variance:
        """Of these rows. Views."""
        return replace(self, v_KN=self.v_KN[own], floor_KJ=self.floor_KJ[own])

    def denominator(self, sqrt: Callable[[Tensor], Tensor] = torch.sqrt) -> Tensor:
        """D, in a new tensor [K, N]."""
        v_KJn = (self.v_KN * self.correction).view(*self.floor_KJ.shape, -1)
        return sqrt(torch.maximum(v_KJn, self.floor_KJ.unsqueeze(-1)).view(self.v_KN.shape)) + self.eps


@dataclass(frozen=True)
class MomentumInputs:
    """What c, the momentum of this step, is made of; see rule 6 of the reference. Only read.

    grads: this rank's gradients where they lie, one per segment of the K·J blocks (None: zeros), of any float type.
    D: float32 [K, N], above 1e-18, or what it is made of. old: sign frames [K, B], or float32 [K, N].
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
        """For kernels: D, None, 0, 0; or v, floor, correction and eps, of which they make it."""
        D = self.D_KN
        return (D.v_KN, D.floor_KJ, D.correction, D.eps) if isinstance(D, Variance) else (D, None, 0.0, 0.0)


@dataclass(frozen=True)
class EncodeOutput:
    """Where some c goes that a fused step makes: frames ← frames of c + error; residual ← what they do not say.

    error: what is owed, only read; float32 or bfloat16 [K, N], as the residual, which may be the same memory. counts:
    int32 [K, J], real elements of each block (None: all full).
    """

    error_KN: Tensor | None
    frames_KB: Tensor
    counts_KJ: Tensor | None
    residual_KN: Tensor


@dataclass(frozen=True)
class ParamUpdate:
    """p ← keep·p + weight·value, the values those of frames, on whose device weight and keep are: float32 [S].

    params: where they lie, one per segment of the frames' blocks (None: left alone), of any float type.
    """

    params: Sequence[Tensor | None]
    segments: Segments
    weight_S: Tensor
    keep_S: Tensor


@dataclass(frozen=True)
class LocalStep:
    """m ← add·y + keep·m, u ← u + weight·m and p ← kept·p - weight·m, from this rank's gradients alone; see rule 8.

    momentum: what the new m is made of; `old`, float32 [K, N], is m and becomes it. sum: u, float32 [K, N]. anchor:
    float32 [K, N], which becomes what the parameters were (None: nobody asks). params: where they lie, one per segment
    (None: neither it nor its anchor moves), of any float type.
    """

    momentum: MomentumInputs
    sum_KN: Tensor
    anchor_KN: Tensor | None
    params: Sequence[Tensor | None]
    weight: float
    kept: float


@dataclass(frozen=True)
class OwnerStep:
    """What the owner of a chunk makes of the frames of all ranks: its variance, and m̂/D; see rule 9.

    received: sign frames [W, B], of which row `row` is the owner's own. grad: its gradient g, float32 [N]. counts:
    int32 [J], real elements of each block, 0 where it stays as it is. variance: float32 [N], in place. direction:
    float32 [N], becomes m̂/D. D: float32 [N], becomes D; None: nobody asks. sums: float32 [J, 4], become those of g²,
    q², g·q̂ and g·m̂ of each block. corrections: of the momentum and the variance; or those of each block, float32
    [2, J]. weight, own, common, eps, floor, inverse_limit: see the rule.
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
        """For kernels: those of each block, or two numbers."""
        each = self.corrections
        return (each, 0.0, 0.0) if isinstance(each, Tensor) else (None, each[0], each[1])


@dataclass(frozen=True)
class GradientSum:
    """What gradients add to what is owed, of which frames go out; see rule 10 of the reference.

    grads: this rank's, where they lie, one per segment of the K·J blocks (None: zeros), of any float type. owed:
    float32 or bfloat16 [K, N]. counts: int32 [K, J], real elements of each block (None: all full). returned: None: owed
    stays as it is; else it becomes what the frames leave, with this share of what they say.
    """

    grads: Sequence[Tensor | None]
    segments: Segments
    owed_KN: Tensor
    frames_KB: Tensor
    counts_KJ: Tensor | None
    add: float
    unscale: float = 1.0
    returned: float | None = None


def check_tensors(name: str, tensors: Sequence[Tensor | None], segments: Segments) -> None:
    """Raise ValueError unless there is one tensor (or None) of the right length for each segment."""
    if len(tensors) != len(segments):
        raise ValueError(f"{name}: got {len(tensors)} tensors for {len(segments)} segments")
    for s, (tensor, numel) in enumerate(zip(tensors, segments.numels, strict=True)):
        if tensor is not None and tensor.numel() != numel:
            raise ValueError(f"{name}[{s}] has {tensor.numel()} elements, its segment {numel}")
