"""Steps that all ranks skip because a gradient is not finite: how many in a row may be, and when a run is over."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..comm import Transport
from ..comm.messages import gather_texts

# A loss scale that begins at 2^32 skips 33 steps until it is 1, GradScaler's 2^16 17. No mishap lasts longer.
MOST_SKIPS = 50
TOO_LARGE = ", finite, but too large to be squared in float32"
"""Stands behind the name of a parameter whose gradient is so."""

_TOLD = 3  # of steps in a row, and then the 4th, 8th, 16th ...

log = logging.getLogger(__name__)


class SkippedStepsError(RuntimeError):
    """Too many steps in a row were skipped: training stands still."""


@dataclass
class SkipLimit:
    """Counts the steps that were skipped in a row. most: that many are an error; 0: none are."""

    most: int
    in_a_row: int = 0

    def __post_init__(self) -> None:
        if not self.most >= 0:
            raise ValueError(f"max_consecutive_skips must be at least 0 (0: skip for ever), got {self.most}")

    def tell(self, rank: int, step: int, bad: Sequence[str], consequence: str, *, tells_of_others: bool = True) -> None:
        """Warn that a step is left out, before it is observed: on the ranks whose gradients are bad, or on rank 0.

        Of many in a row the first ones, and then fewer. step: its number; one that is skipped has it once more. bad: as
        in `observe`. tells_of_others: whether gradients are bad on some rank, if not on this one.
        """
        count = self.in_a_row + 1
        if count > _TOLD and count & (count - 1):
            return
        again = f" ({count} in a row)" if count > 1 else ""
        if bad:
            what = "gradient too large" if all(TOO_LARGE in name for name in bad) else "gradient not finite"
            names = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            log.warning("step %d: rank %d: %s in %s; %s%s", step, rank, what, names, consequence, again)
        elif rank == 0 and tells_of_others:
            what = "a gradient is not finite on another rank, or too large to be squared in float32 there"
            log.warning("step %d: %s; %s%s", step, what, consequence, again)

    def observe(
        self, is_skipped: bool, bad: Sequence[str], transport: Transport, whole: Transport | None = None
    ) -> None:
        """Take in a step. All ranks, alike; raises SkippedStepsError, on all of them, after too many in a row.

        bad: this rank's parameters whose gradients are not finite. whole: the ranks that hold the parts of this
        replica. Sends nothing until it raises.
        """
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if not 0 < self.most <= self.in_a_row:
            return
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        texts = gather_texts(transport, f"{bad[0]}{more}" if bad else "")
        found = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts) if text)
        parts = [found] if whole is None or whole.world_size == 1 else gather_texts(whole, found)
        found = "; ".join(dict.fromkeys(filter(None, parts))) or "in sums or squares of finite ones, beyond float32"
        raise SkippedStepsError(
            f"rank {transport.rank}: {self.in_a_row} steps in a row were skipped, because gradients are too large or "
            f"not finite: {found}. Look at the loss and the data there, lower the learning rate, or clip with "
            "max_grad_norm; max_consecutive_skips=0 skips for ever"
        )
