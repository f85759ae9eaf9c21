"""DeepSpeed's `deepspeed.utils`: log lines of some ranks, the package's logger, endless loaders."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

import torch.distributed

from ...comm.launch import detect

__all__ = ["RepeatingLoader", "log_dist", "logger"]

T = TypeVar("T")

logger = logging.getLogger("onebit.zero")


class RepeatingLoader(Generic[T]):
    """Restarts a loader at its end, so that its iterator never ends.

    Args:
        loader: Any iterable of batches.

    Raises:
        ValueError: The loader is empty; raised by next().
    """

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


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log a line, with the rank in front, on some ranks.

    The logger is `onebit.zero`, which is silent until the program configures logging.

    Args:
        message: The line.
        ranks: Ranks that log it. Default None, or with -1 among them: all.
        level: Level of `logging`. Default INFO.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if running else detect(os.environ).rank
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
