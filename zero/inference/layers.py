"""What a linear layer and an embedding become: of this rank's part of the matrix, in floats or in int8 by rows.

Shape legend: N outputs, K inputs, V rows of a table, D features, B rows of x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Join = Callable[[Tensor], Tensor]
"""Of the products of all ranks one: their sum, or one behind the other."""


class Rows(nn.Module):
    """A matrix in int8 with a float32 scale for each row: w ≈ rows · scale. dtype: of what comes out.

    Rows end in zeros up to a multiple of 16: torch's product reads what lies beyond shorter ones, which is another
    number or no memory of this process; that of int8 with int8 is wrong for rows of 1.
    """

    def __init__(self, weight_NK: Tensor):
        super().__init__()
        self.dtype, self.K = weight_NK.dtype, weight_NK.shape[1]
        rows_NK, scale_N = quantize_rows(weight_NK)
        self.rows_NK, self.scale_N = nn.Buffer(_lengthened(rows_NK, self.K + -self.K % 16)), nn.Buffer(scale_N)
        self.ones_N = _ones(len(scale_N), scale_N.device)

    @property
    def weight(self) -> Tensor:
        """In floats [N, K]."""
        return (self.rows_NK[:, : self.K] * self.scale_N[:, None]).to(self.dtype)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows in floats [..., K]."""
        return (self.rows_NK[ids, : self.K] * self.scale_N[ids][..., None]).to(self.dtype)

    def product(self, x: Tensor, has_int8_inputs: bool) -> Tensor:
        """x·Wᵀ. has_int8_inputs: of x in int8 with a scale for each row of it.

        Else of x in bfloat16 where it has few rows: torch's product of bfloat16 and int8 reads each weight once. That
        of float32 and int8 is 50 times slower (one core with AVX-512, torch 2.13).
        """
        x_BK, width = x.reshape(-1, x.shape[-1]), self.rows_NK.shape[1]
        if has_int8_inputs:
            x_BK, scale_B = quantize_rows(x_BK)
            # A copy in any case: torch's product is wrong for inputs that lie transposed.
            y_BN = torch._int_mm(_lengthened(x_BK, width), self.rows_NK.t()) * scale_B[:, None] * self.scale_N
        elif x_BK.shape[0] <= FEW_ROWS:
            x_BK = x_BK.to(torch.bfloat16).contiguous()
            x_BK = x_BK if width == self.K else _lengthened(x_BK, width)
            # Scales of 1: those of the rows are too coarse in bfloat16.
            y_BN = torch._weight_int8pack_mm(x_BK, self.rows_NK, self.ones_N) * self.scale_N
        else:
            y_BN = linear(x_BK, self.weight)
        return y_BN.to(self.dtype).view(*x.shape[:-1], len(self.scale_N))


def _lengthened(x_BK: Tensor, width: int) -> Tensor:
    """A copy, row by row, with zeros at the end of each."""
    longer = x_BK.new_zeros(len(x_BK), width)
    longer[:, : x_BK.shape[1]] = x_BK
    return longer


@functools.cache
def _ones(n: int, device: torch.device) -> Tensor:
    """One for all matrices of this many rows."""
    return torch.ones(n, dtype=torch.bfloat16, device=device)


FEW_ROWS = 64
"""Above, the product of floats is faster, what it takes to make them included."""


def quantize_rows(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, K], float32 [N]): w ≈ int8 · scale, symmetric, to nearest; a row of zeros has scale 0."""
    scale_N = w_NK.float().abs().amax(1) / 127
    inverse_N = torch.where(scale_N > 0, 1 / scale_N, 0)
    return (w_NK.float() * inverse_N[:, None]).round().to(torch.int8), scale_N


# An operation of its own: inductor takes torch's only with weights that it holds as constants.
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
    """x·Wᵀ + b, without gradients, of a matrix that may lie transposed.

    Of float32 on a CPU by oneDNN: torch's own takes MKL's there, which on some CPUs runs one row on one thread, and
    many rows half as fast (an AMD EPYC, torch 2.13).
    """
    if _HAS_ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel():
        y: Tensor = torch.ops.onebit.onednn_linear(x, matrix_NK, bias_N)
        return y
    return F.linear(x, matrix_NK, bias_N)


class ServedLinear(nn.Module):
    """y = join(x·Wᵀ) + b. matrix: [N, K], floats or `Rows`; bias: of what join gives."""

    def __init__(self, matrix: Tensor | Rows, bias: Tensor | None, join: Join | None, has_int8_inputs: bool = False):
        super().__init__()
        self.matrix = matrix if isinstance(matrix, Rows) else nn.Parameter(matrix, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.join, self.has_int8_inputs = join, has_int8_inputs

    @property
    def weight(self) -> Tensor:
        """Floats [N, K], for models that look at it."""
        return self.matrix.weight if isinstance(self.matrix, Rows) else self.matrix

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix
        if isinstance(matrix, Tensor) and self.join is None:
            return linear(x, matrix, self.bias)
        y = linear(x, matrix) if isinstance(matrix, Tensor) else matrix.product(x, self.has_int8_inputs)
        if self.join is not None:
            y = self.join(y)
        return y if self.bias is None else y + self.bias


class ServedEmbedding(nn.Module):
    """A table in int8 by rows. `weight` is in floats, for models whose outputs are products with it."""

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
    """Whether it is torch's Linear, or the Conv1D of transformers, which keeps W transposed. No subclasses: theirs may
    compute something else."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def matrix_of(module: nn.Module) -> Tensor:
    """Of a linear layer, [N, K]."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().t() if is_transposed(module) else weight.detach()


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of the one of that name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def serve_linears(model: nn.Module) -> None:
    """Put `ServedLinear` where it makes products faster, in place: for all linear layers of float32, which share their
    memory with it; of 16 bits for Conv1D's, whose matrices are turned over: 1.5 times faster on a CPU."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not is_linear(module):
            continue
        matrix, bias = matrix_of(module), cast("Tensor | None", module.bias)
        bias = None if bias is None else bias.detach()
        if matrix.dtype == torch.float32:
            replace(model, name, ServedLinear(matrix, bias, None))
        elif is_transposed(module):
            replace(model, name, ServedLinear(matrix.contiguous(), bias, None))


def quantize(model: nn.Module, *, has_int8_inputs: bool) -> None:
    """Make int8 of the linear layers and embeddings of a model, in place. Tied matrices stay one.

    Not of empty ones, nor of an embedding that changes its rows (max_norm).
    """
    made: dict[int, Rows] = {}

    def rows_of(weight: Tensor, matrix_NK: Tensor) -> Rows:
        if id(weight) not in made:
            made[id(weight)] = Rows(matrix_NK)
        return made[id(weight)]

    for name, module in list(model.named_modules(remove_duplicate=False)):
        if any(not p.numel() for p in module.parameters(recurse=False)):
            continue
        if isinstance(module, ServedLinear):
            rows = rows_of(cast(Tensor, module.matrix), cast(Tensor, module.matrix).detach())
            replace(model, name, ServedLinear(rows, module.bias, module.join, has_int8_inputs))
        elif is_linear(module):
            rows = rows_of(module.weight, matrix_of(module))
            replace(model, name, ServedLinear(rows, module.bias, None, has_int8_inputs))
        elif type(module) is nn.Embedding and module.max_norm is None:
            replace(model, name, ServedEmbedding(rows_of(module.weight, module.weight.detach())))
