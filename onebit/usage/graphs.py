"""Functions that torch.compile leaves out of its graphs: steps, and the work of gradient hooks. See docs/faq.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def outside_graphs(function: F) -> F:
    """The function, at which the graph of a compiled caller breaks.

    A step exchanges with other ranks, and reads numbers that a graph would freeze. torch.compiler.disable would import
    the compiler at once, which takes longer than all of onebit; this one, which torch.optim uses, imports it at the
    first call.
    """
    return cast("F", torch._disable_dynamo(function))
