"""`onebit emulate`: any command on emulated hosts."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from ..output import write_whole
from .hosts import Cluster, Run, available
from .launchers import LAUNCHERS, ClusterError, path_with_own_python
from .machine import MAX_HOSTS
from .queues import parse_rate
from .running import TIMED_OUT

_LONGEST_S = 1e6  # the system's own waits end at some three weeks
_DESCRIPTION = """\
Shows what your own training gains on a slow network before you buy or rent one: emulates hosts on this machine, joined
by Ethernet links of the rate you name, runs your command on them, and counts the bytes that each host sent.

  onebit emulate --hosts 4 --rate 100mbit -- python train.py
  onebit emulate --hosts 4 --rate 1gbit --launcher mpirun --stats traffic.json -- python my_mpi_program.py
"""

_EPILOG = """\
Each host has its own addresses (10.77.0.1, …), name (ob0, ob1, …), processes and shared memory, and the files of this
machine. `python` after the -- is the one this command runs under. The first host writes to your terminal; lines of the
others carry their name (mpirun mixes those of all ranks, as it does everywhere). Exit status: the first one of the
command that is not zero; 124 after --timeout. In a host, ONEBIT_WIRE_COUNTER names the interface whose queue counts:
`tc -s -j qdisc show dev $ONEBIT_WIRE_COUNTER`, or onebit.cli.cluster.sent_on_wire(). Needs Linux, iproute2, and root or
unprivileged user namespaces. All hosts share this machine's processors: only the network is slow, not the computing.
"""


def _parse(arguments: list[str]) -> argparse.Namespace:
    own, command = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, command = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="onebit emulate",
        usage="onebit emulate --hosts N --rate RATE [options] -- COMMAND [ARGUMENT ...]\n       onebit emulate --check",
        description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help=f"hosts, 1 to {MAX_HOSTS} (default 4)")
    parser.add_argument("--rate", default="1gbit", help="rate of each link, in tc's notation: 100mbit, 1gbit (the "
                        "default), 2.5gbit; or none, for links as fast as this machine")  # fmt: skip
    parser.add_argument("--launcher", choices=list(LAUNCHERS), default="torchrun",
                        help="torchrun (default); mpirun (Open MPI); none: start the command itself, with RANK, "
                        "WORLD_SIZE, MASTER_ADDR, … set")  # fmt: skip
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="R", help="processes on each host (default 1)")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="write the traffic of each host to FILE, as JSON")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the command after this time")
    parser.add_argument("--check", action="store_true", help="only check whether this machine can emulate hosts")
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
        return f"--ranks-per-host {options.ranks_per_host}: expected at least 1"
    if options.timeout is not None and not 0 < options.timeout <= _LONGEST_S:
        return f"--timeout {options.timeout:g}: expected more than 0 seconds, and at most {_LONGEST_S:g}"
    if options.stats is not None and not options.stats.absolute().parent.is_dir():
        return f"--stats {options.stats}: there is no such folder"
    if not options.command:
        return "no command: write it after --, as in `onebit emulate --hosts 4 -- python train.py`"
    if shutil.which(options.command[0], path=path_with_own_python()) is None:
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
        print(f"onebit emulate: ended after --timeout {options.timeout:g} s", file=sys.stderr)
    print(f"\n{options.hosts} hosts at {options.rate}, {run.seconds:.1f} s\n{_table(run)}", file=sys.stderr)
    if options.stats is not None:
        text = json.dumps(_statistics(options, run), indent=1) + "\n"
        write_whole("--stats", options.stats, lambda part: part.write_text(text, encoding="utf-8"))
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
        print(f"onebit emulate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
