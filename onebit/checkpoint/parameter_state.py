"""An optimizer's state of one parameter, independent of buckets, ranks and slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout.flat import Layout


@dataclass
class ParameterState:
    """The state of one parameter, or of a slice of it.

    group: number of its group. phase: phase of its bucket. elements: tensors in its shape: torch's state of it;
    "worker_error", the residual of each replica, and "server_error", that of all together; and those that a rule's
    `take_apart` adds. numbers: for the whole parameter, tensors of no dimensions.
    """

    group: int
    phase: str
    elements: dict[str, Tensor]
    numbers: dict[str, Tensor]


def flat_of(layout: Layout, states: Sequence[ParameterState], name: str) -> Tensor | None:
    """The elements of that name, laid out as a bucket, zeros in its padding; None if there are none."""
    if name not in states[0].elements:
        return None
    flat = torch.zeros(layout.numel, dtype=states[0].elements[name].dtype, device="cpu")
    for one, view in zip(states, layout.views(flat), strict=True):
        view.copy_(one.elements[name])
    return flat


def spread_over(layout: Layout, states: Sequence[ParameterState], name: str, flat: Tensor) -> None:
    """Set the elements of that name in each state to views of a flat tensor."""
    for one, view in zip(states, layout.views(flat), strict=True):
        one.elements[name] = view
