"""What the step of a bucket yields: Works, and then what it says where the steps of all buckets meet.

A rule (`rule.py`) writes a bucket's step as one generator. It yields each `Work` that it launches, and goes on when
that is done. Then it yields a `Meeting`, waits until the steps of all buckets have come to theirs, and is told what
all ranks have decided. `driver.py` runs them.
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
    """What a bucket's step says where the steps of all buckets wait for each other."""


class Ready(Meeting):
    """Nothing has been sent: it waits for a vote on the gradients. The answer is a `Decision`; a skipped step ends."""


@dataclass
class Arrived(Meeting):
    """All that was exchanged is here, and nothing has been written. The answer is a `Decision`; a skipped step ends.

    witness: of the frames that have arrived. mean_gradient: float32 [W·N], where gradients were exchanged: for their
    norm. In a step without traffic grads: this rank's own, and scale: what they are to be multiplied by.
    """

    witness: Witness | None = None
    mean_gradient: Tensor | None = None
    grads: Sequence[Tensor | None] = ()
    scale: float = 1.0


@dataclass
class OwnersReplied(Meeting):
    """What owners say of their chunks is here, all of it finite, and no parameter has moved.

    The answer: whether the step counts. A bucket that all ranks skip ends.
    """

    witness: Witness


@dataclass(frozen=True)
class Decision:
    """What all ranks have decided. seen: for each parameter from number `first` on, whether any rank has a gradient.

    clip_factor: for a mean gradient, or for the gradients that are to be sent; what was exchanged in other steps has
    been clipped before. A tensor of no dimensions if the host has not waited for it. grads_nonfinite: in a step without
    traffic, whether this replica's gradients count as zero. moves: False: parameters stay, until the rule's `follow`.
    """

    seen: Sequence[bool]
    clip_factor: float | Tensor = 1.0
    grads_nonfinite: bool = False
    first: int = 0
    moves: bool = True

    def of(self, bucket: AnyBucket) -> Sequence[bool]:
        """For each of the bucket's parameters."""
        return self.seen[bucket.first - self.first :][: len(bucket.params)]


Answer: TypeAlias = Any  # to an Arrived a Decision; to others what the rule's `meet` says
BucketStep: TypeAlias = Generator[Work | Meeting, Answer, None]
