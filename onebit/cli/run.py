"""`onebit run`: a script as a member of a run whose members come and go, started again after a crash."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from ..membership import MembershipError
from ..membership.network import ADDRESS, FOUNDERS, TOKEN, parse_address, reach
from ..membership.published import read_end
from . import UserError
from .cluster.launchers import path_with_own_python

_ABOUT = """\
Starts a script on this machine as a member of a run. `onebit.membership.connect()` in it needs no arguments: it finds
the rendezvous, the number of founders and the token in its environment. Use the same command on every machine, for the
first members and for those that come later.

  onebit run --join host:29400 --founders 4 --token-file run.token -- python train.py
"""

_EPILOG = """\
A process that ends with another status than 0, or by a signal, is started again after 1 s, then 2, 4 and so on up to
60 s; a newcomer with a new name, it gets the run's state from the others. It is not started again if the run has ended,
nor after Ctrl+C or SIGTERM, which are passed on to it. Exit status: the script's last one; 128 and the signal's number
if a signal ended it. `python` after the -- is the one this command runs under.
"""

LONGEST_WAIT_S = 60.0

PROGRESS_S = 600.0
"""A process that lived as long as this has trained: longer than a newcomer waits to be let in."""


def read_token(file: Path | None) -> str | None:
    """The token of a run: the file's, else the environment's. None: there is none.

    It is no option, because every user of a machine sees the command lines of all processes.

    Raises:
        UserError: The file cannot be read, or is empty.
    """
    if file is None:
        return os.environ.get(TOKEN)
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {file} cannot be read: {error}") from error
    if not token:
        raise UserError(f"--token-file {file} is empty: write the run's token into it, one line")
    return token


def address(text: str) -> str:
    """An argument HOST:PORT."""
    try:
        parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT of `onebit rendezvous`, got {text!r}") from error
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of members, at least 1, got {text!r}")
    return int(text)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    command = list(argv[len(own) + 1 :])
    parser = argparse.ArgumentParser(
        prog="onebit run", usage="onebit run --join HOST:PORT [options] -- COMMAND [ARGUMENT ...]",
        description=_ABOUT, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--join", type=address, required=True, metavar="HOST:PORT", help="address of the run's `onebit rendezvous`")
    add("--founders", type=_count, metavar="N", help="number of members with which the run begins, the same on all "
        f"(default: {FOUNDERS}, or 1)")  # fmt: skip
    add("--token-file", type=Path, metavar="FILE", help=f"read the run's secret from FILE (default: {TOKEN}, or none)")
    add("--restarts", type=int, default=10, metavar="K", help="start it again at most K times in a row after crashes "
        f"within {PROGRESS_S / 60:.0f} minutes of its start (default: 10)")  # fmt: skip
    args = parser.parse_args(own)
    if args.restarts < 0:
        parser.error(f"--restarts: expected at least 0, got {args.restarts}")
    if not command:
        parser.error("no command: write it after --, as in `onebit run --join host:29400 -- python train.py`")
    return args, command


def main(argv: Sequence[str]) -> int:
    args, command = _parse(argv)
    path, token = path_with_own_python(), read_token(args.token_file)
    if shutil.which(command[0], path=path) is None:
        raise UserError(f"{command[0]}: no such command")
    host, port = parse_address(args.join)
    try:
        reach(host, port)  # once: later the rendezvous may be away for a while
    except MembershipError as error:
        raise UserError(str(error)) from error
    environment = os.environ | {"PATH": path, ADDRESS: args.join}
    environment |= {} if args.founders is None else {FOUNDERS: str(args.founders)}
    environment |= {} if token is None else {TOKEN: token}
    child, crashes = _Child(command, environment), 0
    while True:
        began = time.monotonic()
        status = child.run()
        lived_s = time.monotonic() - began
        crashes = 1 if lived_s > PROGRESS_S else crashes + 1
        if status == 0 or child.is_stopped:
            return status
        ended = f"onebit run: {shlex.join(command)} ended with status {status} after {lived_s:.0f} s"
        if crashes > args.restarts:
            print(f"{ended}; it is not started again (--restarts {args.restarts})", file=sys.stderr)
            return status
        if why := _end_of_run(host, port, token or ""):
            print(f"{ended}; the run has ended: {why}", file=sys.stderr)
            return status
        wait_s = min(2.0 ** (crashes - 1), LONGEST_WAIT_S)
        print(f"{ended}; restart {crashes} of {args.restarts} in {wait_s:.0f} s", file=sys.stderr, flush=True)
        if child.is_stopped_within(wait_s):
            return status


def _end_of_run(host: str, port: int, token: str) -> str | None:
    try:
        return read_end(reach(host, port), token)
    except RuntimeError:  # the rendezvous is away, which members survive
        return None


class _Child:
    """A command as a process of this one's group, which gets SIGTERM and Ctrl+C from it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and the child is to ignore it, too
                signal.signal(number, self._pass_on)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has asked this command to end."""
        return bool(self._signals)

    def run(self) -> int:
        """Start it, and return its exit status as a shell has it."""
        self._process = subprocess.Popen(self._command, env=self._environment)
        if self._signals:  # one that came while the process was made
            self._process.send_signal(self._signals[-1])
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def is_stopped_within(self, seconds: float) -> bool:
        """Wait for this time, or until a signal comes; whether one came."""
        deadline = time.monotonic() + seconds
        while not self.is_stopped and time.monotonic() < deadline:
            time.sleep(min(0.1, seconds))
        return self.is_stopped

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._process is not None and not _is_from_terminal(number):
            self._process.send_signal(number)


def _is_from_terminal(number: int) -> bool:
    """Whether the terminal has sent this signal, as Ctrl+C or at its end, and so to the child as well.

    A second one would break off what a script does after the first.
    """
    if number == signal.SIGTERM:
        return False
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
