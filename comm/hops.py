"""Two hops: the ranks of a large world in rows and columns, so that a phase takes about 2·√W messages, not W.

A message costs its latency, however few bytes it has: of 1,024 ranks each sends 1,023 in every phase of every bucket,
of some 500 bytes. In rows and columns a frame first goes to the rank of the sender's row that is in the receiver's
column, and from there to the receiver. The same frames arrive at the same ranks, so every bit is that of one hop. The
price is bytes: the first phase sends nearly twice as many, the second as many as before.

Shape legend: W = R·C ranks, in R rows of C; rank = row·C + column. B bytes of one frame.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator

import torch
from torch import Tensor

from .transports.base import Transport, Work
from .transports.composite import Composite

log = logging.getLogger(__name__)

FROM = 128
"""Ranks from which `init` makes two hops. At 100 Mbit/s the bytes more cost as much as messages fewer at about 110."""


class TwoHopTransport(Composite):
    """A transport over many ranks, which exchanges between rows and then between columns. See `Transport`.

    Its operations are those of `world`. `exchange` asks for `all_to_all_in_hops` and `all_gather_in_hops`.

    Args:
        world: Transport over all ranks.
        row: Transport over the C ranks of this rank's row, in order of columns.
        column: Transport over the R ranks of its column, in order of rows.

    Raises:
        ValueError: The rank numbers do not fit: expected rank = row·C + column.
    """

    hops = 2

    def __init__(self, world: Transport, row: Transport, column: Transport):
        R, C = column.world_size, row.world_size
        if world.world_size != R * C or world.rank != column.rank * C + row.rank:
            raise ValueError(
                f"rank {world.rank} of {world.world_size} cannot be in row {column.rank} of {R} and column {row.rank} "
                f"of {C}: expected rank = row·{C} + column"
            )
        super().__init__(world, row, column)
        self.row, self.column = row, column

    def describe(self) -> str:
        return f"{self.world.describe()}, two hops: {self.column.world_size} rows of {self.row.world_size} ranks"

    def all_to_all_in_hops(self, out_WB: Tensor, in_WB: Tensor) -> Generator[Work, None, None]:
        """As `all_to_all`; yields two Works. Sends (2·W - R - C)·B bytes per rank, in R + C - 2 messages."""
        R, C, B = self.column.world_size, self.row.world_size, in_WB.shape[1]
        sent = in_WB.view(R, C, B).transpose(0, 1).contiguous()  # for each column all that goes there
        received = torch.empty_like(sent)
        yield self.row.all_to_all(received.view(C, R * B), sent.view(C, R * B))
        sent = received.transpose(0, 1).contiguous()  # for each row what the ranks of this row send there
        yield self.column.all_to_all(out_WB.view(R, C * B), sent.view(R, C * B))

    def all_gather_in_hops(self, out_WB: Tensor, in_B: Tensor) -> Generator[Work, None, None]:
        """As `all_gather`; yields two Works. Sends (W - 1)·B bytes per rank, in R + C - 2 messages."""
        R, C = self.column.world_size, self.row.world_size
        of_row = torch.empty(C, len(in_B), dtype=in_B.dtype, device=in_B.device)
        yield self.row.all_gather(of_row, in_B)
        yield self.column.all_gather(out_WB.view(R, -1), of_row.view(-1))


def rows_of(world_size: int) -> int:
    """R: the largest divisor of the number of ranks up to its root. 1 if that is prime: then there are no two hops."""
    return max(r for r in range(1, math.isqrt(world_size) + 1) if world_size % r == 0)


def hops_of(world_size: int) -> int:
    """The hops that pay: 2 from `FROM` ranks on, if rows and columns have at most half as many ranks together."""
    R = rows_of(world_size)
    return 2 if world_size >= FROM and 2 * (R + world_size // R) <= world_size else 1


def in_hops(transport: Transport, hops: int | str) -> Transport:
    """Put the ranks of a transport in rows and columns, if that is asked for or worth it. All ranks call it.

    Args:
        transport: A transport over all ranks.
        hops: 2; 1 returns the transport itself; "auto" is what `hops_of` says.

    Raises:
        ValueError: hops is something else, or 2 for a prime number of ranks.
    """
    W, R = transport.world_size, rows_of(transport.world_size)
    if hops not in (1, 2, "auto"):
        raise ValueError(f'rank {transport.rank}: hops must be 1, 2 or "auto", got {hops!r}')
    if hops == 2 and R == 1 and W > 1:
        raise ValueError(f"rank {transport.rank}: {W} ranks cannot be in rows and columns, {W} is prime; use hops=1")
    if hops == "auto":
        hops = hops_of(W)
        if hops == 1 and W >= FROM and transport.rank == 0:
            log.info("one hop between %d ranks: the number has no divisors near its root, and so no rows", W)
    if hops == 1:
        return transport
    C = W // R
    row, column = divmod(transport.rank, C)
    of_row = transport.split(range(row * C, (row + 1) * C))
    return TwoHopTransport(transport, of_row, transport.split(range(column, W, C)))
