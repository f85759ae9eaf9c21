"""The cost of an exchange, from a few measured numbers: seconds and bytes, without tensors or a network.

For deciding whether compression pays on a link, and for estimating worlds that are not at hand. Fitted to 63 points
of up to 8 hosts, it predicts left-out ones within 15 % for 28 of 36 one-bit and 22 of 27 dense points
(`git show d6719c2:scripts/records/growth_2026-11.md`).

The formula, for n elements on W ranks, in pieces that are under way side by side:

    wire = 2·(W-1)/W · n · bytes_per_element / bytes_per_s
    work = ranks_per_core · (n · s_per_element + 2·(W-1) · pieces · latency_s + start_s)
    time = max(wire, work) + unhidden · min(wire, work)

It assumes that every rank sends as fast as it receives, that all are equally fast and start together, that the switch
is not the bottleneck, and that a message's latency is processor time, as it is when many are in flight. So is the
start, which every exchange pays once, whatever its size: waking the ranks and touching the buffers for the first time.
Padding to whole blocks and to 16 bytes per frame is left out: below 1 % if a chunk has more than 10,000 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hops import rows_of

PHASES = 2
PIECE = 1 << 20


@dataclass(frozen=True)
class LinkCost:
    """A rank's link.

    Attributes:
        latency_s: Seconds per message, on top of its bytes.
        bytes_per_s: Payload bandwidth in each direction; may be inf.
        start_s: Seconds per exchange, on top of its messages; 0 if no message is sent. Default 0.
    """

    latency_s: float
    bytes_per_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.start_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"latency_s and start_s must be at least 0 and bytes_per_s more than 0, got {self}")


@dataclass(frozen=True)
class CodecCost:
    """The cost of an element. A dense all-reduce has 4 bytes per element, and the s_per_element of its addition.

    Attributes:
        bytes_per_element: Bytes of its frame in one phase.
        s_per_element: A rank's processor time for all phases together: encode, decode, errors, the transport's copies.
        unhidden: Share of the shorter of wire and work that the longer does not hide: 0, all is hidden; 1, one after
            the other. Default 0.
    """

    bytes_per_element: float
    s_per_element: float
    unhidden: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_element <= 0 or self.s_per_element < 0 or not 0 <= self.unhidden <= 1:
            raise ValueError(
                f"expected bytes_per_element > 0, s_per_element >= 0 and unhidden between 0 and 1, got {self}"
            )


def payload_bytes(elements: int, world_size: int, codec: CodecCost, hops: int = 1) -> float:
    """Bytes that each rank sends to others in one exchange, both phases; in two hops the first sends frames twice."""
    frames = PHASES * (world_size - 1)
    if hops == 2:
        frames += world_size + 1 - _peers(world_size, hops) - 2
    return frames / world_size * elements * codec.bytes_per_element


def messages(elements: int, world_size: int, piece: int | None = PIECE, hops: int = 1) -> int:
    """Number of messages that each rank sends. piece: elements exchanged as one bucket; None: all of them."""
    pieces = 1 if piece is None else -(-elements // piece)
    return PHASES * _peers(world_size, hops) * pieces


def _peers(world_size: int, hops: int) -> int:
    """Ranks to which a rank sends in a phase: all others, or those of its row and of its column."""
    rows = rows_of(world_size)
    return world_size - 1 if hops == 1 else rows + world_size // rows - 2


def wire_s(elements: int, world_size: int, codec: CodecCost, link: LinkCost, hops: int = 1) -> float:
    """Seconds of the payload at full bandwidth: the lower bound for every implementation."""
    return payload_bytes(elements, world_size, codec, hops) / link.bytes_per_s


def exchange_s(
    elements: int,
    world_size: int,
    codec: CodecCost,
    link: LinkCost,
    *,
    piece: int | None = PIECE,
    ranks_per_core: float = 1.0,
    hops: int = 1,
) -> float:
    """Seconds of one exchange, from its start on all ranks to its end on the slowest; the module's formula.

    ranks_per_core: how many ranks share a processor, at least 1; more only if hosts are emulated. hops: 1, or 2 in rows
    and columns (`hops.py`).
    """
    if elements < 0 or world_size < 1 or ranks_per_core < 1:
        raise ValueError(
            f"expected elements >= 0, world_size >= 1 and ranks_per_core >= 1, got {elements}, {world_size}, "
            f"{ranks_per_core}"
        )
    wire = wire_s(elements, world_size, codec, link, hops)
    sent = messages(elements, world_size, piece, hops)
    sending = sent * link.latency_s + (link.start_s if sent else 0.0)
    work = ranks_per_core * (elements * codec.s_per_element + sending)
    return max(wire, work) + codec.unhidden * min(wire, work)
