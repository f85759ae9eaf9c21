"""The cluster inside: the namespaces of hosts and switch, and the first process of each, which answers on a socket.

These processes run as `alone.py __keeper__` and `__enter__`, without site packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .queues import read_queue, sent_before_cutting

MAX_HOSTS = 64
INTERFACE = "eth0"
SWITCH = "switch"
BRIDGE = "br0"
KEEPER, ENTER = "__keeper__", "__enter__"
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"

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
    """From now on interfaces made in this network get no IPv6 address: announcing it would count as traffic."""
    setting = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    if setting.exists():
        setting.write_text("1")


def send_request(connection: socket.socket, request: Mapping[str, object], fds: Sequence[int]) -> None:
    body = json.dumps(request).encode()
    message = struct.pack("=I", len(body)) + body
    sent = socket.send_fds(connection, [message], fds)
    if sent < len(message):
        connection.sendall(message[sent:])


def _receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
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
        """path: socket to listen on."""
        self.selector = selectors.DefaultSelector()
        self.commands: dict[socket.socket, subprocess.Popen[bytes]] = {}
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
            connection.sendall(json.dumps({"queues": queues, "tx_bytes": sent_before_cutting()}).encode())
        connection.close()

    def _start(self, connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
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
        if connection not in self.commands:  # its command's end came in the same round of events, and closed it
            return
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
        """Kill every other process of this machine, detached ones included, and wait until they have ended."""
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
    """Start one host. Returns a process of this machine that shares the host's network."""
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


def run_keeper(directory: str, names: list[str]) -> None:
    """Keep the switch, the ancestor of all processes in the hosts, until the script that asked ends; then end all."""
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


def enter(directory: str, host: str, words: list[str]) -> int:
    """The replacement for ssh that mpirun calls: run a shell command on another host from inside this one."""
    request = {"do": "start", "argv": ["/bin/sh", "-c", " ".join(words)], "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{directory}/{host}")
        send_request(connection, request, [0, 1, 2])
        return int(connection.recv(16) or 255)
