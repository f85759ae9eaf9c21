"""LaProp (Ziyin et al., arXiv 2002.04839): AdamW whose momentum averages moves, gradients over the D of their step.

The dense baseline of `OnebitAdam(momentum_of="moves")` and of `ZeroOneAdam`, whose momenta average moves as well: a
study that compares these with AdamW would count the gain of this order as theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .moments import MomentOptimizer
from .usage.contract import Group, TorchOptions, eps_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LaProp(MomentOptimizer):
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

    moments: ClassVar[tuple[str, ...]] = ("exp_avg_update", "exp_avg_sq")

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction}, **torchs)

    def _update(
        self, group: Group, held: list[Tensor], grads: list[Tensor], steps: Sequence[int], *moments: list[Tensor]
    ) -> None:
        (beta1, beta2), lr, (ms, vs) = group["betas"], float(group["lr"]), moments
        corrections = [(1.0 - beta1**t, (1.0 - beta2**t) ** 0.5) if group["bias_correction"] else (1.0, 1.0)
                       for t in steps]  # fmt: skip
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
