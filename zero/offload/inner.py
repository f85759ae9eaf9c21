"""Any torch optimizer, run on pieces of parameters whose state lies elsewhere.

The optimizer keeps its arithmetic; which tensors it steps on, and what their state is, is said anew for every chunk.
Tensors of a piece's shape are fields, which a store holds; all else (step counts, factored rows) stays here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...host_adam import HostAdam
from ...laprop import LaProp
from ...usage.contract import Group
from .layout import Piece

_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
    LaProp,
)  # fmt: skip


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an element's step depends on that element alone, so that parameters may be split. By exact class."""
    if type(optimizer) is HostAdam:  # a variance in eight bits has a scale for each 256 elements
        return optimizer.variance_dtype == torch.float32
    return type(optimizer) in _ELEMENTWISE


@dataclass
class Part:
    """One piece in a step. weight, grad: float32, of one shape. fields: its views of the store; numbers: the rest.

    numbers: None before its first step.
    """

    group: int
    weight: Tensor
    grad: Tensor
    fields: Mapping[str, Tensor]
    numbers: dict[str, object] | None


def empty_part(group: int, shape: torch.Size, piece: Piece, views: Mapping[str, Tensor]) -> Part:
    """A piece's fields in a step of zeros, on zeros, that only makes state. shape: of the whole parameter."""
    numel = piece.stop - piece.start
    zeros = torch.zeros(shape if numel == shape.numel() else [numel], dtype=torch.float32, device="cpu")
    mine = {name: x[piece.at : piece.at + numel].view(zeros.shape) for name, x in views.items()}
    return Part(group, zeros, torch.zeros_like(zeros), mine, None)


class Inner:
    """Drives `optimizer`, which knows pieces during a step alone: between steps its groups are those it was made with.

    So a scheduler of it sets the options of every step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self._groups = optimizer, optimizer.param_groups
        self.name = type(optimizer).__name__

    def fields(self, groups: Sequence[Group]) -> dict[str, torch.dtype]:
        """What state it keeps of each element, found by a step on a few zeros. Where it speaks to others, all ranks."""
        found: dict[str, torch.dtype] = {}
        for g, group in enumerate(groups):
            like = next(iter(group["params"]), None)
            if like is None:
                continue
            probe = torch.zeros([2 + k for k in range(like.dim())], dtype=torch.float32, device="cpu")
            part = Part(g, probe, torch.zeros_like(probe), {}, None)
            self.step(groups, [part])
            for name, value in (part.numbers or {}).items():
                if not isinstance(value, Tensor) or value.shape != probe.shape or value.dim() == 0:
                    continue
                if found.setdefault(name, value.dtype) != value.dtype:
                    raise TypeError(f"{self.name} keeps {name} in several dtypes; give all groups one")
        return found

    def step(self, groups: Sequence[Group], parts: Sequence[Part]) -> None:
        """One step on these parts, with the options of their groups; fields and numbers are then the new ones."""
        state: defaultdict[Tensor, dict[str, object]] = defaultdict(dict)
        self.optimizer.param_groups = [
            {**group, "params": [part.weight for part in parts if part.group == g]} for g, group in enumerate(groups)
        ]
        for part in parts:
            part.weight.grad = part.grad
            if part.numbers is not None:
                state[part.weight] = {**part.numbers, **part.fields}
        self.optimizer.state = state
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups, self.optimizer.state = self._groups, defaultdict(dict)
        for part in parts:
            part.weight.grad = None
            self._take_back(part, state[part.weight])

    def _take_back(self, part: Part, state: dict[str, object]) -> None:
        part.numbers = {name: value for name, value in state.items() if name not in part.fields}
        for name, field in part.fields.items():
            value = state.get(name)
            if isinstance(value, Tensor) and value.data_ptr() != field.data_ptr():
                field.copy_(value)  # a first step made it
