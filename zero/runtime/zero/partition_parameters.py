"""DeepSpeed's `deepspeed.runtime.zero.partition_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...deepspeed.parameters import GatheredParameters, Init, ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "zero_wrapper_for_fp_tensor_constructor"]

F = TypeVar("F", bound=Callable[..., object])


def zero_wrapper_for_fp_tensor_constructor(fn: F, *args: object, **named: object) -> F:
    """Return `fn`. DeepSpeed's `Init` wraps torch's constructors by it, and transformers puts another in its place."""
    return fn
