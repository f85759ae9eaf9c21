"""ShardStats: what the last step of a sharded optimizer did, for its user."""

from __future__ import annotations

from dataclasses import dataclass

from ...step.stats import Stats


@dataclass
class ShardStats(Stats):
    """Facts about the last step; see `onebit.step.stats.Stats`.

    Attributes:
        phase: "warmup", "compressed", or "local" if the step sends nothing.
        is_skipped: Whether any bucket was skipped; below stage 2, all of them.
        bounded_steps: Steps so far in which this rank's gradients had more than four times the ranks' usual norm, and
            were scaled down to that (`bounds.py`).
        health: `health.Health.ratio`, one step late: votes carry the sums of the step before.
        agreement: `health.Health.agreement`, of the same step.
        offset: `health.Health.offset`, up to the same step.
    """

    is_skipped: bool = False
    bounded_steps: int = 0
    health: float = 0.0
    agreement: float = 0.0
    offset: float = 0.0
