"""DeepSpeed's `deepspeed.compression.compress`: its two functions, with its names of arguments."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from . import composer

M = TypeVar("M", bound=nn.Module)

__all__ = ["init_compression", "redundancy_clean"]


def init_compression(
    model: M, deepspeed_config: object, teacher_model: nn.Module | None = None, mpu: object = None
) -> M:
    """`onebit.zero.init_compression`. mpu: must be None: layers that are divided over ranks cannot be compressed."""
    _refuse(mpu)
    return composer.init_compression(model, deepspeed_config, teacher_model)


def redundancy_clean(model: M, deepspeed_config: object, mpu: object = None) -> M:
    """`onebit.zero.redundancy_clean`."""
    _refuse(mpu)
    return composer.redundancy_clean(model, deepspeed_config)


def _refuse(mpu: object) -> None:
    if mpu is not None:
        raise ValueError("mpu: layers that tensor-parallel ranks divide cannot be compressed; compress whole models")
