"""What `onebit doctor` predicts of a step, and what it takes then, on the same emulated hosts.

    python scripts/bench.py forecasts --folder runs/forecasts --record runs/forecasts.md

The doctor times steps of a few matrices, and knows nothing of the runs that it is compared with: those of
`bench.py time_to_loss seconds`, with the same seconds of sleep as computing. What a folder holds is not run again.
Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.peer_deepspeed import ALLOCATOR
from bench.ranks import need_hosts
from bench.record import here, parser_of
from reports import publish, table

from time_to_loss import seconds

NEAR = 0.1
MEASURED = {
    "DDP bfloat16": ("DDP bfloat16", "plain"),
    "PowerSGD rank 1": ("PowerSGD rank 1", "plain"),
    "PowerSGD rank 4": ("PowerSGD rank 4", "plain"),
    "OnebitAdam": ("OnebitAdam", "compressed"),
    "OnebitAdam, warm-up": ("OnebitAdam", "warmup"),
    "ZeroOneAdam": ("ZeroOneAdam", "compressed"),
    "sharded, int4 down": ("sharded, int4 down", "compressed"),
    "sharded, int4 down, warm-up": ("sharded, int4 down", "warmup"),
}
"""The doctor's rows; the way and the phase of `time_to_loss` that each is about."""


def predicted(args: argparse.Namespace, hosts: int, rate: str) -> dict[str, float]:
    """Seconds of a step by row, as the doctor predicts them."""
    path = args.folder / f"{hosts}-{rate}.json"
    if not path.exists():
        words = [sys.executable, "-m", "onebit", "emulate", "--hosts", str(hosts), "--rate", rate, "--", "python"]
        asked = ["-m", "onebit", "doctor", "--params", str(args.params), "--compute", str(args.compute)]
        env = os.environ | ALLOCATOR
        subprocess.run([*words, *asked, "--json", str(path)], check=True, env=env, stdout=subprocess.DEVNULL)
    return {name: row["hidden"] for name, row in json.loads(path.read_text())["predicted"].items()}


def measured(args: argparse.Namespace, hosts: int, rate: str) -> dict[str, float]:
    """Seconds of a step by row, as it takes."""
    path, ways = args.folder / f"{hosts}-{rate}.jsonl", list(dict.fromkeys(way for way, _ in MEASURED.values()))
    seconds.time_on([rate], hosts, args.params, args.compute, ways, args.budget, path)
    of_way = {timed.way: timed.seconds for timed in seconds.read(path)}
    return {name: of_way[way][phase] for name, (way, phase) in MEASURED.items()}


def compare(args: argparse.Namespace) -> Iterator[dict[str, tuple[float, float]]]:
    """For each network, by row: the seconds predicted and measured."""
    for hosts, rate in args.networks:
        before, after = predicted(args, hosts, rate), measured(args, hosts, rate)
        yield {name: (before[name], after[name]) for name in MEASURED}


def main(argv: Sequence[str]) -> None:
    parser = parser_of("forecasts", __doc__)
    parser.add_argument("--folder", type=Path, help="where results are kept (default: they are not)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--params", type=float, default=25e6, metavar="N")
    parser.add_argument("--compute", type=float, default=0.3, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--budget", type=float, default=6.0, metavar="SECONDS", help="of a method, as in time_to_loss")
    args = parser.parse_args(argv)
    need_hosts()
    args.networks = [(hosts, rate) for hosts in args.hosts for rate in args.rates]
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(parents=True, exist_ok=True)
        every = list(compare(args))
    rows = []
    for name in MEASURED:
        pairs = [network[name] for network in every]
        rows.append([name, *(f"{before:.3f}, {after:.3f} ({before / after - 1:+.0%})" for before, after in pairs)])
    errors = [abs(before / after - 1) for network in every for before, after in network.values()]
    heads = ("seconds of a step: predicted, measured", *(f"{hosts} hosts, {rate}" for hosts, rate in args.networks))
    near = f"{sum(error < NEAR for error in errors)} of {len(errors)} are within {NEAR:.0%}."
    how = f"{args.params / 1e6:g} M parameters, {args.compute:g} s of computing. {near}"
    publish(args, f"# What onebit doctor predicts\n\n{here()}\n\n{how}\n\n{table(heads, rows)}\n")
