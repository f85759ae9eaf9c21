"""LaProp (arXiv 2002.04839, Algorithm 1): the momentum averages g/D, each gradient divided by the D of its step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .codecs import Array


def laprop(
    x: Array,
    grads: Sequence[Array],
    lrs: Sequence[float],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Array:
    """x after each step; decoupled decay, and the learning rate outside of the momentum."""
    (b1, b2), m, v, trajectory = betas, np.zeros_like(x), np.zeros_like(x), []
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        v = b2 * v + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g / (np.sqrt(v / (1 - b2**t)) + eps)
        x = (1 - lr * weight_decay) * x - lr * m / (1 - b1**t)
        trajectory.append(x)
    return np.stack(trajectory)
