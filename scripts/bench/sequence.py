"""Attention over a split sequence on emulated Ethernet: seconds and bytes beside computing alone, and beside a gather.

    python scripts/bench.py sequence --record runs/sequence.md

One causal attention, forward and backward, of float32 queries, keys and values. Sides in each run of the hosts: `ring`
is onebit.zero.ring_attention, also with blocks in eight bits; `alone` computes the same blocks of keys without a
network; `gather` sends all keys and values to all ranks before it computes, and their gradients back after it. Needs
root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from reports import publish, table
from torch import Tensor

from bench.ranks import need_hosts, on_hosts
from bench.record import here, parser_of
from bench.silent import Silent
from bench.timing import measure
from onebit import comm
from onebit.cli.cluster import parse_rate
from onebit.comm import Int8Codec, Transport
from onebit.zero.sequence import Pieces, ring_attention
from onebit.zero.sequence.sight import Sight

SIDES = ("ring", "ring, int8", "alone", "gather")


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


def acts(args: argparse.Namespace, transport: Transport) -> dict[str, Callable[[], None]]:
    """One pass forward and backward of each side."""
    pieces, rank = Pieces(args.tokens, transport.world_size), transport.rank
    size = pieces.size(rank)
    q, k, v = (
        torch.randn(1, heads, size, args.width).requires_grad_() for heads in (args.heads, args.groups, args.groups)
    )
    silent = Silent(rank, transport.world_size)
    order = torch.cat([pieces.positions(r) for r in range(transport.world_size)])
    seen = order <= pieces.positions(rank).unsqueeze(1)

    def gather() -> Tensor:
        both = Gather.apply(torch.stack([k, v]), transport)
        keys, values = both.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)

    made: dict[str, Callable[[], Tensor]] = {
        "ring": lambda: ring_attention(q, k, v, transport, pieces),
        "ring, int8": lambda: ring_attention(q, k, v, transport, pieces, codec=Int8Codec(64)),
        "alone": lambda: ring_attention(q, k, v, silent, pieces),
        "gather": gather,
    }

    def both_ways(forward: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: forward().sum().backward()

    return {side: both_ways(made[side]) for side in SIDES}


def worker(args: argparse.Namespace) -> dict[str, dict] | None:
    """One rank: the sides in turn; on rank 0 what `measure` says of each."""
    transport = comm.init("gloo")
    torch.manual_seed(transport.rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // transport.world_size))
    found = {side: measure(transport, act, args.repeats) for side, act in acts(args, transport).items()}
    transport.close()
    return None if transport.rank else found


def expected_bytes(args: argparse.Namespace) -> list[int]:
    """What each rank sends by the formula: keys and values twice, and gradients, of four bytes an element each."""
    sight, found = Sight(Pieces(args.tokens, args.hosts)), []
    for me in range(args.hosts):
        others = [rank for rank in range(args.hosts) if rank != me]
        keys, grads = (
            sum(part.stop - part.start for pair in pairs for part in sight.keys(*pair))
            for pairs in ([(rank, me) for rank in others], [(me, rank) for rank in others])
        )
        found.append(2 * args.groups * args.width * 4 * (2 * keys + grads))
    return found


def rows_of(network: str, found: dict[str, dict]) -> list[list[str]]:
    """A row for each side."""
    rows, rate = [], parse_rate(network)
    alone = statistics.median(found["alone"]["seconds"])
    for side in SIDES:
        its = found[side]
        seconds, sent, wire = statistics.median(its["seconds"]), its["sent_bytes"], its["wire_payload"]
        limit = sent * 8 / rate if rate else 0.0
        hidden = f"{100 * min(1.0, max(0.0, 1 - (seconds - alone) / limit)):.0f}" if limit and side != "alone" else ""
        cells = [network, side, f"{seconds:.3f}", f"{seconds / alone:.2f}", f"{sent / 1e6:.2f}"]
        cells += [f"{wire / sent:.3f}" if sent and wire else "", f"{limit:.3f}" if limit else "", hidden]
        rows.append(cells)
    return rows


HEADS = ("network", "side", "seconds", "times alone", "sent MB", "on the wire", "limit s", "hidden, %")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("sequence", __doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2, help="key-value heads (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--networks", nargs="+", default=["100mbit", "1gbit", "none"], help="rates; none: unshaped")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if args.tokens % (2 * args.hosts):
        parser.error(f"--tokens {args.tokens}: expected a multiple of {2 * args.hosts}, or gather has unequal rows")
    need_hosts()
    measured = {network: on_hosts(worker, args, hosts=args.hosts, rate=network) for network in args.networks}
    rows, formula = [row for each in measured.items() for row in rows_of(*each)], expected_bytes(args)
    text = f"""# Attention over a split sequence, on emulated Ethernet

{here()}

One causal attention, forward and backward: {args.tokens:,} tokens over {args.hosts} hosts, {args.heads} query and
{args.groups} key-value heads of width {args.width}, float32. Medians of {args.repeats} repetitions, the slowest rank of
each; {args.hosts} ranks share the cores. Bytes are rank 0's: by the formula {formula[0] / 1e6:.2f} MB, and
{sum(formula) / len(formula) / 1e6:.2f} in the mean of all ranks, because backward gets keys and values again, but
gather keeps all of them. On the wire: payload by the queue's counter over that count. Limit: the bytes over the rate.
Hidden: the share of the limit that does not add to the seconds of computing alone. The zigzag's gather needs a table of
what is seen, and computes unseen pairs, too: twice the work.

{table(HEADS, rows, names=2)}
"""
    publish(args, text)
