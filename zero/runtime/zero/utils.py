"""DeepSpeed's `deepspeed.runtime.zero.utils`."""

from ...deepspeed.parameters import is_zero_param

__all__ = ["is_zero_param"]
