"""Matrices in few bits, and their products: int8 with a scale for each row, int4 with a scale for each group of inputs.

Both are buffers that products read as they are. torch's kernels take inputs in bfloat16, add up in float32 and give
bfloat16, so a product differs from that of the matrix in floats by what these roundings make.

Shape legend: N outputs, K inputs, J groups of inputs, B rows of x.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = (256, 128, 64, 32)
"""Numbers of inputs with a common scale for which torch has int4 kernels."""
FEW_ROWS = 64
"""Above this, converting a matrix of int8 to floats and multiplying these is faster."""


class Matrix(nn.Module):
    """A packed matrix, of buffers alone but for an empty parameter with the dtype of products.

    transformers asks a model's first parameter for its dtype and device, and a model may have no other. Casts change
    the parameter, and so the products' dtype.
    """

    N: int
    K: int

    def __init__(self, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.of_products = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.N, self.K

    @property
    def dtype(self) -> torch.dtype:
        return self.of_products.dtype


class Rows(Matrix):
    """A matrix in int8: w ≈ rows · scale + offset, these float32 for each row. Products have the dtype given.

    Rows are padded with zeros to a multiple of 16: torch's product reads past the end of shorter ones, into other
    numbers or memory outside the process, and its int8-by-int8 product is wrong for rows of one element.
    """

    def __init__(self, rows_NK: Tensor, scale_N: Tensor, dtype: torch.dtype, offset_N: Tensor | None = None):
        super().__init__(dtype, rows_NK.device)
        self.N, self.K = rows_NK.shape
        self.rows_NK, self.scale_N = nn.Buffer(_lengthened(rows_NK, self.K + -self.K % 16)), nn.Buffer(scale_N)
        self.offset_N = None if offset_N is None else nn.Buffer(offset_N)
        self.ones_N = _ones(self.N, scale_N.device)

    @classmethod
    def quantized(cls, weight_NK: Tensor) -> Rows:
        """To nearest, symmetric."""
        return cls(*quantize_rows(weight_NK), weight_NK.dtype)

    @property
    def weight(self) -> Tensor:
        """The matrix in floats, [N, K]."""
        return self._floats(self.rows_NK, self.scale_N, self.offset_N)

    def part(self, rows: Tensor, columns: range) -> Rows:
        """A copy of the rows of these numbers, and of these columns."""
        offset = None if self.offset_N is None else self.offset_N[rows]
        rows_NK = self.rows_NK[rows, columns.start : columns.stop]
        return Rows(rows_NK, self.scale_N[rows], self.dtype, offset)

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows of these numbers in floats, [..., K]."""
        return self._floats(self.rows_NK[ids], self.scale_N[ids], None if self.offset_N is None else self.offset_N[ids])

    def _floats(self, rows: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        floats = rows[..., : self.K] * scale[..., None]
        return (floats if offset is None else floats + offset[..., None]).to(self.dtype)

    def product(self, x: Tensor, has_int8_inputs: bool) -> Tensor:
        """x·Wᵀ. has_int8_inputs: quantize x to int8 with a scale for each of its rows.

        Otherwise few rows of x are cast to bfloat16: torch's product of bfloat16 and int8 reads each weight once, and
        that of float32 and int8 is 50 times slower (one core with AVX-512, torch 2.13).
        """
        x_BK, width = x.reshape(-1, x.shape[-1]), self.rows_NK.shape[1]
        scale_B1: Tensor | None = None
        if has_int8_inputs:
            x_BK, scale_B = quantize_rows(x_BK)
            scale_B1 = scale_B[:, None]
            # Always a copy: torch's product is wrong for transposed inputs.
            y_BN = torch._int_mm(_lengthened(x_BK, width), self.rows_NK.t()) * scale_B1 * self.scale_N
        elif x_BK.shape[0] <= FEW_ROWS:
            x_BK = _in_bfloat16(x)
            # Pass scales of 1 and multiply in float32: in bfloat16 the rows' scales would be too coarse.
            lengthened = x_BK if width == self.K else _lengthened(x_BK, width)
            y_BN = torch._weight_int8pack_mm(lengthened, self.rows_NK, self.ones_N) * self.scale_N
        else:
            return linear(x, self.weight)
        if self.offset_N is not None:
            sum_B1 = x_BK.sum(1, keepdim=True, dtype=torch.float32)
            y_BN = y_BN + (sum_B1 if scale_B1 is None else sum_B1 * scale_B1) * self.offset_N
        return y_BN.to(self.dtype).view(*x.shape[:-1], self.N)


def quantize_rows(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 scales [N], w ≈ int8 · scale: symmetric, to nearest. A row of zeros has scale 0."""
    scale_N = w_NK.float().abs().amax(1) / 127
    inverse_N = torch.where(scale_N > 0, 1 / scale_N, 0)
    return (w_NK.float() * inverse_N[:, None]).round().to(torch.int8), scale_N


class Groups(Matrix):
    """A matrix in int4 by groups of inputs: w ≈ ((q - 8) · scale + zero) · row, with q of 0 to 15. On a CPU.

    scale and zero are in bfloat16, for each group of each output; row in float32, for each output. A matrix of codes
    of 8 bits is two such matrices, high · 16 + low, side by side along the inputs: `planes`.

    Args:
        q_PNK: The numbers, uint8 [planes, N, K].
        scale_PNJ: Of each group. zero_PNJ: the same shape.
        group: Inputs in a group, one of `GROUPS`. The last may be shorter.
        dtype: Of products and of the matrix in floats.
        row_N: A factor for each output. None (default): 1.
        first: How many of the K columns come before the matrix, whose first group may be shorter, too. Default 0.

    Raises:
        ValueError: A tensor is not on a CPU.
    """

    def __init__(
        self,
        q_PNK: Tensor,
        scale_PNJ: Tensor,
        zero_PNJ: Tensor,
        group: int,
        dtype: torch.dtype,
        row_N: Tensor | None = None,
        first: int = 0,
    ):
        super().__init__(dtype, q_PNK.device)
        if q_PNK.device.type != "cpu":
            raise ValueError(f"weights in int4 are served from host memory, got {q_PNK.device}: use int8, or a CPU")
        self.group, self.first, (planes, self.N, K) = group, first, q_PNK.shape
        block, self.place = _order()
        # Of whole blocks, so that torch keeps all of them in one order.
        q = q_PNK.new_full((planes, self.N + -self.N % block, K + -K % group), 8)
        q[:, : self.N, :K] = q_PNK
        floats = torch.stack([scale_PNJ, zero_PNJ], -1).to(torch.bfloat16)
        of_groups = floats.new_zeros(planes, floats.shape[2], q.shape[1], 2)
        of_groups[:, :, : self.N] = floats.transpose(1, 2)
        self.planes, self.width, self.K = planes, q.shape[2], K - first
        whole = q.movedim(0, 1).reshape(q.shape[1], planes * self.width)
        self.packed = nn.Buffer(torch._convert_weight_to_int4pack_for_cpu(whole.to(torch.int32), 1))
        self.scale_zero = nn.Buffer(of_groups.flatten(0, 1))
        self.row_N = None if row_N is None else nn.Buffer(row_N)

    @classmethod
    def quantized(cls, weight_NK: Tensor, group: int = 128) -> Groups:
        """To nearest, from the least to the greatest weight of each group. A narrow matrix has smaller groups."""
        N, K = weight_NK.shape
        group = group_size(K, group)
        padded_NK = F.pad(weight_NK.float(), (0, -K % group), mode="constant") if K % group else weight_NK.float()
        w_NJg = padded_NK.view(N, -1, group)
        scale_NJ, zero_NJ = group_range(w_NJg)
        q_NJg = nearest(w_NJg, scale_NJ[..., None], zero_NJ[..., None]).to(torch.uint8)
        return cls(q_NJg.view(1, N, -1)[..., :K], scale_NJ[None], zero_NJ[None], group, weight_NK.dtype)

    @property
    def weight(self) -> Tensor:
        """The matrix in floats, [N, K]."""
        return self.lookup(torch.arange(self.N, device=self.packed.device))

    def part(self, rows: Tensor, columns: range) -> Groups:
        """A copy of the rows of these numbers, and of these columns.

        Groups are divided so that one begins with the columns, or within 31 columns before them.
        """
        start, stop = self.first + columns.start, self.first + columns.stop
        group = next((each for each in GROUPS if each <= self.group and start % each == 0), GROUPS[-1])
        groups = slice(start // group, -(-stop // group))
        of_groups = self.scale_zero.unflatten(0, (self.planes, -1))[:, :, rows].transpose(1, 2)
        scale_PNJ, zero_PNJ = of_groups.repeat_interleave(self.group // group, 2)[:, :, groups].unbind(-1)
        q_PNK = self._numbers(rows).movedim(1, 0)[..., groups.start * group : stop]
        row_N = None if self.row_N is None else self.row_N[rows]
        return Groups(q_PNK, scale_PNJ, zero_PNJ, group, self.dtype, row_N, start % group)

    def _numbers(self, ids: Tensor) -> Tensor:
        """The numbers of these rows, uint8 [..., planes, width]."""
        block = len(self.place)
        at = self.place[ids % block]
        bytes_PK = self.packed.view(-1, self.planes * self.width, block // 2)[ids // block, :, at >> 1]
        q_PK = torch.where((at & 1).bool()[..., None], bytes_PK >> 4, bytes_PK & 15)
        return q_PK.view(*ids.shape, self.planes, self.width)

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows of these numbers in floats, [..., K]."""
        q_PK = self._numbers(ids).flatten(-2)
        scale, zero = self.scale_zero[:, ids].float().movedim(0, -2).unbind(-1)
        floats = (q_PK.float() - 8) * scale.repeat_interleave(self.group, -1) + zero.repeat_interleave(self.group, -1)
        rows: Tensor = floats.view(*ids.shape, self.planes, self.width).sum(-2)[..., self.first :][..., : self.K]
        return (rows if self.row_N is None else rows * self.row_N[ids][..., None]).to(self.dtype)

    def product(self, x: Tensor, has_int8_inputs: bool = False) -> Tensor:
        """x·Wᵀ, for any number of rows: torch's kernel is as fast as products of floats for many, too."""
        x_BK = _in_bfloat16(x)
        x_BK = x_BK if self.width == self.K else _lengthened(x_BK, self.width, self.first)
        x_BK = x_BK if self.planes == 1 else x_BK.repeat(1, self.planes)
        scale_zero = self.scale_zero.to(torch.bfloat16)  # a model may have cast it: Switch does, in every pass
        y_BN = torch._weight_int4pack_mm_for_cpu(x_BK, self.packed, self.group, scale_zero)[:, : self.N]
        y_BN = y_BN if self.row_N is None else y_BN * self.row_N
        return y_BN.to(self.dtype).reshape(*x.shape[:-1], self.N)


Packed = Rows | Groups


def group_size(K: int, most: int = 128) -> int:
    """Inputs in a group of a matrix with K inputs: the most that divide them."""
    return next((each for each in GROUPS if each <= most and K % each == 0), GROUPS[-1])


def group_range(w: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, zero) of each group w [..., g], from its least to its greatest weight, float32 [...].

    Rounded to bfloat16 before weights are, so that these are nearest to what products use.
    """
    low, high = w.amin(-1), w.amax(-1)
    scale = ((high - low) / 15).to(torch.bfloat16).float()
    return scale, (low + 8 * scale).to(torch.bfloat16).float()


def nearest(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The numbers of 0 to 15, in floats, for which (q - 8) · scale + zero is nearest to w."""
    return ((w - zero) * torch.where(scale > 0, 1 / scale, 0) + 8).round().clamp(0, 15)


def _in_bfloat16(x: Tensor) -> Tensor:
    """x as [B, K], row after row. Not by contiguous(), which leaves the strides of no rows as they are."""
    return x.to(torch.bfloat16).reshape(-1).view(math.prod(x.shape[:-1]), x.shape[-1])


def _lengthened(x_BK: Tensor, width: int, first: int = 0) -> Tensor:
    """A copy with `first` zeros before each row, and zeros after it."""
    if first:  # not by assignment: a compiled step would give the copy transposed strides, which kernels refuse
        x_BK = torch.cat([x_BK.new_zeros(len(x_BK), first), x_BK], 1)
    longer = x_BK.new_zeros(len(x_BK), width)
    longer[:, : x_BK.shape[1]] = x_BK
    return longer


@functools.cache
def _ones(n: int, device: torch.device) -> Tensor:
    """Shared by all matrices of n rows."""
    return torch.ones(n, dtype=torch.bfloat16, device=device)


@functools.cache
def _order() -> tuple[int, Tensor]:
    """torch's order of int4: rows in a block, and the nibble of a column of the block, low first, that has each row.

    It depends on the processor, and is documented nowhere, so it is read from what torch packs.
    """

    def packed(q_NK: Tensor) -> Tensor:
        flat: Tensor = torch._convert_weight_to_int4pack_for_cpu(q_NK.to(torch.int32).contiguous(), 1).flatten()
        return flat

    row_NK = torch.arange(64, device="cpu", dtype=torch.int32)[:, None].expand(64, 2)
    is_second = packed(torch.tensor([0, 1], device="cpu", dtype=torch.int32).expand(64, 2)) > 0
    column = int(is_second.int().argmax())  # bytes of a column
    low, high = packed(row_NK % 16)[:column].int(), packed(row_NK // 16)[:column].int()
    row_of_nibble = torch.stack([(low & 15) + 16 * (high & 15), (low >> 4) + 16 * (high >> 4)], 1).flatten()
    return 2 * column, row_of_nibble.argsort()


# A separate operation: inductor uses torch's only for weights that are constants in the graph.
_OPERATIONS = torch.library.Library("onebit", "FRAGMENT")
_OPERATIONS.define("onednn_linear(Tensor x, Tensor matrix, Tensor? bias) -> Tensor")
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn_linear(x: Tensor, matrix_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, matrix_NK, bias_N, "none", [], "")
    return y


def _shaped_as_product(x: Tensor, matrix_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], matrix_NK.shape[0])


_OPERATIONS.impl("onednn_linear", _onednn_linear, "CPU")
torch.library.register_fake("onebit::onednn_linear", _shaped_as_product)


def linear(x: Tensor, matrix_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b without gradients; the matrix may be a transposed view.

    float32 on a CPU uses oneDNN: torch's own product uses MKL there, which on some CPUs runs one row on one thread, and
    many rows half as fast (an AMD EPYC, torch 2.13).
    """
    if _HAS_ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel():
        y: Tensor = torch.ops.onebit.onednn_linear(x, matrix_NK, bias_N)
        return y
    return F.linear(x, matrix_NK, bias_N)
