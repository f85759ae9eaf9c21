"""Small messages between all ranks: bytes, texts and tensors of each, and an error that all of them raise.

Every function is called by all ranks, in the same order, and ends the same way on all of them. Rests on
`transports/base.py`. Shape legend: W ranks, B bytes of a rank's message.
"""

from __future__ import annotations

import logging
import struct
import threading
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .transports.base import Transport, Work
from .transports.notes import calling

log = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_S = 10.0
"""How long a rank waits for the others to make the same call before it logs a warning."""

_TYPE_CODES = {torch.float32: "f", torch.float64: "d", torch.bool: "B", torch.uint8: "B"}


def bytes_on(device: torch.device | str, data: bytes) -> Tensor:
    """These bytes as a uint8 tensor on a device, without waiting for the device.

    On CUDA a copy from pinned memory, which torch's allocator keeps until the copy has read it.
    """
    return numbers_on(device, data, torch.uint8)


def numbers_on(device: torch.device | str, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """As `bytes_on`, for one or more numbers: [len(numbers)]. dtype: float32, float64, bool or uint8."""
    row = torch.frombuffer(array(_TYPE_CODES[dtype], numbers), dtype=dtype)
    if torch.device(device).type == "cuda":
        return row.pin_memory().to(device, non_blocking=True)
    return row.to(device)


@dataclass
class BytesUnderWay:
    """Every rank's bytes, on their way into `rows`, uint8 [W, B]; `work` completes when they have arrived."""

    work: Work
    rows: Tensor

    @classmethod
    def launch(cls, transport: Transport, mine_B: Tensor) -> BytesUnderWay:
        """Send this rank's bytes to all, uint8 [B] with the same B on all ranks. Sends (W-1)·B bytes per rank."""
        rows = torch.empty(transport.world_size, len(mine_B), dtype=torch.uint8, device=mine_B.device)
        return cls(transport.all_gather(rows, mine_B), rows)

    def read(self, *flags: Tensor) -> tuple[list[bytes], bool]:
        """Wait; then every rank's bytes, and whether all flags are true. Waits for the device once.

        flags: bool tensors of no dimensions, on the device of the bytes.
        """
        self.work.wait()
        flat = self.rows.view(-1)
        if flags:
            flat = torch.cat([flat, torch.stack(flags).view(torch.uint8)])
        data, length = bytes(flat.cpu().tolist()), self.rows.numel()
        return _rows_of(data[:length], len(self.rows)), all(data[length:])


def read_together(
    messages: Sequence[BytesUnderWay], numbers: Sequence[Tensor]
) -> tuple[list[list[bytes]], list[float]]:
    """Every rank's bytes of each message, and the values of these numbers. Waits for each device once.

    numbers: float32 tensors of no dimensions.
    """
    for message in messages:
        message.work.wait()
    rows = [message.rows for message in messages]
    parts = [row.view(-1) for row in rows] + [number.view(1).view(torch.uint8) for number in numbers]
    data: dict[torch.device, bytes] = {}
    for device in {part.device: None for part in parts}:
        data[device] = bytes(torch.cat([part for part in parts if part.device == device]).cpu().tolist())
    found = []
    for part in parts:
        found.append(data[part.device][: len(part)])
        data[part.device] = data[part.device][len(part) :]
    texts = [_rows_of(one, len(row)) for one, row in zip(found, rows, strict=False)]
    return texts, [struct.unpack("=f", one)[0] for one in found[len(rows) :]]


def _rows_of(data: bytes, W: int) -> list[bytes]:
    B = len(data) // W
    return [data[k * B : (k + 1) * B] for k in range(W)]


def exchange_bytes(
    transport: Transport, mine: bytes, device: torch.device | str | None = None
) -> Generator[Work, None, list[bytes]]:
    """Every rank's bytes, of one common length. Yields one Work. Sends (W-1)·len bytes per rank.

    device: device of the buffers; None: the transport's own choice.
    """
    device = transport.device if device is None else device
    under_way = BytesUnderWay.launch(transport, bytes_on(device, mine))
    yield under_way.work
    return under_way.read()[0]


def gather_bytes(transport: Transport, mine: bytes, device: torch.device | str | None = None) -> list[bytes]:
    """As `exchange_bytes`, but waits."""
    return wait_for(exchange_bytes(transport, mine, device))


def wait_for(exchange: Generator[Work, None, T]) -> T:
    """Run one exchange to its end, and return its result."""
    try:
        while True:
            next(exchange).wait()
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def gather_tensors(transport: Transport, mine: Tensor) -> Tensor:
    """Every rank's tensor of one common shape: [W, *shape], on its device. Sends (W-1)·nbytes per rank."""
    rows = torch.empty(transport.world_size, mine.nbytes, dtype=torch.uint8, device=mine.device)
    transport.all_gather(rows, mine.contiguous().view(-1).view(torch.uint8)).wait()
    return rows.view(mine.dtype).view(transport.world_size, *mine.shape)


def sum_in_order(rows: Tensor) -> Tensor:
    """The sum over the first dimension, in rank order: the same bits on every device."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def gather_texts(transport: Transport, mine: str, device: torch.device | str | None = None) -> list[str]:
    """Every rank's text, of any length. Sends 16 bytes to each peer, and the texts padded to the longest, if any."""
    data = mine.encode()
    lengths = [int.from_bytes(b, "little") for b in gather_bytes(transport, len(data).to_bytes(16, "little"), device)]
    if not any(lengths):  # no rank has a problem to report, most often
        return [""] * len(lengths)
    padded = data.ljust(max(lengths), b"\0")
    return [b[:n].decode() for b, n in zip(gather_bytes(transport, padded, device), lengths, strict=True)]


def raise_on_all_ranks(
    transport: Transport,
    problem: str | None,
    error: type[Exception],
    device: torch.device | str | None = None,
    hint: Callable[[], str] = lambda: "",
) -> None:
    """Raise on all ranks if any of them has a problem: the lowest such rank's text, followed by `hint()`."""
    problems = [text for text in gather_texts(transport, problem or "", device) if text]
    if problems:
        raise error(problems[0] + hint())


@contextmanager
def call_of_all(transport: Transport, name: str) -> Iterator[None]:
    """Wrap the body of a function that every rank must call, so that a rank which calls it alone gets a clear error.

    The ranks meet first. A rank that has waited for `QUIET_S` logs a warning; the `PeerError` at the end of the wait
    names the ranks that made the call and those that did not. A nested call sends nothing, and errors name the outer
    one. Sends a byte to each peer.
    """
    with calling(name) as is_outermost:
        if is_outermost and transport.world_size > 1:
            text = "rank %d has waited %g s in %s for the other ranks: every rank must call it, and not all have"
            warning = threading.Timer(QUIET_S, log.warning, (text, transport.rank, QUIET_S, name))
            warning.daemon = True
            warning.start()
            try:
                gather_bytes(transport, b"\0")
            finally:
                warning.cancel()
        yield
