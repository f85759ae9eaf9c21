"""0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009): local steps between synchronisations of their sum, in one bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .codecs import Array, compress, parameter_blocks, to_bfloat16
from .onebit_adam import LARGEST_MOVE, floored_denominator, late_weight


@dataclass
class ZeroOneAdam:
    """0/1 Adam for n workers. The caller decides what each step is: "variance", "sync" or "local".

    Each worker has x_i, u_i and m_i, the average of gradients divided by the D of their step. The variance and the
    result of a synchronisation are shared. The dense mean gradient of a variance step is exact here. guarded: as in
    `onebit_adam.CompressedMomentum`.
    """

    x0: Array
    workers: int
    sizes: Sequence[int]
    block: int = 256
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    floor: float = 0.01
    guarded: int = 64

    def __post_init__(self) -> None:
        self.blocks = parameter_blocks(self.sizes, self.block)
        n, size = self.workers, len(self.x0)
        self.x = np.tile(self.x0, (n, 1))
        self.m, self.u, self.worker_error = (np.zeros((n, size)) for _ in range(3))
        self.v, self.server_error, self.anchor = np.zeros(size), np.zeros(size), self.x0.copy()
        self.gamma_sum, self.kept, self.total = 0.0, 1.0, 0.0
        self.t = self.t_variance = 0

    def step(self, grads: Array, lr: float, what: str) -> None:
        b1, b2 = self.betas
        self.t += 1
        gamma = lr / (1 - b1**self.t)
        decay = 1 - lr * self.weight_decay
        if what == "variance":
            g = grads.mean(0)
            weight = late_weight(b2, self.t - self.t_variance)
            self.v, self.t_variance = (1 - weight) * self.v + weight * g**2, self.t
            self.total = (1 - weight) * self.total + weight
            self.m = np.tile(b1 * self.m[0] + (1 - b1) * g / self.denominator(), (self.workers, 1))
            self.x = decay * self.x - gamma * self.m
            self.anchor = self.x[0].copy()
            return
        weight = late_weight(b2, self.t - self.t_variance)
        share = weight / ((1 - weight) * self.total + weight) if self.t <= self.guarded else 1 - b2
        normalised = grads / np.sqrt(self.denominator() ** 2 + share / self.workers * grads**2)
        self.m = b1 * self.m + (1 - b1) * normalised
        self.u = self.u + gamma * self.m
        self.gamma_sum += gamma
        self.kept *= decay
        self.x = decay * self.x - gamma * self.m
        if what == "sync":
            self.sync()

    def sync(self) -> None:
        c = self.u + self.worker_error
        q = np.stack([compress(row, self.blocks) for row in c])
        self.worker_error = c - q
        a = q.mean(0) + self.server_error
        move = compress(a, self.blocks)
        self.server_error = a - move
        most = to_bfloat16(LARGEST_MOVE * self.gamma_sum)
        move = np.clip(move, -most, most)
        self.anchor = self.kept * self.anchor - move
        self.x = np.tile(self.anchor, (self.workers, 1))
        self.m = np.tile(move / self.gamma_sum, (self.workers, 1))
        self.u = np.zeros_like(self.u)
        self.gamma_sum, self.kept = 0.0, 1.0

    def denominator(self) -> Array:
        return floored_denominator(self.v / self.total, self.blocks, self.floor, self.eps)
