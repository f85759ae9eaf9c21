"""Shares: how many micro-batches of a step each member takes, so that none waits for a slower one.

Each member measures its micro-batches, and sends their seconds with its vote. From the votes of a step all members
compute the same shares, of W·m micro-batches in total, m being those of the mean member:

    the next micro-batch goes to the member r whose (n_r + 1)·s_r is least, after each has one    (s_r: its seconds)

which makes the longest n_r·s_r as short as it can be. The shares hold from the step after next on: a member that has
missed the last votes because another one was lost knows them all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

DECIDE_EVERY = 4  # steps: a DataLoader draws ahead, and what it has drawn for other shares is dropped
LEAST_GAIN = 0.03  # of a step's computing; less is noise


def divide(micro_batches: int, seconds: Sequence[float]) -> list[int]:
    """The micro-batches of each member, at least 1.

    Args:
        micro_batches: Those of all together.
        seconds: Seconds of a micro-batch, by rank. 0: not known yet; such a member counts as the mean of the others.
    """
    mean = fmean([s for s in seconds if s > 0.0] or [1.0])
    seconds, shares = [s or mean for s in seconds], [1] * len(seconds)
    for _ in range(micro_batches - len(seconds)):
        shares[min(range(len(shares)), key=lambda rank: (shares[rank] + 1) * seconds[rank])] += 1
    return shares


class Shares:
    """The shares of the members.

    Args:
        micro_batches: Of the mean member.
        is_balanced: Whether members take as many as their speed allows. If not, all take the same number.
        world_size: Number of members.

    Attributes:
        now: Micro-batches of the step that is drawn next, by rank.
        coming: Those of the step after the next vote.
    """

    def __init__(self, micro_batches: int, is_balanced: bool, world_size: int):
        self._mean, self._is_balanced = micro_batches, is_balanced
        self.begin([0.0] * world_size)

    def begin(self, seconds: Sequence[float]) -> None:
        """Begin with these members.

        Args:
            seconds: As `divide`.
        """
        self.now = self.coming = self._divide(seconds) if self._is_balanced else [self._mean] * len(seconds)
        self._votes = 0

    def hear(self, seconds: Sequence[float]) -> bool:
        """Go on to the next step. Returns whether its shares are others.

        Args:
            seconds: As `divide`; of the last vote.
        """
        before, self.now = self.now, self.coming
        self._votes += 1
        if self._is_balanced and self._votes % DECIDE_EVERY == 0:
            better = self._divide(seconds)
            longest, least = (max(n * s for n, s in zip(shares, seconds, strict=True)) for shares in (self.now, better))
            if least < (1.0 - LEAST_GAIN) * longest:
                self.coming = better
        return self.now != before

    def _divide(self, seconds: Sequence[float]) -> list[int]:
        return divide(self._mean * len(seconds), seconds)
