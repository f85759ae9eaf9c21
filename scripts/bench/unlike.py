"""Machines of unlike speed: how much of their joint speed is used, and how long each waits.

    python scripts/bench.py unlike --speeds 1 3 --record runs/unlike.md

Hosts are emulated, with one rank each; computing is emulated by sleeping. "alone" is each machine's own optimizer
without a network: the sum of these speeds is what the machines can do. Local steps meet in rounds; "each step" is
`OnebitAdam` over members with equal or balanced shares (`MemberSampler`). Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from reports import publish, table
from torch.utils.data import DataLoader

import onebit
from bench.ranks import join_members, need_hosts, on_hosts
from bench.record import here, parser_of
from onebit import comm, membership
from onebit.cli.doctor.contenders import LR, EmulatedModel
from onebit.cli.doctor.samples import model_shapes
from onebit.cli.numbers import number
from onebit.comm.messages import gather_texts
from onebit.membership.shares import DECIDE_EVERY

WAYS = ("alone", "equal steps", "balanced", "each step, equal shares", "each step, balanced shares")
LEAST_STEPS = 4 * DECIDE_EVERY
FIRST = 0.25  # share of a run that is not counted: speeds are not known yet


def worker(args: argparse.Namespace) -> list[dict] | None:
    """One rank of a run; of all: micro-batches per second, and the share of the time spent waiting for others."""
    torch.set_num_threads(1)
    if not args.way.startswith("each step"):
        transport: comm.Transport = comm.init("gloo", timeout_s=600)
        marks = local_steps(args, transport)
    else:
        transport, _store = join_members(len(args.speeds))  # it serves as long as it is here
        marks = each_step(args, transport)
    (since_s, since_taken, since_waited), (end_s, taken, waited_s) = marks[int(FIRST * len(marks))], marks[-1]
    seconds = end_s - since_s
    found = {"steps_s": (taken - since_taken) / seconds, "waits": (waited_s - since_waited) / seconds}
    every = [json.loads(text) for text in gather_texts(transport, json.dumps(found))]
    transport.close()
    return None if transport.rank else every


def local_steps(args: argparse.Namespace, transport: comm.Transport) -> list[tuple[float, int, float]]:
    """After each round: the time, and this rank's micro-batches and seconds of waiting so far. A step has one."""
    model = emulated(args, transport)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    if args.way != "alone":
        balanced = args.way == "balanced"
        optimizer = onebit.LocalSteps(optimizer, every=args.every, balanced=balanced, transport=transport)
    taken, waited_s, marks = 0, 0.0, []
    while len(marks) < args.rounds:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if isinstance(optimizer, onebit.LocalSteps):
            waited_s += 1e-3 * optimizer.stats.comm_ms
            is_round = optimizer.stats.phase == "round"
        else:
            is_round = taken % args.every == 0
        if is_round:
            marks.append((time.perf_counter(), taken, waited_s))
    return marks


def each_step(args: argparse.Namespace, members: membership.Members) -> list[tuple[float, int, float]]:
    """The same after each step of `OnebitAdam`, as many micro-batches in all."""
    model = emulated(args, members)
    options: dict[str, Any] = {"freeze_step": 2, "compression": "always"}
    optimizer = onebit.OnebitAdam(model.parameters(), lr=LR, transport=members, **options)
    balanced = "balanced" in args.way
    sampler = membership.MemberSampler(members, 1 << 20, 1, micro_batches=args.micro_batches, balanced=balanced)
    membership.begin(optimizer, sampler=sampler)
    batches = sampler.batches(DataLoader(range(1 << 20), batch_sampler=sampler))  # type: ignore[arg-type]
    taken, waited_s, marks = 0, 0.0, []
    while len(marks) < args.rounds * args.every // args.micro_batches:
        for _ in sampler.step_batches(batches):
            model().backward()
            taken += 1
        optimizer.step()
        optimizer.zero_grad()
        waited_s += 1e-3 * optimizer.stats.comm_ms
        marks.append((time.perf_counter(), taken, waited_s))
    return marks


def emulated(args: argparse.Namespace, transport: comm.Transport) -> EmulatedModel:
    """A model whose micro-batch takes as long as this host needs for it."""
    rank = int(os.environ["RANK"])  # members have theirs only in the run
    return EmulatedModel(model_shapes(args.params), transport, args.compute / args.speeds[rank])


HEADS = ("way", "micro-batches per second, by rank", "sum", "of the sum alone", "waits, by rank")


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
    add("--compute", type=float, default=0.6, metavar="SECONDS", help="of a micro-batch on a host of speed 1")
    add("--rate", default="1gbit")
    add("--params", type=number, default=25e6, metavar="N")
    add("--every", type=int, default=32, help="micro-batches of the mean rank between rounds of local steps")
    add("--micro-batches", type=int, default=8, help="of the mean member in a step, otherwise")
    add("--rounds", type=int, default=12)
    args = parser.parse_args(argv)
    if (steps := args.rounds * args.every // args.micro_batches) < LEAST_STEPS:
        parser.error(
            f"expected at least {LEAST_STEPS} steps, as shares are decided in every {DECIDE_EVERY}th, got {steps}, of "
            f"{args.rounds} rounds x {args.every} / {args.micro_batches} micro-batches; raise --rounds or --every"
        )
    need_hosts()
    found = {}
    for way in WAYS:
        asked = argparse.Namespace(**vars(args), way=way)
        found[way] = on_hosts(worker, asked, hosts=len(args.speeds), rate=args.rate, timeout_s=3600)
    text = f"""# Machines of unlike speed

{here()}

Speeds {", ".join(f"{v:g}" for v in args.speeds)}: a host of speed 1 computes {args.compute:g} s in a micro-batch.
{args.params / 1e6:g} million parameters, {args.rate}. Local steps, of one micro-batch, have a round each {args.every};
"each step" has {args.micro_batches} micro-batches of the mean member in a step. Waits: share of time spent waiting in
rounds or steps. The first {FIRST:.0%} of {args.rounds} rounds are not counted, nor of as many micro-batches in steps.

{table(HEADS, rows_of(found))}
"""
    publish(args, text)
