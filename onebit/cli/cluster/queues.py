"""The queue at a link's end: its rate, and its counters of sent bytes."""

from __future__ import annotations

import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate in tc's notation ("100mbit", "2.5gbit"); None for "none", the unshaped link."""
    if text.lower() == "none":
        return None
    match = _RATE.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"rate {text!r}: write it as tc does, e.g. 100mbit, 1gbit or 2.5gbit, or none")
    rate = round(float(match[1]) * _UNITS[match[2]])
    if not 10**5 <= rate <= 10**11:
        raise ValueError(f"rate {text!r} is outside 100kbit to 100gbit")
    return rate


def queue_arguments(rate: int | None) -> str:
    """The queue of one link end, in tc's words. Without a rate it only counts.

    A burst below one 64 KiB GSO packet or 1 ms of the rate makes tbf cut packets up in software and halves what
    passes; the limit of 50 ms is a switch port's usual depth.
    """
    if rate is None:
        return "pfifo limit 10000"
    per_ms = rate // 8000
    return f"tbf rate {rate}bit burst {max(per_ms, 67050)} limit {max(50 * per_ms, 1_000_000)}"


@dataclass(frozen=True)
class QueueCounters:
    """Traffic that has left an interface's queue: every Ethernet frame of a large (GSO) packet with its own headers.

    `/sys/class/net/eth0/statistics/tx_bytes` counts such a packet once, before it is cut into frames: up to 5 % less.
    """

    sent_bytes: int
    packets: int
    drops: int


def read_queue(interface: str) -> QueueCounters:
    """The counters that `tc -s qdisc show dev INTERFACE` shows, read from the kernel directly (40 µs, no process).

    OSError if there is none. See rtnetlink(7) and linux/gen_stats.h.
    """
    new_qdisc, get_qdisc, request_ack_echo, root = 36, 38, 1 | 4 | 8, 0xFFFFFFFF
    question = struct.pack("=BxxxiIII", 0, socket.if_nametoindex(interface), 0, root, 0)
    header = struct.pack("=IHHII", 16 + len(question), get_qdisc, request_ack_echo, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(header + question)
        answer = kernel.recv(1 << 16)
    if struct.unpack_from("=H", answer, 4)[0] != new_qdisc:  # only the acknowledgement: the kernel's "noqueue"
        raise OSError(f"{interface} has no queue that counts")
    statistics = _netlink_attributes(_netlink_attributes(answer[36:])[7])  # TCA_STATS2
    sent_bytes, packets = struct.unpack_from("=QI", statistics[1])  # TCA_STATS_BASIC
    drops = struct.unpack_from("=III", statistics[3])[2]  # TCA_STATS_QUEUE
    return QueueCounters(sent_bytes, packets, drops)


def _netlink_attributes(data: bytes) -> dict[int, bytes]:
    attributes, at = {}, 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        attributes[kind & 0x3FFF] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return attributes


def sent_on_wire() -> int | None:
    """Bytes that this emulated host has sent so far, headers included; None outside of one. Use differences only.

    Rests on ONEBIT_WIRE_COUNTER, which names the host's interface; a shell reads the same number from
    `tc -s -j qdisc show dev $ONEBIT_WIRE_COUNTER`.
    """
    interface = os.environ.get("ONEBIT_WIRE_COUNTER")
    return read_queue(interface).sent_bytes if interface else None


def sent_before_cutting() -> dict[str, int]:
    """tx_bytes of every interface of this process's network."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(values.split()[8]) for name, values in (row.split(":") for row in rows)}
