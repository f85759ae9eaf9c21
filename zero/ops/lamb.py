"""DeepSpeed's `deepspeed.ops.lamb`: `onebit.Lamb` under DeepSpeed's name and parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from ..config.entries.lamb import LambParams
from ..config.optimizers import OptimizerChoice, build_optimizer

__all__ = ["FusedLamb"]


def FusedLamb(
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
) -> torch.optim.Optimizer:
    """LAMB of whole parameters. For a sharded model write "Lamb" into the configuration, which knows the others."""
    given = LambParams(
        lr=lr,
        bias_correction=bias_correction,
        betas=(betas[0], betas[1]),
        eps=eps,
        weight_decay=weight_decay,
        max_coeff=max_coeff,
        min_coeff=min_coeff,
    )
    return build_optimizer(OptimizerChoice("Lamb", given), params)
