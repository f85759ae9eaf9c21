"""Functions that torch.compile leaves out of its graphs: steps, and the work of gradient hooks. See docs/faq.md.

And those that it compiles for us, each by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def outside_graphs(function: F) -> F:
    """The function, at which the graph of a compiled caller breaks.

    A step exchanges with other ranks, and reads numbers that a graph would freeze. As long as nobody has imported the
    compiler, there is no graph: importing it takes longer than torch itself, and is left to those who compile.
    """
    disabled = torch._disable_dynamo(function)

    @wraps(function)
    def call(*args: object, **named: object) -> object:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **named)

    return cast("F", call)


def compiled_apart(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` of a function whose variants count by themselves.

    torch compiles 8 variants of the same code, such as a method of all objects of a class. It runs any further one
    uncompiled, or refuses it if `fullgraph` is set. Each result of this function has code of its own.
    """

    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, **options)


def _without_import(method: F) -> F:
    """A method without torch's own wrapper; one that something else has wrapped stays."""
    code, inner = getattr(method, "__code__", None), getattr(method, "__wrapped__", None)
    is_torchs = code is not None and code.co_filename == torch._compile.__file__
    return outside_graphs(cast("F", inner)) if is_torchs else method


class Optimizer(torch.optim.Optimizer):
    """torch's, without the import of the compiler in the first call of one of these methods."""

    add_param_group = _without_import(torch.optim.Optimizer.add_param_group)
    zero_grad = _without_import(torch.optim.Optimizer.zero_grad)
    state_dict = _without_import(torch.optim.Optimizer.state_dict)
    load_state_dict = _without_import(torch.optim.Optimizer.load_state_dict)
