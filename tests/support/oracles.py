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


def eight_bits(c: np.ndarray, blocks: Sequence[slice]) -> np.ndarray:
    """What eight bits say of c: whole steps of each block's max/127, that scale rounded up to a bfloat16."""
    q = np.zeros_like(c)
    for block in blocks:
        s = (np.abs(c[block]).max() / 127).astype(np.float32)
        s = ((s.view(np.uint32).astype(np.uint64) + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        if s > 0:
            q[block] = np.clip(np.round(c[block] / float(s)), -127, 127) * float(s)
    return q


def four_log_bits(c: np.ndarray, blocks: Sequence[slice]) -> np.ndarray:
    """What four logarithmic bits say of c: a sign and the nearest of s, s/2, ..., s/128, s the block's max, rounded up.

    Half way between two, the larger. In a block with a zero, or with padding, zeros stay and s/64 is the least.
    """
    q, full = np.zeros_like(c), max(block.stop - block.start for block in blocks)
    for block in blocks:
        has_zero = (c[block] == 0).any() or block.stop - block.start < full
        bits = np.abs(c[block]).max().astype(np.float32).view(np.uint32).astype(np.uint64)
        s = float(((bits + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32))
        if s > 0:
            levels = s * 2.0 ** -np.arange(7 if has_zero else 8)
            nearest = np.argmin(np.abs(np.abs(c[block])[:, None] - levels), axis=1)
            q[block] = np.sign(c[block]) * levels[nearest]
    return q


def mean_in(
    bits: Callable[[np.ndarray, Sequence[slice]], np.ndarray], grads: np.ndarray, blocks: Sequence[slice]
) -> np.ndarray:
    """The mean over workers after two phases of so many bits."""
    return bits(np.mean([bits(g, blocks) for g in grads], axis=0), blocks)


def floored_denominator(v: np.ndarray, blocks: Sequence[slice], floor: float, eps: float) -> np.ndarray:
    """√max(v, floor·blockmean(v)) + eps."""
    floored = v.copy()
    for block in blocks:
        floored[block] = np.maximum(v[block], floor * v[block].mean())
    return np.sqrt(floored) + eps


def late_weight(b2: float, gap: int) -> float:
    """The weight of a squared gradient in the variance, `gap` steps after the one before it."""
    return max(1 - b2, min(1 - b2**gap, 1 / 16))


@dataclass
class MomentumOracle:
    """Bias-corrected Adam moments of n workers; from the first step that is not dense, two compressed phases of m/D.

    dense: whether gradients travel in a step (from 0). Later dense steps refresh the variance. `advance` gives m̂/D.
    of_moves: m averages g/D from the first step on, each over the D of its own step (LaProp).
    The server error of all chunks is one vector: a chunk's owner is whoever holds it.
    """

    x: np.ndarray
    workers: int
    sizes: Sequence[int]
    dense: Callable[[int], bool]
    block: int = 256
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    floor: float = 0.01
    scale: str = "rms"
    bits: Callable[[np.ndarray, Sequence[slice]], np.ndarray] | None = None
    is_refreshed: bool = False
    of_moves: bool = False

    def __post_init__(self) -> None:
        self.blocks = parameter_blocks(self.sizes, self.block)
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.worker_error = np.zeros((self.workers, len(self.x)))
        self.server_error = np.zeros_like(self.x)
        self.d: np.ndarray | None = None
        self.t = self.t_dense = 0
        self.total = 0.0

    def advance(self, grads: np.ndarray) -> np.ndarray:
        self.t += 1
        if self.dense(self.t - 1):
            self.take_in(grads.mean(0) if self.bits is None else mean_in(self.bits, grads, self.blocks))
        else:
            self.compress(grads)
        update = self.m_over_d() if self.d is None else self.update
        return update / (1 - self.betas[0] ** self.t)

    def m_over_d(self) -> np.ndarray:
        return self.m if self.of_moves else self.m / (np.sqrt(self.v / self.total) + self.eps)

    def take_in(self, g: np.ndarray) -> None:
        b1, b2 = self.betas
        weight = late_weight(b2, self.t - self.t_dense)
        self.total = (1 - weight) * self.total + weight
        self.v = (1 - weight) * self.v + weight * g**2
        self.t_dense = self.t
        if self.d is None:
            move = g / (np.sqrt(self.v / self.total) + self.eps) if self.of_moves else g
            self.m = b1 * self.m + (1 - b1) * move
        else:
            self.set_denominator()
            self.update = b1 * self.update + (1 - b1) * g / self.d

    def normalised(self, g: np.ndarray, t: int) -> np.ndarray:
        """g over the root of D² and of what g² would weigh in a refresh in step t, divided among the workers.

        Where no refresh ever comes, 1 - b2.
        """
        weight = late_weight(self.betas[1], t - self.t_dense)
        share = weight / ((1 - weight) * self.total + weight) if self.is_refreshed else 1 - self.betas[1]
        return g / np.sqrt(self.d**2 + share / self.workers * g**2)

    def set_denominator(self) -> None:
        """D is all that is kept of the variance."""
        self.d = floored_denominator(self.v / self.total, self.blocks, self.floor, self.eps)
        self.v = (self.d - self.eps) ** 2 * self.total

    def freeze(self) -> None:
        if self.d is None:
            self.set_denominator()
            self.update = self.m if self.of_moves else self.m / self.d

    def compress(self, grads: np.ndarray) -> None:
        b1 = self.betas[0]
        self.freeze()
        q = np.zeros_like(grads)
        for i in range(self.workers):
            c = b1 * self.update + (1 - b1) * self.normalised(grads[i], self.t) + self.worker_error[i]
            q[i] = compress(c, self.blocks, self.scale)
            self.worker_error[i] = c - q[i]
        a = q.mean(0) + self.server_error
        self.update = compress(a, self.blocks, self.scale)
        self.server_error = a - self.update


def laprop(
    x: np.ndarray,
    grads: Sequence[np.ndarray],
    lrs: Sequence[float],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> np.ndarray:
    """LaProp (arXiv 2002.04839, Algorithm 1) with decoupled decay and the learning rate outside; x after each step."""
    (b1, b2), m, v, trajectory = betas, np.zeros_like(x), np.zeros_like(x), []
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        v = b2 * v + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g / (np.sqrt(v / (1 - b2**t)) + eps)
        x = (1 - lr * weight_decay) * x - lr * m / (1 - b1**t)
        trajectory.append(x)
    return np.stack(trajectory)


@dataclass
class OnebitAdamOracle(MomentumOracle):
    """1-bit Adam: x ← x - lr·(m̂/D + wd·x)."""

    def step(self, grads: np.ndarray, lr: float) -> None:
        self.x = self.x - lr * (self.advance(grads) + self.weight_decay * self.x)


def trust_ratio(x: np.ndarray, u: np.ndarray, least: float, most: float) -> float:
    """‖x‖/‖u‖ within bounds; 1 where one of them is zero."""
    a, b = np.linalg.norm(x), np.linalg.norm(u)
    return float(np.clip(a / b, least, most)) if a > 0 and b > 0 else 1.0


@dataclass
class OnebitLambOracle(MomentumOracle):
    """1-bit LAMB: x_l ← x_l - lr·c_l·(r_l·m̂/D + wd·x_l), layer by layer.

    follows: the variance stays frozen and r_l follows what it would have become; else r_l = 1, and dense steps after
    the warm-up scale c_l with the layer's norm.
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

    def step(self, grads: np.ndarray, lr: float) -> None:
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

    def follow(self, grads: np.ndarray) -> None:
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


def run(oracle: MomentumOracle, grad: Callable[[np.ndarray, int, int], np.ndarray], lrs: Sequence[float]) -> np.ndarray:
    """Step with grad(x, step, worker) along a learning-rate sequence; the parameters after each step."""
    trajectory = []
    for step, lr in enumerate(lrs):
        oracle.step(np.stack([grad(oracle.x, step, i) for i in range(oracle.workers)]), lr)
        trajectory.append(oracle.x.copy())
    return np.stack(trajectory)


@dataclass
class ZeroOneAdamOracle:
    """0/1 Adam for n workers: which round a step is comes from outside ("variance", "sync" or "local").

    Per worker: x_i, u_i and m_i, the average of gradients that were divided by the D of their step; the variance and
    what a synchronisation leaves are shared. The dense mean gradient of a variance step is exact here.
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
        self.gamma_sum, self.kept, self.total = 0.0, 1.0, 0.0
        self.t = self.t_variance = 0

    def step(self, grads: np.ndarray, lr: float, what: str) -> None:
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
        share = weight / ((1 - weight) * self.total + weight)
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
        self.anchor = self.kept * self.anchor - move
        self.x = np.tile(self.anchor, (self.workers, 1))
        self.m = np.tile(move / self.gamma_sum, (self.workers, 1))
        self.u = np.zeros_like(self.u)
        self.gamma_sum, self.kept = 0.0, 1.0

    def denominator(self) -> np.ndarray:
        return floored_denominator(self.v / self.total, self.blocks, self.floor, self.eps)


def orthogonalised(x: np.ndarray, steps: int = 5) -> np.ndarray:
    """Jordan's quintic: five times x ← 3.4445·x - 4.7750·(x·xᵀ)·x + 2.0315·(x·xᵀ)²·x, from x/‖x‖, by its SVD."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / max(np.linalg.norm(s), 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@dataclass
class OnebitMuonOracle:
    """Muon for n workers whose momentum is made of increments in one bit, with error feedback in both phases.

    shapes: of the matrices, which lie one behind the other in x. dense: how many steps take the mean gradient first.
    """

    x: np.ndarray
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

    def step(self, grads: np.ndarray, lr: float) -> None:
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

    def compressed(self, grads: np.ndarray) -> np.ndarray:
        q = np.zeros_like(grads)
        for i in range(self.workers):
            c = (1 - self.momentum) * grads[i] + self.worker_error[i]
            q[i] = compress(c, self.blocks)
            self.worker_error[i] = c - q[i]
        a = q.mean(0) + self.server_error
        d = compress(a, self.blocks)
        self.server_error = a - d
        return d


@dataclass
class LocalStepsOracle:
    """AdamW on each worker, differences in compressed frames every so many steps, error feedback on both phases.

    w: [n, d], one row per worker. theta: what all agree on. e: [n, d]; E: [d], all owners' chunks together. C: the
    compression of one message. Decay acts on w in every step and on theta for as many, so that it is in no difference.
    drift: [n, d], how much further than each worker the mean has moved per learning rate, learnt over correction_steps.
    """

    w: np.ndarray
    C: Callable[[np.ndarray], np.ndarray]
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

    def step(self, grads: np.ndarray) -> None:
        """One AdamW step on every worker, by its own gradient."""
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
        """Differences up, their mean down. away: workers that send nothing and owe theirs."""
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
