"""DeepSpeed's `deepspeed.ops`: torch's Adagrad, Adam and AdamW, `onebit.HostAdam`, `Lamb` and `Lion`, by its names.

Pass the optimizer to `initialize(optimizer=...)`; the engine averages gradients before each of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.optimizer import ParamsT

from ...host_adam import HostAdam
from ..config.entries.adagrad import AdagradParams
from ..config.entries.adam import DenseAdamParams
from ..config.entries.lamb import LambParams
from ..config.entries.lion import LionParams
from ..config.optimizers import OptimizerChoice, build_optimizer

__all__ = ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion"]


def FusedAdam(
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """AdamW of torch, or Adam without adam_w_mode, under DeepSpeed's name. Its caller averages gradients.

    Args:
        params: Parameters or groups.
        lr: Learning rate. Default 1e-3.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
        betas: Decay of m and v. Default (.9, .999).
        eps: Added to the denominator. Default 1e-8.
        adam_w_mode: Whether weight decay is decoupled, instead of an L2 term. Default True.
        weight_decay: Weight decay. Default 0.
        amsgrad: Whether to use the running maximum of v, as in torch. Default False.
        set_grad_none: Without effect: zero_grad() drops gradients, as in torch. Default True.

    Raises:
        ValueError: An option is out of its range, or bias_correction is off with amsgrad or an L2 term.
    """
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
    """`onebit.HostAdam` if all parameters are in host memory; if not, or with amsgrad, as `FusedAdam`.

    Args:
        model_params: Parameters or groups.
        lr: Learning rate. Default 1e-3.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
        betas: Decay of m and v. Default (.9, .999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Weight decay. Default 0.
        amsgrad: As in `FusedAdam`. Default False.
        adamw_mode: Whether weight decay is decoupled, instead of an L2 term. Default True.
        fp32_optimizer_states: False: m in bfloat16 and v in 8 bits. DeepSpeed's states then have the type of their
            parameters; there is no float16 form here, because v would vanish for gradients below 2e-4. Default True.

    Raises:
        ValueError: An option is not available or out of its range.
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
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
) -> torch.optim.Optimizer:
    """LAMB for whole parameters. For a sharded model write "Lamb" into the configuration, which adds up layers' norms.

    Args:
        params: Parameters or groups.
        lr: Learning rate. Default 1e-3.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
        betas: Decay of m and v. Default (.9, .999).
        eps: Added to the denominator. Default 1e-8.
        eps_inside_sqrt: Must be False.
        weight_decay: Weight decay. Default 0.
        max_grad_norm: Must be 0: "gradient_clipping" of the configuration clips.
        max_coeff: Largest trust ratio. Default 10.
        min_coeff: Smallest trust ratio. Default .01.
        amsgrad: Must be False, as in DeepSpeed.

    Raises:
        ValueError: An option is not available or out of its range.
    """
    asked = {"eps_inside_sqrt": eps_inside_sqrt, "max_grad_norm": max_grad_norm, "amsgrad": amsgrad}
    if wanted := [name for name, value in asked.items() if value]:
        advice = ' and write "gradient_clipping" into the configuration' if wanted[0] == "max_grad_norm" else ""
        raise ValueError(f"{wanted[0]}={asked[wanted[0]]} is not supported: leave it out{advice}")
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


def FusedLion(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """`onebit.Lion`, under DeepSpeed's name. Its caller averages gradients.

    Args:
        params: Parameters or groups.
        lr: Learning rate. Default 1e-3.
        betas: Decay of m in the update, and from step to step. Default (.9, .999).
        weight_decay: Decoupled weight decay. Default 0.
        set_grad_none: Without effect: zero_grad() drops gradients, as in torch. Default True.

    Raises:
        ValueError: An option is out of its range.
    """
    given = LionParams(lr=lr, betas=(betas[0], betas[1]), weight_decay=weight_decay)
    return build_optimizer(OptimizerChoice("Lion", given), params)


def DeepSpeedCPULion(
    model_params: ParamsT,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """`onebit.Lion`, wherever the parameters are.

    Args:
        model_params: Parameters or groups.
        lr: Learning rate. Default 1e-3.
        betas: Decay of m in the update, and from step to step. Default (.9, .999).
        weight_decay: Decoupled weight decay. Default 0.
        fp32_optimizer_states: Must be True: the moment is float32. Default True.

    Raises:
        ValueError: An option is not available or out of its range.
    """
    if not fp32_optimizer_states:
        raise ValueError("fp32_optimizer_states=False is not supported: Lion's moment is float32; leave it out")
    return FusedLion(model_params, lr, betas, weight_decay)


def DeepSpeedCPUAdagrad(
    model_params: ParamsT,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Adagrad of torch, wherever the parameters are.

    Args:
        model_params: Parameters or groups.
        lr: Learning rate. Default 1e-2.
        eps: Added to the denominator. Default 1e-10.
        weight_decay: Weight decay, as an L2 term. Default 0.
        amsgrad: Without effect, as in DeepSpeed.
        fp32_optimizer_states: Must be True: the sum of squares is float32. Default True.

    Raises:
        ValueError: An option is not available or out of its range.
    """
    if not fp32_optimizer_states:
        raise ValueError("fp32_optimizer_states=False is not supported: Adagrad's sum is float32; leave it out")
    given = AdagradParams(lr=lr, eps=eps, weight_decay=weight_decay)
    return build_optimizer(OptimizerChoice("Adagrad", given), model_params)
