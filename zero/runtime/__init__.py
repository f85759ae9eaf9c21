"""DeepSpeed's `deepspeed.runtime`, as far as scripts need it: the engine, optimizers' names, seeds, schedules."""

from . import config, engine, lr_schedules, pipe, utils, zero

__all__ = ["config", "engine", "lr_schedules", "pipe", "utils", "zero"]
