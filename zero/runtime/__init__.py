"""DeepSpeed's `deepspeed.runtime`, as far as scripts reach into it: names of optimizers, seeds, schedules."""

from . import config, lr_schedules, utils

__all__ = ["config", "lr_schedules", "utils"]
