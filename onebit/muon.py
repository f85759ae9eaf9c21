"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon): matrices move in orthogonal directions.

Dense, on gradients that are already averaged; `onebit_muon.py` is its one-bit form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .arithmetic.muon import adjustment, check_rule, check_use_muon, orthogonalise_
from .model_parallel import local
from .moments import MomentOptimizer
from .usage.contract import Group, TorchOptions, eps_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Muon(MomentOptimizer):
    """Dense Muon on one process's gradients, with AdamW for all that is not a hidden matrix.

        optimizer = onebit.Muon(onebit.muon_groups(model, head=model.head), lr=1e-3)

    In groups with use_muon:

    m ← β·m + (1-β)·g;  u = β·m + (1-β)·g (nesterov) or m;  O = `newton_schulz`(u);  p ← (1 - lr·wd)·p - lr·a·O

    with a = `adjustment`. Other groups take torch.optim.AdamW's step. Unlike torch.optim.Muon it takes every parameter
    of a model, matrices of more than two dimensions, and shards: a DTensor's ranks call `step` together, and exchange
    the bytes that `orthogonalise_` gives.

    A parameter without a gradient stays as it is. Moments are float32 for every dtype. Parameters in bfloat16 or
    float16 have float32 masters, on which the step is taken (`layout/masters.py`). State, bytes per element: 4 of a
    matrix, 8 of others, 4 more with masters.

    Args:
        params: Groups with `use_muon`, e.g. from `onebit.muon_groups`.
        lr: Learning rate. Default 1e-3.
        betas: Decay of AdamW's moments. Default (.9, .999).
        eps: Added to AdamW's denominator. Default 1e-8.
        weight_decay: Decoupled weight decay. Default 1e-2.
        momentum: Decay β of the momentum of matrices. Default .95.
        nesterov: Whether u looks ahead by one step. Default True.
        ns_steps: Iterations of `newton_schulz`. Default 5.
        adjust_lr: Factor a of the learning rate: "match_rms_adamw", with which one rate suits matrices and the rest, or
            "original", Jordan's. Default "match_rms_adamw".
        **torchs: torch.optim.AdamW's other arguments, as far as they have a meaning here.

    Raises:
        ValueError: An option is out of its range; a group has no use_muon, or has it and contains a vector.
        TypeError: An argument is unknown, or a parameter has an unsupported dtype.
    """

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        **torchs: Unpack[TorchOptions],
    ):
        adams = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr": adjust_lr}
        super().__init__(params, adams | own, **torchs)

    def _moments_of(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")

    def _check_group(self, where: str, group: Group) -> None:
        super()._check_group(where, group)
        check_use_muon(where, group)
        check_rule(group["momentum"], group["ns_steps"], group["adjust_lr"])

    def _update(
        self, group: Group, held: list[Tensor], grads: list[Tensor], steps: Sequence[int], *moments: list[Tensor]
    ) -> None:
        if group["weight_decay"] != 0.0:
            torch._foreach_mul_(held, 1.0 - float(group["lr"]) * group["weight_decay"])
        (self._move_matrices if group["use_muon"] else self._move_others)(group, held, grads, steps, *moments)

    def _move_matrices(
        self, group: Group, held: list[Tensor], grads: list[Tensor], steps: Sequence[int], ms: list[Tensor]
    ) -> None:
        beta = group["momentum"]
        torch._foreach_lerp_(ms, grads, 1.0 - beta)
        updates = [x.clone() for x in (grads if group["nesterov"] else ms)]
        if group["nesterov"]:
            torch._foreach_lerp_(updates, ms, beta)  # in place: torch 2.6 has no other for DTensors
        orthogonalise_([local(u) for u in updates], held, group["ns_steps"])
        factors = [-float(group["lr"]) * adjustment(p.shape, group["adjust_lr"]) for p in held]
        torch._foreach_mul_(updates, factors)
        torch._foreach_add_(held, updates)

    def _move_others(
        self,
        group: Group,
        held: list[Tensor],
        grads: list[Tensor],
        steps: Sequence[int],
        ms: list[Tensor],
        vs: list[Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(ms, grads, 1.0 - beta1)
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, grads, grads, 1.0 - beta2)
        divisors = torch._foreach_sqrt(vs)
        torch._foreach_div_(divisors, [(1.0 - beta2**t) ** 0.5 for t in steps])
        torch._foreach_add_(divisors, eps_of(group))
        moves = torch._foreach_div(ms, divisors)
        torch._foreach_mul_(moves, [-float(group["lr"]) / (1.0 - beta1**t) for t in steps])
        torch._foreach_add_(held, moves)
