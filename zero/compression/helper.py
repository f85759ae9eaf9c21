"""DeepSpeed's `deepspeed.compression.helper`, as far as scripts need it before `init_compression`."""

from __future__ import annotations

from functools import reduce
from typing import Any, TypeVar, cast

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

__all__ = ["convert_conv1d_to_linear", "recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The module, or another attribute, of a dotted name."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: object) -> None:
    """Put a module, or another value, in the place of a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def convert_conv1d_to_linear(model: M, convert_type: type[nn.Module]) -> M:
    """Replace layers whose weight is transposed, as transformers' Conv1D of GPT-2, by nn.Linear. In place.

    Args:
        model: The model, or one whose attribute `module` is.
        convert_type: The class of the layers, with weight [in, out] and bias.

    Returns:
        The model.
    """
    inner = getattr(model, "module", model)
    for name, layer in list(inner.named_modules()):
        if isinstance(layer, convert_type):
            weight, bias = cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)
            linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta")
            linear.weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
            if bias is not None:
                linear.bias = nn.Parameter(bias.detach().view(-1), bias.requires_grad)
            recursive_setattr(inner, name, linear)
    return model
