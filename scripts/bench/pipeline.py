"""Seconds per step of a pipeline times replicas on a slow network: what travels in full, and what in few bits.

Four hosts (network namespaces) with one rank each: two stages, two replicas of each. The GPT "25m-short" of
`train/model.py`; every contender runs in the same layout, in one start. Needs root and iproute2; see
`onebit emulate`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from reports import publish, table
from train.corpus import read_corpus
from train.model import SIZES
from train.model_layers import build_layers, count_parameters
from train.run import Windows

from bench.ranks import need_hosts, on_hosts
from bench.record import here, parser_of
from bench.timing import measure, meet
from onebit import zero
from onebit.cli.cluster import parse_rate, sent_on_wire
from onebit.comm.messages import gather_texts
from onebit.zero import grid as grids

_STAGES, _FREEZE = 2, 2


@dataclass(frozen=True)
class Contender:
    """An optimizer, and what activations and their gradients travel in (None: float32)."""

    name: str
    optimizer: str
    activations: str | None = None
    gradients: str | None = None


CONTENDERS = (
    Contender("AdamW, all in float32", "AdamW"),
    Contender("AdamW, activations int8", "AdamW", "int8", "int8"),
    Contender("OnebitAdam, activations float32", "OneBitAdam"),
    Contender("OnebitAdam, activations int8", "OneBitAdam", "int8", "int8"),
    Contender("OnebitAdam, activations int8, gradients int4", "OneBitAdam", "int8", "int4"),
    Contender("ZeroOneAdam, activations int8", "ZeroOneAdam", "int8", "int8"),
)


def config_of(contender: Contender, micro_batches: int) -> dict:
    params = {"lr": 1e-4} | ({"freeze_step": _FREEZE} if contender.optimizer == "OneBitAdam" else {})
    if contender.optimizer == "ZeroOneAdam":
        params["var_freeze_step"] = _FREEZE
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": None,
        "optimizer": {"type": contender.optimizer, "params": params},
        "pipeline": {
            "stages": _STAGES,
            "activations": contender.activations,
            "activation_gradients": contender.gradients,
        },
        "onebit": {"compression": "always"} if contender.optimizer != "AdamW" else {},
    }


def worker(args: argparse.Namespace) -> dict[str, dict] | None:
    """One rank: the contenders in turn; on rank 0 what every rank has measured."""
    torch.set_num_threads(1)
    grid = grids.start(pipe=_STAGES, shard=1, timeout_s=300)
    windows = Windows(read_corpus(), SIZES[args.size].context)
    results = {contender.name: _measure(contender, grid, windows, args) for contender in CONTENDERS}
    grid.close()
    return None if grid.world.rank else results


def _measure(contender: Contender, grid: grids.Grid, windows: Windows, args: argparse.Namespace) -> dict:
    engine, optimizer, _, _ = zero.initialize(
        model=build_layers(args.size, seed=0), config=config_of(contender, args.micro_batches), grid=grid
    )
    pipeline, step = engine.pipeline, 0
    assert pipeline is not None

    def act() -> None:
        nonlocal step
        parts = [windows.training(1, 0, step, grid.data[0], k) for k in range(args.micro_batches)]
        engine.train_batch(iter([(part[:, :-1], part[:, 1:]) for part in parts]))
        step += 1

    def warm() -> None:
        for _ in range(1 if contender.optimizer == "AdamW" else _FREEZE + 2):
            act()

    warm()
    meet(grid.world)
    before = _counters(pipeline, grid)
    act()
    meet(grid.world)
    counted = (now - then for now, then in zip(_counters(pipeline, grid), before, strict=True))
    mine = {"stage": grid.coordinates["pipe"]} | dict(zip(("activations", "replicas", "wire"), counted, strict=True))
    seconds = measure(grid.world, act, args.repeats, warm=lambda: None)["seconds"]
    ranks = [json.loads(text) for text in gather_texts(grid.world, json.dumps(mine))]
    phase = getattr(getattr(optimizer, "stats", None), "phase", "dense")
    return {"seconds": seconds, "ranks": ranks, "phase": phase}


def _counters(pipeline: zero.pipeline.Pipeline, grid: grids.Grid) -> tuple[int, int, int]:
    return pipeline.sent_bytes, grid.transport.sent_bytes, sent_on_wire() or 0


HEADS = ("", "s/step", "faster", "MB to the other stage", "to the other replica", "on the wire", "seconds of wire")


def report(network: str, results: dict[str, dict], args: argparse.Namespace) -> str:
    rate, rows = parse_rate(network), []
    base = statistics.median(next(iter(results.values()))["seconds"])
    for name, r in results.items():
        first, second = (next(x for x in r["ranks"] if x["stage"] == k) for k in (0, 1))
        both = [f"{first[key] / 1e6:.2f}, {second[key] / 1e6:.2f}" for key in ("activations", "replicas", "wire")]
        floor = f"{8 * max(first['wire'], second['wire']) / rate:.2f}" if rate else ""
        s = statistics.median(r["seconds"])
        rows.append([f"{name} ({r['phase']})", f"{s:.2f}", f"{base / s:.1f} ×", *both, floor])
    return f"## {network}\n\n{table(HEADS, rows)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("pipeline", __doc__)
    parser.add_argument("--networks", nargs="+", default=["100mbit", "1gbit"], help="rates; none: unshaped")
    parser.add_argument("--size", choices=SIZES, default="25m-short")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    need_hosts()
    tables = [
        report(network, on_hosts(worker, args, hosts=4, rate=network, timeout_s=1200), args)
        for network in args.networks
    ]
    text = f"""# A pipeline times replicas on a slow network

{here()}

{count_parameters(build_layers(args.size, seed=0)):,} parameters, {args.micro_batches} micro-batches of one sequence of
{SIZES[args.size].context} bytes per replica and step; medians of {args.repeats}. All four hosts share the cores, with
one thread each. Bytes: sent by one host of the first and of the second stage in a step, activations (or their
gradients) to the other stage and the rest to the other replica; wire: what its network card has sent, headers included.

"""
    publish(args, text + "\n".join(tables))
