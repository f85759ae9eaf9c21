"""DeepSpeed's `deepspeed.ops.lion`."""

from ..deepspeed.ops import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
