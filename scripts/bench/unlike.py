"""Machines of unlike speed in local steps: how much of their joint speed is used, and how long each waits.

    python scripts/bench.py unlike --speeds 1 3 --record runs/unlike.md

Hosts are emulated, with one rank each; computing is emulated by sleeping. "alone" is each machine's own optimizer
without a network: the sum of these speeds is what the machines can do. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from provenance import record_path, write_record

import onebit
from bench.command import words
from bench.record import describe_machine, machines
from onebit import comm
from onebit.cli.cluster import Cluster, available
from onebit.cli.doctor.contenders import LR, EmulatedModel
from onebit.cli.doctor.samples import model_shapes
from onebit.cli.numbers import number

WAYS = ("alone", "equal steps", "balanced")
FIRST = 0.25  # share of a run that is not counted: speeds are not known yet


def worker() -> None:
    """One rank of a run; it writes its steps per second, and its share of the time spent waiting in rounds."""
    asked = json.loads(os.environ["UNLIKE"])
    torch.set_num_threads(1)
    transport = comm.init("gloo", timeout_s=600)
    compute_s = asked["compute_s"] / asked["speeds"][transport.rank]
    model = EmulatedModel(model_shapes(asked["params"]), transport, compute_s)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    if asked["way"] != "alone":
        balanced = asked["way"] == "balanced"
        optimizer = onebit.LocalSteps(optimizer, every=asked["every"], balanced=balanced, transport=transport)
    began, taken, waited_s, rounds = time.perf_counter(), 0, 0.0, 0
    counts_from: tuple[float, int, float] | None = None
    while rounds < asked["rounds"]:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if isinstance(optimizer, onebit.LocalSteps):
            waited_s += 1e-3 * optimizer.stats.comm_ms
            is_round = optimizer.stats.phase == "round"
        else:
            is_round = taken % asked["every"] == 0
        rounds += is_round
        if is_round and counts_from is None and rounds >= FIRST * asked["rounds"]:
            counts_from = time.perf_counter() - began, taken, waited_s
    assert counts_from is not None
    since_s, since_taken, since_waited = counts_from
    seconds = time.perf_counter() - began - since_s
    found = {"steps_s": (taken - since_taken) / seconds, "waits": (waited_s - since_waited) / seconds}
    (Path(asked["out"]) / f"{transport.rank}.json").write_text(json.dumps(found))
    transport.close()


def measure(way: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """What each rank found in a run on hosts laid for it."""
    with tempfile.TemporaryDirectory() as out, Cluster(len(args.speeds), args.rate) as cluster:
        same = {name: getattr(args, name) for name in ("speeds", "params", "every", "rounds")}
        asked = same | {"way": way, "compute_s": args.compute, "out": out}
        env = {"UNLIKE": json.dumps(asked)}
        ended = cluster.run(words("unlike", "--worker"), launcher="none", env=env, timeout_s=3600.0)
        if ended.status:
            raise SystemExit(f"the ranks of {way!r} ended with status {ended.status}")
        return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(len(args.speeds))]


def report(found: Mapping[str, list[dict[str, float]]]) -> Iterator[str]:
    """A row for each way."""
    able = sum(rank["steps_s"] for rank in found["alone"])
    yield "| way | steps per second, by rank | sum | of the sum alone | waits, by rank |\n" + "| --- " * 5 + "|"
    for way, ranks in found.items():
        speeds, waits = ([rank[name] for rank in ranks] for name in ("steps_s", "waits"))
        cells = [way, ", ".join(f"{v:.2f}" for v in speeds), f"{sum(speeds):.2f}", f"{sum(speeds) / able:.1%}"]
        yield "| " + " | ".join([*cells, ", ".join(f"{w:.1%}" for w in waits)]) + " |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py unlike", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--speeds", nargs="+", type=float, default=[1.0, 3.0], metavar="V", help="of each host")
    add("--compute", type=float, default=0.6, metavar="SECONDS", help="of a step on a host of speed 1")
    add("--rate", default="1gbit")
    add("--params", type=number, default=25e6, metavar="N")
    add("--every", type=int, default=32)
    add("--rounds", type=int, default=12)
    add("--record", type=record_path, metavar="FILE")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        worker()
        return
    if (reason := available()) is not None:
        sys.exit(f"unlike: {reason}")
    text = "\n".join(report({way: measure(way, args) for way in WAYS})) + "\n"
    print(text)
    if args.record is not None:
        about = (
            f"Speeds {', '.join(f'{v:g}' for v in args.speeds)}: a host of speed 1 computes {args.compute:g} s in a "
            f"step. {args.params / 1e6:g} million parameters, a round each {args.every} steps, {args.rate}. Waits: "
            f"share of time spent in rounds. The first {FIRST:.0%} of {args.rounds} rounds are not counted."
        )
        lines = ["# Local steps on machines of unlike speed", "", about, "", *machines([describe_machine()]), text]
        write_record(args.record, "\n".join(lines))


if __name__ == "__main__":
    main()
