"""DeepSpeed's `deepspeed.ops.lamb`."""

from ..deepspeed.ops import FusedLamb

__all__ = ["FusedLamb"]
