"""ShardedRule: what the rules of this room have in common. Start at `adam.py`, from which the others differ."""

from __future__ import annotations

from collections.abc import Mapping

from ...layout.buckets import Buckets
from ...rule import BucketRule
from .bucket import ShardedBucket
from .exchange import Sharded, StepNumbers


class ShardedRule(BucketRule[ShardedBucket]):
    """An algorithm whose state is sharded. Its step yields a `Ready`, and exchanges behind the decision."""

    placement: Sharded
    buckets: Buckets[ShardedBucket]

    def bind(self, placement: Sharded, buckets: Buckets[ShardedBucket]) -> None:
        """Take over the optimizer's parts."""
        self.placement, self.buckets = placement, buckets

    def options(self) -> Mapping[str, object]:
        return {}

    def round_name(self) -> str:
        return "step()"

    def begin_group(self) -> None:
        """A group was added."""
        return

    def numbers(self, bucket: ShardedBucket) -> StepNumbers:
        """The bucket's, for the step under way."""
        return StepNumbers.of(self.buckets.group(bucket))

    def after_step(self) -> str:
        return "warmup" if any(bucket.is_warm for bucket in self.buckets) else "compressed"

    def steps_taken(self) -> int:
        """The most steps that any parameter has taken."""
        return max((int(step) for bucket in self.buckets for step in bucket.steps), default=0)
