"""LaProp (Ziyin et al., arXiv 2002.04839): AdamW whose momentum averages moves, gradients over the D of their step.

The dense baseline of `OnebitAdam(momentum_of="moves")` and of `ZeroOneAdam`, whose momenta average moves as well: a
study that compares these with AdamW would count the gain of this order as theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layout.masters import NAME as MASTER
from .layout.masters import check_master, is_low, own_master, round_into_
from .usage.contract import (
    Group,
    State,
    TorchOptions,
    check_arguments,
    check_group,
    check_parameters,
    check_saved_groups,
    eps_of,
    listed_parameters,
    load_checked,
    loss_of,
)
from .usage.frozen import with_gradient
from .usage.graphs import outside_graphs

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOMENTS = ("exp_avg_update", "exp_avg_sq")


class LaProp(torch.optim.Optimizer):
    """Dense LaProp on one process's gradients: torch.optim.AdamW, except that it divides before it averages.

    v ← β2·v + (1-β2)·g²;  m ← β1·m + (1-β1)·g/(√v̂ + eps), v̂ = v/(1-β2^t);  p ← (1 - lr·wd)·p - lr·m/(1-β1^t)

    AdamW divides its average of old gradients by the current D; here each gradient is divided by the D of the step in
    which it came. With betas[1] = 15/16 a new square weighs at least 1/16 in v̂, with .999 at least 1/1000. The paper's
    code averages lr·g/D, which is the same at a constant learning rate. Source: arXiv 2002.04839, Algorithm 1.

    A parameter without a gradient stays as it is. Moments are float32 for every dtype. Parameters in bfloat16 or
    float16 have float32 masters, on which the step is taken (`layout/masters.py`). State: 8 bytes per element, 12 for
    these. Sends nothing.

    Args:
        params: Parameters or groups.
        lr: Learning rate. Default 1e-3.
        betas: Decay of m and v. Default (.9, .999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled weight decay, as in AdamW. Default 1e-2.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
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
        weight_decay: float = 1e-2,
        *,
        bias_correction: bool = True,
        **torchs: Unpack[TorchOptions],
    ):
        check_arguments(type(self).__name__, torchs)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            listed_parameters(type(self).__name__, params), defaults | {"bias_correction": bias_correction}
        )

    def add_param_group(self, param_group: Group) -> None:
        """As torch's. Raises ValueError/TypeError as the constructor does, and then changes nothing."""
        super().add_param_group(param_group)
        g, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:
            check_group(f"group {g}", group)
            check_parameters(0, [(p, f"parameter {k} of group {g}") for k, p in enumerate(group["params"])])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: State) -> None:
        """As torch's, but moments stay float32.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It does not fit, or is not LaProp's. Nothing has changed.
        """
        saved = load_checked(self, state_dict, self._check_loadable)
        pairs = zip(self.param_groups, saved["param_groups"], strict=True)
        for group, there in pairs:
            for p, key in zip(group["params"], there["params"], strict=True):
                if entry := saved["state"].get(key):
                    names = (*_MOMENTS, MASTER) if MASTER in entry else _MOMENTS
                    self.state[p] |= {name: entry[name].to(p.device, torch.float32, copy=True) for name in names}

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of each parameter that has a gradient.

        Args:
            closure: Evaluates the model again and returns the loss. Default None.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: Group) -> None:
        params = with_gradient("LaProp", group["params"])
        for p in params:
            if not self.state[p]:
                check_parameters(0, [(p, "a parameter")])  # it may have come into its group without add_param_group
                self.state[p] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
                self.state[p] |= {name: torch.zeros_like(p, dtype=torch.float32) for name in _MOMENTS}
            self.state[p]["step"] += 1
        if not params:
            return
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        steps = [int(self.state[p]["step"]) for p in params] if group["bias_correction"] else []
        corrections = [(1.0 - beta1**t, (1.0 - beta2**t) ** 0.5) for t in steps] or [(1.0, 1.0)] * len(params)
        held = [own_master(self.state[p], p.detach()) if is_low(p) else p for p in params]
        ms, vs = ([self.state[p][name] for p in params] for name in _MOMENTS)
        grads = [p.grad.float() for p in params if p.grad is not None]
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, grads, grads, 1.0 - beta2)
        divisors = torch._foreach_sqrt(vs)
        torch._foreach_div_(divisors, [c2 for _, c2 in corrections])
        torch._foreach_add_(divisors, eps_of(group))
        torch._foreach_mul_(ms, beta1)
        torch._foreach_addcdiv_(ms, grads, divisors, 1.0 - beta1)
        moves = torch._foreach_mul(ms, [lr / c1 for c1, _ in corrections])
        if group["weight_decay"] != 0.0:
            torch._foreach_mul_(held, 1.0 - lr * group["weight_decay"])
        torch._foreach_sub_(held, moves)
        round_into_(params, held)

    def _check_loadable(self, state: State) -> None:
        where = "cannot load this optimizer state: "
        check_saved_groups(where, state["param_groups"], self.param_groups)
        for group, there in zip(self.param_groups, state["param_groups"], strict=True):
            for p, key in zip(group["params"], there["params"], strict=True):
                entry = state["state"].get(key, {})
                check_master(where, f"parameter {key}", entry, p)
                if entry and (missing := [name for name in ("step", *_MOMENTS) if name not in entry]):
                    raise ValueError(
                        f"{where}parameter {key} has no {missing[0]} there, so it is not LaProp's; load a state of "
                        "LaProp, or none"
                    )
                if wrong := [name for name in _MOMENTS if entry and entry[name].shape != p.shape]:
                    shapes = f"shape {tuple(entry[wrong[0]].shape)} there and {tuple(p.shape)} here"
                    raise ValueError(f"{where}{wrong[0]} of parameter {key} has {shapes}; load that of this model")
