"""What benchmarks time with: calls on this machine, and acts of all ranks. Their quartiles, and what they ran on."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from onebit.cli.cluster import INTERFACE, QueueCounters, read_queue, sent_on_wire
from onebit.comm import Transport

Name, Measured = TypeVar("Name"), TypeVar("Measured")
HEADERS = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps: bytes per packet that are not payload


@dataclass(frozen=True)
class Timing:
    """Quartiles of one side's repetitions, in milliseconds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        quartiles = statistics.quantiles([1e3 * s for s in seconds], n=4, method="inclusive") if seconds[1:] else None
        return cls(*quartiles) if quartiles else cls(*[1e3 * seconds[0]] * 3)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g})"


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(
    calls: Mapping[Name, Callable[[], object]],
    repeats: int,
    clock: Callable[[Callable[[], object]], Measured] = seconds,
) -> dict[Name, list[Measured]]:
    """What `clock` measures of each call, one of every side after the other: other load meets all of them.

    clock: calls, and returns seconds or what else it measures. A first call of each, which touches memory, is not
    counted.
    """
    for call in calls.values():
        call()
    found: dict[Name, list[Measured]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(clock(call))
    return found


def cpu_name() -> str:
    """The processor's model, as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line) if info.exists() else {}
    named = {key.strip(): value.strip() for key, value in fields.items()}
    family = f" (family {named['cpu family']}, model {named['model']})" if "cpu family" in named else ""
    return named.get("model name", platform.processor() or platform.machine()) + family


# ---------------------------------------------------------------- all ranks


def measure(
    transport: Transport,
    act: Callable[[], None],
    repeats: int,
    *,
    warm: Callable[[], None] | None = None,
) -> dict:
    """Seconds of the slowest rank per repetition, and bytes this rank sent in the last one. All ranks.

    warm: what is done first, once, uncounted; default: act. wire_bytes with headers, wire_payload without: None outside
    an emulated host.
    """
    (warm or act)()
    seconds: list[float] = []
    for _ in range(repeats):
        meet(transport)
        wire = _on_wire()
        meet(transport)  # again: another rank of this host must not send before the counter is read
        sent = transport.sent_bytes
        began = time.perf_counter()
        act()
        mine = time.perf_counter() - began
        sent_bytes = transport.sent_bytes - sent
        meet(transport)
        wire_after = _on_wire()
        seconds.append(slowest(transport, mine))
    traffic = {"wire_bytes": None, "wire_payload": None}
    if wire is not None and wire_after is not None:
        wire_bytes = wire_after.sent_bytes - wire.sent_bytes
        traffic = {"wire_bytes": wire_bytes, "wire_payload": wire_bytes - HEADERS * (wire_after.packets - wire.packets)}
    return {"seconds": seconds, "sent_bytes": sent_bytes, **traffic}


def meet(transport: Transport) -> None:
    """Return when all ranks are here."""
    transport.all_reduce(torch.zeros(1)).wait()


def slowest(transport: Transport, mine: float) -> float:
    """The largest of what the ranks say; the same on all of them."""
    every = torch.zeros(transport.world_size)
    every[transport.rank] = mine
    transport.all_reduce(every).wait()
    return float(every.max())


def _on_wire() -> QueueCounters | None:
    """What this host has sent, by the queue's own counter; None outside an emulated host."""
    return None if sent_on_wire() is None else read_queue(INTERFACE)
