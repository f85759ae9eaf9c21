"""What `LocalSteps` says about its last step, and the bytes that belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..comm import Transport
from ..step.stats import Traffic, WaitClock
from .round_vote import Ballot


@dataclass
class LocalStats:
    """What the last step did. Bytes as payload this rank sent to others, without headers; times in milliseconds.

    phase: "local", or "round" where something was sent or has landed. interval: steps to the next round.
    bits_per_parameter: of the last step, to other nodes; mean_bits_per_parameter: of all steps of the run.
    rounds: so far. missed_rounds: those of them in which this rank's difference was owed and not counted.
    skipped_steps: inner steps that this rank left out, because its gradients were not finite. weight: this rank's in
    the last round. shadow_rounds: rounds of other ranks it has taken part in without batches of its own (`join`).
    dropped_states: parameters whose inner state was not finite, or let them stand still, and began anew.
    """

    phase: str = "local"
    interval: int = 0
    sent_bytes: int = 0
    sent_bytes_inter_node: int = 0
    bits_per_parameter: float = 0.0
    mean_bits_per_parameter: float = 0.0
    comm_ms: float = 0.0
    rounds: int = 0
    missed_rounds: int = 0
    skipped_steps: int = 0
    weight: float = 1.0
    shadow_rounds: int = 0
    dropped_states: int = 0

    def count_round(self, ballot: Ballot, interval: int) -> None:
        """A round with these votes. interval: steps to the next one."""
        self.rounds += 1
        self.missed_rounds += not ballot.mine.is_present
        self.shadow_rounds += ballot.mine.is_finished and ballot.goes_on
        self.interval = interval


class LocalTraffic:
    """The bytes of each step and of the run, and how long this rank waits for others.

    sent_in_run: to other nodes. elements: that this rank trains. in_backward: gradients travel inside the node during
    backward, and count in the step; otherwise what is sent between two steps is someone else's.
    """

    def __init__(self, transport: Transport):
        self._all, self._inter_node = Traffic(transport), Traffic(transport)
        self.waited, self.sent_in_run, self.elements = WaitClock(), 0, 1

    def begin(self, *, in_backward: bool) -> None:
        """A step, or a round between two, begins."""
        self.waited.total_s = 0.0
        self._inter_node.begin()
        if not in_backward:
            self._all.begin()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is sent in here belongs to no step."""
        with self._all.left_out(), self._inter_node.left_out():
            yield

    def end(self, stats: LocalStats, steps: int) -> None:
        """What has begun ends: into its stats. steps: taken in the run."""
        (sent, _), (_, inter_node) = self._all.take(), self._inter_node.take()
        self.sent_in_run += inter_node
        stats.sent_bytes, stats.sent_bytes_inter_node = sent, inter_node
        stats.bits_per_parameter = 8.0 * inter_node / self.elements
        stats.mean_bits_per_parameter = 8.0 * self.sent_in_run / self.elements / max(steps, 1)
        stats.comm_ms = 1e3 * self.waited.total_s
