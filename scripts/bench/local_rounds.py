"""Local steps whose H comes from the measured network: which H, and the bits of a whole run by the kernel's counter.

    python scripts/bench.py local_rounds --rates 10mbit 100mbit --record runs/local_rounds.md

Hosts are emulated, with one rank each; computing is emulated by sleeping. The counter is that of the host's network
card: headers, votes, the measurement of the network and the first rounds are in it. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from provenance import record_path, revision, write_record

import onebit
from bench.command import COMMAND
from bench.timing import cpu_name
from onebit import comm
from onebit.cli.cluster import Cluster, available, sent_on_wire
from onebit.cli.doctor.contenders import LR, EmulatedModel
from onebit.cli.doctor.samples import model_shapes
from onebit.cli.numbers import number
from onebit.comm.messages import gather_bytes

FP16_ALL_REDUCE = 32.0  # bits of a parameter and step that both phases of a ring send, but for (n-1)/n
STUCK_S = 3600.0
NOTES = (
    "Bits: per parameter and step, sent by rank 0 over the whole run, with the factor (n-1)/n. The counter is the "
    "network card's: headers, votes, the measurement of the network and the first rounds, 4 steps apart, are in it."
)


@dataclass(frozen=True)
class Run:
    """What one run sent, of rank 0. bits: per parameter and step. counted: by the kernel, payload: by the transport."""

    rate: str
    hosts: int
    params: int
    compute_s: float
    steps: int
    interval: int
    rounds: int
    counted_bits: float
    payload_bits: float
    step_s: float


def worker() -> None:
    """One rank of a run; rank 0 writes what it found."""
    asked = json.loads(os.environ["LOCAL_ROUNDS"])
    torch.set_num_threads(1)
    transport = comm.init("gloo", timeout_s=STUCK_S)
    model = EmulatedModel(model_shapes(asked["params"]), transport, asked["compute_s"])
    numel = sum(p.numel() for p in model.parameters())
    before, began = sent_on_wire() or 0, time.perf_counter()
    optimizer = onebit.LocalSteps(torch.optim.AdamW(model.parameters(), lr=LR), every="auto", transport=transport)
    for _ in range(asked["steps"]):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    gather_bytes(transport, b"done", transport.device)
    per_step, seconds = 8.0 / (numel * asked["steps"]), time.perf_counter() - began
    run = Run(
        asked["rate"],
        transport.world_size,
        numel,
        asked["compute_s"],
        asked["steps"],
        optimizer.stats.interval,
        optimizer.stats.rounds,
        ((sent_on_wire() or 0) - before) * per_step,
        optimizer.stats.mean_bits_per_parameter,
        seconds / asked["steps"],
    )
    if transport.rank == 0:
        Path(asked["out"]).write_text(json.dumps(asdict(run)))
    transport.close()


def measure(rate: str, hosts: int, params: float, compute_s: float, steps: int) -> Run:
    """One run on hosts laid for it."""
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts, rate) as cluster:
        out = Path(folder) / "run.json"
        asked = {"rate": rate, "params": params, "compute_s": compute_s, "steps": steps, "out": str(out)}
        ended = cluster.run(
            [sys.executable, str(COMMAND), "local_rounds", "--worker"],
            launcher="none",
            env={"LOCAL_ROUNDS": json.dumps(asked)},
            timeout_s=STUCK_S,
        )
        if ended.status:
            raise SystemExit(f"the ranks on {hosts} hosts at {rate} ended with status {ended.status}")
        return Run(**json.loads(out.read_text()))


def report(runs: Sequence[Run]) -> Iterator[str]:
    yield (
        "| network | hosts | million parameters | compute, s | steps | H chosen | rounds | bits by the counter | "
        "payload | an fp16 all-reduce sends, times | s/step |"
    )
    yield "| --- " * 11 + "|"
    for run in runs:
        dense = FP16_ALL_REDUCE * (run.hosts - 1) / run.hosts
        yield (
            f"| {run.rate} | {run.hosts} | {run.params / 1e6:.1f} | {run.compute_s:g} | {run.steps} | {run.interval} | "
            f"{run.rounds} | {run.counted_bits:.4f} | {run.payload_bits:.4f} | {dense / run.counted_bits:.0f} | "
            f"{run.step_s:.3f} |"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py local_rounds", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--rates", nargs="+", default=["10mbit", "100mbit"], metavar="RATE")
    add("--hosts", type=int, default=4)
    add("--params", type=number, default=25e6, metavar="N")
    add("--compute", type=float, default=0.3, metavar="SECONDS", help="of a step's forward and backward")
    add("--steps", type=int, default=2000)
    add("--record", type=record_path, metavar="FILE")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        worker()
        return
    if (reason := available()) is not None:
        sys.exit(f"local_rounds: {reason}")
    runs = [measure(rate, args.hosts, args.params, args.compute, args.steps) for rate in args.rates]
    text = "\n".join(report(runs)) + "\n"
    print(text)
    if args.record is not None:
        lines = ("# Local steps, H from the measured network", f"`{_command(args)}`", _circumstances(), NOTES, text)
        write_record(args.record, "\n\n".join(lines))


def _command(args: argparse.Namespace) -> str:
    same = f"--hosts {args.hosts} --params {args.params:g} --compute {args.compute:g} --steps {args.steps}"
    return f"python scripts/bench.py local_rounds --rates {' '.join(args.rates)} {same}"


def _circumstances() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, revision {revision()}"
    return f"{cpu_name()}, {os.cpu_count()} cores, which all hosts share; {versions}."
