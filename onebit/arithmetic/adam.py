"""Adam's arithmetic on flat tensors, shared by the family: the dense steps, the denominator, the late refresh.

Free functions, no state and no traffic. Shape legend: W ranks, N elements of a chunk, J blocks; a bucket has W·N
elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..host import direction_
from ..layout.flat import Layout

# Blocks in one temporary: 256 KiB with blocks of 256, so that it stays in a cache.
BLOCKS_AT_A_TIME = 256


def adam_direction_(
    g: Tensor, m: Tensor, v: Tensor, *, betas: tuple[float, float], eps: float, step: int, bias_correction: bool
) -> None:
    """Advance m and v by the mean gradient g, and write the direction into g: g ← m̂/(√v̂ + eps).

    m ← β1·m + (1-β1)·g,  v ← β2·v + (1-β2)·g²,  m̂ = m/(1-β1^step),  v̂ = v/(1-β2^step)   (arXiv 1412.6980, Alg. 1)

    On the host one pass in C++ if it is built; elsewhere seven operations of torch.

    Args:
        g: Mean gradient, float32 [n], overwritten with the direction.
        m: Momentum, float32 [n], modified in place.
        v: Variance, float32 [n], modified in place.
        betas: β1 and β2.
        eps: Term of the denominator.
        step: Number of this step, from 1.
        bias_correction: Whether to use m̂ and v̂; m and v if not.
    """
    direction = direction_ if g.device.type == "cpu" else direction_in_torch_
    direction(g, m, v, betas=betas, eps=eps, step=step, bias_correction=bias_correction)


def direction_in_torch_(
    g: Tensor, m: Tensor, v: Tensor, *, betas: tuple[float, float], eps: float, step: int, bias_correction: bool
) -> None:
    """`adam_direction_` in torch, for any device. It rounds otherwise than the host's C++."""
    beta1, beta2 = betas
    m.lerp_(g, 1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    torch.sqrt(v, out=g)
    if bias_correction:
        g.mul_((1.0 - beta2**step) ** -0.5)
    torch.div(m, g.add_(eps), out=g)
    if bias_correction:
        g.mul_(1.0 / (1.0 - beta1**step))


def laprop_direction_(
    g: Tensor, m: Tensor, v: Tensor, *, betas: tuple[float, float], eps: float, step: int, bias_correction: bool
) -> None:
    """`adam_direction_` with an m that averages updates: each gradient is divided by the D of its own step. g ← m̂.

    v ← β2·v + (1-β2)·g²,  m ← β1·m + (1-β1)·g/(√v̂ + eps),  m̂ = m/(1-β1^step)   (LaProp, arXiv 2002.04839)

    Args:
        g: Mean gradient, float32 [n], overwritten with the direction.
        m: Average of updates, float32 [n], modified in place.
        v: Variance, float32 [n], modified in place.
        betas: β1 and β2.
        eps: Term of the denominator.
        step: Number of this step, from 1.
        bias_correction: Whether to use m̂ and v̂; m and v if not.
    """
    beta1, beta2 = betas
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    D = adam_denominator(v, beta2, eps, step=step, bias_correction=bias_correction)
    m.mul_(beta1).addcdiv_(g, D, value=1.0 - beta1)
    torch.mul(m, 1.0 / (1.0 - beta1**step) if bias_correction else 1.0, out=g)


def adam_denominator(v: Tensor, beta2: float, eps: float, *, step: int, bias_correction: bool) -> Tensor:
    """√v̂ + eps, without a floor, in a new tensor; v̂ = v/(1-β2^step).

    Args:
        v: Variance, float32 [n].
        beta2: Its decay.
        eps: Term of the denominator.
        step: Number of steps in v.
        bias_correction: Whether to use v̂; v if not.
    """
    D = v.sqrt()
    if bias_correction:
        D.mul_((1.0 - beta2**step) ** -0.5)
    return D.add_(eps)


def floor_of_blocks(
    v: Tensor, layout: Layout, counts: Tensor, *, floor: float, fallback: float, correction: float = 1.0
) -> Tensor:
    """The least variance of each block, float32 [W·J]: floor times the block's mean.

    A block that has never seen a gradient has no scale. It takes the mean of its parameter's other blocks (on this
    rank, if the parameter is sharded), or `fallback` if there is none. So a row that first gets a gradient later moves
    as far as its neighbours. floor = 0 is the paper's rule, without any of this.

    Args:
        v: float32 [W·N]; v·correction is the bias-corrected variance.
        layout: The bucket's layout.
        counts: Real elements of each block, int32 [W, J].
        floor: Share of a block's mean.
        fallback: Mean variance of the whole model.
        correction: Factor of the bias correction. Default 1.
    """
    parts = v.view(-1, layout.block).split(BLOCKS_AT_A_TIME)
    sum_J = torch.cat([(part if correction == 1.0 else part * correction).sum(1) for part in parts])
    mean_J = sum_J / counts.view(-1).clamp(min=1)
    least_J = floor * mean_J
    if floor > 0.0:
        for mean, least in zip(layout.by_parameter(mean_J), layout.by_parameter(least_J), strict=True):
            alive = mean > 0
            filling = mean.sum(dtype=torch.float64) / alive.sum().clamp(min=1)
            filling = torch.where(alive.any(), filling, fallback).to(least.dtype)
            least.copy_(torch.where(alive, least, filling))
    return least_J


def denominator_(v: Tensor, layout: Layout, counts: Tensor, *, eps: float, floor: float, fallback: float) -> Tensor:
    """v ← D(v) = √max(v, `floor_of_blocks`) + eps, in place, and return it.

    Args:
        v: Bias-corrected variance, float32 [W·N].
        layout: The bucket's layout.
        counts: Real elements of each block, int32 [W, J].
        eps: Term of the denominator.
        floor: Share of a block's mean that is the least variance.
        fallback: Mean variance of the whole model.
    """
    v_Jn = v.view(-1, layout.block)
    least_J = floor_of_blocks(v, layout, counts, floor=floor, fallback=fallback)
    torch.maximum(v_Jn, least_J.unsqueeze(1), out=v_Jn)
    return v.sqrt_().add_(eps)


def normalised(g: Tensor, D: Tensor, weight: float) -> Tensor:
    """g/√(D² + weight·g²): g/D while that is small, never more than 1/√weight. A new tensor.

    D is as old as the last variance step. If gradients have grown by orders of magnitude since (attention that wakes
    up), a live variance would have taken them in; this adds a rank's own gradient instead. NaN and infinity become NaN;
    a |g| above 1.8e19, whose square is infinite, becomes 0. `SignCodec.encode_momentum` does the same.

    Args:
        g: Gradient, float32.
        D: Denominator, like g.
        weight: Weight of the gradient's square.
    """
    return g / (D * D + (g * g) * weight).sqrt_()


def sums_of_live_blocks(v: Tensor, counts_WJ: Tensor, share_J: Tensor | None, block: int) -> tuple[float, float]:
    """The sum of v over all blocks in which it is not zero, and the number of their elements, without padding.

    Args:
        v: Flat variance, float32 [W·N].
        counts_WJ: The real elements of each block, int32 [W, J].
        share_J: The share of each block that counts, float64 [W·J]; None: all of it.
        block: Elements of a block.
    """
    sum_J = v.view(-1, block).sum(1)
    count_J = counts_WJ.view(-1) * (sum_J != 0)
    if share_J is None:
        return float(sum_J.sum(dtype=torch.float64)), float(count_J.sum())
    return float((sum_J * share_J).sum()), float((count_J * share_J).sum())
