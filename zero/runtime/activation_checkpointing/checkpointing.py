"""DeepSpeed's `deepspeed.runtime.activation_checkpointing.checkpointing`."""

from ...deepspeed.checkpointing import *  # noqa: F403
