"""1-bit LAMB: `onebit.OnebitLamb`, and `ShardedOnebitLamb` across nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ....arithmetic.schedule import long_warmup
from ....onebit_lamb import OnebitLamb
from ...sharded.lamb import ShardedOnebitLamb
from ..schema import FLOAT, STEPS, Inert, key
from .base import ONE_BIT_INERT, BuildOptions, Footprint, OptimizerEntry, ShardedForm
from .lamb import LambParams

if TYPE_CHECKING:
    from ...sharded.optimizer import ShardedOnebitOptimizer, ShardedOptions


@dataclass(frozen=True)
class OnebitLambParams(LambParams):
    """See `onebit.OnebitLamb`; freeze_step as in `OnebitAdamParams`."""

    inert: ClassVar[Mapping[str, Inert]] = ONE_BIT_INERT

    freeze_step: int | str = key("auto", STEPS, fill="freeze_step", least=1)
    coeff_beta: float = key(0.9, FLOAT, least=0, below=1)
    factor_max: float = key(4.0, FLOAT, least=1)
    factor_min: float = key(0.5, FLOAT, above=0, most=1)
    factor_threshold: float = key(0.1, FLOAT, least=0)


def _build(p: OnebitLambParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return OnebitLamb(
        params,
        **p.options,
        max_coeff=p.max_coeff,
        min_coeff=p.min_coeff,
        coeff_beta=p.coeff_beta,
        factor_max=p.factor_max,
        factor_min=p.factor_min,
        factor_threshold=p.factor_threshold,
        freeze_step=p.freeze_step,
        warmup_codec=given.gradient_codec,
        bias_correction=p.bias_correction,
        variance_floor=given.variance_floor,
        **given.common,
    )


def _build_sharded(p: OnebitLambParams, params: object, options: ShardedOptions) -> ShardedOnebitOptimizer:
    return ShardedOnebitLamb(
        params, **p.options, max_coeff=p.max_coeff, min_coeff=p.min_coeff, coeff_beta=p.coeff_beta, **options
    )


ENTRY = OptimizerEntry(
    "OneBitLamb",
    OnebitLambParams,
    _build,
    is_one_bit=True,
    sharded=ShardedForm(
        _build_sharded, warmup="freeze_step", without_effect=("factor_max", "factor_min", "factor_threshold")
    ),
    footprint=Footprint(moments=lambda frame: 4.0 + frame, sent=lambda frame: frame, dense_steps=long_warmup().count),
    flag="onebit-lamb",
    flag_keys={"freeze_step": "warm-up steps (sharded: at most 64), or auto"},
)
