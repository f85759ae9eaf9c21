"""Attention over longer and longer sequences on emulated Ethernet: all tokens, windows; on one level and on two.

    python scripts/bench.py sequence_lengths --record runs/sequence_lengths.md

One causal attention of onebit.zero.ring_attention, forward and backward, of float32 queries, keys and values. Each side
has ranks of its own, which go through the lengths. A row has the seconds of the slowest rank, the payload that the
first host has sent, with what the formula says, and the most memory that a rank has had above that after 1,024 tokens.
With several ranks on a host "two levels" lets them divide the heads. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from reports import panels_of, publish, table

from bench.ranks import need_hosts, on_hosts
from bench.record import here, parser_of
from bench.timing import measure, slowest
from onebit import comm
from onebit.zero.sequence import Pieces, SequenceRanks, ring_attention
from onebit.zero.sequence.sight import Sight

SIDES = ("all tokens", "window", "two levels")


def options_of(side: str, args: argparse.Namespace) -> tuple[int | None, int]:
    """The window, and how many ranks divide the heads."""
    return (args.window if side == "window" else None), (args.ranks_per_host if side == "two levels" else 1)


def worker(args: argparse.Namespace) -> list[dict] | None:
    """One rank of one side: all lengths, from short to long; on rank 0 what was measured."""
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
    ranks.close()
    transport.close()
    return None if transport.rank else found[1:]


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


def draw(found: dict[str, list[dict]], file: Path) -> None:
    """Three panels against tokens: seconds, bytes and memory."""
    titles = ("seconds", "MB sent by a host", "peak memory of a rank, MB")
    with panels_of(file, titles, xscale="log", yscale="log", xlabel="tokens") as panels:
        for side, rows in found.items():
            tokens = [row["tokens"] for row in rows]
            panels[0].plot(tokens, [statistics.median(row["seconds"]) for row in rows], "o-", label=side)
            panels[1].plot(tokens, [row["wire_payload"] / 1e6 for row in rows], "o-", label=side)
            panels[2].plot(tokens, [row["peak_bytes"] / 1e6 for row in rows], "o-", label=side)


def rows_of(side: str, found: list[dict], args: argparse.Namespace) -> list[list[str]]:
    """A row for each length."""
    rows = []
    for row in found:
        expected = expected_bytes(row["tokens"], side, args)
        cells = [side, f"{row['tokens']:,}", f"{statistics.median(row['seconds']):.3f}"]
        cells += [f"{row['wire_payload'] / 1e6:.2f}", f"{expected / 1e6:.2f}", f"{row['peak_bytes'] / 1e6:.0f}"]
        rows.append(cells)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("sequence_lengths", __doc__)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    add("--dense-to", type=int, default=32768, help="tokens, for all that see all (default: %(default)s)")
    add("--window", type=int, default=1024)
    add("--heads", type=int, default=8)
    add("--groups", type=int, default=2, help="key-value heads (default: %(default)s)")
    add("--width", type=int, default=64)
    add("--hosts", type=int, default=4)
    add("--ranks-per-host", type=int, default=1)
    add("--network", default="100mbit", help="rate of each link; none: unshaped (default: %(default)s)")
    add("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    args.lengths = sorted(args.lengths)
    need_hosts()
    found, where = {}, {"hosts": args.hosts, "rate": args.network, "ranks_per_host": args.ranks_per_host}
    for side in SIDES if args.ranks_per_host > 1 else SIDES[:2]:
        asked = argparse.Namespace(**vars(args), side=side)
        found[side] = on_hosts(worker, asked, **where, timeout_s=1800)
    rows = [row for side, its in found.items() for row in rows_of(side, its, args)]
    text = f"""# Attention over longer and longer sequences, on emulated Ethernet

{here()}

{args.hosts} hosts of {args.ranks_per_host} rank{"s" * (args.ranks_per_host > 1)}, {args.network}. One causal attention,
forward and backward, {args.heads} query and {args.groups} key-value heads of width {args.width}, float32; windows of
{args.window:,} tokens. Medians of {args.repeats} repetitions, the slowest rank of each; all ranks share the cores.
Payload is that of the first host's card, and beside it the formula's. Memory is the most that a rank has had so far,
above what it had after 1,024 tokens.

{table(("side", "tokens", "seconds", "sent MB", "formula MB", "peak MB"), rows)}
"""
    publish(args, text, shows="seconds, bytes and memory against tokens", draw=partial(draw, found))
