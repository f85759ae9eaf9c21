"""Lion (Chen et al., arXiv 2302.06675): every element moves by the learning rate, in the direction of a sign.

Dense, on gradients that are already averaged. Its step needs one moment, where Adam's needs two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .model_parallel import local
from .moments import MomentOptimizer
from .usage.contract import Group, TorchOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Lion(MomentOptimizer):
    """Dense Lion on one process's gradients.

    p ← (1 - lr·wd)·p - lr·sign(β1·m + (1-β1)·g);  m ← β2·m + (1-β2)·g

    The update's root mean square is 1, where AdamW's is about .2: take a third to a tenth of AdamW's learning rate and
    three to ten times its weight decay, as the paper advises. Source: arXiv 2302.06675, Algorithm 2.

    A parameter without a gradient stays as it is. The moment is float32 for every dtype. Parameters in bfloat16 or
    float16 have float32 masters, on which the step is taken (`layout/masters.py`). State: 4 bytes per element, 8 for
    these. Sends nothing.

    Args:
        params: Parameters or groups.
        lr: Learning rate. Default 1e-4.
        betas: Decay of m in the update, and from step to step. Default (.9, .99).
        weight_decay: Decoupled weight decay, as in AdamW. Default 0.
        **torchs: torch.optim.AdamW's other arguments, as far as they have a meaning here.

    Raises:
        ValueError: An option is out of its range.
        TypeError: An argument is unknown, or a parameter has an unsupported dtype.
    """

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **torchs: Unpack[TorchOptions],
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **torchs)

    def _update(
        self, group: Group, held: list[Tensor], grads: list[Tensor], steps: Sequence[int], *moments: list[Tensor]
    ) -> None:
        (beta1, beta2), lr, (ms,) = group["betas"], float(group["lr"]), moments
        moves = torch._foreach_mul(ms, beta1)
        torch._foreach_add_(moves, grads, alpha=1.0 - beta1)
        torch._foreach_sign_([local(move) for move in moves])  # torch 2.6 has none for DTensors
        torch._foreach_mul_(ms, beta2)
        torch._foreach_add_(ms, grads, alpha=1.0 - beta2)
        if group["weight_decay"] != 0.0:
            torch._foreach_mul_(held, 1.0 - lr * group["weight_decay"])
        torch._foreach_add_(held, moves, alpha=-lr)
