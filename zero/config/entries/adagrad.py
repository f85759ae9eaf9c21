"""Adagrad of torch, on gradients that are already averaged. It has half of AdamW's state, so the plan has no row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.optim.optimizer import ParamsT

from ..schema import FLOAT, key
from .base import BuildOptions, OptimizerEntry, OptimizerParams


@dataclass(frozen=True)
class AdagradParams(OptimizerParams):
    """See torch.optim.Adagrad, whose defaults these are."""

    lr: float = key(1e-2, FLOAT, fill="lr", asks=True, least=0)
    lr_decay: float = key(0.0, FLOAT, least=0)
    initial_accumulator_value: float = key(0.0, FLOAT, least=0)
    eps: float = key(1e-10, FLOAT, fill="eps", least=0)


def _build(p: AdagradParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        cast(ParamsT, params),
        lr=p.lr,
        lr_decay=p.lr_decay,
        weight_decay=p.weight_decay,
        initial_accumulator_value=p.initial_accumulator_value,
        eps=p.eps,
    )


ENTRY = OptimizerEntry("Adagrad", AdagradParams, _build)
