"""The protocol of a bucket's step: it yields Works, and Meetings at which the steps of all buckets wait for each other.

A rule (`rule.py`) writes a bucket's step as one generator. It yields each `Work` that it launches, and continues when
that is done. Then it yields a `Meeting`, waits until the steps of all buckets have reached theirs, and receives the
decision of all ranks. `driver.py` runs the generators.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from ..comm import Work
from ..comm.codecs import Witness
from ..layout.buckets import AnyBucket


class Meeting:
    """A point at which a bucket's step waits for the steps of all other buckets."""


class Ready(Meeting):
    """Nothing has been sent: the step waits for a vote on the gradients.

    The answer is a `Decision`; a skipped step ends.
    """


@dataclass
class Arrived(Meeting):
    """The exchange is complete, and nothing has been written. The answer is a `Decision`; a skipped step ends.

    Attributes:
        witness: Shows whether the frames that have arrived are finite. Default None: no frames.
        mean_gradient: The mean gradient, float32 [W·N], if gradients were exchanged; its norm is taken. Default None.
        grads: In a step without traffic, this rank's own gradients. Default ().
        scale: Factor by which grads are to be multiplied. Default 1.
    """

    witness: Witness | None = None
    mean_gradient: Tensor | None = None
    grads: Sequence[Tensor | None] = ()
    scale: float = 1.0


@dataclass
class OwnersReplied(Meeting):
    """The owners' results for their chunks have arrived, all of them finite, and no parameter has moved.

    The answer is whether the step counts. A bucket's step ends if all ranks skip it.

    Attributes:
        witness: Shows whether the frames that the owners have sent are finite.
    """

    witness: Witness


@dataclass(frozen=True)
class Decision:
    """The decision of all ranks on a step.

    Attributes:
        seen: For each parameter from number `first` on, whether any rank has a gradient.
        clip_factor: The factor that gradients still lack. A mean gradient, and gradients that are about to be sent, are
            multiplied by it; what was sent without it is put right in the worker error. A tensor of no dimensions if
            the host has not waited for it. Default 1.
        grads_nonfinite: In a step without traffic, whether this replica's gradients count as zero. Default False.
        first: Number of the parameter at seen[0]. Default 0.
        moves: Whether parameters move now. False: they stay until the rule's `follow`. Default True.
    """

    seen: Sequence[bool]
    clip_factor: float | Tensor = 1.0
    grads_nonfinite: bool = False
    first: int = 0
    moves: bool = True

    def of(self, bucket: AnyBucket) -> Sequence[bool]:
        """The part of `seen` that belongs to the bucket's parameters."""
        return self.seen[bucket.first - self.first :][: len(bucket.params)]


Answer: TypeAlias = Any  # a Decision for an Arrived; for other meetings, what the rule's `meet` returns
BucketStep: TypeAlias = Generator[Work | Meeting, Answer, None]
