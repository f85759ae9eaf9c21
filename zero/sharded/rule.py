"""ShardedRule: the base of the rules in this folder. Start at `adam.py`; the others are variants of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ...layout.buckets import Buckets
from ...rule import BucketRule
from ...step.bucket_step import Answer, Arrived, BucketStep, Decision, Meeting, Ready
from .bucket import ShardedBucket
from .exchange import Sharded, StepNumbers

if TYPE_CHECKING:
    from ...comm import Work


class ShardedRule(BucketRule[ShardedBucket]):
    """An algorithm with sharded state. Its step yields a `Ready`, and exchanges after the decision.

    Attributes:
        works: Number of operations of its exchange, one after the other.
        placement: The exchange, see `Sharded`.
        buckets: All buckets of the optimizer.
    """

    works: ClassVar[int] = 2  # up and down
    placement: Sharded
    buckets: Buckets[ShardedBucket]

    def step(self, bucket: ShardedBucket, scale: float) -> BucketStep:
        decision: Decision = yield Ready()
        yield from self.take(bucket, decision, scale, None)

    def step_early(self, bucket: ShardedBucket, scale: float) -> BucketStep:
        """As `step`, to the bit, but frames go up before the decision: it yields an `Arrived` after them."""
        frames_WB = yield from self.placement.send_early(bucket, self.numbers(bucket), scale)
        decision: Decision = yield Arrived()
        yield from self.take(bucket, decision, scale, frames_WB)

    @abstractmethod
    def take(
        self, bucket: ShardedBucket, decision: Decision, scale: float, early_WB: Tensor | None
    ) -> Generator[Work | Meeting, Answer, None]:
        """Take the step, after the decision.

        Args:
            bucket: The bucket.
            decision: The result of the vote.
            scale: Factor of the gradients, before clipping.
            early_WB: The frames that `step_early` has sent; None in `step`.
        """

    def bind(self, placement: Sharded, buckets: Buckets[ShardedBucket]) -> None:
        """Take the optimizer's placement and buckets. The optimizer calls it once, before the first bucket is made."""
        self.placement, self.buckets = placement, buckets

    def options(self) -> Mapping[str, object]:
        return {}

    def round_name(self) -> str:
        return "step()"

    def numbers(self, bucket: ShardedBucket) -> StepNumbers:
        """Return the numbers of the bucket's group for the step under way."""
        return StepNumbers.of(bucket.group)

    def after_step(self) -> str:
        """Return the phase of the step just taken, for `ShardStats`."""
        return "warmup" if any(b.is_warm and not b.is_idle for b in self.buckets) else "compressed"

    def steps_taken(self) -> int:
        """Return the largest number of steps that any parameter has taken."""
        return max((int(step) for bucket in self.buckets for step in bucket.steps), default=0)
