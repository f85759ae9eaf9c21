"""Local steps: AdamW on each worker, differences in one bit every N steps, error feedback on both phases.

DiLoCo (arXiv 2311.08105) with its outer step; with an outer rate of 1 and momentum of 0 it averages weights. SCAFFOLD's
control variates (arXiv 1910.06378) are in moves per learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .codecs import Array


@dataclass
class LocalSteps:
    """AdamW on each worker, differences in compressed frames every N steps, error feedback on both phases.

    w: [n, d], one row per worker. theta: the anchor that all agree on. e: [n, d], worker errors; E: [d], all owners'
    server errors. C: the compression of one message. Decay acts on w in every step, and on theta for as many steps, so
    that it is in no difference. drift: [n, d], how much further than each worker the mean has moved per learning rate,
    an average over correction_steps.
    """

    w: Array
    C: Callable[[Array], Array]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    error_decay: float = 1.0
    correction_steps: int = 0

    def __post_init__(self) -> None:
        self.theta = self.w[0].copy()
        self.m, self.v, self.e, self.drift = (np.zeros_like(self.w) for _ in range(4))
        self.since = 0
        self.E, self.u = np.zeros_like(self.theta), np.zeros_like(self.theta)
        self.keep, self.steps = 1.0, 0

    def step(self, grads: Array) -> None:
        """One AdamW step on every worker, each with its own gradient."""
        self.steps += 1
        b1, b2 = self.betas
        self.w *= 1.0 - self.lr * self.decay
        self.keep *= 1.0 - self.lr * self.decay
        self.m = b1 * self.m + (1.0 - b1) * grads
        self.v = b2 * self.v + (1.0 - b2) * grads**2
        m, v = self.m / (1.0 - b1**self.steps), self.v / (1.0 - b2**self.steps)
        self.w -= self.lr * m / (np.sqrt(v) + self.eps)
        self.w += self.lr * self.drift
        self.since += 1

    def round(self, away: Sequence[int] = (), weights: Sequence[float] | None = None) -> None:
        """Send differences to the owners and their mean back. away: workers that keep their difference for later."""
        q = np.zeros_like(self.w)
        for i in range(len(self.w)):
            gamma = 1.0 if weights is None else weights[i]
            c = self.e[i] + gamma * (self.keep * self.theta - self.w[i])
            q[i] = 0.0 if i in away else self.C(c)
            self.e[i] = self.error_decay * (c - q[i])
        a = q.mean(0) + self.E
        Q = self.C(a)
        self.E = a - Q
        self.u = self.outer_momentum * self.u + Q
        self.theta = self.keep * self.theta - self.outer_lr * (Q + self.outer_momentum * self.u)
        for i in range(len(self.w)):
            if i not in away:
                gamma = 1.0 if weights is None else weights[i]
                share = min(0.3, self.since / self.correction_steps) if self.correction_steps else 0.0
                self.drift[i] += share * (q[i] / gamma - Q) / (self.since * self.lr)
        self.since = 0
        self.w[:] = self.theta
        self.keep = 1.0
