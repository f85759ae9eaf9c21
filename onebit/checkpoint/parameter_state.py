"""What an optimizer knows of one parameter, whatever bucket, rank or slice it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout.flat import Layout


@dataclass
class ParameterState:
    """The state of one parameter, or of a slice of it.

    elements: tensors in its shape: what torch calls its state; "worker_error" and "server_error", what each replica
    owes to the mean and what all of them owe together; and what a rule's `take_apart` adds. numbers: of the whole
    parameter, tensors of no dimensions. group: whose options it takes.
    """

    group: int
    phase: str
    elements: dict[str, Tensor]
    numbers: dict[str, Tensor]


def flat_of(layout: Layout, states: Sequence[ParameterState], name: str) -> Tensor | None:
    """The elements of that name, laid out as a bucket, zeros in its padding; None where there are none."""
    if name not in states[0].elements:
        return None
    flat = torch.zeros(layout.numel, dtype=states[0].elements[name].dtype, device="cpu")
    for one, view in zip(states, layout.views(flat), strict=True):
        view.copy_(one.elements[name])
    return flat


def spread_over(layout: Layout, states: Sequence[ParameterState], name: str, flat: Tensor) -> None:
    """Give each state its elements of a flat tensor, under that name. Views."""
    for one, view in zip(states, layout.views(flat), strict=True):
        one.elements[name] = view
