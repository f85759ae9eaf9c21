"""1-bit Adam: `onebit.OnebitAdam`, and `ShardedOnebitAdam` across nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ....arithmetic.schedule import DenseSteps
from ....onebit_adam import MOMENTUM_OF, OnebitAdam
from ...sharded.adam import ShardedOnebitAdam
from ..schema import STEPS, TEXT, Inert, key
from .base import ONE_BIT_INERT, AdamParams, BuildOptions, Footprint, OptimizerEntry, ShardedForm

if TYPE_CHECKING:
    from ...sharded.optimizer import ShardedOnebitOptimizer, ShardedOptions


@dataclass(frozen=True)
class OnebitAdamParams(AdamParams):
    """freeze_step: warm-up steps, passed on unchanged; "auto", or absent: the rule of `onebit.OnebitAdam`.

    With sharding across nodes it can only shorten the 64 steps of warm-up: nothing freezes. momentum_of: see
    `onebit.OnebitAdam`.
    """

    inert: ClassVar[Mapping[str, Inert]] = ONE_BIT_INERT

    freeze_step: int | str = key("auto", STEPS, fill="freeze_step", least=1)
    momentum_of: str = key("gradients", TEXT, choices=MOMENTUM_OF)


def _build(p: OnebitAdamParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return OnebitAdam(
        params,
        **p.options,
        freeze_step=p.freeze_step,
        warmup_codec=given.gradient_codec,
        bias_correction=p.bias_correction,
        variance_floor=given.variance_floor,
        momentum_of=p.momentum_of,
        **given.common,
    )


def _build_sharded(p: OnebitAdamParams, params: object, options: ShardedOptions) -> ShardedOnebitOptimizer:
    return ShardedOnebitAdam(params, **p.options, **options)


ENTRY = OptimizerEntry(
    "OneBitAdam",
    OnebitAdamParams,
    _build,
    is_one_bit=True,
    sharded=ShardedForm(_build_sharded, warmup="freeze_step", without_effect=("momentum_of",)),
    footprint=Footprint(
        moments=lambda frame: 4.0 + frame, sent=lambda frame: frame, dense_steps=DenseSteps().count, gradients="log4"
    ),
    flag="onebit-adam",
    flag_keys={
        "freeze_step": "warm-up steps (sharded: at most 64), or auto",
        "momentum_of": "what the warm-up's momentum averages, gradients or moves (as LaProp)",
    },
)
