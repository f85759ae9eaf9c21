"""What torch.compile leaves out of its graphs: steps, and what gradient hooks do. docs/faq.md says what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def outside_graphs(function: F) -> F:
    """The function as it is, where a compiled one calls it: the graph breaks there.

    A step talks to other ranks, and reads numbers that a graph would freeze. torch.compiler.disable would import the
    compiler at once, which takes longer than all of onebit; this one, as torch.optim has it, at the first call.
    """
    return cast("F", torch._disable_dynamo(function))
