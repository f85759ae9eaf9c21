"""Pacing: how difficult samples may be, or how many tokens a layer keeps, at step t. Pure functions of t.

    d(t) = floor((t/T)^(1/degree) · (last - first) + first), less its remainder modulo `multiple`, from first to last

t counts steps from 1. Source: DeepSpeed's data-efficiency tutorial; arXiv 2212.03597, section 3.1, and 2211.11586.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

Pacing = Callable[[int], int]


@dataclass(frozen=True)
class Root:
    """Rises as the degree-th root of t from `first` at the start to `last` at `total_steps`; degree 1: a line.

    multiple: values are rounded down to a multiple of it, but neither below first nor above last.
    """

    first: int
    last: int
    total_steps: int
    multiple: int = 1
    degree: float = 1.0

    def __post_init__(self) -> None:
        if self.first > self.last or self.first < 0:
            raise ValueError(f"expected 0 <= first <= last, got first = {self.first}, last = {self.last}")
        if self.total_steps < 1 or self.multiple < 1 or self.degree <= 0:
            raise ValueError(
                "expected total_steps and multiple of at least 1 and a degree above 0, got "
                f"total_steps = {self.total_steps}, multiple = {self.multiple}, degree = {self.degree:g}"
            )

    def __call__(self, step: int) -> int:
        if step >= self.total_steps:
            return self.last
        value = int((step / self.total_steps) ** (1.0 / self.degree) * (self.last - self.first) + self.first)
        return min(self.last, max(self.first, value - value % self.multiple))


@dataclass(frozen=True)
class Discrete:
    """A table: values[k] up to and with step until[k]; the last value from then on."""

    values: tuple[int, ...]
    until: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.until) + 1:
            raise ValueError(
                f"a table of {len(self.values)} difficulties has one step less, where each but the last ends; got "
                f"{len(self.until)} steps"
            )
        if list(self.until) != sorted(set(self.until)) or list(self.values) != sorted(self.values):
            raise ValueError(f"difficulties and steps must rise, got {list(self.values)} and {list(self.until)}")

    def __call__(self, step: int) -> int:
        return self.values[bisect_left(self.until, step)]


class Custom:
    """The caller's own function of the step, which may be given later than the configuration is read."""

    def __init__(self, name: str, function: Pacing | None = None):
        self.name, self.function = name, function

    def __call__(self, step: int) -> int:
        if self.function is None:
            raise RuntimeError(
                f'the schedule of {self.name!r} is "custom" and has no function; call '
                "engine.set_custom_curriculum_learning_schedule({name: function of the step}) before training"
            )
        return int(self.function(step))
