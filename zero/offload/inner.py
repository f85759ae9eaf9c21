"""Any torch optimizer, run on pieces of parameters whose state is elsewhere.

The optimizer keeps its arithmetic, but gets new tensors and state for every chunk. State tensors of a piece's shape are
fields, which a store holds; everything else (step counts, factored rows) stays in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...host_adam import HostAdam
from ...laprop import LaProp
from ...lion import Lion
from ...usage.contract import Group, State
from .layout import Piece

_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
    LaProp, Lion,
)  # fmt: skip


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element is updated independently, so that parameters may be split. Decided by exact class."""
    if type(optimizer) is HostAdam:  # a variance in eight bits has a scale for each 256 elements
        return optimizer.variance_dtype == torch.float32
    return type(optimizer) in _ELEMENTWISE


@dataclass
class Part:
    """One piece in a step: weight and gradient in float32, of one shape, and its state.

    `fields` are views of the store; `numbers` is the rest of the state, None before the first step.
    """

    group: int
    weight: Tensor
    grad: Tensor
    fields: Mapping[str, Tensor]
    numbers: dict[str, object] | None


def empty_part(group: int, shape: torch.Size, piece: Piece, views: Mapping[str, Tensor]) -> Part:
    """A piece for a step with zero weights and gradients, which only makes state. shape: the whole parameter's."""
    numel = piece.stop - piece.start
    zeros = torch.zeros(shape if numel == shape.numel() else [numel], dtype=torch.float32, device="cpu")
    mine = {name: x[piece.at : piece.at + numel].view(zeros.shape) for name, x in views.items()}
    return Part(group, zeros, torch.zeros_like(zeros), mine, None)


def at_step_0(entry: State) -> State:
    """A parameter's state that a step with zero gradients has made, without the count of that step."""
    return {name: 0 * x if name == "step" else x for name, x in entry.items()}


class Inner:
    """Drives an optimizer, whose groups hold pieces only during a step.

    Between steps they are those it was made with, so that schedulers can set their options.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self._groups = optimizer, optimizer.param_groups
        self.name = type(optimizer).__name__

    def fields(self, groups: Sequence[Group]) -> dict[str, torch.dtype]:
        """The state it keeps for each element, by name, found by a step on a few zeros.

        If the optimizer communicates, all ranks must call it.
        """
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
        """Take one step on these parts with their groups' options. Updates their fields and numbers."""
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
                field.copy_(value)  # made by the first step
