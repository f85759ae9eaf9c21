"""Bounds on how far a rank's gradients may exceed the other ranks': larger ones are scaled down before they are sent.

An owner computes its variance from its own gradients and from the mean, as if ranks were samples of one distribution. A
bad batch on another rank is only in the mean: every element of a block would move by update_limit·lr, step after step,
until that rank's momentum has decayed. The part that is cut off here never enters a momentum, and is not carried over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOST = 4.0
"""A rank's norm is at most this multiple of the usual one. On shuffled data ranks differ by less than a factor of 2."""

_MEMORY = 100  # steps


class Bounds:
    """Computes the factor of each rank's gradients from the norms in a vote. All ranks compute the same factors.

    Attributes:
        usual: For each vote, by the index of its first bucket: the median norm averaged over about 100 steps, and the
            number of steps in it. It is the reference if most gradients of a step are nearly zero, and if a step has no
            vote.
    """

    def __init__(self) -> None:
        self.usual: dict[int, tuple[float, int]] = {}

    def factors(self, first: int, squares_W: Tensor) -> Tensor:
        """Return min(1, MOST·reference/‖g_i‖), float64 [W], on the device of the squares. Does not synchronise with it.

        The reference is the ranks' median norm, or the usual one if that is larger.

        Args:
            first: Index of the vote's first bucket.
            squares_W: ‖g_i‖² of each rank, float64 [W].
        """
        norms, (usual, _) = squares_W.sqrt(), self.usual.get(first, (0.0, 0))
        reference = _median(norms).clamp(min=usual)
        is_known = (norms > 0.0) & (reference > 0.0)
        return torch.where(is_known, MOST * reference / norms, 1.0).clamp_(max=1.0)

    def factors_on_host(self, first: int, squares: Sequence[float], *, alone: bool = False) -> list[float]:
        """As `factors`, to the bit, from numbers on the host.

        Args:
            first: Index of the vote's first bucket.
            squares: ‖g_i‖² of each rank.
            alone: Whether squares is of this rank only, in a step without a vote: the reference is then the usual norm.
                Default False.
        """
        norms, (usual, _) = [math.sqrt(square) for square in squares], self.usual.get(first, (0.0, 0))
        reference = usual if alone else max(median_of(norms), usual)
        return [min(1.0, MOST * reference / norm) if norm > 0.0 and reference > 0.0 else 1.0 for norm in norms]

    def learn(self, first: int, squares: Sequence[float]) -> None:
        """Update the usual norm after a step that counts. All ranks, with the same squares."""
        median, (usual, steps) = median_of([math.sqrt(x) for x in squares]), self.usual.get(first, (0.0, 0))
        if median > 0.0:
            steps = min(steps + 1, _MEMORY)
            known = min(median, 2.0 * usual) if usual else median  # limits the effect of a burst on all ranks
            self.usual[first] = usual + (known - usual) / steps, steps

    def record(self) -> dict[int, tuple[float, int]]:
        """Return the usual norms, for a checkpoint."""
        return dict(self.usual)

    def load_record(self, record: Mapping[int, tuple[float, int]]) -> None:
        """Take over the usual norms of a checkpoint."""
        self.usual = {first: (norm, steps) for first, (norm, steps) in record.items()}


def median_of(norms: Sequence[float]) -> float:
    """Return the lower median of the norms above 0; 0 if there are none."""
    above = sorted(norm for norm in norms if norm > 0.0)
    return above[(len(above) - 1) // 2] if above else 0.0


def _median(norms_W: Tensor) -> Tensor:
    """As `median_of`, on the device; 0-dimensional."""
    has_any = norms_W > 0.0
    ascending = torch.where(has_any, norms_W, torch.inf).sort().values
    middle = (has_any.sum() - 1).clamp_(min=0) // 2
    return torch.where(has_any.any(), ascending.gather(0, middle.view(1))[0], 0.0)
