"""DelayedSteps: steps that land in the next one (`delay=1`): left under way, advanced meanwhile, landed or dropped.

What is kept of such a step, and how that is saved, is in `under_way.py`; whether it is good, and how it is committed,
is asked of the optimizer, whose other steps are decided alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..agreement.step_vote import Ballot, present_anywhere
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
    """A step that was taken, whose parameters have yet to move, with the options it was sent with."""

    decision: Decision
    options: list[Group]


class DelayedSteps:
    """The step under way, if there is one; all ranks do alike. computing: what a step computes, without what is here.

    step: sent, and not landed; None: there is none.
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
        self._landed: Landed | None = None
        self._driver, self._buckets, self._rule, self._placement = driver, buckets, rule, placement
        self._computing = computing

    def leave(self, ballot: Ballot, clip_factor: float, ahead: Lookahead | None) -> None:
        """What was launched travels while the next step computes, where parameters will about be when it lands."""
        self._driver.suspend()
        if self._placement.hierarchy.local_size > 1:  # the sum inside the node
            self._driver.advance(range(len(self._buckets)), is_awaited=True)
        sent = [bucket.wires[self._placement.codec].sent_HB.clone() for bucket in self._buckets]
        self.step = StepUnderWay(ballot, clip_factor, sent, ahead)
        self._look_ahead(ahead, 1.0)

    def _look_ahead(self, ahead: Lookahead | None, sign: float) -> None:
        """There, or with the other sign back. By numbers that all ranks have agreed on: they belong to a step taken."""
        if ahead is not None:
            decision = Decision(ahead.seen)
            for bucket, weight in zip(self._buckets, ahead.weights, strict=True):
                self._rule.look_ahead(bucket, decision, -sign * weight)
                bucket.masters.write_back(decision.of(bucket))

    def advance(self) -> None:
        """Another gradient of the next step has come: launch the second phases that are due."""
        if self.step is not None:
            self._launch_second_phase(self.step.due(len(self._buckets.params)))

    def advance_all(self) -> None:
        """Launch the second phases that have not been: no gradient of the next step may come."""
        if self.step is not None:
            self._launch_second_phase(self.step.until(len(self._buckets)), is_awaited=True)

    def _launch_second_phase(self, indices: Iterable[int], *, is_awaited: bool = False) -> None:
        with torch.no_grad(), self._computing.paused():
            self._driver.advance(indices, is_awaited=is_awaited)

    def land(self, is_good: Callable[[Ballot], bool], commit: Callable[[Decision, float], None]) -> list[str] | None:
        """Decide the step under way, and commit it, with the options it was sent with. None, where it was taken.

        `follow` moves the parameters then: the next step need not wait for that. Where all ranks skip it, the
        parameters whose gradients here were not finite. is_good: whether the step of this vote counts; where it raises,
        the step is under way as it was. commit: with this clip factor.
        """
        step = self.step
        assert step is not None
        self._look_ahead(step.ahead, -1.0)  # while the last buckets are on the wire
        self._driver.resume()
        with self._buckets.with_options(step.options):
            try:
                is_taken = is_good(step.ballot)
            except BaseException:
                self._driver.suspend()  # a state saved now has it still
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
        """Move the parameters by the step that has landed, where they have not moved yet."""
        landed, self._landed = self._landed, None
        if landed is None:
            return
        with self._buckets.with_options(landed.options):
            for bucket in self._buckets:
                self._rule.follow(bucket, landed.decision)
                bucket.masters.write_back(landed.decision.of(bucket))

    def drop(self) -> None:
        """Forget the step under way, once it is here. Nothing was written."""
        if self.step is not None:
            self._driver.resume()
            self._driver.meet()
            self.step.ballot.messages.work.wait()
            self._driver.skip()
            self.step = None

    def send_again(self, record: State, ahead: Lookahead | None) -> None:
        """Launch a step that was under way when its state was saved; the rest of the state is in place."""
        header, mine = vote_of(record, len(self._buckets.frozen))
        with torch.no_grad():
            self._driver.begin()
            for bucket, saved in zip(self._buckets, record["buckets"], strict=True):
                assert bucket.ef is not None
                bucket.ef.worker_next.copy_(saved["residual"])
                self._driver.launch(bucket, self._rule.send_again(bucket, saved["sent"]), is_alone=True)
            sent = [
                saved["sent"].to(bucket.device, copy=True)
                for bucket, saved in zip(self._buckets, record["buckets"], strict=True)
            ]
            self._driver.suspend()
            ballot = Ballot.cast(self._placement.transport, header, mine, self._buckets[0].device)
        self.step = StepUnderWay(ballot, record["clip_factor"], sent, ahead)
