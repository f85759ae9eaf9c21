"""DeepSpeed's `deepspeed.runtime.zero`."""

from ...deepspeed.parameters import GatheredParameters, Init, ZeroParamStatus, register_external_parameter
from . import partition_parameters, utils

__all__ = [
    "GatheredParameters", "Init", "ZeroParamStatus", "partition_parameters", "register_external_parameter", "utils",
]  # fmt: skip
