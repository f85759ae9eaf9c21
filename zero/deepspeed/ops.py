"""DeepSpeed's `deepspeed.ops`: Adam and AdamW of torch, `onebit.HostAdam` and `onebit.Lamb`, under DeepSpeed's names.

Hand what they give to `initialize(optimizer=...)`; the engine averages gradients in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from ...host_adam import HostAdam
from ..config.entries.adam import DenseAdamParams
from ..config.entries.lamb import LambParams
from ..config.optimizers import OptimizerChoice, build_optimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "FusedLamb"]


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
    """`onebit.HostAdam` if all parameters are in host memory; otherwise, or with amsgrad, as `FusedAdam`.

    fp32_optimizer_states: False: m in bfloat16 and v in 8 bits. DeepSpeed's states then have the type of their
    parameters; there is no float16 form here, whose v would vanish below gradients of 2e-4.
    """
    groups = torch.optim.Optimizer(model_params, {}).param_groups
    params = [p for group in groups for p in group["params"]]
    if amsgrad or not all(p.device.type == "cpu" for p in params):
        if not fp32_optimizer_states:
            raise ValueError("fp32_optimizer_states=False needs parameters in host memory and no amsgrad; leave it out")
        return FusedAdam(groups, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
    return HostAdam(
        groups,
        lr=lr,
        betas=(betas[0], betas[1]),
        eps=eps,
        weight_decay=weight_decay,
        decoupled_weight_decay=adamw_mode,
        bias_correction=bias_correction,
        moment_dtype=torch.float32 if fp32_optimizer_states else torch.bfloat16,
        variance_dtype=torch.float32 if fp32_optimizer_states else torch.uint8,
    )


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
