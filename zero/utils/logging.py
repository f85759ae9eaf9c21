"""DeepSpeed's `deepspeed.utils.logging`: the package's logger, and lines of some ranks alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

import torch.distributed

from ...comm.launch import detect

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("onebit.zero")


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log a line, with the rank in front, on these ranks; None, or -1 among them: on all.

    The logger is `onebit.zero`, silent as every library's until the program configures logging.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if running else detect(os.environ).rank
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
