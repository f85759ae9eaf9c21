"""What a newcomer costs the others: seconds beyond ordinary steps, with a copy before the change and without.

    python scripts/bench.py newcomers --record runs/newcomers.md

Hosts are emulated, with one member each; the last one comes later. Computing is emulated by sleeping. "at the change"
is the way without a copy: all wait while the state is sent. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch
from reports import publish, table

import onebit
from bench.ranks import join_members, need_hosts, on_hosts
from bench.record import here, parser_of
from onebit import comm, membership
from onebit.cli.doctor.contenders import LR, EmulatedModel
from onebit.cli.doctor.samples import model_shapes
from onebit.cli.numbers import number
from onebit.membership import change
from onebit.membership.network import reach

FIRST = 10  # steps that are not counted: warm-up in full, then buffers are made
SERVES_S = 3.0  # until the first member serves the rendezvous
WAYS = ("at the change", "before it")


def worker(args: argparse.Namespace) -> dict[str, Any] | None:
    """One member; of the first: when each step ended and of how many members it was, and when the newcomer came."""
    torch.set_num_threads(1)
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == args.members:
        time.sleep(SERVES_S)
        store = reach(*address)
        while not store.check(["bench/come"]):
            time.sleep(0.05)
    if args.way == WAYS[0]:
        change.copy_state = lambda *_: None
    members, served = join_members(args.members)
    store = reach(*address)
    model = EmulatedModel(model_shapes(args.params), comm.SimTransport(rank=rank), args.compute)
    options: dict[str, Any] = {"freeze_step": 3, "compression": "always", "check_replicas_every": 0}
    optimizer = onebit.OnebitAdam(model.parameters(), lr=LR, transport=members, **options)
    came = time.time()
    membership.begin(optimizer)
    store.set(f"bench/in/{rank}", str(time.time() - came))
    steps: list[tuple[float, int]] = []
    while sum(world > args.members for _, world in steps) < args.steps:
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((time.time(), members.world_size))
        if len(steps) == FIRST + args.steps and rank == 0:
            store.set("bench/come", "")
    optimizer.check_replicas()
    membership.end(optimizer)
    if served is None:
        return None
    return {"steps": steps, "in_s": float(store.get(f"bench/in/{args.members}"))}


@dataclass
class Coming:
    """What a newcomer's coming did to the steps of the first member.

    Attributes:
        ordinary_s: Median of the steps before it.
        copying_s: Median of the steps while it copied.
        change_s: How much longer the first step with it took than the later ones.
        let_in_s: Until it was let in.
    """

    ordinary_s: float
    copying_s: float
    change_s: float
    let_in_s: float
    copying: int

    @classmethod
    def of(cls, found: Mapping[str, Any], members: int, steps: int) -> Coming:
        took = [(b - a, world) for (a, _), (b, world) in pairwise(found["steps"])]
        before = [seconds for seconds, world in took if world == members][FIRST:]
        after = [seconds for seconds, world in took if world > members]
        ordinary, copying = before[: steps - 1], before[steps - 1 :]
        change_s = after[0] - median(after[1:])
        return cls(median(ordinary), median(copying or ordinary), change_s, found["in_s"], len(copying))

    @property
    def lost_s(self) -> float:
        return self.copying * (self.copying_s - self.ordinary_s) + self.change_s


HEADS = (
    "network",
    "parameters",
    "compute",
    "the state is sent",
    "an ordinary step, s",
    "one while it copies, s",
    "the change, s",
    "the others lose, s",
    "let in after, s",
)


def rows_of(label: Sequence[str], runs: Mapping[str, Sequence[Coming]]) -> Iterator[list[str]]:
    """A row for each way: medians of its runs, and the range of what is lost."""
    for way, comings in runs.items():
        columns = zip(*((its.ordinary_s, its.copying_s, its.change_s, its.let_in_s) for its in comings), strict=True)
        *cells, let_in = (f"{median(column):.2f}" for column in columns)
        lost = sorted(its.lost_s for its in comings)
        yield [*label, way, *cells, f"{median(lost):.1f} ({lost[0]:.1f} to {lost[-1]:.1f})", let_in]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("newcomers", __doc__)
    add = parser.add_argument
    add("--members", type=int, default=2, help="hosts, besides the newcomer's (default: 2)")
    add("--rates", nargs="+", default=["100mbit"])
    add("--params", nargs="+", type=number, default=[25e6], metavar="N")
    add("--compute", nargs="+", type=float, default=[0.1, 0.6, 1.2], metavar="SECONDS", help="of a step, emulated")
    add("--steps", type=int, default=10, help="before the newcomer comes, and after it (default: 10)")
    add("--runs", type=int, default=3, help="of each way (default: 3)")
    args = parser.parse_args(argv)
    need_hosts()
    rows: list[list[str]] = []
    for rate, params, compute in product(args.rates, args.params, args.compute):
        runs: dict[str, list[Coming]] = {way: [] for way in WAYS}
        for _ in range(args.runs):
            for way in WAYS:
                asked = argparse.Namespace(**{**vars(args), "params": params, "compute": compute, "way": way})
                found = on_hosts(worker, asked, hosts=args.members + 1, rate=rate, timeout_s=3600)
                runs[way].append(Coming.of(found, args.members, args.steps))
        rows += rows_of((rate, f"{params / 1e6:g} M", f"{compute:g} s"), runs)
    text = f"""# What a newcomer costs the others

{here()}

{args.members} emulated hosts, and one that comes later; medians of {args.runs} runs of each way, in turn. The first
member's steps: before the newcomer comes, while it copies, and the first one with it, less the median of later ones.
The others lose: how much longer all steps until then were than ordinary ones; in parentheses the range.

{table(HEADS, rows, names=4)}
"""
    publish(args, text)
