"""What an optimizer says of its last step, and the bytes that belong to it."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

from ..comm import Transport, Work
from .bucket_step import Answer, Meeting

T = TypeVar("T")
Y = TypeVar("Y")


@dataclass
class Stats:
    """What the last step did. Times in milliseconds, bytes as payload this rank sent to others, without headers.

    sent_bytes_inter_node: those to other nodes, which is what a slow network carries; bits_per_parameter is of these.
    The same as sent_bytes where the transport is flat. comm_ms: how long step() waited for exchanges and votes.
    resent_steps: how many steps were sent twice, so far. shadow_steps: how many steps of other ranks this one has taken
    part in without batches of its own (`join`). grad_norm: of the mean gradient, before clipping; exact or the
    estimate, as `clip.py` has it. None without max_grad_norm, and when skipped.
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


@dataclass
class WaitClock:
    """How long this rank has waited for others."""

    total_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """What happens in here is waiting."""
        began = time.perf_counter()
        yield
        self.total_s += time.perf_counter() - began

    def timed(self, exchange: Generator[Y, Answer, T]) -> Generator[Y, Answer, T]:
        """The same exchange, or step of a bucket, with its Works on this clock while they are waited for."""
        answer = None
        try:
            while True:
                said = exchange.send(answer)
                answer = yield said if isinstance(said, Meeting) else cast("Y", _TimedWork(cast(Work, said), self))
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
    """The time between two steps, without what the optimizer itself does in between."""

    def __init__(self, samples: int = 20):
        self._times: collections.deque[float] = collections.deque(maxlen=samples)
        self._began: float | None = None
        self._paused_s = 0.0

    def start(self) -> None:
        """A step has ended."""
        self._began, self._paused_s = time.perf_counter(), 0.0

    def stop(self) -> None:
        """The next one begins."""
        if self._began is not None:
            self._times.append(time.perf_counter() - self._began - self._paused_s)
            self._began = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here does not count."""
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def median_s(self) -> float:
        """Of the last steps; 0 where there were none."""
        return statistics.median(self._times) if self._times else 0.0


class Traffic:
    """The bytes that a transport has sent since the last step: to anybody, and to other nodes."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._before = self._now()

    def _now(self) -> tuple[int, int]:
        return self._transport.sent_bytes, self._transport.sent_bytes_inter_node

    def begin(self) -> None:
        """What was sent so far belongs to no step."""
        self._before = self._now()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is sent in here belongs to no step."""
        before = self._now()
        yield
        sent, inter_node = (now - then for now, then in zip(self._now(), before, strict=True))
        self._before = self._before[0] + sent, self._before[1] + inter_node

    def take(self) -> tuple[int, int]:
        """What this step has sent; the next one begins."""
        before, self._before = self._before, self._now()
        sent, inter_node = (now - then for now, then in zip(self._before, before, strict=True))
        return sent, inter_node
