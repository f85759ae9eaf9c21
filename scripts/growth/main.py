"""How the collective grows: seconds and bytes against hosts and parameters, and a cost model fitted to them.

    python scripts/bench.py growth --results scripts/records/growth_2026-11.jsonl

What --results already holds is not measured again, so that a run may be interrupted and extended; the report is of all
that the file holds. The model is `onebit/comm/cost.py`, its fit `fit.py`, the report `report.py`. Needs root and
iproute2; see `onebit emulate`. With --worker it is one rank's part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from bench.collective import FP32, ONE_BIT, Compressed, dense
from bench.command import words
from bench.record import append, describe_machine, read_lines
from bench.timing import measure
from provenance import add_results, write_record
from rich.progress import Progress

from growth.report import draw, points_of, report
from onebit import comm
from onebit.cli.cluster import Cluster, available, parse_rate
from onebit.comm import SignCodec, Transport

MILLION = 1_000_000
BYTES_PER_ELEMENT = 10  # of a rank that exchanges: tensor, worker error, frames, and its share of the server's

# ---------------------------------------------------------------- one rank


def worker(args: argparse.Namespace) -> None:
    """Every size in turn, both sides of it; rank 0 writes what was measured as JSON lines."""
    link = comm.init("gloo")
    torch.manual_seed(link.rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // link.world_size))
    lines = []
    for elements in args.elements:
        for side in [ONE_BIT, FP32] if elements <= args.dense_up_to else [ONE_BIT]:
            measured = _measure_side(side, elements, link, args)
            lines.append(json.dumps({"side": side, "elements": elements, **measured}))
            gc.collect()
    if link.rank == 0:
        args.out.write_text("\n".join(lines) + "\n")
    link.close()


def _measure_side(side: str, elements: int, link: Transport, args: argparse.Namespace) -> dict:
    """With cold caches, as a backward pass leaves them: else a million parameters cost a third as much each."""
    cache = torch.empty(8 * MILLION)
    options = {"before": cache.zero_, "budget_s": args.budget_s}
    if side == ONE_BIT:
        return measure(link, Compressed(elements, link, SignCodec()), args.repeats, **options)
    warm = dense(-(-elements // 16), link, torch.float32)
    return measure(link, dense(elements, link, torch.float32), args.repeats, warm=warm, **options)


# ---------------------------------------------------------------- all of them


def dense_up_to(rate: str, longest_s: float) -> int:
    """The most elements whose fp32 all-reduce takes no longer than this at 8 bytes each, its payload on many ranks."""
    bits_per_s = parse_rate(rate)
    return 10**12 if bits_per_s is None else int(longest_s * bits_per_s / 64)


def sizes_that_fit(elements: Sequence[int], hosts: int, free_bytes: float) -> list[int]:
    """Those sizes that all hosts can hold at once on this machine, with 0.4 GB of torch each."""
    return [n for n in elements if hosts * (n * BYTES_PER_ELEMENT + 4e8) < free_bytes]


def free_bytes() -> float:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024.0 * int(lines["MemAvailable"].split()[0])


def measure_on(cluster: Cluster, args: argparse.Namespace) -> list[dict]:
    """The lines of all sizes that fit, on a laid and shaped cluster."""
    hosts = len(cluster.names)
    sizes = sizes_that_fit(args.elements, hosts, free_bytes())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.jsonl"
        command = words("growth", "--worker", "--out", str(out))
        command += ["--elements", *map(str, sizes), "--repeats", str(args.repeats), "--budget-s", str(args.budget_s)]
        command += ["--dense-up-to", str(dense_up_to(cluster.rate, args.longest_s))]
        if status := cluster.run(command, launcher="none", timeout_s=1200).status:
            raise SystemExit(f"the workers on {hosts} hosts at {cluster.rate} ended with status {status}")
        measured = [json.loads(line) for line in out.read_text().splitlines()]
    where = {"what": "growth", "hosts": hosts, "network": cluster.rate, "cores": os.cpu_count()}
    left_out = [{"what": "left out", "hosts": hosts, "elements": n} for n in args.elements if n not in sizes]
    return [where | line for line in measured] + left_out


def measure_missing(args: argparse.Namespace) -> None:
    """Run what --results does not hold yet."""
    done = {(line["hosts"], line["network"]) for line in read_lines(args.results) if line["what"] == "growth"}
    missing = [(hosts, net) for hosts in args.hosts for net in args.networks if (hosts, net) not in done]
    if not missing:
        return
    if (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}")
    append(args.results, describe_machine())
    with Progress() as progress:
        task = progress.add_task("", total=len(missing))
        for hosts, network in missing:
            progress.update(task, description=f"{hosts} hosts, {network}")
            with Cluster(hosts=hosts, rate=network) as cluster:
                append(args.results, *measure_on(cluster, args))
            progress.advance(task)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py growth", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[2, 4, 8])
    add("--networks", nargs="+", default=["100mbit", "1gbit", "none"], help="rates; none: unshaped")
    add("--elements", type=int, nargs="+", default=[n * MILLION for n in (1, 5, 25, 100)])
    add("--repeats", type=int, default=25, help="at most")
    add("--budget-s", type=float, default=4.0, help="no repetition starts after so many seconds of a point")
    add("--longest-s", type=float, default=6.0, help="no fp32 all-reduce that must take longer")
    add_results(parser, "growth")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--dense-up-to", type=int, default=10**12, help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.worker:
        worker(args)
        return
    measure_missing(args)
    lines = read_lines(args.results)
    text = report(lines)
    print(text)
    figure = args.results.with_suffix(".png")
    draw(points_of(lines), figure)
    record = f"{text}\nRaw: {args.results.name}\n\n![Measured points and the model]({figure.name})\n"
    write_record(args.results.with_suffix(".md"), record)
