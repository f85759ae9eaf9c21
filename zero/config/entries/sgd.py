"""SGD of torch, on gradients that are already averaged. It has at most the state of AdamW, so the plan has no row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.optim.optimizer import ParamsT

from ..schema import BOOL, FLOAT, key
from .base import BuildOptions, OptimizerEntry, OptimizerParams


@dataclass(frozen=True)
class SgdParams(OptimizerParams):
    """See torch.optim.SGD."""

    momentum: float = key(0.0, FLOAT, least=0)
    dampening: float = key(0.0, FLOAT, least=0, most=1)
    nesterov: bool = key(False, BOOL)

    def check(self, name: str) -> None:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov needs momentum above 0 and no dampening, got {self.momentum:g} and {self.dampening:g}"
            )


def _build(p: SgdParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        cast(ParamsT, params),
        lr=p.lr,
        momentum=p.momentum,
        dampening=p.dampening,
        weight_decay=p.weight_decay,
        nesterov=p.nesterov,
    )


ENTRY = OptimizerEntry("SGD", SgdParams, _build)
