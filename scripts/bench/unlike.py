"""Machines of unlike speed in local steps: how much of their joint speed is used, and how long each waits.

    python scripts/bench.py unlike --speeds 1 3 --record runs/unlike.md

Hosts are emulated, with one rank each; computing is emulated by sleeping. "alone" is each machine's own optimizer
without a network: the sum of these speeds is what the machines can do. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from reports import publish, table

import onebit
from bench.ranks import need_hosts, on_hosts
from bench.record import here, parser_of
from onebit import comm
from onebit.cli.doctor.contenders import LR, EmulatedModel
from onebit.cli.doctor.samples import model_shapes
from onebit.cli.numbers import number
from onebit.comm.messages import gather_texts

WAYS = ("alone", "equal steps", "balanced")
FIRST = 0.25  # share of a run that is not counted: speeds are not known yet


def worker(args: argparse.Namespace) -> list[dict] | None:
    """One rank of a run; of all: steps per second, and the share of the time spent waiting in rounds."""
    torch.set_num_threads(1)
    transport = comm.init("gloo", timeout_s=600)
    compute_s = args.compute / args.speeds[transport.rank]
    model = EmulatedModel(model_shapes(args.params), transport, compute_s)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    if args.way != "alone":
        balanced = args.way == "balanced"
        optimizer = onebit.LocalSteps(optimizer, every=args.every, balanced=balanced, transport=transport)
    began, taken, waited_s, rounds = time.perf_counter(), 0, 0.0, 0
    counts_from: tuple[float, int, float] | None = None
    while rounds < args.rounds:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if isinstance(optimizer, onebit.LocalSteps):
            waited_s += 1e-3 * optimizer.stats.comm_ms
            is_round = optimizer.stats.phase == "round"
        else:
            is_round = taken % args.every == 0
        rounds += is_round
        if is_round and counts_from is None and rounds >= FIRST * args.rounds:
            counts_from = time.perf_counter() - began, taken, waited_s
    assert counts_from is not None
    since_s, since_taken, since_waited = counts_from
    seconds = time.perf_counter() - began - since_s
    found = {"steps_s": (taken - since_taken) / seconds, "waits": (waited_s - since_waited) / seconds}
    every = [json.loads(text) for text in gather_texts(transport, json.dumps(found))]
    transport.close()
    return None if transport.rank else every


HEADS = ("way", "steps per second, by rank", "sum", "of the sum alone", "waits, by rank")


def rows_of(found: Mapping[str, list[dict[str, float]]]) -> Iterator[list[str]]:
    """A row for each way."""
    able = sum(rank["steps_s"] for rank in found["alone"])
    for way, ranks in found.items():
        speeds, waits = ([rank[name] for rank in ranks] for name in ("steps_s", "waits"))
        cells = [way, ", ".join(f"{v:.2f}" for v in speeds), f"{sum(speeds):.2f}", f"{sum(speeds) / able:.1%}"]
        yield [*cells, ", ".join(f"{w:.1%}" for w in waits)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("unlike", __doc__)
    add = parser.add_argument
    add("--speeds", nargs="+", type=float, default=[1.0, 3.0], metavar="V", help="of each host")
    add("--compute", type=float, default=0.6, metavar="SECONDS", help="of a step on a host of speed 1")
    add("--rate", default="1gbit")
    add("--params", type=number, default=25e6, metavar="N")
    add("--every", type=int, default=32)
    add("--rounds", type=int, default=12)
    args = parser.parse_args(argv)
    need_hosts()
    found = {}
    for way in WAYS:
        asked = argparse.Namespace(**vars(args), way=way)
        found[way] = on_hosts(worker, asked, hosts=len(args.speeds), rate=args.rate, timeout_s=3600)
    text = f"""# Local steps on machines of unlike speed

{here()}

Speeds {", ".join(f"{v:g}" for v in args.speeds)}: a host of speed 1 computes {args.compute:g} s in a step.
{args.params / 1e6:g} million parameters, a round each {args.every} steps, {args.rate}. Waits: share of time spent in
rounds. The first {FIRST:.0%} of {args.rounds} rounds are not counted.

{table(HEADS, rows_of(found))}
"""
    publish(args, text)
