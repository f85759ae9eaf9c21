"""1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888), with error feedback on both phases and m/D in the frames.

Read `OnebitAdam.step`, then `compress`. Worker i's gradient is row i of `grads`; all vectors are flat float64. Dense
steps are AdamW's; later dense steps refresh the variance. `docs/differences.md` lists the differences from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .codecs import Array, Blocks, compress, mean_in, parameter_blocks

LARGEST_MOVE = 8.0  # Adam allows |m|/√v of 7.3


@dataclass
class CompressedMomentum:
    """Adam's moments of n workers: dense steps, then steps that send momentum in one bit. `advance` returns m̂/D.

    x: the parameters, flat; sizes: the elements of each. dense: whether gradients are sent in a step, counted from 0.
    bits: the code of gradients; None: in full. guarded: first steps in which a worker's own gradient weighs as much in
    the variance as in a refresh. of_moves: m averages g/D, each divided by the D of its step (LaProp).
    """

    x: Array
    workers: int
    sizes: Sequence[int]
    dense: Callable[[int], bool]
    block: int = 256
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    floor: float = 0.01
    scale: str = "rms"
    bits: Callable[[Array, Blocks], Array] | None = None
    guarded: int = 0
    of_moves: bool = False

    def __post_init__(self) -> None:
        self.blocks = parameter_blocks(self.sizes, self.block)
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.total = 0.0  # the weights in v: v / total has no bias towards its zero start
        self.d: Array = None  # D, from the freeze on
        self.update: Array = None  # m/D, likewise
        self.worker_error = np.zeros((self.workers, len(self.x)))
        self.server_error = np.zeros_like(self.x)  # of all chunks: an owner holds its part of this
        self.t = self.t_dense = 0  # steps taken; the last dense one

    def step(self, grads: Array, lr: float) -> None:
        """Move x by what `advance` returns. grads: [workers, d]."""
        raise NotImplementedError

    def advance(self, grads: Array) -> Array:
        """Advance the moments by one step; returns the move of the parameters without the learning rate."""
        self.t += 1
        if self.dense(self.t - 1):
            self.take_in(grads.mean(0) if self.bits is None else mean_in(self.bits, grads, self.blocks))
        else:
            self.freeze()
            self.compress(grads)
        update = self.m_over_d() if self.d is None else self.update
        return update / (1 - self.betas[0] ** self.t)

    # ---- dense steps: the warm-up, and refreshes of the frozen variance

    def take_in(self, g: Array) -> None:
        """The mean gradient enters both moments."""
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

    def m_over_d(self) -> Array:
        return self.m if self.of_moves else self.m / (np.sqrt(self.v / self.total) + self.eps)

    # ---- compressed steps

    def freeze(self) -> None:
        """From now on keep the momentum as m/D, in which the elements of a block have similar sizes."""
        if self.d is None:
            self.set_denominator()
            self.update = self.m if self.of_moves else self.m / self.d

    def set_denominator(self) -> None:
        """Set D, which is all that is kept of the variance."""
        self.d = floored_denominator(self.v / self.total, self.blocks, self.floor, self.eps)
        self.v = (self.d - self.eps) ** 2 * self.total

    def compress(self, grads: Array) -> None:
        """The paper's Algorithm 1: workers compress momentum, owners compress the mean; both keep the residual."""
        b1 = self.betas[0]
        q = np.zeros_like(grads)
        for i in range(self.workers):
            c = b1 * self.update + (1 - b1) * self.normalised(grads[i], self.t) + self.worker_error[i]
            q[i] = compress(c, self.blocks, self.scale)
            self.worker_error[i] = c - q[i]
        a = q.mean(0) + self.server_error
        self.update = compress(a, self.blocks, self.scale)
        self.server_error = a - self.update
        self.update = np.clip(self.update, -LARGEST_MOVE, LARGEST_MOVE)

    def normalised(self, g: Array, t: int) -> Array:
        """g/D, where g² is added to the frozen D, so that a gradient far beyond it is bounded.

        It gets the weight 1 - b2; in the first steps, if the variance is refreshed and still consists of few gradients,
        the one that it would have in a refresh. Divided by the number of workers.
        """
        weight = late_weight(self.betas[1], t - self.t_dense)
        share = weight / ((1 - weight) * self.total + weight) if t <= self.guarded else 1 - self.betas[1]
        return g / np.sqrt(self.d**2 + share / self.workers * g**2)


@dataclass
class OnebitAdam(CompressedMomentum):
    """1-bit Adam: x ← x - lr·(m̂/D + wd·x)."""

    def step(self, grads: Array, lr: float) -> None:
        self.x = self.x - lr * (self.advance(grads) + self.weight_decay * self.x)


def floored_denominator(v: Array, blocks: Blocks, floor: float, eps: float) -> Array:
    """√max(v, floor·blockmean(v)) + eps."""
    floored = v.copy()
    for block in blocks:
        floored[block] = np.maximum(v[block], floor * v[block].mean())
    return np.sqrt(floored) + eps


def late_weight(b2: float, gap: int) -> float:
    """The weight of a squared gradient in the variance, `gap` steps after the one before it."""
    return max(1 - b2, min(1 - b2**gap, 1 / 16))


def run(reference: CompressedMomentum, grad: Callable[[Array, int, int], Array], lrs: Sequence[float]) -> Array:
    """Step with grad(x, step, worker) along a learning-rate sequence; the parameters after each step."""
    trajectory = []
    for step, lr in enumerate(lrs):
        reference.step(np.stack([grad(reference.x, step, i) for i in range(reference.workers)]), lr)
        trajectory.append(reference.x.copy())
    return np.stack(trajectory)
