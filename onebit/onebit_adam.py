"""1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888): AdamW for a short warm-up, then one-bit momentum.

What it shares with 1-bit LAMB is in `frozen_variance.py`, what the family shares in `base.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .base import CommonOptions
from .comm import Codec
from .frozen_variance import FrozenVarianceOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OnebitAdam(FrozenVarianceOptimizer):
    """AdamW whose data-parallel traffic is about two bits per parameter and step, after a short warm-up.

    Give it the plain model's parameters (not wrapped in DDP) and each rank's own loss; it averages over ranks itself.
    All ranks construct it with the same arguments and parameters, and call step() together; rank 0's initial values are
    sent to all. Between warm-up and the end of the run, per step and bucket:

    1. c_i = β1·m/D + (1-β1)·g_i/D + e_i on each rank, with D = √max(v̂, floor·blockmean) + eps, as the last dense step
       left it (a g_i far beyond D counts in D: the divisor is √(D² + w·g_i²)); the signs and scales of c_i go to the
       chunks' owners; e_i keeps the rest.
    2. The owner averages, adds its own error, compresses again and sends the result, the new m/D, to all.
    3. p ← p - lr·(m̂/D + wd·p).

    The paper compresses m. D is the same on all ranks and fixed, so compressing m/D is the same algorithm in other
    coordinates: those in which all elements of a block are of a size. Otherwise an element with a small D takes its
    block's scale and moves by s/D; see README, "Differences".

    lr, betas, eps, weight_decay: as in torch.optim.AdamW; read anew from param_groups in every step (eps and betas[1]
    act in dense steps). bias_correction: False leaves out both corrections.
    freeze_step: warm-up steps, after which the variance never changes, as in the paper; or "auto": 100 steps, and a
    refresh of the variance now and then, in 16 steps of every doubling of the step count.
    warmup_codec: what gradients travel in, in warm-up and refreshes (default: `Int8Codec`; `IdentityCodec`: in full).
    variance_floor: see `floor_of_blocks`. The others: see `CommonOptions`.

    State on each rank, bytes per parameter: 8 in warm-up; then D 4, worker error 4 (bf16: 2), server error 4/W (2/W),
    m/D 0.13. Sends per rank 2·(W-1)/W·(8 + 16/block) bits per parameter in a dense step, 2·(W-1)/W·(1 + 16/block) in
    the others.

    Raises ValueError/TypeError at construction: bad options, unsupported dtypes, or parameters that differ between
    ranks (named).
    """

    kind = "1-bit Adam"

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int | str = "auto",
        warmup_codec: Codec | None = None,
        bias_correction: bool = True,
        variance_floor: float = 0.01,
        **common: Unpack[CommonOptions],
    ):
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            freeze_step=freeze_step,
            warmup_codec=warmup_codec,
            bias_correction=bias_correction,
            variance_floor=variance_floor,
            **common,
        )
