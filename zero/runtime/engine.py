"""DeepSpeed's `deepspeed.runtime.engine`."""

from ..deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
