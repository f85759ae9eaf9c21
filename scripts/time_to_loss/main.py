"""Loss against seconds of equal work: DDP, PowerSGD, DeMo, DiLoCo, DeepSpeed and ours, on three networks.

    python scripts/bench.py time_to_loss losses --results runs/losses.jsonl
    python scripts/bench.py time_to_loss seconds --results runs/seconds.jsonl
    python scripts/bench.py time_to_loss report --losses runs/losses.jsonl --seconds runs/seconds.jsonl --record FILE

Losses come from simulated ranks, each method once; seconds from steps on emulated hosts, whose computing is emulated by
sleeping: the same loss on every network, at other seconds. What a file holds is not run again. DeepSpeed's optimizers
run in its own environment, which `bench.py peer_deepspeed` makes. The parts are in scripts/time_to_loss/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.peer_deepspeed import why_not_prepared
from provenance import add_record, check_record
from reports import publish

from onebit.cli.cluster import available
from onebit.cli.numbers import number
from time_to_loss import losses, report, seconds
from time_to_loss.ways import WAYS

RATES = ("10mbit", "100mbit", "1gbit")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py time_to_loss", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    common.add_argument("--results", type=Path, required=True, metavar="FILE", help="a JSON line for each run")
    add = commands.add_parser("losses", parents=[common], help="train").add_argument
    add("--task", default="byte-lm")
    add("--ranks", type=int, default=4)
    add("--rows", type=int, default=4, help="of a rank's batch")
    add("--lengths", type=int, nargs="+", default=[250, 500, 1000, 2000, 4000], metavar="STEPS")
    add("--lrs", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3], metavar="LR")
    add("--seeds", type=int, default=1)
    add("--device", default="cpu", help="of all ranks: cuda, with --processes 1 and a task that is worth it, large-lm")
    add("--processes", type=int, default=2, help="runs side by side")
    timing = commands.add_parser("seconds", parents=[common], help="time steps; needs root and iproute2")
    add = timing.add_argument
    add("--rates", nargs="+", default=list(RATES), metavar="RATE")
    add("--hosts", type=int, default=4)
    add(
        "--backend", choices=["gloo", "nccl"], default="gloo", help="nccl: the hosts share a GPU (default: %(default)s)"
    )
    add("--params", type=number, default=25e6, metavar="N")
    add("--compute", type=float, default=0.3, metavar="SECONDS", help="of a step's forward and backward")
    add("--budget", type=float, default=60.0, metavar="SECONDS", help="of a method, once each of its phases has come")
    add_record(timing, "write the seconds there, as a table")
    joining = commands.add_parser("report", help="join both")
    add = joining.add_argument
    add("--losses", type=Path, required=True, metavar="FILE")
    add("--seconds", type=Path, required=True, metavar="FILE")
    add("--control", type=Path, metavar="FILE", help="`seconds` on another number of hosts: a table of its own")
    add_record(joining, "write it there, with its figure beside it as .png")
    commands.add_parser("worker", help="be one rank of `seconds`")
    commands.add_parser("trainer", help="be one rank of DeepSpeed's in `losses`")
    args = parser.parse_args(argv)
    if hasattr(args, "results"):
        check_record(parser, args.results)
        args.ways = _that_run_here(args.ways)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.command == "worker":
        seconds.work()
    elif args.command == "trainer":
        losses.work()
    elif args.command == "losses":
        runs = args.task, args.ways, args.ranks, args.rows, args.lengths, args.lrs, args.seeds, args.device
        wanted = losses.wanted(*runs)
        losses.train_missing(wanted, args.results, args.processes)
    elif args.command == "seconds":
        if (reason := available()) is not None:
            sys.exit(f"time_to_loss: {reason}")
        seconds.time_on(
            args.rates, args.hosts, args.params, args.compute, args.ways, args.budget, args.results, args.backend
        )
        publish(args, seconds.report(seconds.read(args.results)), args.results)
    else:
        _report(args)


def _that_run_here(ways: Sequence[str]) -> list[str]:
    """All, or, where DeepSpeed's environment is missing, the others; says which were left out."""
    reason = why_not_prepared()
    left_out = [way for way in ways if WAYS[way].is_deepspeeds and reason is not None]
    if left_out:
        print(f"time_to_loss: left out: {', '.join(left_out)}: {reason}", file=sys.stderr)
    return [way for way in ways if way not in left_out]


def _report(args: argparse.Namespace) -> None:
    found, timed = losses.read(args.losses), seconds.read(args.seconds)
    control = [] if args.control is None else seconds.read(args.control)
    text = "\n".join(report.report(found, timed, control)) + "\n"
    raw = (file for file in (args.losses, args.seconds, args.control) if file is not None)
    publish(args, text, *raw, shows="Loss against seconds", draw=partial(report.draw, found, timed))
