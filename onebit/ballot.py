"""One small message per rank and step: what all must know before anything is decided."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .comm import Transport
from .replicas import gather_bytes

_NUMBERS = struct.Struct("<2d")


@dataclass(frozen=True)
class Ballot:
    """One rank's contribution. present: which parameters have a gradient here. The rest is its replica's share of sums.

    norm_squared: ‖g_i‖². product: <g_i, m̂>. Both of all the replica's shards together.
    """

    present: Sequence[bool]
    norm_squared: float = 0.0
    product: float = 0.0

    def to_bytes(self) -> bytes:
        bits = sum(1 << k for k, is_present in enumerate(self.present) if is_present)
        return _NUMBERS.pack(self.norm_squared, self.product) + bits.to_bytes(-(-len(self.present) // 8), "little")

    @classmethod
    def from_bytes(cls, data: bytes, parameters: int) -> Ballot:
        bits = int.from_bytes(data[_NUMBERS.size :], "little")
        return cls([bool(bits >> k & 1) for k in range(parameters)], *_NUMBERS.unpack_from(data))


def cast_ballots(link: Transport, mine: Ballot, device: torch.device | str) -> list[Ballot]:
    """Every rank's ballot, in rank order. All ranks. Sends 16 bytes and a bit per parameter to each peer."""
    return [Ballot.from_bytes(data, len(mine.present)) for data in gather_bytes(link, mine.to_bytes(), device)]


def present_anywhere(ballots: Sequence[Ballot]) -> list[bool]:
    """Per parameter: whether any rank has a gradient for it."""
    return [any(column) for column in zip(*(ballot.present for ballot in ballots), strict=True)]
