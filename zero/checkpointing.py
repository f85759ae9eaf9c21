"""DeepSpeed's `deepspeed.checkpointing`."""

from .deepspeed.checkpointing import *  # noqa: F403
