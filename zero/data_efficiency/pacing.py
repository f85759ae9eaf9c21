"""Pacing: how difficult samples may be, or how many tokens a layer keeps, at step t. Pure functions of t.

    d(t) = floor((t/T)^(1/degree) · (last - first) + first), rounded down to a multiple, and clamped to [first, last];
    d(t) = last from t = T on, also if it is no multiple

t counts steps from 1. Source: DeepSpeed's data-efficiency tutorial; arXiv 2212.03597, section 3.1, and 2211.11586.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

Pacing = Callable[[int], int]


@dataclass(frozen=True)
class Root:
    """A difficulty that rises as the degree-th root of the step. Call it with the step, counted from 1.

    Args:
        first: The value at the start.
        last: The value from `total_steps` on.
        total_steps: The steps over which it rises.
        multiple: Values are rounded down to a multiple of this, but not below `first`; 1 by default.
        degree: The degree of the root; 1 (default) rises linearly, 2 faster at first.

    Raises:
        ValueError: `first` is negative or above `last`, or a step count, multiple or degree is too small.
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
    """A difficulty from a table: values[k] up to and including step until[k]. Call it with the step, counted from 1.

    Args:
        values: The difficulties, not falling.
        until: The last step of each difficulty but the last one, rising.

    Raises:
        ValueError: `until` is not one shorter than `values`, or they do not rise.
    """

    values: tuple[int, ...]
    until: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.until) + 1:
            raise ValueError(
                f"a table of {len(self.values)} difficulties needs {len(self.values) - 1} steps, the last of each "
                f"difficulty but the last one; got {len(self.until)} steps"
            )
        if list(self.until) != sorted(set(self.until)) or list(self.values) != sorted(self.values):
            raise ValueError(f"difficulties and steps must rise, got {list(self.values)} and {list(self.until)}")

    def __call__(self, step: int) -> int:
        return self.values[bisect_left(self.until, step)]


class Custom:
    """The caller's own function of the step, which may be set after the configuration has been read."""

    def __init__(self, name: str, function: Pacing | None = None):
        self.name, self.function = name, function

    def __call__(self, step: int) -> int:
        if self.function is None:
            raise RuntimeError(
                f'the schedule of {self.name!r} is "custom" and has no function; call '
                "engine.set_custom_curriculum_learning_schedule({name: function of the step}) before training"
            )
        return int(self.function(step))
