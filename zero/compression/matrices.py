"""A module's weight as a matrix [R, C]: R outputs, C inputs, for every storage order.

Linear, convolutions and Embedding keep outputs (for an Embedding its rows) first; the Conv1D of transformers, in GPT-2,
keeps inputs first. A convolution's inputs are its channels, each with several columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_conv1d_of_transformers(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, by its name: transformers need not be installed."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers") for kind in type(module).__mro__
    )


def is_compressible(module: nn.Module) -> bool:
    """Whether it has a weight that the techniques support."""
    return isinstance(module, (nn.Linear, nn.Embedding, *_CONVOLUTIONS)) or is_conv1d_of_transformers(module)


def is_convolution(module: nn.Module) -> bool:
    """Whether it is a convolution of torch; transformers' Conv1D is a matrix product."""
    return isinstance(module, _CONVOLUTIONS)


@dataclass(frozen=True)
class Form:
    """The storage of a weight: its shape, and whether inputs come first."""

    shape: tuple[int, ...]
    is_transposed: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Form:
        """The form of a compressible module."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        return cls(tuple(weight.shape), is_conv1d_of_transformers(module))

    @property
    def rows(self) -> int:
        """Number of outputs, R."""
        return self.shape[1 if self.is_transposed else 0]

    @property
    def inputs(self) -> int:
        """Input features or channels."""
        return self.shape[0 if self.is_transposed else 1]

    @property
    def columns(self) -> int:
        """Number of columns, C."""
        return torch.Size(self.shape).numel() // self.rows

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as [R, C], a view if possible."""
        return weight.t() if self.is_transposed else weight.reshape(weight.shape[0], -1)

    def weight(self, matrix_RC: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        return matrix_RC.t() if self.is_transposed else matrix_RC.reshape(self.shape)

    def columns_of(self, inputs: Tensor) -> Tensor:
        """A value per input, repeated for each of its columns."""
        return inputs.repeat_interleave(self.columns // self.inputs)

    def without(self, keep_R: Tensor | None, keep_inputs: Tensor | None) -> Form:
        """The form of a weight that keeps only these outputs and inputs."""
        rows = self.rows if keep_R is None else int(keep_R.sum())
        inputs = self.inputs if keep_inputs is None else int(keep_inputs.sum())
        first, second = (inputs, rows) if self.is_transposed else (rows, inputs)
        return Form((first, second, *self.shape[2:]), self.is_transposed)


_SIZES = {
    "rows": ("out_features", "out_channels", "nf", "num_embeddings", "num_features"),
    "inputs": ("in_features", "in_channels", "nx", "embedding_dim"),
}


def set_sizes(module: nn.Module, form: Form) -> dict[str, int]:
    """Set a module's size attributes to those of its weight; return them by name."""
    numbers = {name: getattr(form, what) for what, names in _SIZES.items() for name in names if hasattr(module, name)}
    for name, number in numbers.items():
        setattr(module, name, number)
    return numbers
