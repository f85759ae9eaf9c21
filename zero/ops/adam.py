"""DeepSpeed's `deepspeed.ops.adam`: Adam and AdamW of torch, under DeepSpeed's names and parameters.

Both names are one function: where the state lives decides where the step is taken ("offload_optimizer"). Hand what it
gives to `initialize(optimizer=...)`; the engine averages gradients in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from ..config.entries.adam import DenseAdamParams
from ..config.optimizers import OptimizerChoice, build_optimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def FusedAdam(
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> torch.optim.Optimizer:
    """AdamW, or without adam_w_mode Adam with an L2 term. Raises ValueError where there is no such form."""
    given = DenseAdamParams(
        lr=lr,
        bias_correction=bias_correction,
        betas=(betas[0], betas[1]),
        eps=eps,
        adam_w_mode=adam_w_mode,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
    )
    return build_optimizer(OptimizerChoice("Adam", given), params)


def DeepSpeedCPUAdam(
    model_params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """As `FusedAdam`. fp32_optimizer_states: False has no form here."""
    if not fp32_optimizer_states:
        raise ValueError("fp32_optimizer_states=False is not here: moments are float32; leave it out")
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
