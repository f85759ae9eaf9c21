"""Counts of the last step of `LocalSteps`, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..comm import Transport
from ..step.stats import Traffic, WaitClock
from .round_vote import Ballot


@dataclass
class LocalStats:
    """Counts of the last step and of the run, on this rank.

    Attributes:
        phase: "local", or "round" if something was sent or has landed.
        interval: Steps to the next round.
        sent_bytes: Payload bytes of the last step that this rank sent to others, without headers.
        sent_bytes_inter_node: The part of sent_bytes that went to other nodes.
        bits_per_parameter: Bits of the last step to other nodes, per parameter.
        mean_bits_per_parameter: The same, as the mean over all steps of the run.
        comm_ms: Milliseconds of the last step spent waiting for other ranks.
        rounds: Rounds so far.
        missed_rounds: Rounds in which this rank's difference did not count and was carried over.
        skipped_steps: Inner steps that this rank left out because its gradients were not finite.
        weight: This rank's weight in the last round.
        shadow_rounds: Rounds of other ranks in which this rank took part after its last batch (`join`).
        dropped_states: Parameters whose inner state was reset, because it was not finite or stopped them from moving.
        lost_residuals: Number of errors that went with lost members (`onebit.membership`).
        lost_residual_norm: Sum of the norms of what these would have added to the mean, as of the members' last votes.
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
    lost_residuals: int = 0
    lost_residual_norm: float = 0.0

    def count_round(self, ballot: Ballot, interval: int) -> None:
        """Count a round with these votes. interval: steps to the next one."""
        self.rounds += 1
        self.missed_rounds += not ballot.mine.is_present
        self.shadow_rounds += ballot.mine.is_finished and ballot.goes_on
        self.interval = interval


class LocalTraffic:
    """The bytes of each step and of the run, and how long this rank waits for others.

    sent_in_run: bytes to other nodes. elements: number of elements that this rank trains. in_backward: gradients travel
    inside the node during backward, and count in the step; if not, bytes between two steps belong to other code.
    """

    def __init__(self, transport: Transport):
        self._all, self._inter_node = Traffic(transport), Traffic(transport)
        self.waited, self.sent_in_run, self.elements = WaitClock(), 0, 1

    def begin(self, *, in_backward: bool) -> None:
        """Begin a step, or a round between two steps."""
        self.waited.total_s = 0.0
        self._inter_node.begin()
        if not in_backward:
            self._all.begin()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Bytes sent in this block belong to no step."""
        with self._all.left_out(), self._inter_node.left_out():
            yield

    def end(self, stats: LocalStats, steps: int) -> None:
        """End the step or round, and write its numbers into stats. steps: steps of the run so far."""
        (sent, _), (_, inter_node) = self._all.take(), self._inter_node.take()
        self.sent_in_run += inter_node
        stats.sent_bytes, stats.sent_bytes_inter_node = sent, inter_node
        stats.bits_per_parameter = 8.0 * inter_node / self.elements
        stats.mean_bits_per_parameter = 8.0 * self.sent_in_run / self.elements / max(steps, 1)
        stats.comm_ms = 1e3 * self.waited.total_s
