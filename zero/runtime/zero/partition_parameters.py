"""DeepSpeed's `deepspeed.runtime.zero.partition_parameters`."""

from ...deepspeed.parameters import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
