"""Muon (Jordan et al., 2024) whose orthogonal moves travel in one bit. No paper describes the one-bit form."""

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
    """Muon for n workers: each orthogonalises its own momentum, and the mean of their moves travels in one bit.

    Error feedback in both phases. shapes: those of the matrices, which are concatenated in x. dense: number of first
    steps in which the mean gradient enters the momentum of every worker.
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
        self.m, self.worker_error = (np.zeros((self.workers, len(self.x))) for _ in range(2))
        self.server_error = np.zeros_like(self.x)

    def step(self, grads: Array, lr: float) -> None:
        if self.t < self.dense:
            grads = np.broadcast_to(grads.mean(0), grads.shape)
        self.m = self.momentum * self.m + (1 - self.momentum) * grads
        u = self.momentum * self.m + (1 - self.momentum) * grads if self.nesterov else self.m
        moves = np.stack([self.moves(each) for each in u])
        d = moves.mean(0) if self.t < self.dense else self.compressed(moves)
        self.x = self.x - lr * (d + self.weight_decay * self.x)
        self.t += 1

    def moves(self, u: Array) -> Array:
        moves, end = np.zeros_like(u), 0
        for r, c in self.shapes:
            place = slice(end, end := end + r * c)
            factor = 0.2 * np.sqrt(max(r, c)) if self.adjust_lr == "match_rms_adamw" else np.sqrt(max(1, r / c))
            moves[place] = factor * orthogonalised(u[place].reshape(r, c)).reshape(-1)
        return moves

    def compressed(self, moves: Array) -> Array:
        q = np.zeros_like(moves)
        for i in range(self.workers):
            c = moves[i] + self.worker_error[i]
            q[i] = compress(c, self.blocks)
            self.worker_error[i] = c - q[i]
        a = q.mean(0) + self.server_error
        d = compress(a, self.blocks)
        self.server_error = a - d
        return d
