"""The number of local steps between two rounds: fixed, by a table, from the learning rate, or from the network.

Pure functions of numbers that all ranks share. Source: QSR, the quadratic synchronisation rule (arXiv 2310.14423,
section 2): H = max(H_least, ⌊(a/lr)²⌋).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..arithmetic.schedule import at_least_one, whole_steps


class Interval(Protocol):
    """When the next round is due. smallest: the smallest value that `steps` can return."""

    @property
    def smallest(self) -> int: ...

    def steps(self, step: int, lr: float) -> int:
        """Local steps to the next round, at least 1, decided after this many steps at this learning rate."""


@dataclass(frozen=True)
class Fixed:
    """The same number of steps each time."""

    every: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", at_least_one("every", self.every))

    @property
    def smallest(self) -> int:
        return self.every

    def steps(self, step: int, lr: float) -> int:
        return self.every


@dataclass(frozen=True)
class Table:
    """{first step: interval from there on}. Steps count from 0, and 0 must be in it."""

    intervals: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, table: Mapping[int, int]) -> Table:
        """Raises ValueError if the table does not begin at step 0, or an interval is below 1."""
        pairs = sorted((whole_steps("a step of every", s), at_least_one("every", h)) for s, h in table.items())
        if not pairs or pairs[0][0] != 0:
            raise ValueError(f"every={dict(table)} must have an interval from step 0 on, as {{0: 4, 1000: 32}}")
        return cls(tuple(pairs))

    @property
    def smallest(self) -> int:
        return min(interval for _, interval in self.intervals)

    def steps(self, step: int, lr: float) -> int:
        return [interval for first, interval in self.intervals if first <= step][-1]


@dataclass(frozen=True)
class QSR:
    """H = ⌊(scale/lr)²⌋, between least and most: rounds become rare as the learning rate falls.

    lr is the largest of all groups. Source: arXiv 2310.14423, section 2.

    Args:
        scale: Learning rate at which H is 1. With a peak rate p and H = `least` there, p·√(least + 1) lets H grow as
            soon as the rate has left its peak.
        least: Smallest H, in steps. Default 4.
        most: Largest H, in steps. Default 128.

    Raises:
        ValueError: A number is out of its range.
    """

    scale: float
    least: int = 4
    most: int = 128

    def __post_init__(self) -> None:
        if not 0.0 < self.scale < math.inf:
            raise ValueError(f"scale must be above 0 and finite, got {self.scale}")
        at_least_one("least", self.least)
        if self.most < self.least:
            raise ValueError(f"most must be at least least={self.least}, got {self.most}")

    @property
    def smallest(self) -> int:
        return self.least

    def steps(self, step: int, lr: float) -> int:
        if lr <= 0.0:
            return self.most
        return int(min(max((self.scale / lr) ** 2, self.least), self.most))


@dataclass
class Auto:
    """The smallest H at which a round takes at most `share` of the time that H steps compute.

    Measured once, 12 steps after the start; until then rounds are `least` steps apart.

    Args:
        least: Smallest H, in steps. Default 4.
        most: Largest H, in steps. Default 64.
        share: Largest ratio of a round's seconds to those of H steps. Default .05.
        chosen: The measured H. It is saved, so that a resumed run does not measure again. Default None: not measured.

    Raises:
        ValueError: A number is out of its range.
    """

    least: int = 4
    most: int = 64
    share: float = 0.05
    chosen: int | None = None

    def __post_init__(self) -> None:
        at_least_one("least", self.least)
        if self.most < self.least:
            raise ValueError(f"most must be at least least={self.least}, got {self.most}")
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")

    @property
    def smallest(self) -> int:
        return self.least

    def decide(self, compute_s: float, exchange_s: float) -> int:
        """Choose H from measured seconds, and return it.

        Args:
            compute_s: Seconds that a step computes, the same on all ranks.
            exchange_s: Seconds of a round, the same on all ranks.
        """
        enough = math.inf if compute_s <= 0.0 else exchange_s / (self.share * compute_s)
        self.chosen = int(min(max(math.ceil(min(enough, self.most)), self.least), self.most))
        return self.chosen

    def steps(self, step: int, lr: float) -> int:
        return self.least if self.chosen is None else self.chosen


@dataclass(frozen=True)
class Started:
    """An interval with a start: in the first `start_steps` steps rounds are at most `start_every` apart."""

    interval: Interval
    start_steps: int = 0
    start_every: int = 4

    def __post_init__(self) -> None:
        if self.start_steps < 0 or self.start_every < 1:
            raise ValueError(
                f"start_steps must be at least 0 and start_every 1, got {self.start_steps}, {self.start_every}"
            )

    @property
    def smallest(self) -> int:
        smallest = self.interval.smallest
        return min(smallest, self.start_every) if self.start_steps else smallest

    def steps(self, step: int, lr: float) -> int:
        steps = self.interval.steps(step, lr)
        return min(steps, self.start_every) if step < self.start_steps else steps


MEASURED_STEPS = 12
Every: TypeAlias = "int | str | Mapping[int, int] | QSR | Auto"


def interval_of(every: Every) -> Interval:
    """The interval of the option `every`. Raises ValueError or TypeError."""
    if isinstance(every, QSR | Auto):
        return every
    if isinstance(every, str):
        if every != "auto":
            raise ValueError(f'every must be a number of steps, {{step: number}}, a QSR or "auto", got {every!r}')
        return Auto()
    if isinstance(every, Mapping):
        return Table.of(every)
    return Fixed(every)
