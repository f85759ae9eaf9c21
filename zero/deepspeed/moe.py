"""DeepSpeed's `deepspeed.moe`: parameter groups of a model without experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["split_params_into_different_moe_groups_for_optimizer"]

_Group = dict[str, Any]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: _Group | tuple[_Group, ...] | list[_Group], max_group_size: int | None = None
) -> list[_Group]:
    """Return the groups unchanged, in a list: there are no experts here.

    Args:
        param_groups: One group or several.
        max_group_size: Without effect: it is for experts' groups. Default None.

    Raises:
        ValueError: A parameter is marked as an expert's.
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    for group in groups:
        group["params"] = list(_without_experts(group["params"]))
    return groups


def _without_experts(params: object) -> Iterator[Tensor]:
    for p in params if not isinstance(params, Tensor) else [params]:  # type: ignore[attr-defined]
        if not getattr(p, "allreduce", True) or hasattr(p, "group_name"):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is marked as an expert's, and there are no experts: its "
                "gradient would be averaged over ranks that hold others; train it with DeepSpeed"
            )
        yield p
