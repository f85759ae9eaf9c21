"""Attention over a split sequence on emulated Ethernet: seconds, bytes and memory, beside computing alone and a gather.

    python scripts/bench.py sequence --record runs/sequence.md
    python scripts/bench.py sequence --sides window --lengths 8192 131072 --networks 100mbit
    python scripts/bench.py sequence --sides ring "two levels" --hosts 2 --ranks-per-host 2

One causal attention, forward and backward, of float32 queries, keys and values. Sides: `ring` is
onebit.zero.ring_attention, also with blocks in eight bits and with windows; in `two levels` the ranks of a host divide
the heads; `alone` computes what `ring` does without a network; `gather` sends all keys and values to all ranks before
it computes, and their gradients back after it. Each side has ranks of its own, which go through the lengths. Needs root
and iproute2.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from reports import publish, table
from torch import Tensor

from bench.ranks import need_hosts, on_hosts
from bench.record import here, parser_of
from bench.silent import Silent
from bench.timing import measure, slowest
from onebit import comm
from onebit.cli.cluster import parse_rate
from onebit.comm import Int8Codec, Transport
from onebit.zero.sequence import Pieces, SequenceRanks, ring_attention
from onebit.zero.sequence.sight import Sight

SIDES = ("alone", "ring", "ring, int8", "gather", "window", "two levels")
FIRST = 1024  # tokens; loads libraries


class Gather(torch.autograd.Function):
    """The blocks of all ranks, one after the other; backward adds up their gradients at their ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport) -> Tensor:
        ctx.transport = transport
        out = x.new_empty(transport.world_size, *x.shape)
        transport.all_gather(out.view(transport.world_size, -1).view(torch.uint8), x.view(-1).view(torch.uint8)).wait()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows = grads[0].contiguous().view(ctx.transport.world_size, -1).view(torch.uint8)
        received = torch.empty_like(rows)
        ctx.transport.all_to_all(received, rows).wait()
        return received.view(torch.float32).view(grads[0].shape).sum(0), None


def gathered(q: Tensor, k: Tensor, v: Tensor, transport: Transport, pieces: Pieces) -> Tensor:
    order = torch.cat([pieces.positions(rank) for rank in range(transport.world_size)])
    seen = order <= pieces.positions(transport.rank).unsqueeze(1)
    both = Gather.apply(torch.stack([k, v]), transport)
    keys, values = both.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)


def options_of(side: str, args: argparse.Namespace) -> tuple[int | None, int]:
    """The window, and how many ranks divide the heads."""
    return (args.window if side == "window" else None), (args.ranks_per_host if side == "two levels" else 1)


def attention(length: int, ranks: SequenceRanks, transport: Transport, args: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward of this rank's piece."""
    pieces, (window, _) = ranks.pieces(length), options_of(args.side, args)
    q, k, v = (
        torch.randn(1, heads, pieces.size(ranks.rank), args.width).requires_grad_()
        for heads in (args.heads, args.groups, args.groups)
    )
    codec = Int8Codec(64) if args.side == "ring, int8" else None
    over: Any = Silent(transport.rank, transport.world_size) if args.side == "alone" else ranks

    def forward() -> Tensor:
        if args.side == "gather":
            return gathered(q, k, v, transport, pieces)
        return ring_attention(q, k, v, over, pieces, window=window, codec=codec)

    return lambda: forward().sum().backward()


def worker(args: argparse.Namespace) -> list[dict] | None:
    """One rank of one side: all lengths, from short to long; on rank 0 what was measured."""
    transport = comm.init("gloo")
    torch.manual_seed(transport.rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // transport.world_size))
    ranks, found, at_start = SequenceRanks.of(transport, options_of(args.side, args)[1]), [], 0
    for length in [FIRST // (2 * transport.world_size) * 2 * transport.world_size, *args.lengths]:
        its = measure(transport, attention(length, ranks, transport, args), args.repeats, warm=lambda: None)
        at_start = at_start or _peak_bytes()
        its["peak_bytes"] = slowest(transport, _peak_bytes() - at_start)
        found.append(its | {"tokens": length})
    ranks.close()
    transport.close()
    return None if transport.rank else found[1:]


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def expected_bytes(length: int, side: str, args: argparse.Namespace) -> int | None:
    """What the ranks of the first host send to other hosts: keys and values twice, and gradients, in float32."""
    if side in ("ring, int8", "gather"):
        return None
    window, degree = options_of(side, args)
    pieces, R = Pieces(length, args.hosts * args.ranks_per_host, degree), args.ranks_per_host
    sight, total = Sight(pieces, window=window), 0
    here = range(R // degree if side != "alone" else 0)  # nodes, or ranks, of the first host
    for me in here:
        for other in set(range(pieces.nodes)) - set(here):
            going = sum(part.stop - part.start for part in sight.keys(other, me))
            coming = sum(part.stop - part.start for part in sight.keys(me, other))
            total += 2 * args.groups * args.width * 4 * (2 * going + coming)
    return total


def rows_of(network: str, found: Mapping[str, list[dict]], args: argparse.Namespace) -> list[list[str]]:
    """A row for each side and length."""
    rows, rate = [], parse_rate(network)
    alone = {its["tokens"]: statistics.median(its["seconds"]) for its in found.get("alone", ())}
    for side, lengths in found.items():
        for its in lengths:
            seconds, sent, less = statistics.median(its["seconds"]), its["wire_payload"], alone.get(its["tokens"])
            limit, expected = sent * 8 / rate if rate else 0.0, expected_bytes(its["tokens"], side, args)
            is_shaped = bool(rate) and side != "alone"
            hidden = f"{100 * min(1.0, max(0.0, 1 - (seconds - less) / limit)):.0f}" if is_shaped and less else ""
            cells = [network, side, f"{its['tokens']:,}", f"{seconds:.3f}", f"{seconds / less:.2f}" if less else ""]
            cells += [f"{sent / 1e6:.2f}", "" if expected is None else f"{expected / 1e6:.2f}"]
            rows.append([*cells, f"{limit:.3f}" if is_shaped else "", hidden, f"{its['peak_bytes'] / 1e6:.0f}"])
    return rows


HEADS = (
    "network", "side", "tokens", "seconds", "times alone", "sent MB", "formula MB", "limit s", "hidden, %", "peak MB"
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("sequence", __doc__)
    add = parser.add_argument
    add("--sides", nargs="+", choices=SIDES, default=SIDES[:4], metavar="SIDE", help=", ".join(SIDES))
    add("--lengths", type=int, nargs="+", default=[8192], metavar="TOKENS")
    add("--window", type=int, default=1024, metavar="TOKENS")
    add("--heads", type=int, default=8)
    add("--groups", type=int, default=2, help="key-value heads (default: %(default)s)")
    add("--width", type=int, default=64)
    add("--hosts", type=int, default=4)
    add("--ranks-per-host", type=int, default=1)
    add("--networks", nargs="+", default=["100mbit", "1gbit", "none"], help="rates; none: unshaped")
    add("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    args.lengths = sorted(args.lengths)
    ranks = args.hosts * args.ranks_per_host
    if "gather" in args.sides and any(length % (2 * ranks) for length in args.lengths):
        parser.error(f"--lengths {args.lengths}: expected multiples of {2 * ranks}, or gather has unequal rows")
    need_hosts()
    rows, laid = [], {"hosts": args.hosts, "ranks_per_host": args.ranks_per_host, "timeout_s": 1800.0}
    for network in args.networks:
        found = {
            side: on_hosts(worker, argparse.Namespace(**vars(args), side=side), rate=network, **laid)
            for side in args.sides
        }
        rows += rows_of(network, found, args)
    text = f"""# Attention over a split sequence, on emulated Ethernet

{here()}

{args.hosts} hosts of {args.ranks_per_host} rank{"s" * (args.ranks_per_host > 1)}. One causal attention, forward and
backward, {args.heads} query and {args.groups} key-value heads of width {args.width}, float32; windows of
{args.window:,} tokens. Medians of {args.repeats} repetitions, the slowest rank of each; all ranks share the cores. Sent
is the payload of the first host's card, and beside it the formula's. Limit: the bytes over the rate. Hidden: the share
of the limit that does not add to the seconds of computing alone. Backward gets keys and values again, but gather keeps
all of them; it needs a table of what is seen, and computes unseen pairs, too: twice the work. Memory is the most that a
rank has had so far, above what it had after {FIRST:,} tokens.

{table(HEADS, rows, names=2)}
"""
    publish(args, text)
