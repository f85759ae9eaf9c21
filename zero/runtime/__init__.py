"""DeepSpeed's `deepspeed.runtime`, as far as scripts need it: optimizers' names, seeds, schedules, topologies."""

from . import config, lr_schedules, pipe, utils, zero

__all__ = ["config", "lr_schedules", "pipe", "utils", "zero"]
