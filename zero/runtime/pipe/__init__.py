"""DeepSpeed's `deepspeed.runtime.pipe`."""

from . import module, topology

__all__ = ["module", "topology"]
