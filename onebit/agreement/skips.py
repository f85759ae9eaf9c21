"""Steps that all ranks skip because a gradient is not finite: how many in a row may be, and when a run is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..comm import Transport
from ..comm.messages import gather_texts

# A loss scale that begins at 2^32 skips 33 steps until it is 1, GradScaler's 2^16 17. No mishap lasts longer.
MOST_SKIPS = 50


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
            f"rank {transport.rank}: {self.in_a_row} steps in a row were skipped, because gradients are not finite: "
            f"{found}. Look at the loss and the data there, lower the learning rate, or clip with max_grad_norm; "
            "max_consecutive_skips=0 skips for ever"
        )
