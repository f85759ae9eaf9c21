"""What the ranks tell each other before a sharded step: one small message, and the figures that come of it.

Verdict, clipping and health rest on it, and come out the same on every rank, to the bit: sums run in rank order.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Generator, Sequence
from dataclasses import astuple, dataclass

import torch

from ...agreement.step_vote import Header, StepVote, check_votes
from ...comm import Transport, Work
from ...comm.messages import exchange_bytes

log = logging.getLogger(__name__)

_GRAD_STATS = struct.Struct("<4d")
_AVERAGED_STEPS = 100
_WARN_ABOVE = 0.25


@dataclass(frozen=True)
class GradStats:
    """Sums over this rank's own chunks in its last step. grad: ‖g‖² after clipping. sent: ‖q‖². kept: <g, q>/(1-β1^k).

    agreed: <g, m̂>. q averages to what persists in this rank's gradients, m̂ to what persists in all ranks'.
    """

    grad: float = 0.0
    sent: float = 0.0
    kept: float = 0.0
    agreed: float = 0.0


def gather_votes(
    transport: Transport, header: Header, vote: StepVote, grad_stats: GradStats, device: torch.device
) -> Generator[Work, None, tuple[list[StepVote], list[GradStats]]]:
    """Every rank's vote and grad_stats, in rank order. Yields one Work. Sends 74 bytes and a bit per parameter to each.

    Raises DesyncError, on all ranks, where they are not in the same step with the same options.
    """
    mine = _GRAD_STATS.pack(*astuple(grad_stats)) + vote.to_bytes()
    messages = yield from exchange_bytes(transport, mine, device)
    votes = [StepVote.from_bytes(message[_GRAD_STATS.size :], len(vote.present)) for message in messages]
    check_votes(transport, header, votes, device)
    return votes, [GradStats(*_GRAD_STATS.unpack_from(message)) for message in messages]


def is_finite(votes: Sequence[StepVote]) -> bool:
    """Whether every rank's gradients are, and their squares in float32."""
    return all(math.isfinite(vote.norm_squared) and math.isfinite(vote.product) for vote in votes)


@dataclass
class Health:
    """Whether the ranks' gradients are samples of the same thing; otherwise sharded one-bit Adam is the wrong choice.

    ratio: rms(q)/rms(g): about .22 where gradients are noise around a small mean (β1 = .9), near 1 or above where
    something persists in them: an offset, or a mean that all ranks have in common. agreement: the part of ‖g‖² that is
    in common. offset: the part that persists on a rank and is not in common, averaged over about 100 steps; below .1 on
    shuffled data, and the larger, the more accuracy is lost.
    """

    ratio: float = 0.0
    agreement: float = 0.0
    offset: float = 0.0
    steps: int = 0
    is_warned: bool = False

    def observe(self, tallies: Sequence[GradStats], rank: int) -> None:
        """Take in what the ranks say of their last step; warn on rank 0, once. Same tallies on all ranks."""
        grad, sent, kept, agreed = (sum(column) for column in zip(*map(astuple, tallies), strict=True))
        if not (math.isfinite(grad) and grad > 0.0):
            return
        n = len(tallies)
        self.ratio, self.agreement = (sent / grad) ** 0.5, agreed / grad
        self.steps += 1
        self.offset += ((kept - agreed) / grad - self.offset) / min(self.steps, _AVERAGED_STEPS)
        if n > 1 and self.steps >= _AVERAGED_STEPS and self.offset > _WARN_ABOVE and not self.is_warned:
            self.is_warned = True
            if rank == 0:
                log.warning(
                    "%.0f %% of the gradients' squares persist on a rank and are not in common with the others (below "
                    "10 %% is usual; rms(q)/rms(g) = %.2f): sharded one-bit Adam loses accuracy on such data. Shuffle "
                    "the data across ranks, or use onebit.OnebitAdam",
                    100.0 * self.offset,
                    self.ratio,
                )
