"""IntervalPolicy: when the next round is due; with `every="auto"` from a measurement of the network.

The intervals themselves are in `intervals.py`, the measurement is in `step/link_probe.py`.
"""

from __future__ import annotations

import logging

import torch

from ..comm import Codec, Transport
from ..layout.buckets import Buckets
from ..model_parallel import ModelParallelGroup
from ..step.link_probe import measure
from ..step.stats import StopWatch
from .fragment import LocalBucket
from .intervals import MEASURED_STEPS, Auto, Started
from .round_vote import RoundVote
from .stats import LocalTraffic

log = logging.getLogger(__name__)


class IntervalPolicy:
    """The number of steps between two rounds. computing: measures how long a step computes."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Started,
        buckets: Buckets[LocalBucket],
        codec: Codec,
        transport: Transport,
        parts: ModelParallelGroup,
        traffic: LocalTraffic,
    ):
        self._inner, self._schedule, self._buckets, self._codec = inner, schedule, buckets, codec
        self._transport, self._parts, self._traffic = transport, parts, traffic
        self.computing = StopWatch()

    def next(self, step: int) -> int:
        """Steps to the next round, after `step` steps, at the current learning rates."""
        rates = [float(group["lr"]) for group in self._inner.param_groups]
        return self._schedule.steps(step, max(rates, default=0.0))

    def decide(self, agreed: RoundVote) -> int:
        """The interval that a round agreed on; with "auto", after enough steps, from a measurement. All ranks."""
        interval = self._schedule.interval
        if not isinstance(interval, Auto) or interval.chosen is not None or agreed.step < MEASURED_STEPS:
            return agreed.interval
        self._ask_network(interval)
        return self.next(agreed.step)

    def _ask_network(self, auto: Auto) -> None:
        """Measure a round and choose H; the same on all ranks."""
        if not self._transport.inter_node.has_network:
            auto.chosen = auto.most
            return
        numels = [bucket.layout.numel for bucket in self._buckets]
        with self._traffic.left_out(), self.computing.paused():
            compute_s, device = self.computing.median_s(), self._buckets[0].device
            mine = measure(self._transport, compute_s, numels, self._codec, self._codec, device)
            every = self._parts.gather(mine.compute_s, mine.onebit_s)
        slowest_s, exchange_s = (max(column) for column in zip(*every, strict=True))
        auto.decide(slowest_s, exchange_s)
        if self._transport.rank == 0:
            log.info(
                "a step computes %.3g s and a round takes %.3g s: a round every %s steps",
                slowest_s, exchange_s, auto.chosen,
            )  # fmt: skip
