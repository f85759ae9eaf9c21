"""What members that come and go cost while none does: a step over `onebit.membership` and over plain Gloo, in turn.

    python scripts/bench.py members --record runs/members.md

Hosts are emulated, with one member each. Both transports are in each process, each with its own model and `OnebitAdam`;
blocks of steps alternate, so that both see the same machine. A step is backward, step() and zero_grad(), in one bit.
Computing is emulated by sleeping. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
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
from onebit.comm.messages import gather_texts

FIRST = 10  # steps of each that are not counted: warm-up in full, then buffers are made
WAYS = ("plain Gloo", "membership")


def _optimizer(args: argparse.Namespace, transport: comm.Transport) -> tuple[EmulatedModel, onebit.OnebitAdam]:
    model = EmulatedModel(model_shapes(args.params), comm.SimTransport(), args.compute)
    options: dict[str, Any] = {"freeze_step": 3, "compression": "always", "check_replicas_every": 0}
    return model, onebit.OnebitAdam(model.parameters(), lr=LR, transport=transport, **options)


def worker(args: argparse.Namespace) -> dict[str, list[list[float]]] | None:
    """One member; of the first: by way, the seconds and the bits per parameter of each step, those of the slowest."""
    torch.set_num_threads(1)
    members, store = join_members(args.members)
    model, optimizer = _optimizer(args, members)
    membership.begin(optimizer)
    plain = members.split(range(members.world_size))
    runs = dict(zip(WAYS, (_optimizer(args, plain), (model, optimizer)), strict=True))
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for block in range(1 + args.blocks):
        for way in WAYS if block % 2 else WAYS[::-1]:
            model, optimizer = runs[way]
            for _ in range(args.steps if block else FIRST):
                began = time.perf_counter()
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                if block:
                    found[way].append([time.perf_counter() - began, optimizer.stats.bits_per_parameter])
    every = [json.loads(text) for text in gather_texts(plain, json.dumps(found))]
    plain.close()
    membership.end(runs[WAYS[1]][1])
    if store is None:
        return None
    return {
        way: [list(map(max, zip(*step, strict=True))) for step in zip(*(one[way] for one in every), strict=True)]
        for way in WAYS
    }


HEADS = (
    "network",
    "parameters",
    "compute",
    "way",
    "median of a step, ms",
    "quarters, ms",
    "to plain",
    "bits per parameter",
)


def rows_of(label: tuple[str, str, str], found: Mapping[str, list[list[float]]]) -> Iterator[list[str]]:
    """A row for each way."""
    base = median(seconds for seconds, _ in found[WAYS[0]])
    for way in WAYS:
        seconds, bits = (sorted(column) for column in zip(*found[way], strict=True))
        low, high = seconds[len(seconds) // 4], seconds[3 * len(seconds) // 4]
        cells = [f"{1e3 * median(seconds):.2f}", f"{1e3 * low:.2f} to {1e3 * high:.2f}"]
        yield [*label, way, *cells, f"{median(seconds) / base - 1:+.1%}", f"{median(bits):.4f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("members", __doc__)
    add = parser.add_argument
    add("--members", type=int, default=2, help="hosts (default: 2)")
    add("--rates", nargs="+", default=["100mbit", "1gbit"])
    add("--params", nargs="+", type=number, default=[1e6, 25e6], metavar="N")
    add("--compute", nargs="+", type=float, default=[0.0, 0.1], metavar="SECONDS", help="of a step, emulated")
    add("--steps", type=int, default=20, help="of a block (default: 20)")
    add("--blocks", type=int, default=20, help="of each way (default: 20)")
    args = parser.parse_args(argv)
    need_hosts()
    rows: list[list[str]] = []
    for rate, params, compute in product(args.rates, args.params, args.compute):
        asked = argparse.Namespace(**{**vars(args), "params": params, "compute": compute})
        found = on_hosts(worker, asked, hosts=args.members, rate=rate, timeout_s=3600)
        rows += rows_of((rate, f"{params / 1e6:g} M", f"{compute:g} s"), found)
    text = f"""# Members that could come and go, while none does

{here()}

{args.members} emulated hosts; {args.blocks} blocks of {args.steps} steps of each way, in turn in the same processes; of
each step the slowest. Quarters: between them are the middle half of the steps.

{table(HEADS, rows, names=4)}
"""
    publish(args, text)
