"""Seconds of a training step, from timed steps of a few matrices: only arithmetic, no tensors and no network.

A contender's step has three parts, each linear in the number of elements, fitted through two samples:

    exchange    from the start of a backward pass that computes nothing until gradients or momentum have arrived
    launching   the part of it in the computing thread: it makes backward longer, and nothing hides it
    update      the part of step() after they have arrived

Computing is a third forward and two thirds backward, which completes gradients at an even pace, last layer first. A
bucket's exchange starts when its last gradient exists and the wire is free; phase 2 of ours starts when the next bucket
has been launched, or in step(). See `step/driver.py`. The wire carries one operation at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...layout.flat import partition

FORWARD = 1 / 3
MIB = 1 << 20
LEAST_GAIN = 0.05  # as in step/link_probe.py: less is not worth a change


@dataclass(frozen=True)
class Line:
    """base + slope · elements."""

    base: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """Line through the first and last (elements, seconds); proportional for one point. It never falls."""
        (n0, s0), (n1, s1) = points[0], points[-1]
        if n1 <= n0 or s1 <= s0:
            return cls(0.0, s1 / n1)
        slope = (s1 - s0) / (n1 - n0)
        return cls(s1 - slope * n1, slope) if s1 >= slope * n1 else cls(0.0, s1 / n1)

    def at(self, elements: float) -> float:
        return self.base + self.slope * elements


@dataclass(frozen=True)
class Schedule:
    """When a contender sends its buckets. bucket_mb: float32 MiB; first_mb: of the first bucket, if it differs.

    hides: share of a bucket's exchange that is sent during backward; the rest follows it. closes_above: a bucket takes
    tensors until it reaches its size (DDP); if not, it takes none that would exceed it (ours). phases: operations of a
    bucket that are sent during backward, one after the other.
    """

    hides: float
    bucket_mb: float = 16.0
    first_mb: float | None = None
    closes_above: bool = False
    phases: int = 2

    def buckets(self, numels: Sequence[int]) -> list[int]:
        """Elements of each bucket, in the order of sending. numels: of the parameters, first layer first."""
        capacity = int(self.bucket_mb * MIB / 4)
        if not self.closes_above:
            return [sum(numels[k] for k in members) for members in partition(numels, capacity)]
        buckets, limit = [0], int((self.first_mb or self.bucket_mb) * MIB / 4)
        for numel in reversed(numels):
            if buckets[-1] >= limit:
                buckets.append(0)
                limit = capacity
            buckets[-1] += numel
        return buckets


@dataclass(frozen=True)
class StepCost:
    """The parts of a contender's step, fitted to samples: seconds by the number of elements."""

    exchange: Line
    launching: Line
    update: Line


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step. hidden: traffic overlaps with backward. behind: traffic comes after computing."""

    hidden: float
    behind: float


def predict(cost: StepCost, schedule: Schedule, numels: Sequence[int], compute_s: float) -> Prediction:
    """A step of a model with these parameters that computes for compute_s seconds."""
    n = sum(numels)
    exchange, launching, update = cost.exchange.at(n), min(cost.launching.at(n), cost.exchange.at(n)), cost.update.at(n)
    behind = compute_s + exchange + update
    if schedule.hides == 0.0:
        return Prediction(behind, behind)
    later = (1.0 - schedule.hides) * exchange
    exchange -= later
    launching = min(launching, exchange)
    launched_at, on_wire = [], []
    clock, complete = FORWARD * compute_s, 0
    for size in schedule.buckets(numels):
        complete += size
        clock += (1 - FORWARD) * compute_s * size / n + launching * size / n
        launched_at.append(clock)
        on_wire.append((exchange - launching) * size / n)
    return Prediction(_wire_end(launched_at, on_wire, clock, schedule.phases) + later + update, behind)


def _wire_end(launched_at: Sequence[float], seconds: Sequence[float], step_at: float, phases: int) -> float:
    """When the last bucket has arrived, and backward is over (step_at). seconds: of each bucket, all its phases."""
    K = len(launched_at)
    free = 0.0
    # In the order of launches: phase p of a bucket is launched together with phase 0 of the p-th bucket after it.
    for turn in range(K + phases - 1):
        for phase in range(phases):
            k = turn - phase
            if 0 <= k < K:
                launch = launched_at[turn] if turn < K else step_at
                free = max(free, launch) + seconds[k] / phases
    return max(free, step_at)


@dataclass(frozen=True)
class Verdict:
    """Whether one bit pays. factor: the shortest dense step over our shortest; text: a sentence."""

    pays: bool
    factor: float
    text: str


def verdict(dense: dict[str, float], ours: dict[str, float], compute_s: float) -> Verdict:
    """dense, ours: seconds per step by name; the first of dense is the one to compare with in the sentence."""
    best, best_dense = min(ours, key=lambda name: ours[name]), min(dense, key=lambda name: dense[name])
    factor = dense[best_dense] / ours[best]
    pays = ours[best] <= (1 - LEAST_GAIN) * dense[best_dense]
    if pays:
        factors = ", ".join(f"{seconds / ours[best]:.1f} times as fast as {name}" for name, seconds in dense.items())
        return Verdict(True, factor, f"{best} pays {dense[next(iter(dense))] / ours[best]:.1f} times: {factors}")
    left = dense[best_dense] - compute_s
    why = (
        f"a step computes {compute_s:.3g} s, and {best_dense} leaves no more than {left:.3g} s of traffic and update "
        "to save"
        if compute_s > 0 and left < 0.5 * dense[best_dense]
        else f"this network is fast for its processors: what {best} saves on the wire it spends on encoding and its "
        f"update ({ours[best]:.3g} s against {dense[best_dense]:.3g} s)"
    )
    return Verdict(False, factor, f"one bit does not pay here, because {why}")


def shapes_of(params: float) -> list[tuple[int, int]]:
    """The matrices of a transformer of this size, first layer first: blocks of 12·d² elements."""
    d = width_of(params)
    block = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)]
    blocks = max(1, round(params / (12 * d * d)))
    return block * blocks


def width_of(params: float) -> int:
    """The usual width of a transformer of this size: 768 at 124 M, 1024 at 340 M, 1600 at 1.5 B, 4096 at 8 B."""
    for width, most in ((128, 3e6), (256, 12e6), (512, 6e7), (768, 2e8), (1024, 6e8), (1536, 1.8e9), (2560, 4e9)):
        if params <= most:
            return width
    return 4096 if params < 2e10 else 8192
