"""The vote of every rank before a round: its step, whether its differences count, and their weight.

If ranks are not in the same step, or their schedules differ, all raise a `DesyncError` before anything of the round is
sent. Rests on `comm/messages.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

import torch

from ..agreement.step_vote import DesyncError
from ..agreement.wrappers import NOT_COMPARED
from ..comm import Transport
from ..comm.messages import gather_bytes, raise_on_all_ranks

_FIXED = struct.Struct("<qqq??Bddd8s")


@dataclass(frozen=True)
class RoundVote:
    """One rank's vote.

    step: local steps so far. interval: steps to the next round. synced_at: step of the last round. is_present: whether
    its difference counts now; if not, it is carried over. is_finished: it has no batches left (`join`). owes: whether
    it has a residual of earlier rounds. tokens: its training data since the last round, from `add_tokens`.
    step_s: see `Balance`. gradients: see `wrappers.gradient_digest`. edit: a replaced parameter that this rank has
    found in its groups, for the error; for another rank, whether there is one.
    changes: newcomers wait to be let in, among members that come and go. residual_norm: see `membership/residuals.py`.
    keeps: by group, the product of the weight decays since the last round. decays: by parameter, whether it had a
    gradient in every step since then: only then has the inner optimizer decayed it each time.
    """

    step: int
    interval: int
    is_present: bool = True
    is_finished: bool = False
    owes: bool = False
    tokens: float = 0.0
    step_s: float = 0.0
    gradients: bytes = NOT_COMPARED
    keeps: tuple[float, ...] = ()
    decays: tuple[bool, ...] = ()
    edit: str = ""
    changes: bool = False
    synced_at: int = 0
    residual_norm: float = 0.0

    def to_bytes(self) -> bytes:
        flags = self.is_present, self.is_finished, self.owes | bool(self.edit) << 1 | self.changes << 2
        numbers = self.tokens, self.step_s, self.residual_norm
        fixed = _FIXED.pack(self.step, self.interval, self.synced_at, *flags, *numbers, self.gradients)
        bits = sum(1 << k for k, decays in enumerate(self.decays) if decays)
        keeps = struct.pack(f"<{len(self.keeps)}d", *self.keeps)
        return fixed + keeps + bits.to_bytes(-(-len(self.decays) // 8), "little")

    @classmethod
    def from_bytes(cls, data: bytes, groups: int, parameters: int) -> RoundVote:
        end = _FIXED.size + 8 * groups
        keeps, bits = struct.unpack(f"<{groups}d", data[_FIXED.size : end]), int.from_bytes(data[end:], "little")
        decays = tuple(bool(bits >> k & 1) for k in range(parameters))
        step, interval, synced_at, is_present, is_finished, flags, *numbers, gradients = _FIXED.unpack_from(data)
        tokens, step_s, norm = numbers
        owes, edit = bool(flags & 1), "something" if flags & 2 else ""
        changes = bool(flags & 4)
        return cls(
            step,
            interval,
            is_present,
            is_finished,
            owes,
            tokens,
            step_s,
            gradients,
            keeps,
            decays,
            edit,
            changes,
            synced_at,
            norm,
        )


@dataclass(frozen=True)
class Ballot:
    """All votes, and the decisions that follow from them. The same on all ranks, except `mine`, this rank's vote.

    votes: in rank order. goes_on: whether any rank has batches left. agreed: the vote of the ranks that have; if none
    has, of the one with the most steps. is_counted: whether any rank's difference counts. owes_nothing: all count, and
    no rank has a residual of earlier rounds. decays: as in `RoundVote`, on every rank. presents, weights: by node, as
    its ranks share one difference: whether it counts, and its weight. seconds: by node, of a step of its slowest rank.
    """

    mine: RoundVote
    votes: list[RoundVote]
    goes_on: bool
    agreed: RoundVote
    is_counted: bool
    owes_nothing: bool
    decays: list[bool]
    presents: list[bool]
    weights: list[float]
    seconds: list[float]

    @classmethod
    def of(cls, mine: RoundVote, votes: list[RoundVote], local_size: int) -> Ballot:
        """local_size: ranks of a node."""
        nodes = [votes[k : k + local_size] for k in range(0, len(votes), local_size)]
        goes_on = not all(vote.is_finished for vote in votes)
        active = [vote for vote in votes if not vote.is_finished or not goes_on]
        furthest = max(active, key=lambda vote: vote.step)
        return cls(
            mine,
            votes,
            goes_on,
            agreed=replace(furthest, keeps=_mean_keeps(active)),
            is_counted=any(vote.is_present for vote in votes),
            owes_nothing=all(vote.is_present and not vote.owes for vote in votes),
            decays=[all(column) for column in zip(*(vote.decays for vote in votes), strict=True)],
            presents=[all(vote.is_present for vote in node) for node in nodes],
            weights=weights_of([sum(vote.tokens for vote in node) for node in nodes]),
            seconds=[max(vote.step_s for vote in node) for node in nodes],
        )


def cast_votes(
    transport: Transport, mine: RoundVote, device: torch.device | str, local_size: int, *, is_balanced: bool = False
) -> Ballot:
    """Exchange the votes. All ranks. Raises DesyncError, and RuntimeError if a rank's groups were edited.

    local_size: ranks of a node. is_balanced: ranks take unlike numbers of steps (`Balance`). Sends 59 bytes, 8 for each
    group and a bit for each parameter to each peer.
    """
    messages = gather_bytes(transport, mine.to_bytes(), device)
    votes = [RoundVote.from_bytes(data, len(mine.keeps), len(mine.decays)) for data in messages]
    if any(vote.edit for vote in votes):
        raise_on_all_ranks(transport, mine.edit, RuntimeError, device)
    check_votes(transport.rank, votes, may_change=transport.ranks_change, is_balanced=is_balanced)
    return Ballot.of(mine, votes, local_size)


def check_votes(rank: int, votes: Sequence[RoundVote], *, may_change: bool = False, is_balanced: bool = False) -> None:
    """Raise DesyncError, on all ranks, unless those with batches left are at the same step of the same schedule.

    may_change: among members that come and go, who compare their options as they enter. The schedule of one that has
    entered within a step may differ by one step from the others', and the round goes by the vote that `Ballot` takes.
    is_balanced: ranks take unlike numbers of steps, and must be in the same round.
    """
    active = [(k, vote) for k, vote in enumerate(votes) if not vote.is_finished]
    for what, remedy, values in (
        ("steps since the start",
         "every rank must call step() the same number of times, or in `with optimizer.join():`",
         [] if is_balanced else [vote.step for _, vote in active]),
        ("steps at their last round", "load states that all ranks saved after the same round",
         [vote.synced_at for _, vote in active] if is_balanced else []),
        ("steps to the next round", "give all ranks the same every=, learning rates and schedules",
         [] if may_change or is_balanced else [vote.interval for _, vote in active]),
        ("weight decay since the last round", "give all ranks the same learning rates, schedules and weight_decay",
         [] if is_balanced else _keeps(active, may_change)),
    ):  # fmt: skip
        if len(set(values)) > 1:
            other = next(k for k, value in enumerate(values) if value != values[0])
            raise DesyncError(
                f"rank {rank}: the ranks have different {what}: {values[0]} on rank {active[0][0]} and "
                f"{values[other]} on rank {active[other][0]}; {remedy}"
            )


def _keeps(active: Sequence[tuple[int, RoundVote]], may_change: bool) -> list[tuple[float, ...]]:
    """What is left by weight decay, by vote. may_change: that of the first vote if they differ by a step's at most."""
    keeps = [vote.keeps for _, vote in active]
    if may_change and keeps:
        first, steps = keeps[0], min(vote.interval for _, vote in active)
        one_step = [2.0 * (1.0 - min(column)) / steps for column in zip(*keeps, strict=True)]
        keeps = [
            first if all(abs(a - b) <= most for a, b, most in zip(its, first, one_step, strict=True)) else its
            for its in keeps
        ]
    return keeps


def _mean_keeps(votes: Sequence[RoundVote]) -> tuple[float, ...]:
    """What is left by weight decay, by group, in the mean over ranks, weighted as their differences."""
    weights = weights_of([vote.tokens for vote in votes])
    columns = zip(*(vote.keeps for vote in votes), strict=True)
    return tuple(
        column[0] if len(set(column)) == 1 else sum(map(mul, weights, column)) / len(votes) for column in columns
    )


def weights_of(tokens_by_node: Sequence[float]) -> list[float]:
    """The weight of each node's difference in the mean over nodes. Their sum is their number. No tokens: 1 each."""
    total = sum(tokens_by_node)
    if total <= 0.0 or len(set(tokens_by_node)) == 1:
        return [1.0] * len(tokens_by_node)
    return [tokens * len(tokens_by_node) / total for tokens in tokens_by_node]
