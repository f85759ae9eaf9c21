"""The compressed all-reduce against a dense fp32 one, on emulated Ethernet: seconds, bytes, and the physical limit.

    python scripts/bench.py collective --record scripts/records/collective_2026-11.md

Each row is measured in one run of four hosts (network namespaces), both sides in turn. The limit of a side is its own
payload over the link's rate. `--hosts 32 --hops 1 2` compares exchanges in two hops with those in one. Needs root and
iproute2; see `onebit emulate`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from reports import publish, table

from bench.ranks import need_hosts, on_cluster
from bench.record import here, parser_of
from bench.timing import HEADERS, in_turn, measure
from onebit import comm
from onebit.cli.cluster import Cluster, parse_rate
from onebit.comm import (
    EncodeOutput,
    ErrorFeedback,
    Exchange,
    SignCodec,
    Transport,
    Wire,
    compressed_allreduce,
    in_hops,
    interleave,
)

ONE_BIT, FP32 = "one-bit", "dense fp32"
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

    def __init__(self, elements: int, transport: Transport, codec: SignCodec, piece: int = PIECE):
        self.transport, self.codec = transport, codec
        row = codec.block * transport.world_size
        sizes = [min(piece, elements - start) // row * row for start in range(0, elements, piece)]
        self.xs = [torch.randn(n) for n in sizes if n]
        self.efs = [ErrorFeedback.zeros(len(x), transport.world_size) for x in self.xs]
        self.wires = [Wire.empty(codec, len(x), transport.world_size) for x in self.xs]

    def __call__(self) -> None:
        interleave(map(self._average, self.xs, self.efs, self.wires))

    def _average(self, x: torch.Tensor, ef: ErrorFeedback, wire: Wire) -> Exchange:
        yield from compressed_allreduce(x, ef, self.codec, self.transport, wire)
        ef.commit()
        self.codec.decode(wire.frames_WB, x.view(self.transport.world_size, -1))


def codec_work(elements: int, world_size: int, kernel: str) -> Callable[[], None]:
    """What one rank computes for one exchange: encode all, average its chunk, encode that, decode all."""
    codec = SignCodec(kernel=kernel)
    n = elements // world_size // codec.block * codec.block
    x = torch.randn(world_size * n)
    ef, wire = ErrorFeedback.zeros(len(x), world_size), Wire.empty(codec, len(x), world_size)

    def work() -> None:
        codec.encode(x.view(world_size, -1), ef.worker.view(world_size, -1), wire.sent_HB, None)
        ef.worker_next.copy_(x)
        out = EncodeOutput(ef.server.view(1, -1), wire.received_HB[:1], None, ef.server_next.view(1, -1))
        codec.encode_mean(wire.sent_HB, out)
        ef.commit()
        codec.decode(wire.sent_HB, x.view(world_size, -1))

    return work


def dense(elements: int, transport: Transport) -> Callable[[], None]:
    """The transport's own all-reduce of float32 numbers."""
    x = torch.randn(elements)
    return lambda: transport.all_reduce(x).wait()


def worker(args: argparse.Namespace) -> dict[str, dict] | None:
    """One rank: the sides in turn; on rank 0 what `measure` says of each."""
    transport = comm.init(args.transport, hops=1)
    torch.manual_seed(transport.rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // transport.world_size))
    results = {}
    for piece, hops in itertools.product(args.pieces, args.hops):
        name = f"{ONE_BIT}, pieces of {piece:,}" if len(args.pieces) > 1 else ONE_BIT
        whole = Compressed(args.elements, in_hops(transport, hops), SignCodec(), piece)
        results[name + ", two hops" * (hops == 2)] = measure(whole.transport, whole, args.repeats)
    warm = dense(-(-args.elements // 16), transport)  # the whole of it takes 13 s at 100 Mbit/s
    repeats = max(1, args.repeats // 3)
    results[FP32] = measure(transport, dense(args.elements, transport), repeats, warm=warm)
    transport.close()
    return None if transport.rank else results


def run_network(network: str, transport: str, args: argparse.Namespace) -> list[Row]:
    """Lay the hosts, run the workers on them, take them down."""
    asked = argparse.Namespace(**vars(args) | {"transport": transport})
    launcher = "mpirun" if transport == "mpi" else "none"
    with Cluster(hosts=args.hosts, rate=network) as cluster:
        results = on_cluster(cluster, worker, asked, launcher=launcher)
    rate = parse_rate(network)
    rows = []
    for side, r in results.items():
        limit_s = 8 * r["sent_bytes"] / rate if rate else None
        rows.append(Row(network, transport, side, r["seconds"], r["sent_bytes"], r["wire_payload"], limit_s))
    return rows


def measure_codec(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of one rank's codec work, by kernel, one thread, repetitions interleaved."""
    torch.set_num_threads(1)
    acts = {kernel: codec_work(args.elements, args.hosts, kernel) for kernel in ("auto", "reference")}
    return {kernel: statistics.median(spent) for kernel, spent in in_turn(acts, args.repeats).items()}


def report(rows: list[Row], codec: dict[str, float], args: argparse.Namespace) -> str:
    """The record, in Markdown."""
    dense = {(row.network, row.transport): statistics.median(row.seconds) for row in rows if row.side == FP32}
    pieces = ", ".join(f"{piece:,}" for piece in args.pieces)
    lines = [_cells(row, dense.get((row.network, row.transport))) for row in rows]
    return f"""\
# The collective on emulated Ethernet

{here()}

{args.elements:,} float32 parameters, {args.hosts} hosts with one rank each on this machine, one thread per rank.
Median of {args.repeats} repetitions (dense: {max(1, args.repeats // 3)}), the slowest rank of each. The limit is the
side's own payload over the link's rate. On the wire: payload by the queue's counter (bytes minus {HEADERS} per packet)
over the transport's own count. One bit travels in buckets of {pieces} elements.

{table(HEADS, lines, names=3)}

Codec work of one rank for one exchange, one thread: {codec["auto"] * 1e3:.0f} ms; pure-torch reference
{codec["reference"] * 1e3:.0f} ms, **{codec["reference"] / codec["auto"]:.1f} ×** as long.
"""


HEADS = (
    "network", "transport", "side", "sent MB", "s", "spread", "limit s", "s / limit", "on the wire", "speed-up"
)  # fmt: skip


def _cells(row: Row, dense_s: float | None) -> list[str]:
    s = statistics.median(row.seconds)
    return [
        row.network,
        row.transport,
        row.side,
        f"{row.sent_bytes / 1e6:.2f}",
        f"{s:.3f}",
        f"{min(row.seconds):.3f}-{max(row.seconds):.3f}",
        "" if row.limit_s is None else f"{row.limit_s:.3f}",
        "" if row.limit_s is None else f"{s / row.limit_s:.2f}",
        "" if row.wire_payload is None else f"{row.wire_payload / row.sent_bytes:.3f}",
        f"{dense_s / s:.1f} ×" if dense_s is not None and row.side != FP32 else "",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("collective", __doc__)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--networks", nargs="+", default=["100mbit", "1gbit", "none"], help="rates; none: unshaped")
    parser.add_argument("--transports", nargs="+", default=["gloo", "mpi"], choices=["gloo", "mpi"])
    parser.add_argument("--pieces", nargs="+", type=int, default=[PIECE], metavar="N", help="elements of a bucket")
    parser.add_argument("--hops", nargs="+", type=int, default=[1], choices=[1, 2], help="of an exchange in one bit")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    need_hosts()
    rows = [row for network in args.networks for t in args.transports for row in run_network(network, t, args)]
    publish(args, report(rows, measure_codec(args), args))
