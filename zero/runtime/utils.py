"""DeepSpeed's `deepspeed.runtime.utils`."""

from ..deepspeed.runtime import see_memory_usage, set_random_seed

__all__ = ["see_memory_usage", "set_random_seed"]
