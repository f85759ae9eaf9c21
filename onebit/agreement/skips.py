"""Steps that all ranks skip because a gradient is not finite: warnings, and an error after too many in a row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..comm import Transport
from ..comm.messages import gather_texts

# A loss scale that begins at 2^32 skips 33 steps until it is 1, and GradScaler's 2^16 skips 17.
# No mishap lasts longer.
MOST_SKIPS = 50
TOO_LARGE = ", finite, but too large to be squared in float32"
"""Follows the name of a parameter whose gradient is too large, in messages."""

_TOLD = 3  # warn of this number of skipped steps in a row, and then of the 4th, 8th, 16th ...

log = logging.getLogger(__name__)


class SkippedStepsError(RuntimeError):
    """Too many steps in a row were skipped: training makes no progress."""


@dataclass
class SkipLimit:
    """Counts skipped steps in a row, warns of them, and raises an error after too many.

    Attributes:
        most: Number of skipped steps in a row that is an error; 0: never an error.
        in_a_row: Number of steps skipped in a row so far. Default 0.
    """

    most: int
    in_a_row: int = 0

    def __post_init__(self) -> None:
        if not self.most >= 0:
            raise ValueError(f"max_consecutive_skips must be at least 0 (0: skip for ever), got {self.most}")

    def tell(self, rank: int, step: int, bad: Sequence[str], consequence: str, *, tells_of_others: bool = True) -> None:
        """Warn that a step is left out: on the ranks with bad gradients, or on rank 0. Call it before `observe`.

        Of many skipped steps in a row, the first ones are reported, then fewer and fewer. Sends nothing.

        Args:
            rank: This rank.
            step: Number of the step. A step that is skipped keeps its number for the next attempt.
            bad: Names of this rank's parameters with gradients that are not finite, or too large.
            consequence: End of the message.
            tells_of_others: Whether gradients are bad on another rank if they are not on this one. Default True.
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
        """Count a step. All ranks, with the same is_skipped. Sends nothing until it raises.

        Args:
            is_skipped: Whether the step was skipped.
            bad: Names of this rank's parameters with gradients that are not finite, or too large.
            transport: Between the replicas.
            whole: The ranks that hold the parts of this replica. Default None: this rank holds all of it.

        Raises:
            SkippedStepsError: Too many steps in a row were skipped. On all ranks.
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
