"""DeepSpeed's `deepspeed.runtime.pipe`."""

from . import topology

__all__ = ["topology"]
