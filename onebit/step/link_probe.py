"""Does compression pay on this network? Measured once per run, by all ranks, before the first one-bit step.

A few buckets are exchanged for real, in one bit and in bfloat16, and set against the time that a step computes. Where
one bit gains nothing, gradients had better travel in bfloat16.
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

SAMPLE = 4  # buckets that are exchanged; the rest is taken to be like them
REPEATS = 2

# What a backward pass can hide: it is two thirds of a step's computing, and buckets leave while it runs.
HIDDEN = 2 / 3
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class LinkProbe:
    """Seconds of the slowest rank: of computing in a step, and of one exchange of all gradients in either codec."""

    compute_s: float
    onebit_s: float
    bf16_s: float

    def step_s(self, exchange_s: float) -> float:
        """A step with that exchange: computing, and what backward does not hide."""
        return self.compute_s + max(0.0, exchange_s - HIDDEN * self.compute_s)

    @property
    def should_compress(self) -> bool:
        """Whether steps with one-bit traffic are at least `LEAST_GAIN` shorter."""
        return self.step_s(self.onebit_s) <= (1.0 - LEAST_GAIN) * self.step_s(self.bf16_s)

    def __str__(self) -> str:
        return (
            f"a step computes {self.compute_s:.3g} s; exchanging takes {self.onebit_s:.3g} s in one bit and "
            f"{self.bf16_s:.3g} s in bfloat16; a step would take {self.step_s(self.onebit_s):.3g} s against "
            f"{self.step_s(self.bf16_s):.3g} s"
        )


class CompressionPolicy:
    """Whether gradients go over to momentum in one bit. Asks the network once, and says what it has found.

    mode: "auto", or "always": ask nothing. compresses: the decision; None: there is none yet. computing: how long a
    step computes. All ranks bind and decide alike.
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
        """What to measure with: a sample of the buckets, in this codec."""
        self._transport, self._codec, self._buckets, self._parts = transport, codec, buckets, parts
        self._traffic, self.computing = traffic, computing

    def decide(self) -> bool:
        """Whether it pays to compress; measured when first asked. All ranks, between two steps. Sends a few buckets.

        One rank sends nothing, and compresses: its steps and its state are those of the same optimizer on several.
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
        """Take over what a run that goes on here has decided; "always" stays what it is."""
        if self.mode == "auto":
            self.compresses = compresses


def measure(
    transport: Transport, compute_s: float, numels: Sequence[int], onebit: Codec, bf16: Codec, device: torch.device
) -> LinkProbe:
    """The same on every rank. All ranks; sends a few buckets of these lengths, `REPEATS` + 1 times in each codec."""
    seconds = [compute_s, *(_exchange_s(transport, codec, numels, device) for codec in (onebit, bf16))]
    every = [struct.unpack("<3d", row) for row in gather_bytes(transport, struct.pack("<3d", *seconds), device)]
    return LinkProbe(*(max(column) for column in zip(*every, strict=True)))


def _exchange_s(transport: Transport, codec: Codec, numels: Sequence[int], device: torch.device) -> float:
    sample = list(numels[:SAMPLE])
    generator = torch.Generator(device).manual_seed(0)  # the training's own is resumed to the bit, and not touched
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
