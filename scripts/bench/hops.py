"""Exchanges between many hosts in one hop and in two: seconds, messages, bytes, open files and memory of a rank.

    python scripts/bench.py hops --record scripts/records/hops_2026-11.md

Hosts are network namespaces; each starts one rank over Gloo. Both ways exchange the same buckets of one tensor, in
turn, and must leave the same bits. All ranks share this machine's cores, so messages, which cost processor time, weigh
more here than on hosts of their own. Needs root and iproute2; see `onebit emulate`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Sequence

import torch
from reports import publish, table

from bench.collective import Compressed
from bench.ranks import need_hosts, on_hosts
from bench.record import here, parser_of
from bench.timing import meet, slowest
from onebit import comm
from onebit.comm import SignCodec, in_hops
from onebit.comm.cost import messages
from onebit.comm.hops import rows_of


def worker(args: argparse.Namespace) -> dict | None:
    """One rank: both ways in turn; on rank 0 what was measured."""
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    meet(transport)
    ways[2].transport.close()
    assert same, f"rank {transport.rank} of {W}: two hops left other bits"
    return None if transport.rank else {"ways": found, "files": files, "MB": peak, "start": started_s}


HEADS = (
    "network", "hosts", "rows", "one hop, s", "two hops, s", "messages", "", "MB sent", "", "open files", "peak MB",
    "start, s",
)  # fmt: skip


def report(rows: Sequence[tuple[int, str, dict]], args: argparse.Namespace) -> str:
    cells = []
    for hosts, rate, found in rows:
        ways = [found["ways"][hops] for hops in ("1", "2")]
        cells.append([rate, hosts, rows_of(hosts), *(f"{statistics.median(way['seconds']):.3g}" for way in ways)])
        cells[-1] += [f"{messages(args.elements, hosts, args.piece, hops):,}" for hops in (1, 2)]
        cells[-1] += [f"{way['sent'] / 1e6:.3g}" for way in ways]
        cells[-1] += [found["files"], f"{found['MB']:.0f}", f"{found['start']:.3g}"]
    return f"""\
# Exchanges in one hop and in two

{here()}

{args.elements:,} elements in buckets of {args.piece:,}, one bit, one rank on each host (network namespaces of one
machine), Gloo. Medians of {args.repeats} exchanges, both ways in turn, the slowest rank of each; ranks share the cores.
All ranks have the same bits both ways. "Open files" and memory are those of rank 0 with the transports of both ways.

{table(HEADS, cells)}
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("hops", __doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--rates", nargs="+", default=["1gbit"], help="of the network")
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--piece", type=int, default=1 << 20, metavar="N", help="elements of a bucket")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    need_hosts()
    asked = [(hosts, rate) for hosts in args.hosts for rate in args.rates]
    rows = [(hosts, rate, on_hosts(worker, args, hosts=hosts, rate=rate)) for hosts, rate in asked]
    publish(args, report(rows, args))
