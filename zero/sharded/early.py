"""Frames that go up during backward, at stages 0 and 1: whether they may, and whether they are still up to date."""

from __future__ import annotations

from ...layout.buckets import Buckets
from ...step.overlap import Overlap
from .bucket import ShardedBucket
from .rule import ShardedRule


class EarlyFrames(Overlap):
    """`Overlap`, for frames that also depend on the weights that the rule gives the gradients."""

    def __init__(self, rank: int, is_on: bool, rule: ShardedRule, buckets: Buckets[ShardedBucket]):
        super().__init__(rank, is_on)
        self._rule, self._buckets = rule, buckets
        self._weights: dict[int, tuple[float, float]] = {}  # by bucket, of the frames sent in this step
        self._warms_up = False

    def look_ahead(self) -> None:
        """Note whether the next step is one of a warm-up: its frames would have to be held for all buckets at once."""
        self._warms_up = any(self._rule.placement.config.holds_warmup(bucket) for bucket in self._buckets)

    @property
    def has_room(self) -> bool:
        """Whether the next step's frames may be sent before its vote, on all ranks."""
        return self.is_on and not self._warms_up

    def note(self, bucket: ShardedBucket, *, in_backward: bool) -> None:
        """Note that the bucket's frames are being made."""
        self.mark_sent(bucket, in_backward=in_backward)
        self._weights[bucket.index] = self._weights_of(bucket)

    def _weights_of(self, bucket: ShardedBucket) -> tuple[float, float]:
        numbers = self._rule.numbers(bucket)
        return numbers.betas[0], numbers.share

    def has_changed(self, scale: float) -> bool:
        """Whether the frames already sent differ from those that would be sent now."""
        are_others = [self._weights_of(self._buckets[index]) != sent for index, sent in self._weights.items()]
        return super().has_changed(scale) or any(are_others)

    def end_step(self) -> None:
        """As `Overlap.end_step`."""
        super().end_step()
        self._weights.clear()
