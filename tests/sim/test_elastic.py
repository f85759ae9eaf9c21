"""From one world size to another: nothing that was owed is lost, and the new world trains on."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from family import FAMILY, flat, make, model, same, train
from family_contract import check_another_world, trained
from torch import Tensor

from onebit.comm import SimTransport, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.pairwise
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("steps", [3, 14, 20])
def test_what_is_owed_is_kept_and_training_goes_on(name: str, old: int, new: int, steps: int) -> None:
    check_another_world(name, (old, None), (new, None), steps)


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
def test_the_variance_is_refreshed_in_the_new_world(name: str) -> None:
    states = [state for state, _, _ in trained((3, None), name, 106, freeze_step="auto")]
    before = copy.deepcopy(states)

    def work(transport: SimTransport) -> list[str]:
        net = model()
        optimizer = make(name, net, transport, freeze_step="auto", check_replicas_every=1)
        optimizer.load_state_dicts(states)
        phases = []
        for step in range(106, 114):
            train(transport, range(step, step + 1), net, optimizer)
            phases.append(optimizer.stats.phase)
        return phases

    for phases in run_ranks(2, work):
        assert phases.count("refresh") == (1 if name == "OnebitAdam" else 2)
    assert same(states, before)


@pytest.mark.parametrize("name", FAMILY)
def test_a_world_of_the_same_size_continues_to_the_bit(name: str) -> None:
    states = [state for state, _, _ in trained((2, None), name, 14)]

    def work(transport: SimTransport) -> bool:
        net = model()
        optimizer = make(name, net, transport)
        optimizer.load_state_dicts(copy.deepcopy(states))
        return same(optimizer.state_dict(), states[transport.rank])

    assert run_ranks(2, work) == [True, True]


def test_it_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    states = [state for state, _, _ in trained((3, None), "OnebitAdam", 9)]
    optimizer = make("OnebitAdam", model(), SimTransport())
    with caplog.at_level(logging.INFO):
        optimizer.load_state_dicts(states)
    assert "optimizer state of 3 ranks taken over by 1: each rank takes the mean of the old residuals" in caplog.text


@pytest.mark.parametrize("damage", ["order", "missing", "foreign"])
def test_states_that_are_no_world_are_refused(damage: str) -> None:
    states = [state for state, _, _ in trained((3, None), "OnebitAdam", 9)]
    if damage == "order":
        states.reverse()
    if damage == "missing":
        states.pop()
    if damage == "foreign":
        del states[1]["onebit"]
    optimizer = make("OnebitAdam", model(), SimTransport())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="expected the states of"):
        optimizer.load_state_dicts(states)
    assert same(before, optimizer.state_dict())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "options", "steps", "new"),
    [
        *((name, {}, 14, 3) for name in FAMILY),
        *((name, {}, *of) for name in ("OnebitAdam", "ZeroOneAdam") for of in ((3, 3), (20, 2))),
        *(("OnebitAdam", {"delay": 1}, *of) for of in ((14, 3), (20, 2))),
    ],
)
def test_what_rank_0_alone_has_saved_is_enough(
    name: str, options: dict, steps: int, new: int, caplog: pytest.LogCaptureFixture
) -> None:
    """nanoGPT's habit: `if master_process: torch.save(...)`, and every rank loads that file."""
    state, weights, _ = trained((3, None), name, steps, **options)[0]

    def work(transport: SimTransport) -> tuple[dict, Tensor, Tensor]:
        net = model(seed=3)
        optimizer = make(name, net, transport, check_replicas_every=1, **options)
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
        taken, at_start = copy.deepcopy(optimizer.state_dict()), flat(net).clone()
        train(transport, range(steps, steps + 6), net, optimizer)
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        return taken, at_start, flat(net).clone()

    with caplog.at_level(logging.WARNING):
        after = run_ranks(new, work)
    of_rank_0 = torch.cat([p.reshape(-1) for p in weights.values()])
    for rank, (taken, at_start, at_end) in enumerate(after):
        assert torch.equal(at_start, of_rank_0) and torch.equal(at_end, after[0][2]) and at_end.isfinite().all()
        is_own = (rank, new) == (0, 3)
        for key, entry in taken["state"].items():
            for part, x in entry.items():
                expected = state["state"][key][part]
                assert torch.equal(x, expected if is_own or part != "worker_error" else torch.zeros_like(x)), part
        told = f"rank {rank}: this optimizer state is that of rank 0 of 3: momentum and variance are taken over"
        assert (told in caplog.text) != is_own


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FAMILY)
def test_copies_of_one_ranks_state_are_refused_on_all_ranks(name: str) -> None:
    state = trained((3, None), name, 9)[0][0]

    def work(transport: SimTransport) -> bool:
        optimizer = make(name, model(), transport)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match=r"rank 1: .* number 1 is that of rank 0 of 3; .* load_state_dict"):
            optimizer.load_state_dicts([copy.deepcopy(state) for _ in range(3)])
        return same(before, optimizer.state_dict())

    assert run_ranks(3, work) == [True] * 3
