"""Balanced rounds of local steps: ranks of unlike speed arrive together, and count by their steps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import IdentityCodec, SimTransport, run_ranks
from onebit.comm.hierarchy import hierarchical
from onebit.local.balance import divide_steps

CLOCK = threading.local()


@pytest.fixture(autouse=True)
def own_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's thread has a clock, which its steps move."""
    monkeypatch.setattr("onebit.local.balance.time", Mock(monotonic=lambda: getattr(CLOCK, "now", 0.0)))


def spend(seconds: float) -> None:
    CLOCK.now = getattr(CLOCK, "now", 0.0) + seconds


def make(x: Tensor, transport: SimTransport, **options: Any) -> onebit.LocalSteps:
    inner = options.pop("inner", None) or torch.optim.SGD([x], lr=0.1)
    return onebit.LocalSteps(inner, transport=transport, balanced=True, **{"every": 8, **options})


def target(rank: int) -> Tensor:
    return torch.arange(5, dtype=torch.float32) * (rank + 1) - 2.0


def step(x: Tensor, optimizer: onebit.LocalSteps, rank: int, seconds: float) -> None:
    optimizer.zero_grad()
    (x - target(rank)).square().sum().mul(0.5).backward()
    spend(seconds)
    optimizer.step()


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("interval", "seconds", "shares"),
    [
        (32, [1.0, 1.0, 1.0], [32, 32, 32]),
        (32, [3.0, 1.0], [16, 48]),
        (32, [0.0, 0.0], [32, 32]),  # not known yet
        (10, [2.0, 0.0, 1.0], [7, 10, 13]),  # a newcomer counts as one of mean speed
        (1, [1.0, 1.0], [1, 1]),
        (4, [1000.0, 1.0], [1, 8]),
        (32, [0.25], [32]),
        (0, [1.0, 2.0], [1, 1]),
    ],
)
def test_steps_are_divided_by_speed(interval: int, seconds: list[float], shares: list[int]) -> None:
    assert divide_steps(interval, seconds) == shares


@pytest.mark.parametrize("seed", range(20))
def test_all_arrive_within_half_a_step_of_each_and_take_as_many_steps_as_before(seed: int) -> None:
    draw = np.random.default_rng(seed)
    seconds = draw.uniform(0.1, 2.0, int(draw.integers(1, 9))).tolist()
    interval = int(draw.integers(20, 200))
    shares, ideal = divide_steps(interval, seconds), interval * len(seconds) / sum(1 / s for s in seconds)
    assert all(abs(n * s - ideal) <= 0.5 * s + 1e-9 or n == 1 for n, s in zip(shares, seconds, strict=True))
    assert abs(sum(shares) - interval * len(seconds)) <= len(seconds)


# ---------------------------------------------------------------- rounds


def test_rounds_are_those_of_a_float64_loop() -> None:
    """Two ranks, one of which takes three seconds for a step and the other one."""

    def work(transport: SimTransport) -> tuple[list[Tensor], list[tuple[int, float]]]:
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, transport, codec=IdentityCodec())
        anchors, rounds, taken, began = [], [], 0, 0.0
        CLOCK.now = 0.0
        while optimizer.steps_taken() < 32:
            step(x, optimizer, transport.rank, 3.0 - 2.0 * transport.rank)
            taken += 1
            if optimizer.stats.phase == "round":
                anchors.append(x.detach().clone())
                rounds.append((taken, CLOCK.now - began))
                taken, began = 0, CLOCK.now
        assert optimizer.stats.weight == [0.5, 1.5][transport.rank]
        return anchors, rounds

    (first, slow), (second, fast) = run_ranks(2, work)
    assert slow == [(8, 24.0), (4, 12.0), (4, 12.0), (4, 12.0)] and fast == [(8, 8.0), *[(12, 12.0)] * 3]
    anchor = np.zeros(5)
    for round_index, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        steps = [(8, 8), (4, 12)][min(round_index, 1)]
        ends = []
        for rank in range(2):
            x = anchor.copy()
            for _ in range(steps[rank]):
                x -= 0.1 * (x - target(rank).double().numpy())
            ends.append(x)
        anchor = (steps[0] * ends[0] + steps[1] * ends[1]) / sum(steps)
        assert torch.equal(ours, theirs)
        np.testing.assert_allclose(ours.numpy(), anchor, rtol=1e-5, atol=1e-6)


def test_weight_decay_is_that_of_the_weighted_mean() -> None:
    def work(transport: SimTransport) -> Tensor:
        x = nn.Parameter(torch.ones(3))
        inner = torch.optim.AdamW([x], lr=0.1, weight_decay=0.2)
        optimizer = make(x, transport, inner=inner, codec=IdentityCodec())
        while optimizer.steps_taken() < 16:
            x.grad = torch.zeros(3)
            spend(3.0 - 2.0 * transport.rank)
            optimizer.step()
        return x.detach()

    keep = 1.0 - 0.1 * 0.2
    expected = keep**8 * (4 * keep**4 + 12 * keep**12) / 16
    for x in run_ranks(2, work):
        torch.testing.assert_close(x, torch.full((3,), expected), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("seconds", "is_slow", "expected"),
    [
        pytest.param(3.0, lambda k, j: k >= 3, [[8] * 4 + [4] * 4, [8] * 4 + [12] * 4], id="slower from a round on"),
        pytest.param(100.0, lambda k, j: (k, j) == (3, 2), [[8] * 8] * 2, id="one long pause"),
    ],
)
def test_a_rank_that_becomes_slower_takes_fewer_steps(
    seconds: float, is_slow: Callable[[int, int], bool], expected: list[list[int]]
) -> None:
    """The median of three rounds leaves out an evaluation on one rank, within one of them."""

    def work(transport: SimTransport) -> list[int]:
        x = nn.Parameter(torch.zeros(5))
        optimizer, shares = make(x, transport), []
        for k in range(8):
            for j in range(optimizer.balance.share):
                step(x, optimizer, transport.rank, seconds if transport.rank == 0 and is_slow(k, j) else 1.0)
            shares.append(optimizer.balance.share)
        return shares

    assert run_ranks(2, work) == expected


@pytest.mark.parametrize("codec", [IdentityCodec(), onebit.comm.SignCodec()], ids=["full", "one bit"])
def test_resume_within_a_round_is_no_interruption(codec: onebit.comm.Codec) -> None:
    def work(transport: SimTransport, saved_at: int | None) -> Tensor:
        CLOCK.now = 0.0
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, transport, codec=codec)
        taken = 0
        while optimizer.steps_taken() < 40:
            step(x, optimizer, transport.rank, 3.0 - 2.0 * transport.rank)
            taken += 1
            if taken == saved_at:
                state, weights = copy.deepcopy(optimizer.state_dict()), x.detach().clone()
                x = nn.Parameter(weights)
                optimizer = make(x, transport, codec=codec)
                optimizer.load_state_dict(state)
        optimizer.sync()
        return x.detach()

    whole = run_ranks(2, lambda transport: work(transport, None))
    # In the second and third round, each within it: the slow rank after its 9th and 13th step, the fast one as well.
    for at in ((9, 9), (13, 22)):
        resumed = run_ranks(2, lambda transport, at=at: work(transport, at[transport.rank]))
        assert all(map(torch.equal, resumed, whole))


def test_states_of_different_rounds_are_refused() -> None:
    """Each rank has saved after as many steps, and the anchors are not the same."""

    def before(transport: SimTransport) -> dict[str, Any]:
        x, states = nn.Parameter(torch.zeros(5)), []
        optimizer = make(x, transport)
        while optimizer.steps_taken() < 40:
            step(x, optimizer, transport.rank, 3.0 - 2.0 * transport.rank)
            states.append(copy.deepcopy(optimizer.state_dict()))
        return states[15]

    def after(transport: SimTransport) -> None:
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, transport)
        optimizer.load_state_dict(states[transport.rank])
        with pytest.raises(
            onebit.DesyncError, match="different steps at their last round: 24 on rank 0 and 8 on rank 1"
        ):
            for _ in range(16):
                step(x, optimizer, transport.rank, 1.0)

    states = run_ranks(2, before)
    run_ranks(2, after)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_world_of_another_size_measures_its_own_speeds(ranks: int) -> None:
    """Saved within a round, by ranks that are in unlike steps of it."""

    def before(transport: SimTransport) -> dict[str, Any]:
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, transport)
        while optimizer.steps_taken() < 20:
            step(x, optimizer, transport.rank, 3.0 - 2.0 * transport.rank)
        return copy.deepcopy(optimizer.state_dict())

    def after(transport: SimTransport) -> tuple[Tensor, list[int]]:
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, transport)
        optimizer.load_state_dicts(states)
        shares = []
        while optimizer.steps_taken() < 64:
            step(x, optimizer, transport.rank, 1.0)
            if optimizer.stats.phase == "round":
                shares.append(optimizer.balance.share)
        return x.detach(), shares

    states = run_ranks(2, before)
    (first, shares), *others = run_ranks(ranks, after)
    assert shares == [8] * 6 and all(torch.equal(first, x) and its == shares for x, its in others)


@pytest.mark.parametrize("steps", [1, 7, 16, 21])
def test_all_ranks_end_with_the_same_parameters_after_sync(steps: int) -> None:
    """In the middle of a round ranks are in unlike steps, and the fast one may not have counted its first."""

    def work(transport: SimTransport) -> tuple[Tensor, int]:
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, transport)
        while optimizer.steps_taken() < steps:
            step(x, optimizer, transport.rank, [5.0, 1.0, 0.3][transport.rank])
        optimizer.sync()
        assert optimizer.is_at_anchor()
        return x.detach(), optimizer.steps_taken()

    (first, at), *others = run_ranks(3, work)
    assert at >= steps and all(torch.equal(first, x) and at == its for x, its in others)


def test_ranks_that_run_out_of_batches_are_waited_for_by_none() -> None:
    """Loaders of one length: the fast rank has finished when the slow one has a third."""

    def work(transport: SimTransport) -> Tensor:
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, transport)
        with optimizer.join():
            for _ in range(50):
                step(x, optimizer, transport.rank, 3.0 - 2.0 * transport.rank)
        return x.detach()

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)


def test_nodes_are_divided_by_their_slowest_rank() -> None:
    def work(transport: onebit.comm.Transport) -> list[int]:
        x = nn.Parameter(torch.zeros(5))
        optimizer = make(x, hierarchical(transport, 2))
        for _ in range(2):
            for _ in range(optimizer.balance.share):
                step(x, optimizer, transport.rank, [3.0, 2.0, 1.0, 1.0][transport.rank])
        return [optimizer.balance.share, *(round(w, 1) for w in [optimizer.stats.weight])]

    assert run_ranks(4, work) == [[4, 0.5], [4, 0.5], [12, 1.5], [12, 1.5]]


@pytest.mark.parametrize("options", [{"fragments": 2}, {"delay": 1}, {"correction_steps": 80}])
def test_what_needs_as_many_steps_on_all_ranks_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="balanced=True needs fragments=1, delay=0 and correction_steps=0"):
        make(nn.Parameter(torch.zeros(5)), SimTransport(), **options)
