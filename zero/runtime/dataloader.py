"""DeepSpeed's `deepspeed.runtime.dataloader`."""

from ..deepspeed.utils import RepeatingLoader

__all__ = ["RepeatingLoader"]
