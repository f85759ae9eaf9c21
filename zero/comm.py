"""DeepSpeed's `deepspeed.comm`."""

from .deepspeed.comm import *  # noqa: F403
