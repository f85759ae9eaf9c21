"""DeepSpeed's `deepspeed.utils.logging`."""

from ..deepspeed.utils import log_dist, logger

__all__ = ["log_dist", "logger"]
