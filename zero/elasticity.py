"""DeepSpeed's `deepspeed.elasticity`."""

from .deepspeed.elasticity import *  # noqa: F403
