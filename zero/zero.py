"""DeepSpeed's `deepspeed.zero`: a model built under `Init`, parameters whole under `GatheredParameters`."""

from __future__ import annotations

from .deepspeed.parameters import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
