"""What a lost member takes with it: the residuals that it had not sent.

Nobody else has them, so each member sends the norm of its own with every vote, and the others remember the last one.
With local steps that norm is exact; an optimizer that votes in every step measures a part of it each time.
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

PARTS = 16
"""Of the residuals a step's vote measures one part in this many."""


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
    return _norm(_square(bucket, bucket.ef, 0, 1) for bucket in buckets if bucket.ef is not None)


class RunningResidualNorm:
    """`residual_norm` for every step, of which each call measures one part in `PARTS` anew.

    To read 25 M errors takes 4 to 10 ms, as much as a tenth of a step at 1 Gbit/s, and a loss is a rare event.
    """

    def __init__(self) -> None:
        self._of: list[tuple[ErrorFeedback, int]] = []  # and in a world of which size
        self._squares: list[float] = []
        self._next = 0

    def __call__(self, buckets: Sequence[Residual]) -> float:
        residuals = [(bucket, bucket.ef) for bucket in buckets if bucket.ef is not None]
        if not residuals:
            return 0.0
        cuts = -(-PARTS // len(residuals))  # of a bucket
        count, of = cuts * len(residuals), [(ef, its.layout.world_size) for its, ef in residuals]
        due = [(self._next + k) % count for k in range(-(-count // PARTS))]
        if [(id(ef), W) for ef, W in of] != [(id(ef), W) for ef, W in self._of]:  # the first call in this world
            self._of, self._squares, due = of, [0.0] * count, list(range(count))
        for k in due:
            self._squares[k] = _square(*residuals[k // cuts], k % cuts, cuts)
        self._next = (due[-1] + 1) % count
        return _norm(self._squares)


def _square(bucket: Residual, ef: ErrorFeedback, cut: int, cuts: int) -> float:
    """Of one of several cuts through the chunks of a bucket."""
    layout, W = bucket.layout, bucket.layout.world_size
    part = slice(layout.chunk * cut // cuts, layout.chunk * (cut + 1) // cuts)
    rows, server = ef.worker.view(W, -1)[:, part], ef.server[part]
    own = 2.0 * dot(rows[bucket.rank], server) / W + dot(server, server)
    return sum(dot(row, row) for row in rows) / W**2 + own


def _norm(squares: Iterable[float]) -> float:
    return math.sqrt(max(sum(squares), 0.0))  # rounding may leave the sum just below 0


@dataclass(frozen=True)
class Loss:
    """The residuals that lost members took with them.

    Attributes:
        elements: Number of errors: one for each element of the parameters, and one for each that the member averaged.
        norm: Sum over these members of the norm of their residuals' share in the mean, as of their last votes: an upper
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
            norms: For each, its `residual_norm` or `RunningResidualNorm`.
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
