"""Bandwidth between every two nodes, in both directions at once, and the latency of a small message.

One rank of each node measures. Pairs that share no node measure at the same time, as in a round of a tournament, so
that 64 nodes take 63 rounds. All ranks call everything here.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...comm import Transport
from ...comm.messages import gather_bytes, gather_texts

PING_BYTES, PINGS = 64, 9
FIRST_BYTES, MOST_BYTES, ENOUGH_S = 1 << 18, 1 << 26, 0.25
SLOW = 0.7  # of the median bandwidth


@dataclass(frozen=True)
class Node:
    """A host and its ranks; the first of them measures."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """A link between nodes number a and b. latency_s: of a small message in each direction, both at the same time."""

    a: int
    b: int
    bytes_per_s: float
    latency_s: float


def find_nodes(transport: Transport) -> list[Node]:
    """The hosts by name, in order of their first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_texts(transport, socket.gethostname(), transport.device)):
        ranks.setdefault(name, []).append(rank)
    return [Node(name, tuple(members)) for name, members in ranks.items()]


def rounds(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds without a repeated node: a round-robin tournament."""
    places: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    half = len(places) // 2
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        places.insert(1, places.pop())


def measure(transport: Transport, nodes: Sequence[Node], say: Callable[[str], None] = lambda text: None) -> list[Link]:
    """All links, the same on every rank."""
    mine = next(k for k, node in enumerate(nodes) if transport.rank in node.ranks)
    is_leader = nodes[mine].ranks[0] == transport.rank
    found: list[Link] = []
    for k, pairs in enumerate(rounds(len(nodes))):
        say(f"links: round {k + 1} of {len(nodes) - 1 + len(nodes) % 2}")
        own = next((pair for pair in pairs if mine in pair), None)
        measured = b"\0" * 16
        if own is not None and is_leader:
            part = transport.split(sorted(nodes[node].ranks[0] for node in own))
            bandwidth, latency = _between_two(part)
            part.close()
            measured = struct.pack("<2d", bandwidth, latency)
        every = gather_bytes(transport, measured, transport.device)
        for a, b in pairs:
            values = [struct.unpack("<2d", every[nodes[node].ranks[0]]) for node in (a, b)]
            found.append(Link(a, b, min(v[0] for v in values), max(v[1] for v in values)))
    return sorted(found, key=lambda link: (link.a, link.b))


def _between_two(part: Transport) -> tuple[float, float]:
    """(bytes per second in each direction, seconds of a small message)."""
    pings = [_exchange_s(part, PING_BYTES) for _ in range(PINGS)]
    size, seconds = FIRST_BYTES, _exchange_s(part, FIRST_BYTES)
    while seconds < ENOUGH_S and size < MOST_BYTES:
        size *= 4
        seconds = _exchange_s(part, size)
    # The shortest: what else runs on these machines can only make them longer.
    seconds = min(seconds, *(_exchange_s(part, size) for _ in range(3))) - min(pings)
    return size / max(seconds, 1e-9), statistics.median(pings)


def _exchange_s(part: Transport, size: int) -> float:
    """Seconds until both ranks have received this many bytes from each other, of the slower one."""
    sent = torch.zeros(2, size, dtype=torch.uint8, device=part.device)
    received = torch.empty_like(sent)
    gather_bytes(part, b"ready", part.device)
    began = time.perf_counter()
    part.all_to_all(received, sent).wait()
    if part.device.type == "cuda":
        torch.cuda.synchronize(part.device)
    seconds = struct.pack("<d", time.perf_counter() - began)
    return float(max(struct.unpack("<d", row)[0] for row in gather_bytes(part, seconds, part.device)))


def slow(links: Sequence[Link], nodes: Sequence[Node]) -> str | None:
    """A sentence that names the slow node or link; None if all are equally fast."""
    if not links:
        return None
    usual = statistics.median(link.bytes_per_s for link in links)
    fastest = max(link.bytes_per_s for link in links)
    reference = fastest if len(links) < 4 else usual
    bad = [link for link in links if link.bytes_per_s < SLOW * reference]
    if not bad:
        return None
    for k, node in enumerate(nodes):
        own = [link for link in links if k in (link.a, link.b)]
        if len(own) > 1 and set(bad) == set(own):
            best = max(link.bytes_per_s for link in own)
            return (
                f"{node.name} is slow: its links pass {8e-9 * best:.3g} Gbit/s at most, others {8e-9 * fastest:.3g}; "
                "every exchange waits for it. Look at its cable, its switch port and other traffic there"
            )
    worst = min(bad, key=lambda link: link.bytes_per_s)
    return (
        f"the link between {nodes[worst.a].name} and {nodes[worst.b].name} is the slowest: "
        f"{8e-9 * worst.bytes_per_s:.3g} Gbit/s, the fastest passes {8e-9 * fastest:.3g}"
    )
