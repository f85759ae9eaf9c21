"""The arithmetic of the sharded one-bit optimizers on flat tensors: of the senders, and of the chunks' owners.

Free functions without communication: see `exchange.py` and `optimizer.py` for that. The algorithm is this project's own
(no paper has it); the docstring of `ShardedOnebitAdam` contains it in formulas.

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
    """Encode q = C(c), with c = momentum + (1-β1)·share·g; then momentum ← c - (1-β1)·q, rounded once to its own dtype.

    So c_k = c_{k-1} + (1-β1)·(g_k - q_{k-1}): momentum and residual are one tensor. In the padding of a block momentum
    holds values without meaning. Local: sends nothing.

    Args:
        x_WN: The gradients g, float32 [W, N]. Garbage afterwards.
        momentum_WN: float32 or bfloat16, in place.
        codec: Format of the frames.
        block: Elements of a block.
        frames_WB: Frames of q, uint8, overwritten.
        counts_WJ: Real elements of each block, int32; 0 for blocks that are not seen, so that their frames are zeros.
        seen_WJ: bool; blocks for which it is False keep their momentum. None: all are seen.
        beta1: Decay of the momentum.
        share: Weight of this gradient. Default 1.
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
    """Encode share·g; c = momentum + (1-β1)·share·g; momentum ← β1·c; x ← c.

    As `advance_momentum_` with q = c, except that the frames contain the gradient: owners compute the momentum
    themselves. There is no residual: the error of the frames is not carried over. Arguments as there.
    """
    x_WN.mul_(share)
    codec.encode(x_WN.clone(), None, frames_WB, counts_WJ)
    x_WN.mul_(1.0 - beta1).add_(momentum_WN)
    keep_unseen_(momentum_WN, x_WN * beta1, seen_WJ, block)


def keep_unseen_(old: Tensor, new: Tensor, seen_J: Tensor | None, block: int) -> None:
    """Copy new to old, of any dtype, except in blocks for which seen_J (bool, one per block) is False. None: all."""
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
    """Return (q̄ - β1·q̄_prev)/(1-β1), float32 [N]: the ranks' mean gradient, up to the rounding error of q.

    c_k = c_{k-1} + (1-β1)·(g_k - q_{k-1}), so with q = c up to an error e this is ḡ + (ē_{k-1} - ē_k)/(1-β1): with
    eight bits ten times their error in the momentum, some 1 % of a block's mean square. The last step is assumed to
    have had the same β1: if it changes slowly, little is lost.

    Args:
        mean: q̄, float32 [N].
        last_mean: q̄_prev; None before the first step.
        beta1: Decay of the momentum.
    """
    g = mean.clone() if last_mean is None else torch.sub(mean, last_mean, alpha=beta1)
    return g.mul_(1.0 / (1.0 - beta1))


def advance_variance_(variance: Tensor, target: Tensor, *, beta2: float, block: int, seen_J: Tensor | None) -> None:
    """v ← β2·v + (1-β2)·target in place, float32 [N]; it may be negative. Blocks that are not seen keep their v."""
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
    """m̂ ← m̂/D in place, with D = √max(v̂, floor·blockmean(v̂), (s̄/limit)²) + eps and v̂ = max(v, 0)/(1-β2^t).

    In one bit |m̂| ≤ s̄, so no element moves more than `limit` learning rates, whatever its variance is.

    Args:
        mean_hat: m̂, float32 [N], modified in place.
        scale_hat_J: s̄, the mean of the ranks' scales with the correction of m̂; in eight bits the mean of |m̂|.
        variance: v, float32 [N].
        correction2_J1: 1/(1-β2^t), for each block or for all.
        divisors_J: Real elements of each block; 1 for a block without any.
        eps: Added to D.
        floor: Least v̂, as a share of its block's mean.
        limit: Bound of |m̂|/D, in one bit.
        block: Elements of a block.

    Returns:
        D, float32 [J, n].
    """
    v_Jn = variance.view(-1, block).clamp(min=0.0).mul_(correction2_J1)
    least_J = floor * v_Jn.sum(1) / divisors_J
    torch.maximum(least_J, (scale_hat_J / limit).square_(), out=least_J)
    torch.maximum(v_Jn, least_J.unsqueeze(1), out=v_Jn)
    D_Jn = v_Jn.sqrt_().add_(eps)
    mean_hat.view(-1, block).div_(D_Jn)
    return D_Jn


def grad_stats(g: Tensor, q: Tensor, q_hat: Tensor, mean_hat: Tensor) -> list[Tensor]:
    """Return ‖g‖², ‖q‖², <g, q̂>, <g, m̂> of a chunk, 0-dimensional.

    q is decoded from this rank's own frame; q̂ is q with the correction of m̂.
    """
    return [torch.dot(a, b) for a, b in ((g, g), (q, q), (g, q_hat), (g, mean_hat))]
