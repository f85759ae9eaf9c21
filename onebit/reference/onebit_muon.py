"""Muon (Jordan et al., 2024) with a momentum built from increments in one bit. No paper describes the one-bit form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .codecs import Array, compress, parameter_blocks


def orthogonalised(x: Array, steps: int = 5) -> Array:
    """Jordan's quintic: five times x ← 3.4445·x - 4.7750·(x·xᵀ)·x + 2.0315·(x·xᵀ)²·x, from x/‖x‖, by its SVD."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / max(np.linalg.norm(s), 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@dataclass
class OnebitMuon:
    """Muon for n workers, with a momentum built from increments in one bit, and error feedback in both phases.

    shapes: those of the matrices, which are concatenated in x. dense: how many first steps use the mean gradient.
    """

    x: Array
    workers: int
    shapes: Sequence[tuple[int, int]]
    block: int = 256
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.01
    adjust_lr: str = "match_rms_adamw"
    dense: int = 0

    def __post_init__(self) -> None:
        self.t = 0
        self.blocks = parameter_blocks([r * c for r, c in self.shapes], self.block)
        self.m, self.server_error = np.zeros_like(self.x), np.zeros_like(self.x)
        self.worker_error = np.zeros((self.workers, len(self.x)))

    def step(self, grads: Array, lr: float) -> None:
        d = (1 - self.momentum) * grads.mean(0) if self.t < self.dense else self.compressed(grads)
        self.t += 1
        self.m = self.momentum * self.m + d
        u = self.momentum * self.m + d if self.nesterov else self.m
        end = 0
        for r, c in self.shapes:
            place = slice(end, end := end + r * c)
            factor = 0.2 * np.sqrt(max(r, c)) if self.adjust_lr == "match_rms_adamw" else np.sqrt(max(1, r / c))
            move = factor * orthogonalised(u[place].reshape(r, c)).reshape(-1)
            self.x[place] -= lr * (move + self.weight_decay * self.x[place])

    def compressed(self, grads: Array) -> Array:
        q = np.zeros_like(grads)
        for i in range(self.workers):
            c = (1 - self.momentum) * grads[i] + self.worker_error[i]
            q[i] = compress(c, self.blocks)
            self.worker_error[i] = c - q[i]
        a = q.mean(0) + self.server_error
        d = compress(a, self.blocks)
        self.server_error = a - d
        return d
