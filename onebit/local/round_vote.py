"""What every rank says before a round: where it is, whether its differences count, and how much they weigh.

Ranks that are not in the same step, or whose schedules differ, end with a `DesyncError` on all of them before anything
of the round is sent. Rests on `comm/messages.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..agreement.step_vote import DesyncError
from ..agreement.wrappers import NOT_COMPARED
from ..comm import Transport
from ..comm.messages import gather_bytes, raise_on_all_ranks

_FIXED = struct.Struct("<qq??Bd8s")


@dataclass(frozen=True)
class RoundVote:
    """One rank's.

    step: local steps so far. interval: those to the next round. is_present: whether its difference counts now, and is
    not only owed. is_finished: it has no batches left (`join`). owes: whether anything is owed to it by earlier rounds.
    tokens: what it has trained on since the last round, in its own unit. gradients: see `wrappers.gradient_digest`.
    edit: what this rank has found replaced in its groups, for the error; of another rank, whether there is anything.
    keeps: by group, what weight decay has left of the anchor since the last round. decays: by parameter, whether it had
    a gradient in every step since then: only then has the inner optimizer decayed it each time.
    """

    step: int
    interval: int
    is_present: bool = True
    is_finished: bool = False
    owes: bool = False
    tokens: float = 0.0
    gradients: bytes = NOT_COMPARED
    keeps: tuple[float, ...] = ()
    decays: tuple[bool, ...] = ()
    edit: str = ""

    def to_bytes(self) -> bytes:
        flags = self.is_present, self.is_finished, self.owes | bool(self.edit) << 1
        fixed = _FIXED.pack(self.step, self.interval, *flags, self.tokens, self.gradients)
        bits = sum(1 << k for k, decays in enumerate(self.decays) if decays)
        numbers = struct.pack(f"<{len(self.keeps)}d", *self.keeps)
        return fixed + numbers + bits.to_bytes(-(-len(self.decays) // 8), "little")

    @classmethod
    def from_bytes(cls, data: bytes, groups: int, parameters: int) -> RoundVote:
        end = _FIXED.size + 8 * groups
        numbers, bits = struct.unpack(f"<{groups}d", data[_FIXED.size : end]), int.from_bytes(data[end:], "little")
        decays = tuple(bool(bits >> k & 1) for k in range(parameters))
        step, interval, is_present, is_finished, flags, tokens, gradients = _FIXED.unpack_from(data)
        owes, edit = bool(flags & 1), "something" if flags & 2 else ""
        return cls(step, interval, is_present, is_finished, owes, tokens, gradients, numbers, decays, edit)


@dataclass(frozen=True)
class Ballot:
    """What all ranks have said, and what follows from it. The same on all of them, but for `mine`, this one's vote.

    votes: in rank order. goes_on: whether any rank has batches left. agreed: the vote of those that have; where none
    has, of the one furthest on. is_counted: whether any rank's difference counts. owes_nothing: all count, and nothing
    is owed of earlier ones. decays: as `RoundVote`'s, on every rank. By node, whose ranks have one difference:
    presents, whether it counts, and weights, how much.
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

    @classmethod
    def of(cls, mine: RoundVote, votes: list[RoundVote], local_size: int) -> Ballot:
        """local_size: ranks of a node."""
        nodes = [votes[k : k + local_size] for k in range(0, len(votes), local_size)]
        goes_on = not all(vote.is_finished for vote in votes)
        active = [vote for vote in votes if not vote.is_finished or not goes_on]
        return cls(
            mine,
            votes,
            goes_on,
            agreed=max(active, key=lambda vote: vote.step),
            is_counted=any(vote.is_present for vote in votes),
            owes_nothing=all(vote.is_present and not vote.owes for vote in votes),
            decays=[all(column) for column in zip(*(vote.decays for vote in votes), strict=True)],
            presents=[all(vote.is_present for vote in node) for node in nodes],
            weights=weights_of([sum(vote.tokens for vote in node) for node in nodes]),
        )


def cast_votes(transport: Transport, mine: RoundVote, device: torch.device | str, local_size: int) -> Ballot:
    """Every rank's. All ranks. Raises DesyncError, and RuntimeError where a rank's groups were edited.

    local_size: ranks of a node.

    Sends 35 bytes, 8 for each group and a bit for each parameter to each peer.
    """
    messages = gather_bytes(transport, mine.to_bytes(), device)
    votes = [RoundVote.from_bytes(data, len(mine.keeps), len(mine.decays)) for data in messages]
    if any(vote.edit for vote in votes):
        raise_on_all_ranks(transport, mine.edit, RuntimeError, device)
    check_votes(transport.rank, votes)
    return Ballot.of(mine, votes, local_size)


def check_votes(rank: int, votes: Sequence[RoundVote]) -> None:
    """Raise DesyncError, on all ranks, unless those that have batches are in the same place of the same schedule."""
    active = [(k, vote) for k, vote in enumerate(votes) if not vote.is_finished]
    for what, remedy, values in (
        ("steps since the start", "every rank must call step() equally often, or in `with optimizer.join():`",
         [vote.step for _, vote in active]),
        ("steps to the next round", "give every=, learning rates and their schedules alike on all ranks",
         [vote.interval for _, vote in active]),
        ("weight decay since the last round", "give learning rates, schedules and weight_decay alike on all ranks",
         [vote.keeps for _, vote in active]),
    ):  # fmt: skip
        if len(set(values)) > 1:
            other = next(k for k, value in enumerate(values) if value != values[0])
            raise DesyncError(
                f"rank {rank}: the ranks have different {what}: {values[0]} on rank {active[0][0]} and "
                f"{values[other]} on rank {active[other][0]}; {remedy}"
            )


def weights_of(tokens_by_node: Sequence[float]) -> list[float]:
    """How much each node's difference weighs in the mean over nodes; they add up to their number. No tokens: 1 each."""
    total = sum(tokens_by_node)
    if total <= 0.0 or len(set(tokens_by_node)) == 1:
        return [1.0] * len(tokens_by_node)
    return [tokens * len(tokens_by_node) / total for tokens in tokens_by_node]
