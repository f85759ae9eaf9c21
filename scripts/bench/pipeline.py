"""Seconds per step of a pipeline times replicas on a slow network: what travels in full, and what in few bits.

Four hosts (network namespaces) with one rank each: two stages, two replicas of each. The GPT "25m-short" of
`train/model.py`; every contender runs in the same layout, in one start. Needs root and iproute2; see
`onebit emulate`. With --worker it is one rank's part of that, which the hosts run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from provenance import record_path, write_record
from train.corpus import read_corpus
from train.model import SIZES
from train.model_layers import build_layers, count_parameters
from train.run import Windows

from bench.command import words
from bench.record import describe_machine
from bench.timing import measure, meet
from onebit import zero
from onebit.cli.cluster import Cluster, available, parse_rate, sent_on_wire
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


def worker(args: argparse.Namespace) -> None:
    """One rank: the contenders in turn; rank 0 writes what every rank has measured."""
    torch.set_num_threads(1)
    grid = grids.start(pipe=_STAGES, shard=1, timeout_s=300)
    windows = Windows(read_corpus(), SIZES[args.size].context)
    results = {contender.name: _measure(contender, grid, windows, args) for contender in CONTENDERS}
    if grid.world.rank == 0:
        args.out.write_text(json.dumps(results))
    grid.close()


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


def run(network: str, args: argparse.Namespace) -> dict[str, dict]:
    """Lay the hosts, run the workers on them, take them down. RuntimeError where they fail."""
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=4, rate=network) as cluster:
        out = Path(folder) / "result.json"
        flags = ["--size", args.size, "--micro-batches", str(args.micro_batches), "--repeats", str(args.repeats)]
        command = words("pipeline", "--worker", "--out", str(out), *flags)
        ended = cluster.run(command, launcher="none", timeout_s=1200)
        if ended.status:
            raise RuntimeError(f"the pipeline at {network} ended with status {ended.status}")
        return json.loads(out.read_text())


def report(network: str, results: dict[str, dict], args: argparse.Namespace) -> str:
    machine, rate = describe_machine(), parse_rate(network)
    base = statistics.median(next(iter(results.values()))["seconds"])
    model = build_layers(args.size, seed=0)
    lines = [
        f"## {network}\n",
        f"{count_parameters(model):,} parameters, {args.micro_batches} micro-batches of one sequence of "
        f"{SIZES[args.size].context} bytes per replica and step; medians of {args.repeats}. Bytes: sent by one host of "
        "the first and of the second stage in a step, activations (or their gradients) to the other stage and the rest "
        "to the other replica; wire: what its network card has sent, headers included.\n",
        "| | s/step | faster | MB to the other stage | to the other replica | on the wire | seconds of wire |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, r in results.items():
        first, second = (next(x for x in r["ranks"] if x["stage"] == k) for k in (0, 1))
        both = [f"{first[key] / 1e6:.2f}, {second[key] / 1e6:.2f}" for key in ("activations", "replicas", "wire")]
        floor = f"{8 * max(first['wire'], second['wire']) / rate:.2f}" if rate else ""
        s = statistics.median(r["seconds"])
        lines.append(f"| {name} ({r['phase']}) | {s:.2f} | {base / s:.1f} × | {' | '.join(both)} | {floor} |")
    lines.append(
        f"\n{machine['date']}, {machine['cpu']}, {machine['cores']} cores for all four hosts, one thread each, torch "
        f"{machine['torch']}, revision {machine['revision']}, load {machine['load']} before.\n"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py pipeline", description=__doc__.split("\n\n")[0])
    parser.add_argument("--networks", nargs="+", default=["100mbit", "1gbit"], help="rates; none: unshaped")
    parser.add_argument("--size", choices=SIZES, default="25m-short")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", type=record_path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        worker(args)
        return
    if (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}")
    command = f"python scripts/bench.py pipeline --networks {' '.join(args.networks)} --repeats {args.repeats}"
    text = f"# A pipeline times replicas on a slow network\n\n`{command}`\n\n"
    text += "\n".join(report(network, run(network, args), args) for network in args.networks)
    print(text)
    if args.record is not None:
        write_record(args.record, text)
