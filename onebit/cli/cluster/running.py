"""Commands that run on the hosts: passes their output on, and waits for their ends."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

from .launchers import Start
from .machine import send_request

GRACE_S = 5.0  # from SIGTERM to SIGKILL, when one host's failure ends the others
TIMED_OUT = 124  # the exit status of timeout(1)


class Running:
    """Commands started on several hosts: passes their output on, waits for all, ends all when one fails."""

    def __init__(self, capture: bool) -> None:
        self.captured = bytearray()
        self._capture = capture
        self._selector = selectors.DefaultSelector()
        self._alive: set[socket.socket] = set()
        self._status = 0

    def start(self, connection: socket.socket, start: Start) -> None:
        pipes = self._open_pipes(start)
        stdin = 0 if start.is_first and os.isatty(0) else os.open(os.devnull, os.O_RDONLY)
        request = {"do": "start", "argv": start.argv, "cwd": os.getcwd(), "env": start.env}
        try:
            send_request(connection, request, [stdin, *pipes])
        finally:
            for fd in {stdin, *pipes} - {0, 1, 2}:
                os.close(fd)
        self._alive.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._note_end(connection))

    def wait(self, timeout_s: float | None) -> int:
        end = time.monotonic() + timeout_s if timeout_s else None
        try:
            self._pump(end, until=lambda: not self._alive or self._status != 0)
            if self._alive:
                self._status = self._status or TIMED_OUT
                self._end_with(signal.SIGTERM)
        except BaseException as stop:
            self._end_with(signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
            raise
        return self._status

    def drain(self) -> None:
        """Pass on the rest in the pipes. All writers must have ended."""
        self._pump(time.monotonic() + GRACE_S, until=lambda: not self._selector.get_map())
        for connection in self._alive:
            connection.close()
        self._selector.close()

    def _open_pipes(self, start: Start) -> list[int]:
        if not start.is_first:
            return [self._pipe(Labelled(1, start.label).feed), self._pipe(Labelled(2, start.label).feed)]
        return [self._pipe(self.captured.extend) if self._capture else 1, 2]

    def _pipe(self, sink: Callable[[bytes], object]) -> int:
        readable, writable = os.pipe()

        def take() -> None:
            data = os.read(readable, 1 << 16)
            sink(data)
            if not data:
                self._selector.unregister(readable)
                os.close(readable)

        self._selector.register(readable, selectors.EVENT_READ, take)
        return writable

    def _pump(self, end: float | None, until: Callable[[], bool]) -> None:
        while not until() and (end is None or time.monotonic() < end):
            left = None if end is None else max(end - time.monotonic(), 0)
            for key, _ in self._selector.select(left):
                key.data()

    def _note_end(self, connection: socket.socket) -> None:
        self._status = self._status or int(connection.recv(16) or 255)
        self._selector.unregister(connection)
        self._alive.remove(connection)
        connection.close()

    def _end_with(self, number: signal.Signals) -> None:
        for connection in self._alive:
            with contextlib.suppress(OSError):
                connection.send(bytes([number]))
        self._pump(time.monotonic() + GRACE_S, until=lambda: not self._alive)


class Labelled:
    """Passes lines on to a descriptor, each with the name of its host in front."""

    def __init__(self, fd: int, label: str) -> None:
        self.fd, self.label, self.rest = fd, f"[{label}] ".encode(), b""

    def feed(self, data: bytes) -> None:
        """data: the next bytes, none at the end."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines.append(self.rest)
        if lines:
            os.write(self.fd, b"".join(self.label + line + b"\n" for line in lines))
