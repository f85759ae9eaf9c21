"""Linear layers and embeddings in inference: this rank's part of the matrix, in floats or in int8 by rows.

Shape legend: N outputs, K inputs, V rows of a table, D features, B rows of x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel.styles import is_transposed

Join = Callable[[Tensor], Tensor]
"""Joins the products of all ranks: their sum, or their concatenation."""


class Rows(nn.Module):
    """A matrix in int8 with a float32 scale for each row: w ≈ rows · scale. Its products have the matrix's dtype.

    Rows are padded with zeros to a multiple of 16: torch's product reads past the end of shorter ones, into other
    numbers or memory outside the process, and its int8-by-int8 product is wrong for rows of one element.
    """

    def __init__(self, weight_NK: Tensor):
        super().__init__()
        self.dtype, self.K = weight_NK.dtype, weight_NK.shape[1]
        rows_NK, scale_N = quantize_rows(weight_NK)
        self.rows_NK, self.scale_N = nn.Buffer(_lengthened(rows_NK, self.K + -self.K % 16)), nn.Buffer(scale_N)
        self.ones_N = _ones(len(scale_N), scale_N.device)

    @property
    def weight(self) -> Tensor:
        """The matrix in floats, [N, K]."""
        return (self.rows_NK[:, : self.K] * self.scale_N[:, None]).to(self.dtype)

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows of these numbers in floats, [..., K]."""
        return (self.rows_NK[ids, : self.K] * self.scale_N[ids][..., None]).to(self.dtype)

    def product(self, x: Tensor, has_int8_inputs: bool) -> Tensor:
        """x·Wᵀ. has_int8_inputs: quantize x to int8 with a scale for each of its rows.

        Otherwise few rows of x are cast to bfloat16: torch's product of bfloat16 and int8 reads each weight once, and
        that of float32 and int8 is 50 times slower (one core with AVX-512, torch 2.13).
        """
        x_BK, width = x.reshape(-1, x.shape[-1]), self.rows_NK.shape[1]
        if has_int8_inputs:
            x_BK, scale_B = quantize_rows(x_BK)
            # Always a copy: torch's product is wrong for transposed inputs.
            y_BN = torch._int_mm(_lengthened(x_BK, width), self.rows_NK.t()) * scale_B[:, None] * self.scale_N
        elif x_BK.shape[0] <= FEW_ROWS:
            x_BK = x_BK.to(torch.bfloat16).contiguous()
            x_BK = x_BK if width == self.K else _lengthened(x_BK, width)
            # Pass scales of 1 and multiply in float32: in bfloat16 the rows' scales would be too coarse.
            y_BN = torch._weight_int8pack_mm(x_BK, self.rows_NK, self.ones_N) * self.scale_N
        else:
            y_BN = linear(x_BK, self.weight)
        return y_BN.to(self.dtype).view(*x.shape[:-1], len(self.scale_N))


def _lengthened(x_BK: Tensor, width: int) -> Tensor:
    """A copy with zeros at the end of each row."""
    longer = x_BK.new_zeros(len(x_BK), width)
    longer[:, : x_BK.shape[1]] = x_BK
    return longer


@functools.cache
def _ones(n: int, device: torch.device) -> Tensor:
    """Shared by all matrices of n rows."""
    return torch.ones(n, dtype=torch.bfloat16, device=device)


FEW_ROWS = 64
"""Above this, converting the matrix to floats and multiplying these is faster."""


def quantize_rows(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 scales [N], w ≈ int8 · scale: symmetric, to nearest. A row of zeros has scale 0."""
    scale_N = w_NK.float().abs().amax(1) / 127
    inverse_N = torch.where(scale_N > 0, 1 / scale_N, 0)
    return (w_NK.float() * inverse_N[:, None]).round().to(torch.int8), scale_N


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


class ServedLinear(nn.Module):
    """y = join(x·Wᵀ) + b. matrix: [N, K], floats or `Rows`. The bias has the size of the joined output.

    inputs: the features of x that the matrix is for. None: all.
    """

    def __init__(
        self,
        matrix: Tensor | Rows,
        bias: Tensor | None,
        join: Join | None,
        has_int8_inputs: bool = False,
        inputs: slice | None = None,
    ):
        super().__init__()
        self.matrix = matrix if isinstance(matrix, Rows) else nn.Parameter(matrix, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.join, self.has_int8_inputs, self.inputs = join, has_int8_inputs, inputs

    @property
    def weight(self) -> Tensor:
        """The matrix in floats, [N, K], for models that read it."""
        return self.matrix.weight if isinstance(self.matrix, Rows) else self.matrix

    def forward(self, x: Tensor) -> Tensor:
        matrix, x = self.matrix, x if self.inputs is None else x[..., self.inputs]
        if isinstance(matrix, Tensor) and self.join is None:
            return linear(x, matrix, self.bias)
        y = linear(x, matrix) if isinstance(matrix, Tensor) else matrix.product(x, self.has_int8_inputs)
        if self.join is not None:
            y = self.join(y)
        return y if self.bias is None else y + self.bias


class ServedEmbedding(nn.Module):
    """An embedding table in int8 by rows. `weight` is in floats, for models that multiply by it."""

    def __init__(self, table: Rows):
        super().__init__()
        self.table = table
        self.num_embeddings, self.embedding_dim = len(table.rows_NK), table.K

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.lookup(ids)


# -------------------------------------------------------------------------------- a model's layers


def is_linear(module: nn.Module) -> bool:
    """Whether a module is exactly torch's Linear, or transformers' Conv1D, which keeps W transposed.

    Subclasses do not count: they may compute something else.
    """
    return type(module) is nn.Linear or is_transposed(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module's forward pass runs hooks, which another in its place would not: quantized inputs are one."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def matrix_of(module: nn.Module) -> Tensor:
    """The matrix of a linear layer, [N, K]."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().t() if is_transposed(module) else weight.detach()


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the model's module of this name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def serve_linears(model: nn.Module) -> None:
    """Replace linear layers by `ServedLinear` where that is faster, in place.

    In float32 all of them without hooks, sharing their memory; in 16 bits only Conv1D's, whose matrices are transposed
    by a copy: 1.5 times faster on a CPU.
    """
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not is_linear(module) or has_hooks(module):
            continue
        matrix, bias = matrix_of(module), cast("Tensor | None", module.bias)
        bias = None if bias is None else bias.detach()
        if matrix.dtype == torch.float32:
            replace(model, name, ServedLinear(matrix, bias, None))
        elif is_transposed(module):
            replace(model, name, ServedLinear(matrix.contiguous(), bias, None))


def quantize(model: nn.Module, *, has_int8_inputs: bool) -> None:
    """Convert a model's linear layers and embeddings to int8, in place. Tied matrices stay tied.

    Empty ones stay, and so do those with hooks and an embedding that changes its rows (max_norm).
    """
    made: dict[int, Rows] = {}

    def rows_of(weight: Tensor, matrix_NK: Tensor) -> Rows:
        if id(weight) not in made:
            made[id(weight)] = Rows(matrix_NK)
        return made[id(weight)]

    for name, module in list(model.named_modules(remove_duplicate=False)):
        if any(not p.numel() for p in module.parameters(recurse=False)) or has_hooks(module):
            continue
        if isinstance(module, ServedLinear):
            rows = rows_of(cast(Tensor, module.matrix), cast(Tensor, module.matrix).detach())
            replace(model, name, ServedLinear(rows, module.bias, module.join, has_int8_inputs, module.inputs))
        elif is_linear(module):
            rows = rows_of(module.weight, matrix_of(module))
            replace(model, name, ServedLinear(rows, module.bias, None, has_int8_inputs))
        elif type(module) is nn.Embedding and module.max_norm is None:
            replace(model, name, ServedEmbedding(rows_of(module.weight, module.weight.detach())))
