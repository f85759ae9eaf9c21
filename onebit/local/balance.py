"""Balanced rounds: each rank takes as many of a round's steps as its speed allows, and none waits for the slowest.

Each rank measures how long its own steps take, the vote before a round carries these times, and every rank computes
from all of them who takes how many steps of the next round:

    n_r = max(1, round(W·H·v_r / Σ v))        v_r: steps per second of rank r; H: the interval; W: ranks

The optimizer counts steps of the mean rank: a round is H of them. After its own k-th step a rank has ⌊k·H/n_r⌋.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from ..usage.contract import State

_MEDIAN_OF = 3  # rounds: an evaluation or a checkpoint on one rank within one of them does not count


def divide_steps(interval: int, seconds: Sequence[float]) -> list[int]:
    """The steps that each rank takes in the next round, at least 1.

    Args:
        interval: Steps of the mean rank.
        seconds: Seconds of a step, by rank. 0: not known yet; such a rank counts as one of mean speed.
    """
    known = [1.0 / s for s in seconds if s > 0.0]
    if not known:
        return [interval] * len(seconds)
    speeds = [1.0 / s if s > 0.0 else sum(known) / len(known) for s in seconds]
    steps = interval * len(seconds)
    return [max(1, math.floor(steps * v / sum(speeds) + 0.5)) for v in speeds]


class Balance:
    """This rank's part of the round that has begun.

    Attributes:
        length: Steps of the mean rank in it.
        share: Steps of this rank in it.
        taken: Steps that this rank has taken in it.
    """

    def __init__(self, length: int):
        self._seconds: deque[float] = deque(maxlen=_MEDIAN_OF)
        self.begin(length, length)
        self._since: tuple[int, float] | None = None  # the first step may compile

    def begin(self, length: int, share: int) -> None:
        """Begin a round."""
        self.length, self.share, self.taken = length, max(share, 1), 0
        self._since = 0, time.monotonic()

    def count_step(self) -> int:
        """Count a step of this rank. Returns how many steps of the mean rank that adds."""
        before = self.taken * self.length // self.share
        self.taken += 1
        if self._since is None:
            self._since = self.taken, time.monotonic()
        return self.taken * self.length // self.share - before

    def end(self) -> None:
        """Note how long a step took in this round, which ends with a vote."""
        if self._since is not None and self.taken > self._since[0]:
            first, began = self._since
            self._seconds.append((time.monotonic() - began) / (self.taken - first))
        self._since = None

    @property
    def step_s(self) -> float:
        """Seconds of a step of this rank, the median of the last rounds. 0: not known yet."""
        return median(self._seconds) if self._seconds else 0.0

    def state_dict(self) -> State:
        """The part of the round, and the speed."""
        return {"length": self.length, "share": self.share, "taken": self.taken, "seconds": list(self._seconds)}

    def load_state_dict(self, state: State) -> None:
        """Continue in the middle of a round. What has passed since it was saved counts as no time."""
        self.length, self.share, self.taken = state["length"], state["share"], state["taken"]
        self._seconds = deque(state["seconds"], _MEDIAN_OF)
        self._since = None
