"""Commands on several hosts, each under its own ssh: passes their output on, and ends all when one fails."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from ..cluster.running import Labelled

END_S = 45.0
"""From closing a command's input to SIGKILL for its ssh: longer than the agent on its host takes to end."""

DRAIN_S = 2.0
_POLL_S = 0.1


class Commands:
    """Commands that hold their standard input open: they end when it is closed. Lines carry their host's name."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alive: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str, argv: Sequence[str]) -> None:
        """In its own session: Ctrl+C reaches the launcher alone, which ends the command in order."""
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._alive[host] = process
        assert process.stdout is not None and process.stderr is not None
        for source, sink in ((process.stdout, 1), (process.stderr, 2)):
            self._selector.register(source, selectors.EVENT_READ, Labelled(sink, host))

    def wait(self) -> tuple[str, int] | None:
        """Wait until all have ended with status 0: None; or until one fails: its host, and its status."""
        return self._pump(None, until=lambda: not self._alive)

    def end(self) -> None:
        """End those that are alive, within `END_S` and `DRAIN_S`."""
        try:
            for process in self._alive.values():
                assert process.stdin is not None
                process.stdin.close()
            deadline = time.monotonic() + END_S
            while self._alive and time.monotonic() < deadline:
                self._pump(deadline, until=lambda: not self._alive)
            self._pump(time.monotonic() + DRAIN_S, until=lambda: not self._selector.get_map())
        finally:  # also after another Ctrl+C
            for process in self._alive.values():
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _pump(self, deadline: float | None, until: Callable[[], bool]) -> tuple[str, int] | None:
        """Pass output on; returns at the first failure."""
        while not until() and (deadline is None or time.monotonic() < deadline):
            self._pass_on()
            for host, process in list(self._alive.items()):
                if (code := process.poll()) is not None:
                    del self._alive[host]
                    if code:
                        return host, code if code > 0 else 128 - code
        return None

    def _pass_on(self) -> None:
        """What has arrived, or arrives soon."""
        for key, _ in self._selector.select(_POLL_S):
            data = os.read(key.fd, 1 << 16)
            key.data.feed(data)
            if not data:
                self._selector.unregister(key.fileobj)
