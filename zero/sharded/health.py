"""Whether sharded one-bit Adam is right for the data: what votes say of the step before, and the figures of it."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ...usage.contract import State

log = logging.getLogger(__name__)

_GRAD_STATS = struct.Struct("<4d")
_AVERAGED_STEPS = 100
_WARN_ABOVE = 0.25


@dataclass(frozen=True)
class GradStats:
    """Sums over this rank's own chunks in its last step. grad: ‖g‖² after clipping. sent: ‖q‖². kept: <g, q>/(1-β1^k).

    agreed: <g, m̂>. q averages to what persists in this rank's gradients, m̂ to what persists in all ranks'.
    """

    grad: float = 0.0
    sent: float = 0.0
    kept: float = 0.0
    agreed: float = 0.0

    def __add__(self, other: GradStats) -> GradStats:
        return GradStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def to_bytes(self) -> bytes:
        return _GRAD_STATS.pack(*astuple(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> GradStats:
        return cls(*_GRAD_STATS.unpack(data))


@dataclass
class Health:
    """Whether the ranks' gradients are samples of the same thing; otherwise sharded one-bit Adam is the wrong choice.

    ratio: rms(q)/rms(g): about .22 where gradients are noise around a small mean (β1 = .9), near 1 or above where
    something persists in them: an offset, or a mean that all ranks have in common. agreement: the part of ‖g‖² that is
    in common. offset: the part that persists on a rank and is not in common, averaged over about 100 steps; below .1 on
    shuffled data, and the larger, the more accuracy is lost.
    """

    ratio: float = 0.0
    agreement: float = 0.0
    offset: float = 0.0
    steps: int = 0
    is_warned: bool = False

    def load(self, record: State) -> None:
        """Take over what `vars` gave of another."""
        vars(self).update(vars(Health(**record)))

    def observe(self, tallies: Sequence[GradStats], rank: int) -> None:
        """Take in what the ranks say of their last step; warn on rank 0, once. Same tallies on all ranks."""
        grad, sent, kept, agreed = (sum(column) for column in zip(*map(astuple, tallies), strict=True))
        if not (math.isfinite(grad) and grad > 0.0):
            return
        n = len(tallies)
        self.ratio, self.agreement = (sent / grad) ** 0.5, agreed / grad
        self.steps += 1
        self.offset += ((kept - agreed) / grad - self.offset) / min(self.steps, _AVERAGED_STEPS)
        if n > 1 and self.steps >= _AVERAGED_STEPS and self.offset > _WARN_ABOVE and not self.is_warned:
            self.is_warned = True
            if rank == 0:
                log.warning(
                    "%.0f %% of the gradients' squares persist on a rank and are not in common with the others (below "
                    "10 %% is usual; rms(q)/rms(g) = %.2f): sharded one-bit Adam loses accuracy on such data. Shuffle "
                    "the data across ranks, or use onebit.OnebitAdam",
                    100.0 * self.offset,
                    self.ratio,
                )
