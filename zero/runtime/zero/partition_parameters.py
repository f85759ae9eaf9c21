"""DeepSpeed's `deepspeed.runtime.zero.partition_parameters`."""

from ...deepspeed.parameters import GatheredParameters, Init, ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]
