"""Lion on averaged gradients: `onebit.Lion`. It has half of AdamW's state, so the plan has no row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....lion import Lion
from ..schema import PAIR, key
from .base import BuildOptions, OptimizerEntry, OptimizerParams


@dataclass(frozen=True)
class LionParams(OptimizerParams):
    """See `onebit.Lion`. Defaults are DeepSpeed's; the paper's are an lr of 1e-4 and betas of .9 and .99."""

    betas: tuple[float, float] = key((0.9, 0.999), PAIR, fill="betas", least=0, below=1)


def _build(p: LionParams, params: object, given: BuildOptions) -> torch.optim.Optimizer:
    return Lion(params, lr=p.lr, betas=p.betas, weight_decay=p.weight_decay)


ENTRY = OptimizerEntry("Lion", LionParams, _build)
