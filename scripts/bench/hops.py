"""Exchanges between many hosts in one hop and in two: seconds, messages, bytes, open files and memory of a rank.

    python scripts/bench.py hops --record scripts/records/hops_2026-11.md

Hosts are network namespaces; each starts one rank over Gloo. Both ways exchange the same buckets of one tensor, in
turn, and must leave the same bits. All ranks share this machine's cores, so messages, which cost processor time, weigh
more here than on hosts of their own. Needs root and iproute2; see `onebit emulate`. With --worker it is one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from provenance import record_path, write_record

from bench.collective import Compressed
from bench.command import words
from bench.timing import meet, slowest
from onebit import comm
from onebit.cli.cluster import Cluster, available
from onebit.comm import SignCodec, in_hops
from onebit.comm.cost import messages
from onebit.comm.hops import rows_of


def worker(args: argparse.Namespace) -> None:
    """One rank: both ways in turn; rank 0 writes what was measured as JSON."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    transport = comm.init("gloo", levels=1, hops=1)
    started_s, W = slowest(transport, time.perf_counter() - began), transport.world_size
    ways = {}
    for hops in (1, 2):
        torch.manual_seed(transport.rank)
        ways[hops] = Compressed(args.elements, in_hops(transport, hops), SignCodec(), args.piece)
    files = len(os.listdir("/proc/self/fd"))
    found = {hops: {"seconds": [], "sent": 0} for hops in ways}
    for repeat in range(args.repeats + 1):
        for hops, exchange in ways.items():
            meet(transport)
            sent, began = exchange.transport.sent_bytes, time.perf_counter()
            exchange()
            seconds = slowest(transport, time.perf_counter() - began)
            if repeat:  # the first one touches memory
                found[hops]["seconds"].append(seconds)
                found[hops]["sent"] = exchange.transport.sent_bytes - sent
    same = all(torch.equal(one, two) for one, two in zip(ways[1].xs, ways[2].xs, strict=True))
    if transport.rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        args.out.write_text(json.dumps({"ways": found, "same": same, "files": files, "MB": peak, "start": started_s}))
    meet(transport)
    ways[2].transport.close()
    assert same, f"rank {transport.rank} of {W}: two hops left other bits"


def run_hosts(hosts: int, rate: str, args: argparse.Namespace) -> dict:
    with Cluster(hosts=hosts, rate=rate) as cluster, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        flags = ["--elements", str(args.elements), "--repeats", str(args.repeats), "--piece", str(args.piece)]
        run = cluster.run(words("hops", "--worker", "--out", str(out), *flags), launcher="none", timeout_s=600)
        if run.status:
            raise RuntimeError(f"{hosts} hosts at {rate} ended with status {run.status}")
        return json.loads(out.read_text())


def report(rows: Sequence[tuple[int, str, dict]], args: argparse.Namespace) -> str:
    text = f"""\
# Exchanges in one hop and in two

`python {shlex.join(sys.argv)}`

{args.elements:,} elements in buckets of {args.piece:,}, one bit, one rank on each host (network namespaces of one
machine, {os.cpu_count()} cores), Gloo. Medians of {args.repeats} exchanges, both ways in turn, the slowest rank of
each; ranks share the cores. All ranks have the same bits both ways. torch {torch.__version__}, Python
{platform.python_version()}. "Open files" and memory are those of rank 0 with the transports of both ways.

| hosts | rows | network | one hop, s | two hops, s | messages | | MB sent | | open files | peak MB | start, s |
| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""
    for hosts, rate, found in rows:
        cells = [str(hosts), str(rows_of(hosts)), rate]
        cells += [f"{statistics.median(found['ways'][hops]['seconds']):.3g}" for hops in ("1", "2")]
        cells += [f"{messages(args.elements, hosts, args.piece, hops):,}" for hops in (1, 2)]
        cells += [f"{found['ways'][hops]['sent'] / 1e6:.3g}" for hops in ("1", "2")]
        cells += [str(found["files"]), f"{found['MB']:.0f}", f"{found['start']:.3g}"]
        text += f"| {' | '.join(cells)} |\n"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py hops", description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--rates", nargs="+", default=["1gbit"], help="of the network")
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--piece", type=int, default=1 << 20, metavar="N", help="elements of a bucket")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--record", type=record_path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        worker(args)
        return
    if (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}")
    rows = [(hosts, rate, run_hosts(hosts, rate, args)) for hosts in args.hosts for rate in args.rates]
    text = report(rows, args)
    print(text)
    if args.record is not None:
        write_record(args.record, text)
