"""DeepSpeed's `deepspeed.ops.adagrad`."""

from ..deepspeed.ops import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
