"""DeepSpeed's `deepspeed.runtime`, as far as scripts need it: the engine, optimizers' names, seeds, schedules."""

from . import activation_checkpointing, config, dataloader, engine, lr_schedules, pipe, utils, zero

__all__ = [
    "activation_checkpointing", "config", "dataloader", "engine", "lr_schedules", "pipe", "utils", "zero",
]  # fmt: skip
