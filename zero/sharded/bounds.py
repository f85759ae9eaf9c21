"""How far a rank's gradients may stand out from the others': beyond that they are scaled down before they are sent.

An owner's variance is made of its own gradients and of the mean, as if ranks were samples of the same. A bad batch on
another rank is in the mean alone: every element of a block would move by update_limit·lr, step after step, until that
rank's momentum has forgotten it. What is bounded here never enters a momentum, and is not returned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOST = 4.0
"""A rank's norm is at most so many times the usual one. Ranks whose data is shuffled differ by less than 2."""

_MEMORY = 100  # steps


class Bounds:
    """What to multiply each rank's gradients by, from the norms in a vote; all ranks find the same.

    usual: by the first bucket of a vote, the median norm averaged over about 100 steps, and of how many. It holds where
    most ranks have next to nothing in a step, and where a step has no vote.
    """

    def __init__(self) -> None:
        self.usual: dict[int, tuple[float, int]] = {}

    def factors(self, first: int, squares_W: Tensor) -> Tensor:
        """min(1, MOST·reference/‖g_i‖), float64 [W], where the squares lie. Waits for nothing.

        The reference is the ranks' median norm, or the usual one if that is larger. first: of the vote's buckets.
        squares: ‖g_i‖², float64 [W].
        """
        norms, (usual, _) = squares_W.sqrt(), self.usual.get(first, (0.0, 0))
        reference = _median(norms).clamp(min=usual)
        is_known = (norms > 0.0) & (reference > 0.0)
        return torch.where(is_known, MOST * reference / norms, 1.0).clamp_(max=1.0)

    def factors_on_host(self, first: int, squares: Sequence[float], *, alone: bool = False) -> list[float]:
        """As `factors`, to the bit, of numbers that the host has. alone: of one rank, which has not heard of others."""
        norms, (usual, _) = [math.sqrt(square) for square in squares], self.usual.get(first, (0.0, 0))
        reference = usual if alone else max(median_of(norms), usual)
        return [min(1.0, MOST * reference / norm) if norm > 0.0 and reference > 0.0 else 1.0 for norm in norms]

    def learn(self, first: int, squares: Sequence[float]) -> None:
        """Take in the norms of a step that counts. All ranks, the same."""
        median, (usual, steps) = median_of([math.sqrt(x) for x in squares]), self.usual.get(first, (0.0, 0))
        if median > 0.0:
            steps = min(steps + 1, _MEMORY)
            known = min(median, 2.0 * usual) if usual else median  # a storm on all ranks is soon forgotten
            self.usual[first] = usual + (known - usual) / steps, steps

    def record(self) -> dict[int, tuple[float, int]]:
        return dict(self.usual)

    def load_record(self, record: Mapping[int, tuple[float, int]]) -> None:
        self.usual = {first: (norm, steps) for first, (norm, steps) in record.items()}


def median_of(norms: Sequence[float]) -> float:
    """The lower one, of those above 0; 0 if none is."""
    above = sorted(norm for norm in norms if norm > 0.0)
    return above[(len(above) - 1) // 2] if above else 0.0


def _median(norms_W: Tensor) -> Tensor:
    """The lower one, of the ranks that have a gradient; 0 where none has. Of no dimensions."""
    has_any = norms_W > 0.0
    ascending = torch.where(has_any, norms_W, torch.inf).sort().values
    middle = (has_any.sum() - 1).clamp_(min=0) // 2
    return torch.where(has_any.any(), ascending.gather(0, middle.view(1))[0], 0.0)
