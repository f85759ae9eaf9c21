"""0/1 Adam: `onebit.ZeroOneAdam`, and `ShardedZeroOneAdam` across nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ....arithmetic.schedule import VarianceUpdates
from ....zero_one_adam import ZeroOneAdam
from ...sharded.zero_one_adam import ShardedZeroOneAdam
from ..schema import INT, STEPS, Inert, key
from .base import ONE_BIT_INERT, AdamParams, BuildOptions, Footprint, OptimizerEntry, ShardedForm

if TYPE_CHECKING:
    from ...sharded.optimizer import ShardedOnebitOptimizer, ShardedOptions


@dataclass(frozen=True)
class ZeroOneAdamParams(AdamParams):
    """See `onebit.ZeroOneAdam`; absent keys take its defaults, not DeepSpeed's, whose variance freezes at step 100,000.

    var_freeze_step: "auto": the variance is refreshed ever more rarely, without an end. With sharding across nodes it
    shortens the warm-up as freeze_step does, and a numeric local_step_scaler counts from it.
    """

    inert: ClassVar[Mapping[str, Inert]] = ONE_BIT_INERT

    var_freeze_step: int | str = key("auto", STEPS, fill="var_freeze_step", least=0)
    var_update_scaler: int = key(16, INT, least=1)
    local_step_scaler: int | str = key("auto", STEPS, least=1)
    local_step_clipper: int | str = key(1, STEPS, least=1)


def _build(p: ZeroOneAdamParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return ZeroOneAdam(
        params,
        **p.options,
        var_freeze_step=None if isinstance(p.var_freeze_step, str) else p.var_freeze_step,
        var_update_scaler=p.var_update_scaler,
        local_step_scaler=p.local_step_scaler,
        local_step_clipper=p.local_step_clipper,
        variance_codec=given.gradient_codec,
        bias_correction=p.bias_correction,
        variance_floor=given.variance_floor,
        **given.common,
    )


def _build_sharded(p: ZeroOneAdamParams, params: object, options: ShardedOptions) -> ShardedOnebitOptimizer:
    return ShardedZeroOneAdam(
        params,
        **p.options,
        local_step_scaler=p.local_step_scaler,
        local_step_clipper=p.local_step_clipper,
        local_step_start=p.var_freeze_step if isinstance(p.var_freeze_step, int) else 0,
        **options,
    )


ENTRY = OptimizerEntry(
    "ZeroOneAdam",
    ZeroOneAdamParams,
    _build,
    is_one_bit=True,
    sharded=ShardedForm(
        _build_sharded,
        warmup="var_freeze_step",
        without_effect=("var_update_scaler",),
        counts_from_warmup=lambda p: p.local_step_scaler != "auto",
    ),
    footprint=Footprint(moments=lambda frame: 8.0, sent=lambda frame: frame, dense_steps=VarianceUpdates().count),
    flag="zero-one-adam",
    flag_keys={"local_step_clipper": "most steps per exchange, or auto"},
)
