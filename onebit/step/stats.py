"""The figures that an optimizer reports of its last step, and the counters of bytes and time behind them."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

from ..comm import Transport, Work

T = TypeVar("T")


@dataclass
class Stats:
    """Figures of the last step. Bytes are payload that this rank has sent to other ranks, without headers.

    Attributes:
        phase: Kind of the step. Default "warmup", before the first step.
        sent_bytes: Bytes sent to all ranks.
        sent_bytes_inter_node: Bytes sent to other nodes, over the slow network. Equal to sent_bytes if the transport is
            flat.
        bits_per_parameter: sent_bytes_inter_node in bits, per parameter.
        comm_ms: Milliseconds for which step() waited for exchanges and votes.
        skipped_steps: Number of skipped steps so far.
        clip_factor: Factor by which gradients were clipped; 1 if they were not.
        grad_norm: Norm of the mean gradient before clipping; exact or estimated, see `clip.py`. None without
            max_grad_norm, and if the step was skipped.
        resent_steps: Number of steps that were sent twice so far.
        shadow_steps: Number of steps of other ranks in which this one has taken part without batches so far (`join`).
        lost_residuals: Number of errors that went with lost members so far (`onebit.membership`).
        lost_residual_norm: Sum of the norms of what these would have added to the mean, as of the members' last votes.
    """

    phase: str = "warmup"
    sent_bytes: int = 0
    sent_bytes_inter_node: int = 0
    bits_per_parameter: float = 0.0
    comm_ms: float = 0.0
    skipped_steps: int = 0
    clip_factor: float = 1.0
    grad_norm: float | None = None
    resent_steps: int = 0
    shadow_steps: int = 0
    lost_residuals: int = 0
    lost_residual_norm: float = 0.0


@dataclass
class WaitClock:
    """Measures how long this rank waits for others.

    Attributes:
        total_s: Seconds so far.
    """

    total_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent in this block."""
        began = time.perf_counter()
        yield
        self.total_s += time.perf_counter() - began

    def timed(self, work: Work) -> Work:
        """Wrap a Work so that the time spent waiting for it is counted."""
        return _TimedWork(work, self)

    def wait_for(self, exchange: Generator[Work, None, T]) -> T:
        """Run an exchange to its end, count the time spent waiting for its Works, and return its result."""
        try:
            while True:
                self.timed(next(exchange)).wait()
        except StopIteration as end:
            return cast("T", end.value)


@dataclass
class _TimedWork:
    work: Work
    clock: WaitClock

    def wait(self) -> None:
        with self.clock.running():
            self.work.wait()

    def is_ready(self) -> bool:
        return self.work.is_ready()


class StopWatch:
    """Measures the time between two steps, without the optimizer's own work in between."""

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque(maxlen=20)
        self._began: float | None = None
        self._paused_s = 0.0

    def start(self) -> None:
        """Start the clock: a step has ended."""
        self._began, self._paused_s = time.perf_counter(), 0.0

    def stop(self) -> None:
        """Stop the clock, and keep the time: the next step begins."""
        if self._began is not None:
            self._times.append(time.perf_counter() - self._began - self._paused_s)
            self._began = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent in this block."""
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def median_s(self) -> float:
        """Median over the last steps, in seconds; 0 if there are none."""
        return statistics.median(self._times) if self._times else 0.0


class Traffic:
    """Counts the bytes that a transport has sent since the last step: to all ranks, and to other nodes."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        return self._transport.sent_bytes, self._transport.sent_bytes_inter_node

    def begin(self) -> None:
        """Begin to count: bytes sent so far belong to no step."""
        self._before = self._now()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave out the bytes that are sent in this block."""
        before = self._now()
        yield
        sent, inter_node = (now - then for now, then in zip(self._now(), before, strict=True))
        self._before = self._before[0] + sent, self._before[1] + inter_node

    def take(self) -> tuple[int, int]:
        """The bytes of this step, to all ranks and to other nodes. Counting begins anew."""
        before, self._before = self._before, self._now()
        sent, inter_node = (now - then for now, then in zip(self._before, before, strict=True))
        return sent, inter_node
