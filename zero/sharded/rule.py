"""ShardedRule: what the rules of this room have in common. Start at `adam.py`, from which the others differ."""

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
    """An algorithm whose state is sharded. Its step yields a `Ready`, and exchanges after the decision.

    works: how many operations its exchange takes, one after the other.
    """

    works: ClassVar[int] = 2  # up and down
    placement: Sharded
    buckets: Buckets[ShardedBucket]

    def step(self, bucket: ShardedBucket, scale: float) -> BucketStep:
        decision: Decision = yield Ready()
        yield from self.take(bucket, decision, scale, None)

    def step_early(self, bucket: ShardedBucket, scale: float) -> BucketStep:
        """As `step`, to the bit, but that frames go up before the decision: it yields an `Arrived` after them."""
        frames_WB = yield from self.placement.send_early(bucket, self.numbers(bucket), scale)
        decision: Decision = yield Arrived()
        yield from self.take(bucket, decision, scale, frames_WB)

    @abstractmethod
    def take(
        self, bucket: ShardedBucket, decision: Decision, scale: float, early_WB: Tensor | None
    ) -> Generator[Work | Meeting, Answer, None]:
        """The step after the decision. early: the frames of `step_early`."""

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
        return StepNumbers.of(bucket.group)

    def after_step(self) -> str:
        return "warmup" if any(bucket.is_warm for bucket in self.buckets) else "compressed"

    def steps_taken(self) -> int:
        """The most steps that any parameter has taken."""
        return max((int(step) for bucket in self.buckets for step in bucket.steps), default=0)
