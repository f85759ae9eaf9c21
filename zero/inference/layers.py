"""Linear layers and embeddings in inference: this rank's part of the matrix, in floats or packed (`packed.py`).

Shape legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..parallel.styles import is_transposed
from .packed import Groups, Packed, Rows, linear

Join = Callable[[Tensor], Tensor]
"""Joins the products of all ranks: their sum, or their concatenation."""


class InFloats(Tensor):
    """The weight of a packed layer as models read it: the first operation makes the floats, [N, K].

    Models that only ask for its dtype, as T5 in every pass, do not wait for them.
    """

    matrix: Packed

    @staticmethod
    def __new__(cls, matrix: Packed) -> InFloats:
        device = matrix.of_products.device
        weight: InFloats = Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=matrix.dtype, device=device)
        weight.matrix = matrix
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda weight: weight.matrix.weight, (args, kwargs or {}))
        return func(*args, **kwargs)


def in_floats(matrix: Packed) -> Tensor:
    """`InFloats`, or in a compiled step the floats themselves: they are left out of it if nothing reads them."""
    return matrix.weight if torch.compiler.is_compiling() else InFloats(matrix)


class ServedLinear(nn.Module):
    """y = join(x·Wᵀ) + b. matrix: [N, K], floats or packed. The bias has the size of the joined output.

    inputs: the features of x that the matrix is for. None: all.
    """

    def __init__(
        self,
        matrix: Tensor | Packed,
        bias: Tensor | None,
        join: Join | None,
        has_int8_inputs: bool = False,
        inputs: slice | None = None,
    ):
        super().__init__()
        self.matrix = nn.Parameter(matrix, requires_grad=False) if isinstance(matrix, Tensor) else matrix
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.join, self.has_int8_inputs, self.inputs = join, has_int8_inputs, inputs
        self.out_features, self.in_features = matrix.shape

    @property
    def weight(self) -> Tensor:
        """The matrix in floats, [N, K], for models that read it."""
        return self.matrix if isinstance(self.matrix, Tensor) else in_floats(self.matrix)

    def forward(self, x: Tensor) -> Tensor:
        matrix, x = self.matrix, x if self.inputs is None else x[..., self.inputs]
        if isinstance(matrix, Tensor) and self.join is None:
            return linear(x, matrix, self.bias)
        y = linear(x, matrix) if isinstance(matrix, Tensor) else matrix.product(x, self.has_int8_inputs)
        if self.join is not None:
            y = self.join(y)
        return y if self.bias is None else y + self.bias


class ServedEmbedding(nn.Module):
    """A packed embedding table. `weight` is in floats, for models that multiply by it.

    It has the attributes of an nn.Embedding, which adapters around it read.
    """

    padding_idx = max_norm = None
    norm_type, scale_grad_by_freq, sparse = 2.0, False, False

    def __init__(self, matrix: Packed):
        super().__init__()
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.shape

    @property
    def weight(self) -> Tensor:
        return in_floats(self.matrix)

    def forward(self, ids: Tensor) -> Tensor:
        return self.matrix.lookup(ids)


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


def weight_of(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """(the tensor that tied layers share, the matrix [N, K]) of a linear layer in floats that can be packed.

    None: another module; a layer that is empty, packed already, or has hooks.
    """
    if any(not p.numel() for p in module.parameters(recurse=False)) or has_hooks(module):
        return None
    if isinstance(module, ServedLinear):
        return (module.matrix, module.matrix.detach()) if isinstance(module.matrix, Tensor) else None
    return (cast(Tensor, module.weight), matrix_of(module)) if is_linear(module) else None


def serve_packed(model: nn.Module, name: str, matrix: Packed, *, has_int8_inputs: bool = False) -> None:
    """Replace the model's linear layer of this name by one with the packed matrix."""
    module = model.get_submodule(name)
    join, inputs = (module.join, module.inputs) if isinstance(module, ServedLinear) else (None, None)
    bias = cast("Tensor | None", module.bias)
    replace(model, name, ServedLinear(matrix, bias, join, has_int8_inputs, inputs))


def tables_of(model: nn.Module) -> set[int]:
    """The ids of the embeddings' weights."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def quantize(model: nn.Module, bits: int, *, has_int8_inputs: bool = False) -> None:
    """Pack a model's linear layers and embeddings in 8 or 4 bits, in place. Tied matrices stay tied.

    Empty ones stay, and so do those with hooks, those that are packed, and an embedding that changes its rows
    (max_norm). Of 4 bits tables have 8, also those that are a head: they cost few bytes, and much accuracy.
    """
    made: dict[int, Packed] = {}
    tables = tables_of(model)

    def packed(weight: Tensor, matrix_NK: Tensor) -> Packed:
        if id(weight) not in made:
            has_rows = bits == 8 or id(weight) in tables
            made[id(weight)] = Rows.quantized(matrix_NK) if has_rows else Groups.quantized(matrix_NK)
        return made[id(weight)]

    for name, module in list(model.named_modules(remove_duplicate=False)):
        if (found := weight_of(module)) is not None:
            serve_packed(model, name, packed(*found), has_int8_inputs=has_int8_inputs)
        elif (
            type(module) is nn.Embedding and module.max_norm is None and module.weight.numel() and not has_hooks(module)
        ):
            replace(model, name, ServedEmbedding(packed(module.weight, module.weight.detach())))
