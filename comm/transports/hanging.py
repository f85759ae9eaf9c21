"""Calls into torch's store that may never return: a deadline around them, and a look at its connections."""

from __future__ import annotations

import atexit
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TypeVar, cast

T = TypeVar("T")

_LINGER_S = 0.5
_AT_EXIT_S = 5.0
_PAUSE_S = 0.05


def call_within(timeout_s: float, call: Callable[[], T], port: int | None, connected: Set[int] = frozenset()) -> T:
    """Return or raise what call() does. Raises TimeoutError if it does neither in time, and leaves it in its thread.

    port: port of the store that it talks to. connected: sockets over which it talks. After a timeout these, and all
    that it has connected to the port, are shut down, and the process waits for the thread before it ends; see `_Left`.
    """
    ends: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ends.put((True, call()))
        except BaseException as error:
            ends.put((False, error))

    before = sockets() - connected
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        has_returned, end = ends.get(timeout=timeout_s)
    except queue.Empty:
        left = _Left(thread, port, before)
        atexit.register(left.wake, _AT_EXIT_S)
        left.wake(_LINGER_S)
        raise TimeoutError(f"no answer for {timeout_s:g} s") from None
    if has_returned:
        return cast(T, end)
    try:
        raise cast(BaseException, end)
    finally:
        del end  # this frame is in its traceback: a cycle, which would keep all that the callers hold


@dataclass(frozen=True)
class _Left:
    """A thread that is still in a call to a store. before: sockets that do not belong to the call.

    Python ends with SIGABRT if a thread comes back from C++ while it ends: 3 of 4 times in
    tests/processes/test_hanging.py without a wait at the end, and on a busy machine after a wait of half a second.
    """

    thread: threading.Thread
    port: int | None
    before: Set[int]

    def wake(self, patience_s: float) -> None:
        """Shut down its connections, new ones included, until it has returned or patience_s have passed."""
        deadline = time.monotonic() + patience_s
        while self.thread.is_alive() and time.monotonic() < deadline:
            for descriptor in connections(self.port, self.before):
                _shut(descriptor)
            self.thread.join(min(_PAUSE_S, patience_s))


def _shut(descriptor: int) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


def sockets() -> set[int]:
    """The sockets that this process has open; an empty set if the system has no /proc."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def connections(port: int | None, before: Set[int]) -> set[int]:
    """This process's connections to that port, except those in `before`."""
    found = set()
    for descriptor in sockets() - before:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getpeername()[1] == port:
                    found.add(descriptor)
        except (OSError, IndexError):
            continue  # no connection, or ended by now
    return found


def have_ended(connected: Set[int]) -> bool:
    """Whether the process at the other end of any of these connections has ended; one that hangs has not."""
    for descriptor in connected:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return True
        except BlockingIOError:
            continue
        except OSError:
            return True
    return False
