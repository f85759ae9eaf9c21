"""The arithmetic of the sharded one-bit optimizers on flat tensors: what ranks send, what chunks' owners make of it.

Free functions, no traffic, no agreement: see `exchange.py` and `optimizer.py`. The algorithm is this project's own (no
paper has it); it is written out in `ShardedOnebitAdam`.

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk, n elements of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm import Codec


def advance_momentum_(
    x_WN: Tensor,
    momentum_WN: Tensor,
    codec: Codec,
    block: int,
    frames_WB: Tensor,
    counts_WJ: Tensor,
    seen_WJ: Tensor | None,
    beta1: float,
    share: float = 1.0,
) -> None:
    """c = momentum + (1-β1)·share·g; frames ← those of q = C(c); momentum ← c - (1-β1)·q, rounded once to its own type.

    x: float32, the gradients g in, garbage out. momentum: float32 or bfloat16, in place. So c_k = c_{k-1} +
    (1-β1)·(g_k - q_{k-1}): momentum and error are one. seen: blocks where it is False keep their momentum; their counts
    are 0, so that their frames say zero. None: all are seen. In the padding of a block momentum holds values without
    meaning.
    """
    x_WN.mul_((1.0 - beta1) * share)
    codec.encode(x_WN, momentum_WN, frames_WB, counts_WJ)  # x ← c - q
    codec.decode(frames_WB, x_WN, weight=beta1, keep=1.0)  # x ← c - (1-β1)·q
    keep_unseen_(momentum_WN, x_WN, seen_WJ, block)


def advance_in_full_(
    x_WN: Tensor,
    momentum_WN: Tensor,
    codec: Codec,
    block: int,
    frames_WB: Tensor,
    counts_WJ: Tensor,
    seen_WJ: Tensor | None,
    beta1: float,
    share: float = 1.0,
) -> None:
    """frames ← those of share·g; c = momentum + (1-β1)·share·g, of which nothing stays owed: momentum ← β1·c. x ← c.

    As `advance_momentum_` where q = c, but that the frames say the gradient: owners make momentum by themselves. What
    the frames leave out is not returned.
    """
    x_WN.mul_(share)
    codec.encode(x_WN.clone(), None, frames_WB, counts_WJ)
    x_WN.mul_(1.0 - beta1).add_(momentum_WN)
    keep_unseen_(momentum_WN, x_WN * beta1, seen_WJ, block)


def keep_unseen_(old: Tensor, new: Tensor, seen_J: Tensor | None, block: int) -> None:
    """old ← new, but for the blocks that are not seen. old: any type; seen: bool, one for each block; None: all."""
    if seen_J is None:
        old.copy_(new)
    else:
        blocks, is_seen = old.view(-1, block), seen_J.view(-1, 1)
        if old.dtype == new.dtype:
            torch.where(is_seen, new.view(-1, block), blocks, out=blocks)
        else:
            blocks.copy_(torch.where(is_seen, new.view(-1, block), blocks))


def mean_magnitudes(x: Tensor, divisors_J: Tensor, block: int) -> Tensor:
    """The mean of |x| over each block's real elements, float32 [J]; zeros in the padding."""
    return x.view(-1, block).abs().sum(1) / divisors_J


def mean_gradient(mean: Tensor, last_mean: Tensor | None, beta1: float) -> Tensor:
    """(q̄ - β1·q̄_prev)/(1-β1), float32 [N]: the ranks' mean gradient, but for what rounding q left out of it.

    c_k = c_{k-1} + (1-β1)·(g_k - q_{k-1}), so where q is c but for e, it is ḡ + (ē_{k-1} - ē_k)/(1-β1): with eight bits
    ten times their error in the momentum, some 1 % of a block's mean square. β1 is taken to be the last step's: where
    it changes slowly, little is lost. last_mean: None before the first step.
    """
    g = mean.clone() if last_mean is None else torch.sub(mean, last_mean, alpha=beta1)
    return g.mul_(1.0 / (1.0 - beta1))


def advance_variance_(variance: Tensor, target: Tensor, *, beta2: float, block: int, seen_J: Tensor | None) -> None:
    """v ← β2·v + (1-β2)·target, kept signed; blocks that are not seen stay. float32 [N], v in place."""
    if seen_J is not None:
        target = torch.where(seen_J.unsqueeze(1), target.view(-1, block), variance.view(-1, block)).view(-1)
    variance.lerp_(target, 1.0 - beta2)


def direction_(
    mean_hat: Tensor,
    scale_hat_J: Tensor,
    variance: Tensor,
    correction2_J1: Tensor | float,
    divisors_J: Tensor,
    *,
    eps: float,
    floor: float,
    limit: float,
    block: int,
) -> Tensor:
    """m̂ ← m̂/D, D = √max(v̂, floor·blockmean(v̂), (s̄/limit)²) + eps, v̂ = max(v, 0)/(1-β2^t). float32 [N], in place.

    Returns D, float32 [J, n].
    In one bit |m̂| ≤ s̄, so that no element moves more than `limit` learning rates, whatever its variance says.
    scale_hat: s̄, the mean of the ranks' scales, corrected like m̂, [J]; in eight bits the mean of |m̂|. divisors: real
    elements of each block, 1 where there is none.
    """
    v_Jn = variance.view(-1, block).clamp(min=0.0).mul_(correction2_J1)
    least_J = floor * v_Jn.sum(1) / divisors_J
    torch.maximum(least_J, (scale_hat_J / limit).square_(), out=least_J)
    torch.maximum(v_Jn, least_J.unsqueeze(1), out=v_Jn)
    D_Jn = v_Jn.sqrt_().add_(eps)
    mean_hat.view(-1, block).div_(D_Jn)
    return D_Jn


def grad_stats(g: Tensor, q: Tensor, q_hat: Tensor, mean_hat: Tensor) -> list[Tensor]:
    """‖g‖², ‖q‖², <g, q̂>, <g, m̂> of a chunk, of no dimensions. q: what the rank's own frame says; q̂: corrected as m̂."""
    return [torch.dot(a, b) for a, b in ((g, g), (q, q), (g, q_hat), (g, mean_hat))]
