"""The compressed all-reduce against a dense fp32 one, on emulated Ethernet: seconds, bytes, and the physical limit.

    python scripts/bench_collective.py --record scripts/records/collective_2026-11.md

Each row is measured in one run of four hosts (network namespaces), both sides in turn. The limit of a side is its own
payload over the link's rate. Needs root and iproute2; see cluster.py. With --worker it is one rank's part of that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from cluster import INTERFACE, Cluster, available, parse_rate, read_queue, sent_on_wire

from onebit import comm
from onebit.comm import (
    ErrorFeedback,
    SignCodec,
    Transport,
    Wire,
    compressed_allreduce,
    interleave,
    kernels,
)

HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps: bytes per packet that are not payload
PIECE = 1 << 20  # elements exchanged as one bucket; several are under way at once, as in the optimizer


@dataclass(frozen=True)
class Row:
    """One side on one network. seconds: of each repetition, of the slowest rank."""

    network: str
    transport: str
    side: str
    seconds: list[float]
    sent_bytes: int
    wire_payload: float | None
    limit_s: float | None


class Compressed:
    """The tensor in pieces, each with its errors and buffers, exchanged side by side."""

    def __init__(self, elements: int, link: Transport, codec: SignCodec):
        self.link, self.codec = link, codec
        row = codec.block * link.world_size
        sizes = [min(PIECE, elements - start) // row * row for start in range(0, elements, PIECE)]
        self.xs = [torch.randn(n) for n in sizes if n]
        self.efs = [ErrorFeedback.zeros(len(x), link.world_size) for x in self.xs]
        self.wires = [Wire.empty(codec, len(x), link.world_size) for x in self.xs]

    def __call__(self) -> None:
        parts = list(zip(self.xs, self.efs, self.wires, strict=True))

        def take(k: int) -> None:
            x, ef, wire = parts[k]
            ef.commit()
            self.codec.decode(wire.frames_WB, x.view(self.link.world_size, -1))

        interleave((compressed_allreduce(x, ef, self.codec, self.link, wire) for x, ef, wire in parts), take)


def codec_work(elements: int, world_size: int, kernel: str) -> Callable[[], None]:
    """What one rank computes for one exchange: encode all, average its chunk, encode that, decode all."""
    codec = SignCodec(kernel=kernel)
    n = elements // world_size // codec.block * codec.block
    x = torch.randn(world_size * n)
    ef, wire = ErrorFeedback.zeros(len(x), world_size), Wire.empty(codec, len(x), world_size)

    def work() -> None:
        codec.encode(x.view(world_size, -1), ef.worker.view(world_size, -1), wire.sent_HB, None)
        ef.worker_next.copy_(x)
        codec.encode_mean(wire.sent_HB, ef.server.view(1, -1), wire.received_HB[:1], None, ef.server_next.view(1, -1))
        ef.commit()
        codec.decode(wire.sent_HB, x.view(world_size, -1))

    return work


def measure(link: Transport, act: Callable[[], None], repeats: int) -> dict:
    """Seconds of the slowest rank per repetition, and bytes of one, after one repetition that is not counted."""
    act()
    seconds = []
    for _ in range(repeats):
        _meet(link)
        sent, wire, packets = link.sent_bytes, sent_on_wire(), _packets()
        began = time.perf_counter()
        act()
        mine = torch.tensor(time.perf_counter() - began)
        sent_bytes = link.sent_bytes - sent
        _meet(link)
        payload = None if wire is None else (sent_on_wire() or 0) - wire - HEADERS * (_packets() - packets)
        seconds.append(_slowest(link, mine))
    return {"seconds": seconds, "sent_bytes": sent_bytes, "wire_payload": payload}


def _meet(link: Transport) -> None:
    link.all_reduce(torch.zeros(1)).wait()


def _slowest(link: Transport, mine: torch.Tensor) -> float:
    every = torch.zeros(link.world_size)
    every[link.rank] = mine
    link.all_reduce(every).wait()
    return float(every.max())


def _packets() -> int:
    """Packets this host has sent, by the queue's own counter; 0 outside an emulated host."""
    return 0 if sent_on_wire() is None else read_queue(INTERFACE).packets


def worker(args: argparse.Namespace) -> None:
    """One rank: both sides in turn; rank 0 writes what was measured as JSON."""
    link = comm.init(args.transport)
    torch.manual_seed(link.rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // link.world_size))
    x = torch.randn(args.elements)
    results = {"one-bit": measure(link, Compressed(args.elements, link, SignCodec()), args.repeats)}
    if not args.without_dense:
        results["dense fp32"] = measure(link, lambda: link.all_reduce(x).wait(), max(1, args.repeats // 3))
    if link.rank == 0:
        args.out.write_text(json.dumps(results))
    link.close()


def run_network(network: str, transport: str, args: argparse.Namespace) -> list[Row]:
    """Lay the hosts, run the workers on them, take them down."""
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=args.hosts, rate=network) as cluster:
        out = Path(folder) / "result.json"
        flags = ["--elements", str(args.elements), "--repeats", str(args.repeats), "--transport", transport]
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--out", str(out), *flags]
        launcher = "mpirun" if transport == "mpi" else "torchrun"
        run = cluster.run(command, launcher=launcher, timeout_s=600)
        if run.status:
            raise SystemExit(f"{launcher} on {network} ended with status {run.status}")
        results = json.loads(out.read_text())
    rate = parse_rate(network)
    return [
        Row(
            network,
            transport,
            side,
            r["seconds"],
            r["sent_bytes"],
            r["wire_payload"],
            r["sent_bytes"] * 8 / rate if rate else None,
        )
        for side, r in results.items()
    ]


def measure_codec(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of one rank's codec work, by kernel, one thread, repetitions interleaved."""
    torch.set_num_threads(1)
    acts = {kernel: codec_work(args.elements, args.hosts, kernel) for kernel in ("auto", "reference")}
    seconds: dict[str, list[float]] = {kernel: [] for kernel in acts}
    for _ in range(args.repeats):
        for kernel, act in acts.items():
            began = time.perf_counter()
            act()
            seconds[kernel].append(time.perf_counter() - began)
    return {kernel: statistics.median(times) for kernel, times in seconds.items()}


def report(rows: list[Row], codec: dict[str, float], args: argparse.Namespace) -> str:
    """The record, in Markdown."""
    dense = {(row.network, row.transport): statistics.median(row.seconds) for row in rows if row.side == "dense fp32"}
    text = f"""\
# The collective on emulated Ethernet

`python {" ".join(sys.argv)}`

{args.elements:,} float32 parameters, {args.hosts} hosts with one rank each on one machine ({os.cpu_count()} cores,
{platform.machine()}), one thread per rank; {kernels.describe()}. torch {torch.__version__}, Python
{platform.python_version()}. Median of {args.repeats} repetitions (dense: {max(1, args.repeats // 3)}), the slowest rank
of each. The limit is the side's own payload over the link's rate. On the wire: payload by the queue's counter (bytes
minus {HEADERS} per packet) over the transport's own count.

| network | transport | side | sent MB | s | spread | limit s | s / limit | on the wire | speed-up |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
    text += "".join(_line(row, dense.get((row.network, row.transport))) for row in rows)
    return text + (
        f"\nCodec work of one rank for one exchange, one thread: {codec['auto'] * 1e3:.0f} ms; pure-torch reference "
        f"{codec['reference'] * 1e3:.0f} ms, **{codec['reference'] / codec['auto']:.1f} ×** as long.\n"
    )


def _line(row: Row, dense_s: float | None) -> str:
    s = statistics.median(row.seconds)
    cells = [
        row.network,
        row.transport,
        row.side,
        f"{row.sent_bytes / 1e6:.2f}",
        f"{s:.3f}",
        f"{min(row.seconds):.3f}-{max(row.seconds):.3f}",
        "" if row.limit_s is None else f"{row.limit_s:.3f}",
        "" if row.limit_s is None else f"{s / row.limit_s:.2f}",
        "" if row.wire_payload is None else f"{row.wire_payload / row.sent_bytes:.3f}",
        f"{dense_s / s:.1f} ×" if dense_s is not None and row.side == "one-bit" else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--networks", nargs="+", default=["100mbit", "1gbit", "none"], help="rates; none: unshaped")
    parser.add_argument("--transports", nargs="+", default=["gloo", "mpi"], choices=["gloo", "mpi"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--transport", choices=["gloo", "mpi"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without-dense", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    if (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}")
    rows = [row for network in args.networks for t in args.transports for row in run_network(network, t, args)]
    text = report(rows, measure_codec(args), args)
    print(text)
    if args.record is not None:
        args.record.write_text(text)


if __name__ == "__main__":
    main()
