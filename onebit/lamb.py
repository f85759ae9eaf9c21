"""LAMB (You et al., ICLR 2020, arXiv 1904.00962, Algorithm 2): Adam that moves each layer by a share of its norm.

The dense optimizer, and the trust ratio that 1-bit LAMB (`onebit_lamb.py`) shares with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .arithmetic.squares import norms
from .comm import Transport
from .layout.masters import NAME as MASTER
from .layout.masters import check_master, own_master, round_into_
from .model_parallel import ModelParallelGroup, local, model_parallel_group_of
from .moments import DenseOptimizer
from .usage.contract import (
    ADAM_STATE,
    Group,
    State,
    TorchOptions,
    check_adam_entry,
    check_arguments,
    check_group,
    check_is_number,
    check_parameters,
    check_saved_groups,
    eps_of,
    listed_parameters,
    load_checked,
)
from .usage.gradients import with_gradient

if TYPE_CHECKING:
    from typing_extensions import Unpack


def trust_ratio(weight_norm: Tensor, update_norm: Tensor, *, min_coeff: float, max_coeff: float) -> Tensor:
    """‖p‖/‖u‖ within [min_coeff, max_coeff]; 1 if either norm is zero. Tensors of one shape; stays on the device."""
    ratio = (weight_norm / update_norm).clamp(min_coeff, max_coeff)
    return torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


def check_trust_options(min_coeff: float, max_coeff: float) -> None:
    """Raise TypeError unless both are numbers, ValueError unless 0 ≤ min_coeff ≤ max_coeff."""
    check_is_number("the trust ratio", "min_coeff", min_coeff)
    check_is_number("the trust ratio", "max_coeff", max_coeff)
    if not 0.0 <= min_coeff <= max_coeff:
        raise ValueError(f"expected 0 <= min_coeff <= max_coeff, got {min_coeff} and {max_coeff}")


class Lamb(DenseOptimizer):
    """Dense LAMB on one process's gradients: the baseline of `OnebitLamb`, as torch.optim.AdamW is of `OnebitAdam`.

    Per parameter (a layer): u = m̂/(√v̂ + eps) + wd·p, p ← p - lr·r·u with r = `trust_ratio`(‖p‖, ‖u‖). A parameter
    without a gradient stays as it is. Moments are float32 for every dtype. Parameters in bfloat16 or float16 have
    float32 masters, on which the step is taken (`layout/masters.py`). No host synchronisation: the ratios stay on the
    device. Source: arXiv 1904.00962, Algorithm 2.

    State: 8 bytes per element held, 12 for bfloat16 and float16. Sends nothing, except 16 bytes per layer to each other
    shard of a sharded model.

    Args:
        params: Parameters or groups.
        lr: Learning rate. Default 1e-3.
        betas: Decay of m and v. Default (.9, .999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Weight decay, part of u. Default 0.
        max_coeff: Largest trust ratio. Default 10.
        min_coeff: Smallest trust ratio. Default .01.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
        model_parallel_group: As in `CommonOptions`; a layer's norms are then those of all its shards. Default None.
        **torchs: torch.optim.AdamW's other arguments, as far as they have a meaning here.

    Raises:
        ValueError: An option is out of its range.
        TypeError: An argument is unknown, or a parameter has an unsupported dtype.
    """

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        bias_correction: bool = True,
        model_parallel_group: ModelParallelGroup | Transport | None = None,
        **torchs: Unpack[TorchOptions],
    ):
        check_arguments(type(self).__name__, torchs)
        self.model_parallel_group = model_parallel_group_of(model_parallel_group)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"max_coeff": max_coeff, "min_coeff": min_coeff, "bias_correction": bias_correction}
        super().__init__(listed_parameters(type(self).__name__, params), defaults)

    def add_param_group(self, param_group: Group) -> None:
        """As torch's. Raises ValueError/TypeError as the constructor does, and then changes nothing."""
        super().add_param_group(param_group)
        g, group = len(self.param_groups) - 1, self.param_groups[-1]
        named = [(p, f"parameter {k} of group {g}") for k, p in enumerate(group["params"])]
        try:
            check_group(f"group {g}", group)
            check_trust_options(group["min_coeff"], group["max_coeff"])
            check_parameters(self.model_parallel_group.whole.rank, named)
            for p, name in named:
                self.model_parallel_group.check_holds(p, name)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> State:
        return super().__getstate__() | {"model_parallel_group": self.model_parallel_group}

    def load_state_dict(self, state_dict: State) -> None:
        """As torch's, but moments stay float32. States of torch.optim.Adam and AdamW load, too.

        So do those of `OnebitAdam` and `OnebitLamb` in their warm-up.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It does not fit. Nothing has changed.
        """
        saved = load_checked(self, state_dict, self._check_loadable)
        for p, entry in self._saved_entries(saved):
            names = (*ADAM_STATE, MASTER) if MASTER in entry else ADAM_STATE
            self.state[p] |= {name: entry[name].to(p.device, torch.float32, copy=True) for name in names}
        for group in self.param_groups:  # Adam's state has no trust ratios
            for name in ("max_coeff", "min_coeff", "bias_correction"):
                group.setdefault(name, self.defaults[name])

    def _check_loadable(self, state: State) -> None:
        where = "cannot load this optimizer state: "
        check_saved_groups(where, state["param_groups"], self.param_groups)
        for p, entry in self._saved_entries(state):
            check_adam_entry(where, "a parameter", entry, local(p).shape)
            check_master(where, "a parameter", entry, p)

    def _saved_entries(self, state: State) -> Iterator[tuple[Tensor, State]]:
        """(parameter, its saved state), of those that have one."""
        for group, there in zip(self.param_groups, state["param_groups"], strict=True):
            for p, key in zip(group["params"], there["params"], strict=True):
                if state["state"].get(key):
                    yield p, state["state"][key]

    def _step_group(self, group: Group) -> None:
        params = with_gradient("Lamb", group["params"])
        for p in params:
            if not self.state[p]:
                # Other code may have put it into its group without add_param_group.
                check_parameters(self.model_parallel_group.whole.rank, [(p, "a parameter")])
                self.state[p] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")} | {
                    name: torch.zeros_like(local(p), dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")
                }
        if not params:
            return
        updates, held = self._updates(params, group), [own_master(self.state[p], local(p)) for p in params]
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(updates, held, alpha=group["weight_decay"])
        bounds = {"min_coeff": group["min_coeff"], "max_coeff": group["max_coeff"]}
        table_L2 = torch.stack([norms(held), norms(updates)], 1)
        weight_norm, update_norm = self.model_parallel_group.norms(table_L2, params).unbind(1)
        ratios = trust_ratio(weight_norm, update_norm, **bounds) * group["lr"]
        torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_sub_(held, updates)
        round_into_([local(p) for p in params], held)

    def _updates(self, params: list[Tensor], group: Group) -> list[Tensor]:
        """Advance the moments; m̂/(√v̂ + eps) of each parameter, float32."""
        beta1, beta2 = group["betas"]
        grads = [local(p.grad).float() for p in params if p.grad is not None]
        ms, vs = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(ms, grads, 1.0 - beta1)
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, grads, grads, 1.0 - beta2)
        updates = torch._foreach_sqrt(vs)
        corrections = []
        for p in params:
            self.state[p]["step"] += 1
            t = int(self.state[p]["step"])
            corrections.append((1.0 - beta1**t, (1.0 - beta2**t) ** 0.5) if group["bias_correction"] else (1.0, 1.0))
        torch._foreach_div_(updates, [c2 for _, c2 in corrections])
        torch._foreach_add_(updates, eps_of(group))
        updates = torch._foreach_div(ms, updates)
        torch._foreach_div_(updates, [c1 for c1, _ in corrections])
        return list(updates)
