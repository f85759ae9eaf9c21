"""The cluster seen from outside: start it, shape its links, read its counters, run commands, and end it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .launchers import LAUNCHERS, ClusterError, hosts_environment
from .machine import ENTER, INTERFACE, KEEPER, MAX_HOSTS, SEARCH_PATH, SWITCH, send_request
from .queues import parse_rate, queue_arguments
from .running import Running

ANSWER_S = 60.0  # a machine's daemon needs milliseconds; waiting longer means it is stuck
_ALONE = ("-E", "-s", "-S", str(Path(__file__).resolve().with_name("alone.py")))
"""For a Python that reads neither its environment nor any site packages."""


@dataclass(frozen=True)
class HostTraffic:
    """What one host sent and received: frames with all their headers, acknowledgements included."""

    host: str
    address: str
    sent_bytes: int
    packets: int
    drops: int  # at the host's own queue
    received_bytes: int
    arrival_drops: int  # at the switch's port towards the host
    tx_bytes: int  # the interface's own counter, which sees large packets before they are cut into frames

    def since(self, earlier: HostTraffic) -> HostTraffic:
        counts = {k: v - getattr(earlier, k) for k, v in asdict(self).items() if isinstance(v, int)}
        return replace(self, **counts)


@dataclass(frozen=True)
class Run:
    """A finished command: exit status, wall time with start-up, traffic per host, and captured output of rank 0."""

    status: int
    seconds: float
    traffic: list[HostTraffic]
    output: str


class Cluster:
    """Emulated hosts ob0, ob1, … (10.77.0.1, 10.77.0.2, …) on one switch, during a `with` block.

    with Cluster(hosts=4, rate="100mbit") as cluster:
        run = cluster.run(["python", "train.py"], launcher="torchrun")
        print(run.traffic[0].sent_bytes)

    Every link is limited to `rate` in both directions at once. One command at a time. A Cluster belongs to the process
    that made it, and ends with it, even if that is killed.
    """

    def __init__(self, hosts: int, rate: str = "none") -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts={hosts}: between 1 and {MAX_HOSTS} can be emulated")
        self.rate = rate
        self.bits_per_s = parse_rate(rate)
        self.names = [f"ob{k}" for k in range(hosts)]
        self.addresses = [f"10.77.0.{k + 1}" for k in range(hosts)]
        self.directory = ""
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        try:
            self._start()
            self._configure()
            self.shape(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process in the hosts, and the hosts. Returns when they have ended; idempotent."""
        if self._keeper is not None:
            self._keeper.communicate(b".")  # closing the lifeline is not enough: a forked child may hold it too
            self._keeper = None
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def shape(self, rate: str) -> None:
        """Limit all links to `rate`; "none" lifts the limit. Not during a run: the counters may restart from zero."""
        bits_per_s = parse_rate(rate)
        queue = queue_arguments(bits_per_s)
        for name in self.names:
            self._call(name, ["tc", "qdisc", "replace", "dev", INTERFACE, "root", *queue.split()])
        lines = [f"qdisc replace dev p{k} root {queue}" for k in range(len(self.names))]
        self._call(SWITCH, ["tc", "-batch", "-"], "\n".join(lines))
        self.rate, self.bits_per_s = rate, bits_per_s

    def traffic(self) -> list[HostTraffic]:
        """The counters of every host since the last shape()."""
        ports = self._ask(SWITCH, "count", [f"p{k}" for k in range(len(self.names))])["queues"]
        return [self._traffic_of(k, port) for k, port in enumerate(ports.values())]

    def run(
        self,
        command: Sequence[str],
        *,
        launcher: str = "torchrun",
        ranks_per_host: int = 1,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        capture: bool = False,
    ) -> Run:
        """Run `command` on all hosts and wait for it. Its status is the first one that is not zero, or 124 (timeout).

        launcher: one of LAUNCHERS. env: added to this process's environment. capture: collect the standard output of
        the first host instead of passing it on. Processes that the command left running in the hosts are killed.
        """
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher {launcher!r}: one of {', '.join(LAUNCHERS)}")
        starts = LAUNCHERS[launcher](self, list(command), ranks_per_host, hosts_environment(self, ranks_per_host, env))
        before, began = self.traffic(), time.monotonic()
        running = Running(capture)
        try:
            for start in starts:
                running.start(self._connect(start.host), start)
            status = running.wait(timeout_s)
        finally:
            seconds = time.monotonic() - began
            for name in self.names:
                self._ask(name, "end")
            running.drain()
        traffic = [after.since(earlier) for after, earlier in zip(self.traffic(), before, strict=True)]
        return Run(status, seconds, traffic, running.captured.decode(errors="replace"))

    def _start(self) -> None:
        for tool in ("ip", "tc"):
            if shutil.which(tool, path=SEARCH_PATH) is None:
                raise ClusterError(f"`{tool}` is missing: apt-get install iproute2")
        if not hasattr(os, "pidfd_open"):
            raise ClusterError("emulated hosts need Linux 5.3 or later")
        self.directory = tempfile.mkdtemp(prefix="onebit-cluster-", dir="/tmp")  # short: socket paths end at 108 bytes
        known = "".join(f"{a} {name}\n" for a, name in zip(self.addresses, self.names, strict=True))
        Path(self.directory, "hosts").write_text("127.0.0.1 localhost\n" + known)
        agent = Path(self.directory, "enter")
        words = shlex.join([sys.executable, *_ALONE, ENTER, self.directory])
        agent.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        agent.chmod(0o755)
        with open(f"{self.directory}/errors", "w+") as errors:
            self._keeper = subprocess.Popen(
                [sys.executable, *_ALONE, KEEPER, self.directory, *self.names],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
            if self._keeper.stdout is None or not self._keeper.stdout.read(1):
                errors.seek(0)
                raise ClusterError(f"cannot emulate hosts here: {errors.read().strip()}")

    def _configure(self) -> None:
        for name, address in zip(self.names, self.addresses, strict=True):
            lines = ["link set lo up", f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up"]
            self._call(name, ["ip", "-batch", "-"], "\n".join(lines))

    def _connect(self, machine: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"{self.directory}/{machine}")
        except OSError as error:
            connection.close()
            raise ClusterError(f"{machine} is not running: {error}; a Cluster lives within its `with` block") from error
        return connection

    def _ask(self, machine: str, what: str, interfaces: Sequence[str] = ()) -> dict[str, Any]:
        with self._connect(machine) as connection, connection.makefile() as answer:
            connection.settimeout(ANSWER_S)
            send_request(connection, {"do": what, "interfaces": interfaces}, [])
            text = answer.read()
        if not text:
            raise ClusterError(f"{machine} does not answer")
        answered: dict[str, Any] = json.loads(text)
        return answered

    def _call(self, machine: str, argv: list[str], stdin: str = "") -> None:
        """Run a configuration command to its end. Raises ClusterError with its output if it fails."""
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as written:
            given.write(stdin)
            given.seek(0)
            fds = [given.fileno(), written.fileno(), written.fileno()]
            with self._connect(machine) as connection:
                connection.settimeout(ANSWER_S)
                request = {"do": "start", "argv": argv, "cwd": "/", "env": {"PATH": SEARCH_PATH}}
                send_request(connection, request, fds)
                status = connection.recv(16)
            written.seek(0)
            if status != b"0":
                raise ClusterError(f"`{shlex.join(argv)}` failed on {machine}: {written.read().strip()}\n{stdin}")

    def _traffic_of(self, k: int, port: dict[str, int]) -> HostTraffic:
        answer = self._ask(self.names[k], "count", [INTERFACE])
        return HostTraffic(
            self.names[k], self.addresses[k], **answer["queues"][INTERFACE],
            received_bytes=port["sent_bytes"], arrival_drops=port["drops"], tx_bytes=answer["tx_bytes"][INTERFACE],
        )  # fmt: skip


def available() -> str | None:
    """None if this machine can emulate hosts, else the reason why not. Tries it, which takes a quarter of a second."""
    if sys.platform != "linux":
        return "emulated hosts need Linux"
    try:
        with Cluster(hosts=1, rate="100mbit"):
            return None
    except (ClusterError, OSError) as error:
        return str(error)
