"""Frames that go up during backward, at stages 0 and 1: whether they may, and whether they still say what they said."""

from __future__ import annotations

from collections.abc import Sequence

from ...layout.buckets import Buckets
from ...step.overlap import Overlap
from ...usage.marks import is_inspected
from .bucket import ShardedBucket
from .rule import ShardedRule


class EarlyFrames(Overlap):
    """`Overlap`, for frames that depend on more than the gradients: on the weights that the rule gives them."""

    def __init__(self, rank: int, is_on: bool, rule: ShardedRule, buckets: Buckets[ShardedBucket]):
        super().__init__(rank, is_on)
        self._rule, self._buckets = rule, buckets
        self._weights: dict[int, tuple[float, float]] = {}  # of what each bucket has sent in the step under way
        self._steps = 0  # in which frames went up early
        self._warms_up = False

    def look_ahead(self) -> None:
        """Note whether the next step is one of a warm-up: its frames would have to be held for all buckets at once."""
        self._warms_up = any(self._rule.placement.config.warms_up(bucket, ahead=1) for bucket in self._buckets)

    @property
    def has_room(self) -> bool:
        """Whether the next step's frames may be sent before its vote, on all ranks."""
        return self.is_on and not self._warms_up

    def note(self, bucket: ShardedBucket, *, in_backward: bool) -> None:
        """The bucket's frames are being made. Some steps look for edits that torch does not count."""
        self.mark_sent(bucket, with_bits=in_backward and is_inspected(self._steps))
        self._weights[bucket.index] = self._weights_of(bucket)

    def _weights_of(self, bucket: ShardedBucket) -> tuple[float, float]:
        numbers = self._rule.numbers(bucket)
        return numbers.betas[0], numbers.share

    def has_changed(self, scale: float) -> bool:
        """Whether what has been sent is no longer what would be sent."""
        are_others = [self._weights_of(self._buckets[index]) != sent for index, sent in self._weights.items()]
        return super().has_changed(scale) or any(are_others)

    def count_resent(self, ranks: Sequence[int]) -> None:
        """As `Overlap.count_resent`; and the step was one whose frames went up early."""
        self._steps += 1
        super().count_resent(ranks)

    def end_step(self) -> None:
        """As `Overlap.end_step`."""
        super().end_step()
        self._weights.clear()
