"""DeepSpeed's `deepspeed.utils`: log lines of some ranks, endless loaders, and parameters asked for whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from ..deepspeed.parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from .logging import log_dist, logger

__all__ = [
    "RepeatingLoader", "log_dist", "logger", "safe_get_full_fp32_param", "safe_get_full_grad",
    "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad",
    "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]  # fmt: skip

T = TypeVar("T")


class RepeatingLoader(Generic[T]):
    """Begins a loader again at its end: its iterator never ends. Raises ValueError, when asked, where it is empty."""

    def __init__(self, loader: Iterable[T]):
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        for _ in range(2):
            for item in self._iterator:
                return item
            self._iterator = iter(self.loader)
        raise ValueError("the loader is empty: there is nothing to repeat")
