"""Calls into torch that may never return: a deadline of ours around them."""

from __future__ import annotations

import os
import queue
import socket
import stat
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")

_LINGER_S = 0.5


def call_within(timeout_s: float, call: Callable[[], T], port: int | None) -> T:
    """What call() returns or raises. Raises TimeoutError where it does neither in time, and leaves it in its thread.

    port: of the store that it talks to. What it has connected there is shut then: Python ends with SIGABRT where a
    thread comes back from C++ meanwhile.
    """
    ends: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ends.put((True, call()))
        except BaseException as error:
            ends.put((False, error))

    before = _sockets()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        has_returned, end = ends.get(timeout=timeout_s)
    except queue.Empty:
        _hang_up(port, before)
        thread.join(_LINGER_S)
        raise TimeoutError(f"no answer for {timeout_s:g} s") from None
    if has_returned:
        return cast(T, end)
    raise cast(BaseException, end)


def _sockets() -> set[int]:
    """The sockets that this process has open; none where the system does not tell."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
        except OSError:
            continue  # that of the listing itself
    return found


def _hang_up(port: int | None, before: set[int]) -> None:
    for descriptor in _sockets() - before:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            continue  # no connection, or ended by now
