"""A module's weight as a matrix [R, C]: R outputs, C inputs, whatever way its class stores it.

Linear, convolutions and Embedding keep outputs (for an Embedding its rows) first; the Conv1D of transformers, in GPT-2,
keeps inputs first. A convolution's inputs are its channels, each with several columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_conv1d_of_transformers(module: nn.Module) -> bool:
    """Known by its name: transformers need not be there."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers") for kind in type(module).__mro__
    )


def is_compressible(module: nn.Module) -> bool:
    """Whether it has a weight that the techniques know."""
    return isinstance(module, (nn.Linear, nn.Embedding, *_CONVOLUTIONS)) or is_conv1d_of_transformers(module)


def is_convolution(module: nn.Module) -> bool:
    """Whether it is one of torch's, not a Conv1D of transformers, which multiplies matrices."""
    return isinstance(module, _CONVOLUTIONS)


@dataclass(frozen=True)
class Form:
    """How a weight of this shape is stored."""

    shape: tuple[int, ...]
    is_transposed: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Form:
        """Of a compressible module."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        return cls(tuple(weight.shape), is_conv1d_of_transformers(module))

    @property
    def rows(self) -> int:
        """R."""
        return self.shape[1 if self.is_transposed else 0]

    @property
    def inputs(self) -> int:
        """Input features or channels."""
        return self.shape[0 if self.is_transposed else 1]

    @property
    def columns(self) -> int:
        """C."""
        return torch.Size(self.shape).numel() // self.rows

    def matrix(self, weight: Tensor) -> Tensor:
        """[R, C], a view where it can be."""
        return weight.t() if self.is_transposed else weight.reshape(weight.shape[0], -1)

    def weight(self, matrix_RC: Tensor) -> Tensor:
        """Back, in this shape."""
        return matrix_RC.t() if self.is_transposed else matrix_RC.reshape(self.shape)

    def columns_of(self, inputs: Tensor) -> Tensor:
        """What is said of each input, of each column."""
        return inputs.repeat_interleave(self.columns // self.inputs)

    def without(self, keep_R: Tensor | None, keep_inputs: Tensor | None) -> Form:
        """That of a weight which keeps these outputs and inputs."""
        rows = self.rows if keep_R is None else int(keep_R.sum())
        inputs = self.inputs if keep_inputs is None else int(keep_inputs.sum())
        first, second = (inputs, rows) if self.is_transposed else (rows, inputs)
        return Form((first, second, *self.shape[2:]), self.is_transposed)


_SIZES = {
    "rows": ("out_features", "out_channels", "nf", "num_embeddings", "num_features"),
    "inputs": ("in_features", "in_channels", "nx", "embedding_dim"),
}


def set_sizes(module: nn.Module, form: Form) -> dict[str, int]:
    """Let a module's own numbers be those of its weight; what they are now, by name."""
    numbers = {name: getattr(form, what) for what, names in _SIZES.items() for name in names if hasattr(module, name)}
    for name, number in numbers.items():
        setattr(module, name, number)
    return numbers
