"""DeepSpeed's `deepspeed.ops.adam`."""

from ..deepspeed.ops import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
