"""Weights and activations in few bits: codes, scales and values. Pure functions.

    symmetric   bits ≥ 3   (2^bits - 1) levels around 0; scale = max|w| / (2^(bits-1) - 1)
    asymmetric  bits ≥ 3   2^bits levels from min to max, of which one is 0; a zero point for each tile
    ternary     2 bits     0 where |w| ≤ 0.7·mean|w|, else ±scale, the mean |w| of the others
    binary      1 bit      ±mean|w|

A weight is a matrix [R, C], R its outputs. It is cut into a grid of tiles with a scale each. Values are computed in
float32, and from the codes, so that a file of codes gives the same bits.
Shape legend: R rows, C columns, I × J tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_TERNARY_THRESHOLD = 0.7  # of mean |w|: arXiv 1605.04711


@dataclass(frozen=True)
class Grid:
    """A grid of tiles: tile (i, j) has rows[i] rows and columns[j] columns."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, R: int, C: int, tiles: int) -> Grid:
        """Tiles of whole rows; of parts of a row if there are more tiles than rows. Raises ValueError."""
        if R % tiles == 0:
            return cls((R // tiles,) * tiles, (C,))
        if tiles % R == 0 and C % (tiles // R) == 0:
            return cls((1,) * R, (C * R // tiles,) * (tiles // R))
        raise ValueError(f"a weight of {R} outputs and {C} inputs cannot be cut into {tiles} equal groups")

    def without(self, keep_R: Tensor | None = None, keep_C: Tensor | None = None) -> Grid:
        """The grid of a matrix that keeps only these rows and columns."""
        return Grid(_left(self.rows, keep_R), _left(self.columns, keep_C))

    def expand(self, x_IJ: Tensor) -> Tensor:
        """A value per tile, repeated for each of its elements: [R, C]."""
        rows, columns = (
            torch.tensor(sizes, device=x_IJ.device, dtype=torch.int64) for sizes in (self.rows, self.columns)
        )
        return x_IJ.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _left(sizes: Sequence[int], keep: Tensor | None) -> tuple[int, ...]:
    if keep is None:
        return tuple(sizes)
    return tuple(int(part.sum()) for part in keep.cpu().split(list(sizes)))


@dataclass(frozen=True)
class Code:
    """The kind of a code: "symmetric" or "asymmetric"; at 1 and 2 bits both are binary and ternary."""

    kind: str
    bits: int

    @property
    def zero(self) -> int:
        """The code of 0 for a kind without zero points; -1: binary has none."""
        return -1 if self.bits == 1 else (1 if self.bits == 2 else 2 ** (self.bits - 1) - 1)

    @property
    def has_zero(self) -> bool:
        """Whether 0 has a code."""
        return self.bits > 1


@dataclass(frozen=True)
class Scales:
    """Scales of the tiles, float32 [I, J], and the code of 0 in each tile if the code has zero points."""

    code: Code
    grid: Grid
    scale_IJ: Tensor
    zero_IJ: Tensor | None = None

    def without(self, keep_R: Tensor | None = None, keep_C: Tensor | None = None) -> Scales:
        """The scales of a matrix that keeps only these rows and columns."""
        return replace(self, grid=self.grid.without(keep_R, keep_C))

    def levels(self, x_RC: Tensor, noise_RC: Tensor | None = None) -> Tensor:
        """Signed levels, float32 [R, C]: a value is its level times its tile's scale. noise: rounds x + noise down."""
        scale_RC = self.grid.expand(torch.where(self.scale_IJ == 0, 1.0, self.scale_IJ))
        if self.code.bits == 1:
            return torch.where(x_RC < 0, -1.0, 1.0).to(torch.float32)
        if self.code.bits == 2:
            return torch.sign(x_RC)
        ratio_RC = x_RC / scale_RC
        level_RC = ratio_RC.round() if noise_RC is None else (ratio_RC + noise_RC).floor()
        if self.zero_IJ is None:
            return level_RC.clamp(-self.code.zero, self.code.zero)
        zero_RC = self.grid.expand(self.zero_IJ)
        return (level_RC + zero_RC).clamp(0, 2**self.code.bits - 1) - zero_RC

    def values(self, level_RC: Tensor) -> Tensor:
        """Values of these levels, float32 [R, C]."""
        return level_RC * self.grid.expand(self.scale_IJ)

    def encode(self, level_RC: Tensor) -> Tensor:
        """Codes, int32 [R, C], from 0 on."""
        if self.code.bits == 1:
            return (level_RC > 0).int()
        zero_RC = self.code.zero if self.zero_IJ is None else self.grid.expand(self.zero_IJ)
        return (level_RC + zero_RC).int()

    def decode(self, codes_RC: Tensor) -> Tensor:
        """Levels of these codes, int16 for codes of up to 8 bits, otherwise int32."""
        whole = torch.int16 if self.code.bits <= 8 else torch.int32
        if self.code.bits == 1:
            return codes_RC.to(whole) * 2 - 1
        zero_RC = self.code.zero if self.zero_IJ is None else self.grid.expand(self.zero_IJ.to(whole))
        return codes_RC.to(whole) - zero_RC


def quantize(x_RC: Tensor, code: Code, tiles: int, noise_RC: Tensor | None = None) -> tuple[Scales, Tensor]:
    """(scales, levels [R, C]) of a float32 matrix. noise: in [0, 1), for stochastic rounding of 3 bits and more."""
    grid = Grid.of(x_RC.shape[0], x_RC.shape[1], tiles)
    x = x_RC.reshape(len(grid.rows), grid.rows[0], len(grid.columns), grid.columns[0])
    if code.bits == 1:
        return (scales := Scales(code, grid, x.abs().mean((1, 3)))), scales.levels(x_RC)
    if code.bits == 2:
        return _ternary(x, x_RC, code, grid)
    if code.kind == "symmetric":
        scales = Scales(code, grid, x.abs().amax((1, 3)) / code.zero)
    else:
        low, high = x.amin((1, 3)).clamp(max=0), x.amax((1, 3)).clamp(min=0)
        scale = (high - low) / (2**code.bits - 1)
        scales = Scales(code, grid, scale, (-low / torch.where(scale == 0, 1.0, scale)).round())
    return scales, scales.levels(x_RC, noise_RC)


def _ternary(x: Tensor, x_RC: Tensor, code: Code, grid: Grid) -> tuple[Scales, Tensor]:
    size = x.abs()
    is_kept = size > _TERNARY_THRESHOLD * size.mean((1, 3), keepdim=True)
    scale = (size * is_kept).sum((1, 3)) / is_kept.sum((1, 3)).clamp(min=1)
    scales = Scales(code, grid, scale)
    return scales, scales.levels((x * is_kept).reshape(x_RC.shape))


def quantize_range(x: Tensor, low: Tensor, high: Tensor, kind: str, bits: int) -> Tensor:
    """x in levels between low and high, which broadcast over it; clamped to that range. The dtype of x."""
    exact = x.float()
    if kind == "symmetric":
        most = 2 ** (bits - 1) - 1
        scale = torch.maximum(low.abs(), high.abs()).float() / most
        scale = torch.where(scale == 0, 1.0, scale)
        return ((exact / scale).round().clamp(-most, most) * scale).to(x.dtype)
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    zero = (-low / scale).round()
    return (((exact / scale).round() + zero).clamp(0, 2**bits - 1).sub(zero) * scale).to(x.dtype)


class StraightThrough(torch.autograd.Function):
    """Returns the second argument; the gradient goes to the first."""

    @staticmethod
    def forward(ctx: object, x: Tensor, instead: Tensor) -> Tensor:
        return instead

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, instead: Tensor) -> Tensor:
    """The value of `instead`, with the gradient of x."""
    through: Tensor = StraightThrough.apply(x, instead.detach())  # type: ignore[no-untyped-call]
    return through


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes in [0, 2^bits), flat, as bytes; the lowest bit first."""
    flat = codes.reshape(-1, 1).int()
    stream = (flat >> torch.arange(bits, device=flat.device)) & 1
    stream = stream.reshape(-1)
    padded = torch.nn.functional.pad(stream, (0, -len(stream) % 8)).reshape(-1, 8)
    return (padded << torch.arange(8, device=flat.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """n codes, uint8 for up to 8 bits, otherwise int32. Raises ValueError if the number of bytes does not fit."""
    if packed.numel() != -(-n * bits // 8):
        raise ValueError(f"{n} codes of {bits} bits take {-(-n * bits // 8)} bytes, got {packed.numel()}")
    if 8 % bits == 0:  # whole codes in a byte: no stream of single bits, which takes eight times the memory
        shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
        codes: Tensor = (packed.reshape(-1, 1) >> shifts) & (2**bits - 1)
        return codes.reshape(-1)[:n]
    dtype = torch.uint8 if bits <= 8 else torch.int32
    each = torch.arange(8, device=packed.device, dtype=torch.uint8)
    stream = ((packed.reshape(-1, 1) >> each) & 1).reshape(-1)[: n * bits].reshape(n, bits).to(dtype)
    return (stream << torch.arange(bits, device=packed.device, dtype=dtype)).sum(1, dtype=dtype)
