"""Delayed steps (`delay=1`): a step is left under way, advanced while the next one computes, then landed or dropped.

`under_way.py` has the record of such a step, and saves it. The optimizer judges and commits it, by the same functions
as its other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..agreement.step_vote import Ballot, present_anywhere
from ..comm import PeerError
from ..layout.bucket import Bucket
from ..layout.buckets import Buckets
from ..usage.contract import Group, State
from .bucket_step import Decision
from .driver import Driver
from .replicated import Replicated
from .stats import StopWatch
from .under_way import Lookahead, StepUnderWay, vote_of

if TYPE_CHECKING:
    from ..rule import Rule


@dataclass(frozen=True)
class Landed:
    """A step that was taken, but has not moved its parameters yet.

    Attributes:
        decision: The decision of all ranks.
        options: For each group, the options with which the step was sent.
    """

    decision: Decision
    options: list[Group]


class DelayedSteps:
    """Holds the step under way, if there is one. All ranks call every method, in the same order.

    Args:
        driver: Runs the steps of all buckets.
        buckets: All buckets.
        rule: The optimizer's rule.
        placement: How buckets are exchanged.
        computing: Measures how long a step computes; the work done here is not counted.

    Attributes:
        step: The step that was sent and has not landed; None if there is none.
        forgotten: Its record if a change of members has ended it before it landed, until it is sent again.
    """

    def __init__(
        self,
        driver: Driver[Bucket],
        buckets: Buckets[Bucket],
        rule: Rule,
        placement: Replicated,
        computing: StopWatch,
    ):
        self.step: StepUnderWay | None = None
        self.forgotten: State | None = None
        self._landed: Landed | None = None
        self._driver, self._buckets, self._rule, self._placement = driver, buckets, rule, placement
        self._computing = computing

    def leave(self, ballot: Ballot, clip_factor: float, ahead: Lookahead | None) -> None:
        """Leave the launched step under way, and move the parameters to about where they will be when it lands.

        Args:
            ballot: The step's vote.
            clip_factor: Factor by which its gradients were multiplied.
            ahead: How far parameters look ahead. None: not at all.
        """
        self._driver.suspend()
        if self._placement.hierarchy.local_size > 1:  # the sum inside the node
            self._driver.advance(range(len(self._buckets)), is_awaited=True)
        self.step = StepUnderWay(ballot, clip_factor, self._sent(), ahead)
        self._look_ahead(ahead, 1.0)

    def _sent(self) -> list[Tensor]:
        """For each bucket, a copy of the frames that this rank has sent, before averages replace them."""
        return [bucket.wires[self._placement.codec].sent_HB.clone() for bucket in self._buckets]

    def _look_ahead(self, ahead: Lookahead | None, sign: float) -> None:
        """Move the parameters ahead (sign 1) or back (-1).

        The numbers were agreed on by all ranks: they belong to a step that was taken.
        """
        if ahead is not None:
            decision = Decision(ahead.seen)
            for bucket, weight in zip(self._buckets, ahead.weights, strict=True):
                self._rule.look_ahead(bucket, decision, -sign * weight)
                bucket.masters.write_back(decision.of(bucket))

    def advance(self) -> None:
        """Launch the second phases that are due, after another gradient of the next step has been computed."""
        if self.step is not None:
            self._launch_second_phase(self.step.due(len(self._buckets.params)))

    def advance_all(self) -> None:
        """Launch all remaining second phases, because the next step may have no further gradients."""
        if self.step is not None:
            self._launch_second_phase(self.step.until(len(self._buckets)), is_awaited=True)

    def _launch_second_phase(self, indices: Iterable[int], *, is_awaited: bool = False) -> None:
        with torch.no_grad(), self._computing.paused():
            self._driver.advance(indices, is_awaited=is_awaited)

    def land(self, is_good: Callable[[Ballot], bool], commit: Callable[[Decision, float], None]) -> list[str] | None:
        """Decide the step under way and commit it, with the options with which it was sent.

        If it is taken, `follow` moves the parameters later: the next step need not wait for that.

        Args:
            is_good: Returns whether the step of this vote counts. If it raises, the step is under way again, as it was.
            commit: Commits the decision, with this clip factor.

        Returns:
            None if the step was taken. If all ranks skip it, the names of the parameters for which this rank has sent
            values that are not finite.
        """
        step = self.step
        assert step is not None
        self._look_ahead(step.ahead, -1.0)  # while the last buckets are on the wire
        self._driver.resume()
        with self._buckets.with_options(step.options):
            try:
                is_taken = is_good(step.ballot)
            except BaseException as error:
                self._driver.suspend()  # a state that is saved now must still contain the step
                if isinstance(error, PeerError) and self._placement.transport.ranks_change:
                    step.ahead = None  # ahead and back once more would leave other bits than on other members
                else:
                    self._look_ahead(step.ahead, 1.0)
                raise
            self.step = None
            if is_taken:
                self._landed = Landed(Decision(present_anywhere(step.ballot.votes), moves=False), step.options)
                commit(self._landed.decision, step.clip_factor)
                return None
        self._driver.skip()
        pairs = zip(self._buckets, step.sent, strict=True)  # the gradients themselves are gone
        return [name for bucket, sent in pairs for name in self._placement.spoilt(bucket, sent)]

    def follow(self) -> None:
        """Move the parameters by the step that has landed, if they have not moved yet."""
        landed, self._landed = self._landed, None
        if landed is None:
            return
        with self._buckets.with_options(landed.options):
            for bucket in self._buckets:
                self._rule.follow(bucket, landed.decision)
                bucket.masters.write_back(landed.decision.of(bucket))

    def drop(self) -> None:
        """Wait for the step under way, and forget it. Nothing was written."""
        if self.step is not None:
            self._driver.resume()
            self._driver.meet()
            self.step.ballot.messages.work.wait()
            self._driver.skip()
            self.step = None

    def forget(self) -> None:
        """Let the parameters be where the last landed step has left them, and keep the step under way as a record.

        Local: nothing is waited for, and the driver has yet to skip the step.
        """
        self.follow()
        if self.step is not None:
            self._look_ahead(self.step.ahead, -1.0)
            self.forgotten = self.step.record(self._buckets[:])
            self.step = None

    def send_forgotten(self, record: State, ahead: Lookahead | None, note: bytes) -> None:
        """Launch the step that was forgotten, among the members as they are now. All ranks.

        Args:
            record: The step.
            ahead: How far parameters look ahead until it lands. None: not at all.
            note: What this member adds to its vote.
        """
        self.send_again(record, ahead, note)
        self.forgotten = None
        self._look_ahead(ahead, 1.0)

    def send_again(self, record: State, ahead: Lookahead | None, note: bytes = b"") -> None:
        """Launch a step that was under way when its state was saved. The rest of the state must have been loaded.

        Args:
            record: The saved step, from `StepUnderWay.record`. If it has no "buckets", this rank has not sent its
                gradients in that step, and does so now, multiplied by "scale".
            ahead: How far parameters look ahead until it lands; they do already. None: not at all.
            note: What this rank adds to its vote. Default b"".
        """
        header, mine = vote_of(record, len(self._buckets.frozen), note)
        with torch.no_grad():
            self._driver.begin()
            self._rule.begin_step()
            for bucket in self._buckets:
                if "buckets" in record:
                    saved = record["buckets"][bucket.index]
                    assert bucket.ef is not None
                    bucket.ef.worker_next.copy_(saved["residual"])
                    step = self._rule.send_again(bucket, saved["sent"])
                else:
                    step = self._rule.step(bucket, record["scale"])
                self._driver.launch(bucket, step, is_alone=True)
            self._driver.suspend()
            sent = self._sent()
            ballot = Ballot.cast(self._placement.transport, header, mine, self._buckets[0].device)
        self.step = StepUnderWay(ballot, record["clip_factor"], sent, ahead)
