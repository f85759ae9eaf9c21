"""Textbook loops in float64, written from the papers. Nothing here imports onebit.

Workers are rows: grads[i] is worker i's gradient, a flat float64 vector. Blocks and chunks are spelled out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float64 to the nearest bfloat16, ties to even (through float32, as the wire's scales are)."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def compress(c: np.ndarray, blocks: Sequence[slice], scale: str = "rms") -> np.ndarray:
    """C(c): per block the scale, rounded to bfloat16, with the sign of each element."""
    q = np.zeros_like(c)
    for block in blocks:
        part = c[block]
        s = np.sqrt(np.mean(part**2)) if scale == "rms" else np.mean(np.abs(part))
        q[block] = to_bfloat16(s) * np.where(np.signbit(part), -1.0, 1.0)
    return q


def parameter_blocks(sizes: Sequence[int], block: int) -> list[slice]:
    """Blocks over the concatenated parameters; none straddles two of them."""
    blocks, start = [], 0
    for size in sizes:
        blocks += [slice(start + k, start + min(k + block, size)) for k in range(0, size, block)]
        start += size
    return blocks


@dataclass
class OnebitAdamOracle:
    """1-bit Adam for n workers: bias-corrected AdamW until freeze_step, then two compressed legs of m/D.

    The server error of all chunks is one vector: a chunk's owner is whoever holds it.
    """

    x: np.ndarray
    workers: int
    sizes: Sequence[int]
    freeze_step: int
    block: int = 256
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    floor: float = 0.01
    scale: str = "rms"

    def __post_init__(self) -> None:
        self.blocks = parameter_blocks(self.sizes, self.block)
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.worker_error = np.zeros((self.workers, len(self.x)))
        self.server_error = np.zeros_like(self.x)
        self.d: np.ndarray | None = None
        self.t = 0

    def step(self, grads: np.ndarray, lr: float) -> None:
        b1, b2 = self.betas
        self.t += 1
        if self.t <= self.freeze_step:
            g = grads.mean(0)
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * g**2
            self.update = self.m / (np.sqrt(self.v / (1 - b2**self.t)) + self.eps)
        else:
            if self.d is None:
                self.d = self.frozen(self.v / (1 - b2 ** (self.t - 1)))
                self.update = self.m / self.d
            d = self.d
            q = np.zeros_like(grads)
            for i in range(self.workers):
                c = b1 * self.update + (1 - b1) * grads[i] / d + self.worker_error[i]
                q[i] = compress(c, self.blocks, self.scale)
                self.worker_error[i] = c - q[i]
            a = q.mean(0) + self.server_error
            self.update = compress(a, self.blocks, self.scale)
            self.server_error = a - self.update
        self.x = self.x - lr * (self.update / (1 - b1**self.t) + self.weight_decay * self.x)

    def frozen(self, v: np.ndarray) -> np.ndarray:
        floored = v.copy()
        for block in self.blocks:
            floored[block] = np.maximum(v[block], self.floor * v[block].mean())
        return np.sqrt(floored) + self.eps


def run(
    oracle: OnebitAdamOracle, grad: Callable[[np.ndarray, int, int], np.ndarray], lrs: Sequence[float]
) -> np.ndarray:
    """Step with grad(x, step, worker) along a learning-rate sequence; the parameters after each step."""
    trajectory = []
    for step, lr in enumerate(lrs):
        oracle.step(np.stack([grad(oracle.x, step, i) for i in range(oracle.workers)]), lr)
        trajectory.append(oracle.x.copy())
    return np.stack(trajectory)


@dataclass
class ZeroOneAdamOracle:
    """0/1 Adam for n workers: which round a step is comes from outside ("variance", "sync" or "local").

    Per worker: x_i, m_i and u_i; the variance and what a synchronisation leaves are shared. The dense mean gradient of
    a variance step is exact here.
    """

    x0: np.ndarray
    workers: int
    sizes: Sequence[int]
    block: int = 256
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    floor: float = 0.01

    def __post_init__(self) -> None:
        self.blocks = parameter_blocks(self.sizes, self.block)
        n, size = self.workers, len(self.x0)
        self.x = np.tile(self.x0, (n, 1))
        self.m, self.u, self.worker_error = (np.zeros((n, size)) for _ in range(3))
        self.v, self.server_error, self.anchor = np.zeros(size), np.zeros(size), self.x0.copy()
        self.gamma_sum, self.kept = 0.0, 1.0
        self.t = self.t_variance = 0

    def step(self, grads: np.ndarray, lr: float, what: str) -> None:
        b1, b2 = self.betas
        self.t += 1
        gamma = lr / (1 - b1**self.t)
        decay = 1 - lr * self.weight_decay
        if what == "variance":
            g = grads.mean(0)
            self.m = np.tile(b1 * self.m[0] + (1 - b1) * g, (self.workers, 1))
            weight = b2 ** (self.t - self.t_variance)
            self.v, self.t_variance = weight * self.v + (1 - weight) * g**2, self.t
            self.x = decay * self.x - gamma * self.m / self.denominator()
            self.anchor = self.x[0].copy()
            return
        self.m = b1 * self.m + (1 - b1) * grads
        self.u = self.u + gamma * self.m
        self.gamma_sum += gamma
        self.kept *= decay
        self.x = decay * self.x - gamma * self.m / self.denominator()
        if what == "sync":
            self.sync()

    def sync(self) -> None:
        c = self.u / self.denominator() + self.worker_error
        q = np.stack([compress(row, self.blocks) for row in c])
        self.worker_error = c - q
        a = q.mean(0) + self.server_error
        move = compress(a, self.blocks)
        self.server_error = a - move
        self.anchor = self.kept * self.anchor - move
        self.x = np.tile(self.anchor, (self.workers, 1))
        self.m = np.tile(move * self.denominator() / self.gamma_sum, (self.workers, 1))
        self.u = np.zeros_like(self.u)
        self.gamma_sum, self.kept = 0.0, 1.0

    def denominator(self) -> np.ndarray:
        v = self.v / (1 - self.betas[1] ** self.t_variance)
        for block in self.blocks:
            v[block] = np.maximum(v[block], self.floor * v[block].mean())
        return np.sqrt(v) + self.eps
