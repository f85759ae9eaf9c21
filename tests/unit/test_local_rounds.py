"""What rounds of local steps agree on, as pure functions: votes that decide, and intervals with a start."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from onebit.local.intervals import QSR, Fixed, Interval, Started, Table
from onebit.local.round_vote import Ballot, RoundVote

VOTES = [
    RoundVote(8, 4, tokens=1.0, keeps=(0.5,), decays=(True, True)),
    RoundVote(8, 4, is_present=False, tokens=3.0, keeps=(0.5,), decays=(True, False)),
    RoundVote(6, 2, is_finished=True, keeps=(0.9,), decays=(True, True)),
    RoundVote(8, 4, owes=True, keeps=(0.5,), decays=(True, True)),
]


def test_a_vote_is_read_as_it_was_cast() -> None:
    names, alone = (
        ("is_present", "is_finished", "owes", "changes"),
        RoundVote(8, 4, keeps=(0.5, 1.0), decays=(True,) * 9),
    )
    for flags in itertools.product([False, True], repeat=4):
        vote = replace(alone, **dict(zip(names, flags, strict=True)), synced_at=3, residual_norm=0.25, step_s=2.0)
        for edit in ("", "something"):
            cast = replace(vote, edit=edit)
            assert RoundVote.from_bytes(cast.to_bytes(), 2, 9) == cast


def test_all_ranks_come_to_the_same_decisions_whoever_asks() -> None:
    ballots = [Ballot.of(mine, VOTES, 1) for mine in VOTES]
    assert {ballot.mine for ballot in ballots} == set(VOTES)
    assert len({repr(replace(ballot, mine=VOTES[0])) for ballot in ballots}) == 1


def test_a_rank_without_batches_decides_only_when_nobody_has_any() -> None:
    for votes in itertools.permutations(VOTES):
        ballot = Ballot.of(votes[0], list(votes), 1)
        assert ballot.goes_on and (ballot.agreed.step, ballot.agreed.interval, ballot.agreed.keeps) == (8, 4, (0.5,))
        ended = [replace(vote, is_finished=True) for vote in votes]
        ballot = Ballot.of(ended[0], ended, 1)
        assert not ballot.goes_on and ballot.agreed.step == 8


def test_a_node_counts_where_all_its_ranks_do_and_weighs_by_their_tokens() -> None:
    ballot = Ballot.of(VOTES[0], VOTES, 2)
    assert ballot.presents == [False, True] and ballot.weights == [2.0, 0.0]
    assert ballot.decays == [True, False] and ballot.is_counted and not ballot.owes_nothing
    alone = [replace(vote, is_present=False) for vote in VOTES]
    assert not Ballot.of(alone[0], alone, 2).is_counted


@pytest.mark.parametrize("interval", [Fixed(6), Table.of({0: 2, 9: 8}), QSR(0.5, least=3)], ids=str)
def test_a_start_bounds_the_interval_and_then_is_without_effect(interval: Interval) -> None:
    started, plain = Started(interval, start_steps=10, start_every=4), Started(interval)
    for step, lr in itertools.product(range(20), (0.1, 0.2, 0.5)):
        h = interval.steps(step, lr)
        assert plain.steps(step, lr) == h
        assert started.steps(step, lr) == (min(h, 4) if step < 10 else h) >= started.smallest
    assert plain.smallest == interval.smallest
