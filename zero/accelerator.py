"""DeepSpeed's `deepspeed.accelerator`."""

from .deepspeed.accelerator import *  # noqa: F403
