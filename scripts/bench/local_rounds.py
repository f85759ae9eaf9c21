"""Local steps whose H comes from the measured network: which H, and the bits of a whole run by the kernel's counter.

    python scripts/bench.py local_rounds --rates 10mbit 100mbit --record runs/local_rounds.md

Hosts are emulated, with one rank each; computing is emulated by sleeping. The counter is that of the host's network
card: headers, votes, the measurement of the network and the first rounds are in it. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from reports import publish, table

import onebit
from bench.ranks import need_hosts, on_hosts
from bench.record import here, parser_of
from onebit import comm
from onebit.cli.cluster import sent_on_wire
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


def worker(args: argparse.Namespace) -> dict | None:
    """One rank of a run; what rank 0 found."""
    torch.set_num_threads(1)
    transport = comm.init("gloo", timeout_s=STUCK_S)
    model = EmulatedModel(model_shapes(args.params), transport, args.compute)
    numel = sum(p.numel() for p in model.parameters())
    before, began = sent_on_wire() or 0, time.perf_counter()
    optimizer = onebit.LocalSteps(torch.optim.AdamW(model.parameters(), lr=LR), every="auto", transport=transport)
    for _ in range(args.steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.sync()
    gather_bytes(transport, b"done", transport.device)
    per_step, seconds = 8.0 / (numel * args.steps), time.perf_counter() - began
    run = Run(
        args.rate,
        transport.world_size,
        numel,
        args.compute,
        args.steps,
        optimizer.stats.interval,
        optimizer.stats.rounds,
        ((sent_on_wire() or 0) - before) * per_step,
        optimizer.stats.mean_bits_per_parameter,
        seconds / args.steps,
    )
    transport.close()
    return None if transport.rank else asdict(run)


HEADS = (
    "network", "hosts", "million parameters", "compute, s", "steps", "H chosen", "rounds", "bits by the counter",
    "payload", "an fp16 all-reduce sends, times", "s/step",
)  # fmt: skip


def cells_of(run: Run) -> list[object]:
    dense = FP16_ALL_REDUCE * (run.hosts - 1) / run.hosts
    cells = [run.rate, run.hosts, f"{run.params / 1e6:.1f}", f"{run.compute_s:g}", run.steps, run.interval, run.rounds]
    cells += [f"{run.counted_bits:.4f}", f"{run.payload_bits:.4f}", f"{dense / run.counted_bits:.0f}"]
    return [*cells, f"{run.step_s:.3f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("local_rounds", __doc__)
    add = parser.add_argument
    add("--rates", nargs="+", default=["10mbit", "100mbit"], metavar="RATE")
    add("--hosts", type=int, default=4)
    add("--params", type=number, default=25e6, metavar="N")
    add("--compute", type=float, default=0.3, metavar="SECONDS", help="of a step's forward and backward")
    add("--steps", type=int, default=2000)
    args = parser.parse_args(argv)
    need_hosts()
    runs = [measure(rate, args) for rate in args.rates]
    text = f"""# Local steps, H from the measured network

{here()}

{NOTES}

{table(HEADS, map(cells_of, runs))}
"""
    publish(args, text)


def measure(rate: str, args: argparse.Namespace) -> Run:
    """One run on hosts laid for it."""
    asked = argparse.Namespace(**vars(args), rate=rate)
    return Run(**on_hosts(worker, asked, hosts=args.hosts, rate=rate, timeout_s=STUCK_S))
