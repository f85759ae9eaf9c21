"""The thread that drives MPI's non-blocking operations, and the tasks that it drives.

MPI moves a non-blocking operation only while a thread tests it (Open MPI, MPICH and Intel MPI, measured), so a thread
does that while the caller computes. Rests on `notes.py`; `mpi.py` posts the operations and waits for them.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .notes import Note, Operation

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)

# The thread sleeps this long between two tests, doubling while nothing completes. 4 ranks on 2 cores, Open MPI 5.0.11,
# 20 Nov 2026: a longest pause of 0.2 ms burns 6 % of a core while peers are late (0.1 ms: 9 %, 1 ms: 2 %); an exchange
# of 1 kB per peer takes 0.26 ms, polled without a pause 0.19 ms; of 4 MB through shared memory 22 ms and 14 ms; 0.1 to
# 1 MB, and everything over TCP but 1 kB (0.94 and 0.76 ms), no slower (one run each, others on the machine).
# The library's own non-blocking collectives are not used: Open MPI's Iallreduce sent 1.33 times the bytes of a ring
# and took 3.5 times the limit of a 100 Mbit/s transport (16 MB, 4 hosts).
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 200e-6

Posted = list[tuple["MPI.Request", "int | None"]]
"""Requests, each with the peer on whom its completion depends (None: any)."""


class Listener(Protocol):
    """A transport whose peers may call the roll."""

    def hear(self, task: Task) -> None:
        """Answer those that do, while this rank waits in the task. Called by the progress thread."""

    def note(self, task: Task, suspects: Sequence[int]) -> Note:
        """A note that this rank waits in this task."""


class Task:
    """One operation, shared by the caller and the progress thread."""

    def __init__(
        self,
        transport: Listener,
        operation: Operation,
        phases: Sequence[Callable[[], Posted]],
        tensors: tuple[Tensor, ...],
    ):
        self.transport = transport
        self.operation = operation
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.blamed: tuple[int, ...] = ()  # peers, once it has failed
        self._phases = collections.deque(phases)
        self._tensors = tensors
        self._requests: list[MPI.Request] = []
        self._peers: list[int | None] = []

    def post(self) -> None:
        """Start the next phase."""
        posted = self._phases.popleft()()
        self._requests = [request for request, _ in posted]
        self._peers = [peer for _, peer in posted]

    def test(self) -> bool:
        """Whether any request completed just now. After the last one, posts the next phase or ends the operation."""
        completed = self._requests[0].Testsome(self._requests) if self._requests else None
        if completed is None or not any(self._requests):
            if self._phases:
                self.post()
            else:
                self.ended.set()
            return True
        return len(completed) > 0

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def missing(self) -> tuple[int, ...]:
        """Peers with incomplete requests; empty if the library does not tell."""
        peers = {peer for request, peer in zip(self._requests, self._peers, strict=False) if request}
        return tuple(sorted(peer for peer in peers if peer is not None))


class Progress:
    """The thread that makes all MPI calls of one transport and of those split from it.

    waits_in: task that the caller waits for, or in which it has failed.
    """

    def __init__(self) -> None:
        self.transports: list[Listener] = []
        self.waits_in: Task | None = None
        self._queue: collections.deque[Task] = collections.deque()
        self._changed = threading.Condition()
        self._hearing = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="onebit-mpi-progress", daemon=True)
        self._thread.start()

    def serve(self, transport: Listener) -> None:
        with self._hearing:
            self.transports.append(transport)

    def forget(self, transport: Listener) -> None:
        """From here on the thread makes no call on the transport's communicator, except for operations in flight."""
        with self._hearing:
            self.transports.remove(transport)

    def submit(self, task: Task) -> None:
        with self._changed:
            self._queue.append(task)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread, even if operations are still in flight."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        in_flight: list[Task] = []
        pause_s = FIRST_PAUSE_S
        while (fresh := self._take(in_flight, pause_s)) is not None:
            for task in fresh:
                _guarded(task, task.post)
            in_flight += fresh
            has_moved = any([_guarded(task, task.test) for task in in_flight])
            in_flight = [task for task in in_flight if not task.ended.is_set()]
            if pause_s == LONGEST_PAUSE_S and (waits_in := self.waits_in) is not None:
                self._hear(waits_in)
            pause_s = FIRST_PAUSE_S if has_moved or fresh else min(2 * pause_s, LONGEST_PAUSE_S)

    def _hear(self, waits_in: Task) -> None:
        with self._hearing:
            for transport in self.transports:
                try:
                    transport.hear(waits_in)
                except Exception as error:  # MPI's errors must not end this thread
                    _log.info("cannot answer a roll call: %s", error)

    def _take(self, in_flight: Sequence[Task], pause_s: float) -> list[Task] | None:
        """New operations; None: stop. Waits for pause_s if operations are in flight, else until there is a new one."""
        with self._changed:
            if not self._queue and not self._is_stopping:
                self._changed.wait(pause_s if in_flight or self.waits_in is not None else None)
            if self._is_stopping:
                return None
            fresh = list(self._queue)
            self._queue.clear()
            return fresh


def _guarded(task: Task, act: Callable[[], bool | None]) -> bool:
    """Run one step of an operation. An exception goes to the caller that waits for it."""
    if task.ended.is_set():
        return False
    try:
        return bool(act())
    except Exception as error:
        task.fail(error)
        return True
