"""Attention over longer and longer sequences on emulated Ethernet: all tokens, windows; on one level and on two.

    python scripts/bench.py sequence_lengths --record scripts/records/sequence_lengths_2026-11.md

One causal attention of onebit.zero.ring_attention, forward and backward, of float32 queries, keys and values. Each side
has ranks of its own, which go through the lengths. A row has the seconds of the slowest rank, the payload that the
first host has sent, with what the formula says, and the most memory that a rank has had above that after 1,024 tokens.
With several ranks on a host "two levels" lets them divide the heads. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from provenance import record_path, revision, write_record

from bench.command import words
from bench.timing import cpu_name, measure, slowest
from onebit import comm
from onebit.cli.cluster import Cluster, available
from onebit.zero.sequence import Pieces, SequenceRanks, ring_attention
from onebit.zero.sequence.sight import Sight

SIDES = ("all tokens", "window", "two levels")
_SIZES = ("heads", "groups", "width", "window", "repeats", "hosts", "ranks_per_host", "dense_to")


def options_of(side: str, args: argparse.Namespace) -> tuple[int | None, int]:
    """The window, and how many ranks divide the heads."""
    return (args.window if side == "window" else None), (args.ranks_per_host if side == "two levels" else 1)


def worker(args: argparse.Namespace) -> None:
    """One rank of one side: all lengths, from short to long; rank 0 writes what was measured as JSON."""
    transport = comm.init("gloo")
    torch.manual_seed(transport.rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // transport.world_size))
    window, degree = options_of(args.side, args)
    ranks, found = SequenceRanks.of(transport, degree), []
    at_start = 0
    lengths = [n for n in args.lengths if args.side == "window" or n <= args.dense_to]
    for length in [1024, *lengths]:  # the first loads libraries
        its = measure(transport, attention(length, ranks, window, args), args.repeats, warm=lambda: None)
        at_start = at_start or _peak_bytes()
        its["peak_bytes"] = slowest(transport, _peak_bytes() - at_start)
        found.append(its | {"tokens": length})
    if transport.rank == 0:
        args.out.write_text(json.dumps(found[1:]))
    ranks.close()
    transport.close()


def attention(length: int, ranks: SequenceRanks, window: int | None, args: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward of this rank's piece."""
    pieces = ranks.pieces(length)
    q, k, v = (
        torch.randn(1, heads, pieces.size(ranks.rank), args.width).requires_grad_()
        for heads in (args.heads, args.groups, args.groups)
    )
    return lambda: ring_attention(q, k, v, ranks, pieces, window=window).sum().backward()


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def expected_bytes(length: int, side: str, args: argparse.Namespace) -> int:
    """What the ranks of the first host send to other hosts: keys and values twice, and gradients."""
    window, degree = options_of(side, args)
    pieces, R = Pieces(length, args.hosts * args.ranks_per_host, degree), args.ranks_per_host
    sight, total = Sight(pieces, window=window), 0
    here = range(R // degree)  # nodes, or ranks, of the first host
    for me in here:
        for other in set(range(pieces.nodes)) - set(here):
            going = sum(part.stop - part.start for part in sight.keys(other, me))
            coming = sum(part.stop - part.start for part in sight.keys(me, other))
            total += 2 * args.groups * args.width * 4 * (2 * going + coming)
    return total


def run_side(side: str, args: argparse.Namespace) -> list[dict]:
    """Lay the hosts, run the workers on them, take them down."""
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=args.hosts, rate=args.network) as cluster:
        out = Path(folder) / "result.json"
        flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in _SIZES]
        flags += ["--lengths", *map(str, args.lengths), "--side", side, "--out", str(out)]
        command = words("sequence_lengths", "--worker", *flags)
        run = cluster.run(command, launcher="none", ranks_per_host=args.ranks_per_host, timeout_s=1800)
        if run.status:
            raise RuntimeError(f"the workers of {side!r} ended with status {run.status}")
        return json.loads(out.read_text())


def draw(found: dict[str, list[dict]], file: Path) -> None:
    """Three panels against tokens: seconds, bytes and memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for side, rows in found.items():
        tokens = [row["tokens"] for row in rows]
        panels[0].plot(tokens, [statistics.median(row["seconds"]) for row in rows], "o-", label=side)
        panels[1].plot(tokens, [row["wire_payload"] / 1e6 for row in rows], "o-", label=side)
        panels[2].plot(tokens, [row["peak_bytes"] / 1e6 for row in rows], "o-", label=side)
    for panel, name in zip(panels, ("seconds", "MB sent by a host", "peak memory of a rank, MB"), strict=True):
        panel.set(xscale="log", yscale="log", xlabel="tokens", title=name)
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(file, dpi=100)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py sequence_lengths", description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument(
        "--dense-to", type=int, default=32768, help="tokens, for all that see all (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2, help="key-value heads (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--network", default="100mbit", help="rate of each link; none: unshaped (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", type=record_path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.lengths = sorted(args.lengths)
    if args.worker:
        worker(args)
        return
    if (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}")
    found, lines = {}, []
    for side in SIDES if args.ranks_per_host > 1 else SIDES[:2]:
        found[side] = run_side(side, args)
        for row in found[side]:
            expected = expected_bytes(row["tokens"], side, args)
            cells = [f"{row['tokens']:,}", side, f"{statistics.median(row['seconds']):.3f}"]
            cells += [f"{row['wire_payload'] / 1e6:.2f}", f"{expected / 1e6:.2f}", f"{row['peak_bytes'] / 1e6:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    if args.record is None:
        return
    picture = args.record.with_suffix(".png")
    draw(found, picture)
    layout = f"{args.hosts} hosts of {args.ranks_per_host} rank{'s' * (args.ranks_per_host > 1)}"
    text = f"""# Attention over longer and longer sequences, on emulated Ethernet

`python scripts/bench.py sequence_lengths {" ".join(argv or [])}`, {time.strftime("%Y-%m-%d")}, revision {revision()},
torch {torch.__version__}, {os.cpu_count()} cores ({cpu_name()}), {layout}, {args.network}. One causal attention,
forward and backward, {args.heads} query and {args.groups} key-value heads of width {args.width}, float32; windows of
{args.window:,} tokens. Medians of {args.repeats} repetitions, the slowest rank of each; all ranks share the cores.
Payload is that of the first host's card, and beside it the formula's. Memory is the most that a rank has had so far,
above what it had after 1,024 tokens.

| tokens | side | seconds | sent MB | formula MB | peak MB |
| ---: | --- | ---: | ---: | ---: | ---: |
{chr(10).join(lines)}

![seconds, bytes and memory against tokens]({picture.name})
"""
    write_record(args.record, text)
