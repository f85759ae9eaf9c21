"""DeepSpeed's `deepspeed.utils`: see `../deepspeed/utils.py` and `../deepspeed/parameters.py`."""

from ..deepspeed.parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    set_z3_leaf_modules,
)
from ..deepspeed.utils import RepeatingLoader, log_dist, logger

__all__ = [
    "RepeatingLoader", "log_dist", "logger", "safe_get_full_fp32_param", "safe_get_full_grad",
    "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad",
    "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state", "set_z3_leaf_modules",
]  # fmt: skip
