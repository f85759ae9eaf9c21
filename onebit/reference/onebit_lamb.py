"""1-bit LAMB (Li et al., arXiv 2104.06069): 1-bit Adam's momentum, and a trust ratio for each layer.

While gradients are sent, the ratio is LAMB's, ‖x‖/‖u‖; afterwards it is the average of those ratios, times the factor
by which the variance would have changed (the paper's scaling, here from each worker's own gradient).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .codecs import Array
from .onebit_adam import CompressedMomentum


def trust_ratio(x: Array, u: Array, least: float, most: float) -> float:
    """‖x‖/‖u‖ within bounds; 1 if one of them is zero."""
    a, b = np.linalg.norm(x), np.linalg.norm(u)
    return float(np.clip(a / b, least, most)) if a > 0 and b > 0 else 1.0


@dataclass
class OnebitLamb(CompressedMomentum):
    """1-bit LAMB: x_l ← x_l - lr·c_l·(r_l·m̂/D + wd·x_l), layer by layer.

    With `follows` the variance stays frozen, and r_l follows what it would have become. Otherwise r_l = 1, and dense
    steps after the warm-up scale c_l with the layer's norm.
    """

    follows: bool = True
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = np.cumsum(self.sizes)
        self.layers = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        L = len(self.layers)
        self.ratios: list[list[float]] = [[] for _ in range(L)]
        self.warm_norm, self.c = np.zeros(L), np.ones(L)
        self.fresh, self.r = np.ones(L), np.ones(L)

    def step(self, grads: Array, lr: float) -> None:
        is_dense = self.dense(self.t)
        if not is_dense:
            self.freeze()
            if self.follows:
                self.follow(grads)
        m_hat = self.advance(grads)
        for k, layer in enumerate(self.layers):
            x = self.x[layer]
            u = (m_hat[layer] if is_dense else self.r[k] * m_hat[layer]) + self.weight_decay * x
            norm = np.linalg.norm(x)
            if self.d is None:
                self.warm_norm[k] = norm
                self.c[k] = trust_ratio(x, u, self.min_coeff, self.max_coeff)
                self.ratios[k].append(self.c[k])
            elif is_dense:
                growth = norm / self.warm_norm[k] if self.warm_norm[k] > 0 else 1.0
                self.c[k] = np.clip(self.mean_ratio(k) * growth, self.min_coeff, self.max_coeff)
            elif self.follows or self.t_dense == len(self.ratios[k]):
                self.c[k] = self.mean_ratio(k)
            self.x[layer] = x - lr * self.c[k] * u

    def mean_ratio(self, k: int) -> float:
        """The exponential average of all ratios so far, divided by its weights' sum."""
        weights = [(1 - self.coeff_beta) * self.coeff_beta**age for age in range(len(self.ratios[k]))]
        return float(np.average(self.ratios[k][::-1], weights=weights))

    def follow(self, grads: Array) -> None:
        n = self.workers
        m_hat = self.update / (1 - self.betas[0] ** self.t)
        for k, layer in enumerate(self.layers):
            normalised = np.stack([self.normalised(g, self.t + 1) for g in grads])[:, layer]
            square = np.mean(np.sum(normalised**2, axis=1))
            product = np.mean(normalised @ m_hat[layer])
            estimate = square / n + (1 - 1 / n) * max(0.0, product)
            self.fresh[k] = self.betas[1] * self.fresh[k] + (1 - self.betas[1]) * estimate / self.sizes[k]
            factor = np.clip(self.fresh[k] ** -0.5, self.factor_min, self.factor_max)
            least, most = self.r[k] * (1 - self.factor_threshold), self.r[k] * (1 + self.factor_threshold)
            self.r[k] = np.clip(factor, least, most)
