"""The link probe finds out whether compression pays on this network, once per run, before the first one-bit step.

All ranks exchange a few buckets for real, in one bit and in bfloat16, and compare the times with the time that a step
computes. If one bit gains nothing, gradients are sent in bfloat16 from then on.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm import Bf16Codec, Codec, Hierarchy, Transport, Wire, compressed_allreduce, interleave
from ..comm.messages import gather_bytes
from ..layout.bucket import Bucket
from ..layout.buckets import Buckets
from ..model_parallel import ModelParallelGroup
from .stats import StopWatch, Traffic

log = logging.getLogger(__name__)

SAMPLE = 4  # buckets that are exchanged; the others are assumed to take as long per element
REPEATS = 2

# The share of computing that hides traffic: backward is two thirds of a step's computing, and buckets are sent in it.
HIDDEN = 2 / 3
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class LinkProbe:
    """Times of the slowest rank, in seconds.

    Attributes:
        compute_s: Computing in one step.
        onebit_s: One exchange of all gradients in one bit.
        bf16_s: The same in bfloat16.
    """

    compute_s: float
    onebit_s: float
    bf16_s: float

    def step_s(self, exchange_s: float) -> float:
        """Seconds of a step: its computing, and the part of this exchange that backward does not hide."""
        return self.compute_s + max(0.0, exchange_s - HIDDEN * self.compute_s)

    @property
    def should_compress(self) -> bool:
        """Whether steps with one-bit traffic are shorter by the share `LEAST_GAIN` or more."""
        return self.step_s(self.onebit_s) <= (1.0 - LEAST_GAIN) * self.step_s(self.bf16_s)

    def __str__(self) -> str:
        return (
            f"a step computes {self.compute_s:.3g} s; exchanging takes {self.onebit_s:.3g} s in one bit and "
            f"{self.bf16_s:.3g} s in bfloat16; a step would take {self.step_s(self.onebit_s):.3g} s against "
            f"{self.step_s(self.bf16_s):.3g} s"
        )


class CompressionPolicy:
    """Decides whether gradients are replaced by momentum in one bit. Measures the network once, and logs the result.

    All ranks bind and decide together.

    Args:
        mode: "auto" measures; "always" compresses without measuring.

    Attributes:
        mode: The same.
        compresses: The decision; None as long as there is none.
        computing: Measures how long a step computes. Set by `bind`.
    """

    def __init__(self, mode: str):
        if mode not in ("auto", "always"):
            raise ValueError(f'compression must be "auto" or "always", got {mode!r}')
        self.mode = mode
        self.compresses: bool | None = True if mode == "always" else None

    def bind(
        self,
        transport: Transport,
        codec: Codec,
        buckets: Buckets[Bucket],
        parts: ModelParallelGroup,
        traffic: Traffic,
        computing: StopWatch,
    ) -> None:
        """Set the objects with which `decide` measures.

        Args:
            transport: Between the replicas.
            codec: The one-bit codec.
            buckets: All buckets; the first few are the sample.
            parts: The ranks that hold the parts of this replica.
            traffic: Counts bytes; the probe's bytes are left out.
            computing: Measures how long a step computes.
        """
        self._transport, self._codec, self._buckets, self._parts = transport, codec, buckets, parts
        self._traffic, self.computing = traffic, computing

    def decide(self) -> bool:
        """Whether to compress; measured at the first call. All ranks, between two steps. Sends a few buckets.

        A world of one rank sends nothing, and compresses, so that its steps and its state are those of the same
        optimizer on several ranks.
        """
        has_network = self._transport.world_size > 1 and Hierarchy.of(self._transport).inter_node.has_network
        if self.compresses is None and not has_network:
            self.compresses = True  # there is nothing to measure
        if self.compresses is None:
            numels = [bucket.layout.numel for bucket in self._buckets]
            compute_s, device = self.computing.median_s(), self._buckets[0].device
            with self._traffic.left_out():
                mine = measure(self._transport, compute_s, numels, self._codec, Bf16Codec(self._codec.block), device)
                every = self._parts.gather(mine.compute_s, mine.onebit_s, mine.bf16_s)
            found = LinkProbe(*(max(column) for column in zip(*every, strict=True)))
            self.compresses = found.should_compress
            if self._transport.rank == 0 and found.should_compress:
                log.info("one-bit compression pays here: %s", found)
            elif self._transport.rank == 0:
                log.warning(
                    "one-bit compression does not pay here (%s): gradients travel in bfloat16 instead; "
                    'compression="always" sends one bit all the same',
                    found,
                )
        return self.compresses

    def load(self, compresses: bool | None) -> None:
        """Take over the decision of the run that continues here. In mode "always" nothing changes."""
        if self.mode == "auto":
            self.compresses = compresses


def measure(
    transport: Transport, compute_s: float, numels: Sequence[int], onebit: Codec, bf16: Codec, device: torch.device
) -> LinkProbe:
    """Measure both codecs; the result is the same on every rank. All ranks.

    Sends a few buckets of these lengths, `REPEATS` + 1 times in each codec.

    Args:
        transport: Between the replicas.
        compute_s: Seconds that a step computes on this rank.
        numels: Elements of each bucket.
        onebit: The one-bit codec.
        bf16: The bfloat16 codec.
        device: Device of the buckets.
    """
    seconds = [compute_s, *(_exchange_s(transport, codec, numels, device) for codec in (onebit, bf16))]
    every = [struct.unpack("<3d", row) for row in gather_bytes(transport, struct.pack("<3d", *seconds), device)]
    return LinkProbe(*(max(column) for column in zip(*every, strict=True)))


def _exchange_s(transport: Transport, codec: Codec, numels: Sequence[int], device: torch.device) -> float:
    sample = list(numels[:SAMPLE])
    generator = torch.Generator(device).manual_seed(0)  # torch's default one must resume to the bit: leave it alone
    xs = [torch.randn(n, device=device, generator=generator, dtype=torch.float32) for n in sample]
    W, hierarchy = transport.world_size, Hierarchy.of(transport)
    wires = [Wire.empty(codec, n, W, hierarchy=hierarchy, device=device) for n in sample]
    times = []
    for _ in range(REPEATS + 1):
        gather_bytes(transport, b"ready", device)
        began = time.perf_counter()
        interleave(compressed_allreduce(x, None, codec, transport, wire) for x, wire in zip(xs, wires, strict=True))
        for x, wire in zip(xs, wires, strict=True):
            codec.decode(wire.frames_WB, x.view(W, -1))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:]) * sum(numels) / sum(sample)
