"""What a lost member takes with it: the residuals that it had not sent.

Nobody else has them, so each member sends the norm of its own with every vote, and the others remember the last one.
The norm is that of the share in the mean: with W members, a worker error e counts e/W, a server error counts in full.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..arithmetic.squares import dot
from ..comm import ErrorFeedback
from ..layout.flat import Layout


class Residual(Protocol):
    """A bucket of any optimizer.

    Attributes:
        layout: Its layout in the current world.
        rank: This rank.
        ef: Its worker and server error; None before compression has begun.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def rank(self) -> int: ...

    @property
    def ef(self) -> ErrorFeedback | None: ...


def residual_norm(buckets: Iterable[Residual]) -> float:
    """Norm of what this rank's residuals add to the mean. Reads the errors once. Local."""
    total = 0.0
    for bucket in buckets:
        if bucket.ef is not None:
            W, worker, server = bucket.layout.world_size, bucket.ef.worker, bucket.ef.server
            own = worker.view(W, -1)[bucket.rank]
            total += dot(worker, worker) / W**2 + 2.0 * dot(own, server) / W + dot(server, server)
    return math.sqrt(max(total, 0.0))  # rounding may leave it just below 0


@dataclass(frozen=True)
class Loss:
    """The residuals that lost members took with them.

    Attributes:
        elements: Number of errors: one for each element of the parameters, and one for each that the member averaged.
        norm: Sum over these members of the norm of their residuals' share in the mean, as of their last vote: an upper
            bound for the norm of what is missing from it.
    """

    elements: int = 0
    norm: float = 0.0


NOTHING_LOST = Loss()


class Residuals:
    """What is known of the residuals of each member, by its name."""

    def __init__(self) -> None:
        self._known: dict[str, Loss] = {}
        self._layouts: tuple[int, list[int]] = 0, []

    def hear(self, epoch: int, names: Sequence[str], norms: Iterable[float], buckets: Sequence[Residual]) -> None:
        """Remember what the members of an epoch have told of their residuals.

        Args:
            epoch: Its number.
            names: Its members, by rank.
            norms: For each, its `residual_norm`.
            buckets: This rank's, laid out as theirs.
        """
        if self._layouts[0] != epoch:
            self._layouts = epoch, [_elements(buckets, rank) for rank in range(len(names))]
        has_begun = any(bucket.ef is not None for bucket in buckets)
        for name, norm, elements in zip(names, norms, self._layouts[1], strict=True):
            self._known[name] = Loss(elements if has_begun else 0, norm)

    def take(self, lost: Collection[str]) -> Loss:
        """Forget these members, and return what went with them. One that has not voted yet had no residual."""
        gone = [self._known.pop(name) for name in lost if name in self._known]
        return Loss(sum(its.elements for its in gone), sum(its.norm for its in gone))


def _elements(buckets: Iterable[Residual], rank: int) -> int:
    return sum(bucket.layout.parameter_numel + int(bucket.layout.counts()[rank].sum()) for bucket in buckets)
