"""Whether sharded one-bit Adam suits the data: sums that votes carry, and the figures computed from them."""

from __future__ import annotations

import logging
import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ...usage.contract import State

log = logging.getLogger(__name__)

_GRAD_STATS = struct.Struct("<4d")
_AVERAGED_STEPS = 100
_WARN_ABOVE = 0.25


@dataclass(frozen=True)
class GradStats:
    """Sums over this rank's own chunks in its last step.

    q averages to the persistent part of this rank's gradients, m̂ to the part that persists in all ranks' gradients.

    Attributes:
        grad: ‖g‖² after clipping.
        sent: ‖q‖².
        kept: <g, q>/(1-β1^k).
        agreed: <g, m̂>.
    """

    grad: float = 0.0
    sent: float = 0.0
    kept: float = 0.0
    agreed: float = 0.0

    def __add__(self, other: GradStats) -> GradStats:
        return GradStats(*map(operator.add, vars(self).values(), vars(other).values()))  # astuple copies deeply: slow

    def to_bytes(self) -> bytes:
        """Return the four sums as little-endian float64, 32 bytes, for a vote."""
        return _GRAD_STATS.pack(*vars(self).values())

    @classmethod
    def from_bytes(cls, data: bytes) -> GradStats:
        """The inverse of `to_bytes`."""
        return cls(*_GRAD_STATS.unpack(data))


@dataclass
class Health:
    """Measures whether the ranks' gradients are samples of one distribution; if not, use `OnebitAdam` instead.

    Attributes:
        ratio: rms(q)/rms(g). About .22 if gradients are noise around a small mean (β1 = .9); near 1 or above if they
            have a persistent part: an offset, or a mean that all ranks have in common.
        agreement: The part of ‖g‖² that ranks have in common.
        offset: The part that persists on a rank and is not in common, averaged over about 100 steps. Below .1 on
            shuffled data; the larger it is, the more accuracy is lost.
        steps: Steps in these figures.
        is_warned: Whether the warning was given.
    """

    ratio: float = 0.0
    agreement: float = 0.0
    offset: float = 0.0
    steps: int = 0
    is_warned: bool = False

    def load(self, record: State) -> None:
        """Take over a record, made by `vars` of another instance."""
        vars(self).update(vars(Health(**record)))

    def observe(self, tallies: Sequence[GradStats], rank: int) -> None:
        """Update the figures from the sums of all ranks, and warn on rank 0, once. All ranks, with the same tallies."""
        columns = zip(*(vars(each).values() for each in tallies), strict=True)
        grad, sent, kept, agreed = map(sum, columns)
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
