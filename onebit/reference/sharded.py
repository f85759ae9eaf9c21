"""1-bit Adam, LAMB and 0/1 Adam sharded across nodes: owners receive momentum, and send parameter differences back.

Each element has an owner, which keeps its variance and its float32 master. Read `ShardedAdam.step`: what is sent to
owners enters the momentum at once, and the owner's variance is computed from its gradient and from what all others
sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .codecs import Array, Blocks, eight_bits, four_bits, parameter_blocks, signs, to_bfloat16


@dataclass
class ShardedAdam:
    """1-bit Adam sharded across nodes.

    x: the parameters that every rank holds. owner: the worker that owns each element. warmup: steps that send momentum
    in eight bits, or gradients in `warmup_bits`. down: "int4" or "sign". has_masters: False is stage 0, in which
    updates are sent back. bf16_*: what is kept in bfloat16.
    """

    x: Array
    workers: int
    sizes: Sequence[int]
    owner: Array
    block: int = 256
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    floor: float = 0.01
    limit: float = 5.0
    clip: float = 0.0
    warmup: int = 0
    down: str = "int4"
    has_masters: bool = True
    bf16_replica: bool = False
    bf16_momentum: bool = False
    share: float = 1.0  # of this step's gradient in the one that is sent
    warmup_bits: Callable[[Array, Blocks], Array] | None = None

    def __post_init__(self) -> None:
        self.blocks = parameter_blocks(self.sizes, self.block)
        n, size = self.workers, len(self.x)
        self.c, self.q = np.zeros((n, size)), np.zeros((n, size))
        self.r = np.zeros((n, size))  # c - (1-b1) q, as it is kept
        self.v, self.m_hat, self.mean = np.zeros(size), np.zeros(size), np.zeros(size)
        self.master, self.error = self.x.copy(), np.zeros(size)
        self.k, self.factor = 0, 1.0
        self.mean_factor, self.factor_weight = 0.0, 0.0
        self.squares = np.zeros(size)  # of the owners' gradients that went before, each by its share

    def own(self, rows: Array) -> Array:
        """For each element its owner's row."""
        return rows[self.owner, np.arange(len(self.x))]

    def clip_factor(self, grads: Array) -> float:
        n = self.workers
        past = self.mean_factor / self.factor_weight if self.factor_weight else 1.0
        squares = np.mean(np.sum(grads**2, axis=1))
        product = float(self.own(grads) @ self.m_hat) / past
        norm = math.sqrt(squares / n + (1 - 1 / n) * max(0.0, product))
        return min(1.0, self.clip / (norm + 1e-6))

    def step(self, grads: Array, lr: float) -> None:
        (b1, b2), n = self.betas, self.workers
        if self.clip:
            self.factor = self.clip_factor(grads)
            grads = grads * self.factor
            self.mean_factor = b1 * self.mean_factor + (1 - b1) * self.factor
            self.factor_weight = b1 * self.factor_weight + (1 - b1)
        self.k += 1
        is_warmup, last_mean = self.k <= self.warmup, self.q.mean(0)
        s = np.zeros_like(self.c)
        for i in range(n):
            self.c[i] = self.r[i] + (1 - b1) * self.share * grads[i]
            if is_warmup and self.warmup_bits:
                self.q[i] = self.c[i]
            elif is_warmup:
                self.q[i] = eight_bits(self.c[i], self.blocks)
            else:
                self.q[i], s[i] = signs(self.c[i], self.blocks)
            self.r[i] = self.c[i] - (1 - b1) * self.q[i]
            if self.bf16_momentum:
                self.r[i] = to_bfloat16(self.r[i])
        mean = self.q.mean(0)
        if is_warmup and self.warmup_bits:
            g_mean = np.mean([self.warmup_bits(self.share * g, self.blocks) for g in grads], axis=0)
            self.mean = mean = b1 * self.mean + (1 - b1) * g_mean
        self.m_hat = mean / (1 - b1**self.k)
        s_bar = s.mean(0) / (1 - b1**self.k)
        g = self.own(grads)
        squares = self.squares + self.share * g * g
        target = squares / n + (1 - 1 / n) * g * self.m_hat
        if is_warmup:
            target = (g_mean if self.warmup_bits else (mean - b1 * last_mean) / (1 - b1)) ** 2
            for block in self.blocks:
                s_bar[block] = np.abs(self.m_hat[block]).mean()
        self.v = b2 * self.v + (1 - b2) * target
        v_hat = np.maximum(self.v, 0) / (1 - b2**self.k)
        least = np.zeros_like(v_hat)
        for block in self.blocks:
            least[block] = self.floor * v_hat[block].mean()
        self.g = g
        self.D = np.sqrt(np.maximum(np.maximum(v_hat, least), (s_bar / self.limit) ** 2)) + self.eps
        self.u = self.m_hat / self.D
        self.move(lr)

    def move(self, lr: float) -> None:
        if self.has_masters:
            self.master = self.master - lr * (self.u + self.weight_decay * self.master)
            self.x = self.x + self.compress(self.master - self.x)
        else:
            sent = self.compress(self.u + self.error)
            self.error = self.u + self.error - sent
            self.x = self.x - lr * (sent + self.weight_decay * self.x)
        if self.bf16_replica:
            self.x = to_bfloat16(self.x)

    def compress(self, x: Array) -> Array:
        return four_bits(x, self.blocks) if self.down == "int4" else signs(x, self.blocks)[0]


@dataclass
class ShardedLamb(ShardedAdam):
    """1-bit LAMB sharded across nodes: each parameter moves by a share of its norm."""

    weight_decay: float = 0.0
    min_coeff: float = 0.01
    max_coeff: float = 10.0
    coeff_beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self.agreed = np.zeros(len(self.sizes))

    def move(self, lr: float) -> None:
        (b1, b2), wd, ends = self.betas, self.weight_decay, np.cumsum(self.sizes)
        v_hat = np.maximum(self.v, 0) / (1 - b2**self.k)
        share = (1 - b1) / (1 + b1) * (1 + b1**self.k) / (1 - b1**self.k)
        for k, layer in enumerate(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)):
            D, u, w = self.D[layer], self.u[layer], self.master[layer]
            noise = np.sum(v_hat[layer] / D**2)
            common = np.sum(self.g[layer] * u / D)
            self.agreed[k] = self.coeff_beta * self.agreed[k] + (1 - self.coeff_beta) * common
            a = min(max(self.agreed[k] / (1 - self.coeff_beta**self.k), 0.0), noise)
            square = share * noise + (1 - share) * a + 2 * wd * (u @ w) + wd**2 * (w @ w)
            weight, update = np.linalg.norm(w), math.sqrt(max(square, 0.0))
            ratio = min(max(weight / update, self.min_coeff), self.max_coeff) if weight > 0 and update > 0 else 1.0
            self.master[layer] = w - lr * ratio * (u + wd * w)
        self.x = self.x + self.compress(self.master - self.x)


@dataclass
class ShardedZeroOneAdam(ShardedAdam):
    """0/1 Adam sharded across nodes: only the last of H steps is `step`; the gradients of the others wait for it."""

    waited: int = 0
    moved_lr: float = 0.0

    def take(self, grads: Array, lr: float, interval: int) -> None:
        """Take one step of a cycle of `interval` steps."""
        (b1, _), n = self.betas, self.workers
        self.share, self.waited = 1 / interval, self.waited + 1
        self.moved_lr += lr
        if self.waited == interval:
            self.step(grads, self.moved_lr)
            self.waited, self.moved_lr, self.squares = 0, 0.0, np.zeros_like(self.squares)
            return
        for i in range(n):
            g = grads[i] * (self.own_clip_factor(i, grads[i]) if self.clip else 1.0)
            self.r[i] += (1 - b1) * self.share * g
            mine = self.owner == i
            self.squares[mine] += self.share * g[mine] ** 2

    def own_clip_factor(self, i: int, g: Array) -> float:
        """As `clip_factor`, from what worker i knows: its norm, and n times the product on its chunk."""
        n = self.workers
        past = self.mean_factor / self.factor_weight if self.factor_weight else 1.0
        product = n * float((g * self.m_hat)[self.owner == i].sum()) / past
        norm = math.sqrt(g @ g / n + (1 - 1 / n) * max(0.0, product))
        return min(1.0, self.clip / (norm + 1e-6))
