"""DeepSpeed's `deepspeed.moe.utils`."""

from ..deepspeed.moe import *  # noqa: F403
