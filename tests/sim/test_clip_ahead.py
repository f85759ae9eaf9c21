"""Clipped steps leave during backward, with an expected factor; a factor that was far too large is sent once more."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport, run_ranks
from onebit.optimizer import CompressedOptimizer

KINDS = [onebit.OnebitAdam, onebit.OnebitLamb, onebit.OnebitMuon, onebit.ZeroOneAdam]
BETA1, SLACK, FREEZE, STEPS = 0.9, 1.25, 6, 40
SIZES = (64, 700, 3, 129)


def gradients(step: int, rank: int, spike: float) -> list[Tensor]:
    """Of unlike size in each step; one rank has a spike."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    size = (1.0 + 0.1 * (step % 3)) * (spike if (step, rank) == (25, 1) else 1.0)
    return [size * (0.3 + torch.randn(n, generator=g)) for n in SIZES]


def train(
    transport: SimTransport, max_norm: float, spike: float = 50.0, resume_at: int = -1, kind: type = onebit.OnebitAdam
) -> tuple[list[Tensor], list[tuple[float, float | None, int]]]:
    """Parameters at the end; of each step the factor, the norm, and how many buckets had left in backward."""

    def new(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = {"max_grad_norm": max_norm, "bucket_cap_mb": 1e-3, "compression": "always"}
        freeze = "var_freeze_step" if kind is onebit.ZeroOneAdam else "freeze_step"
        groups = [{"params": part, "use_muon": use} for part, use in ((params[:1], True), (params[1:], False))]
        given = groups if kind is onebit.OnebitMuon else params
        return kind(given, lr=1e-2, transport=transport, **options, **{freeze: FREEZE})

    g = torch.Generator().manual_seed(7)
    params = [nn.Parameter(torch.randn((8, 8) if n == 64 else n, generator=g)) for n in SIZES]
    optimizer, told = new(params), []
    for step in range(STEPS):
        if step == resume_at:
            state = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = new(params)
            optimizer.load_state_dict(state)
        pairs = zip(params, gradients(step, transport.rank, spike), strict=True)
        sum((p * x.view_as(p)).sum() for p, x in pairs).backward()
        left = optimizer._driver.launched
        optimizer.step()
        optimizer.zero_grad()
        told.append((optimizer.stats.clip_factor, optimizer.stats.grad_norm, left))
    return [p.detach().clone() for p in params], told


def test_factors_are_those_of_a_loop_in_float64() -> None:
    """From the norms alone: expected is the average of what was asked for; a factor is never 1.25 times too large."""
    max_norm = 20.0
    ranks = run_ranks(2, lambda transport: train(transport, max_norm))
    params, told = ranks[0]
    assert all(torch.equal(a, b) for a, b in zip(params, ranks[1][0], strict=True))
    assert [each[:2] for each in told] == [each[:2] for each in ranks[1][1]]
    average = weight = 0.0
    sent_again = 0
    for step, (factor, norm, left) in enumerate(told):
        asked = min(1.0, max_norm / (norm + 1e-6))
        expected = min(1.0, average / weight) if weight else 1.0
        if step < FREEZE:
            assert factor == pytest.approx(asked, rel=1e-12)
        else:
            is_too_large = expected > SLACK * asked
            sent_again += is_too_large
            assert factor == pytest.approx(asked if is_too_large else expected, rel=1e-9)
            assert factor <= SLACK * asked * (1 + 1e-9)
        average, weight = BETA1 * average + (1 - BETA1) * asked, BETA1 * weight + 1 - BETA1
        assert (left > 0) == (step > 0)  # the first step counts passes
    assert 0 < sent_again < 10 and told[25][0] < 0.2 < told[24][0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_that_is_never_reached_changes_no_bit(kind: type) -> None:
    plain, _ = run_ranks(2, lambda transport: train(transport, 0.0, kind=kind))[0]
    clipped, told = run_ranks(2, lambda transport: train(transport, 1e6, kind=kind))[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, clipped, strict=True))
    assert {factor for factor, *_ in told} == {1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_sent_twice_is_that_of_one_sent_when_the_norm_is_known(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebit.optimizer.MOST_TOO_LARGE", 0.0)
    twice, told = run_ranks(2, lambda transport: train(transport, 20.0, kind=kind))[0]
    monkeypatch.setattr(CompressedOptimizer, "_clips_before_sending", CompressedOptimizer._estimates_norm)
    once, known = run_ranks(2, lambda transport: train(transport, 20.0, kind=kind))[0]
    assert all(torch.equal(a, b) for a, b in zip(twice, once, strict=True))
    assert [each[:2] for each in told] == [each[:2] for each in known]
    assert all(left > 0 for *_, left in told[FREEZE:]) and not any(left for *_, left in known[-5:])


@pytest.mark.parametrize("at", [4, 20, 26])
def test_a_resumed_run_expects_the_same(at: int) -> None:
    without, told = run_ranks(2, lambda transport: train(transport, 20.0))[1]
    resumed, again = run_ranks(2, lambda transport: train(transport, 20.0, resume_at=at))[1]
    assert all(torch.equal(a, b) for a, b in zip(without, resumed, strict=True))
    assert [each[:2] for each in told] == [each[:2] for each in again]


def test_a_spike_that_is_not_finite_is_skipped_by_all() -> None:
    skipped = run_ranks(2, lambda transport: train(transport, 20.0, spike=float("inf")))
    assert all(torch.equal(a, b) for a, b in zip(skipped[0][0], skipped[1][0], strict=True))
    assert all(x.isfinite().all() for x in skipped[0][0])
    assert [norm for _, norm, _ in skipped[0][1]].count(None) == 1


def test_clipping_may_begin_after_backward_but_not_end_there() -> None:
    def ours(transport: SimTransport) -> list[str]:
        params = [nn.Parameter(torch.ones(n)) for n in SIZES]
        optimizer = onebit.OnebitAdam(
            params, lr=1e-2, freeze_step=2, transport=transport, bucket_cap_mb=1e-3, compression="always"
        )
        said = []
        for step in range(12):
            sum((p * x).sum() for p, x in zip(params, gradients(step, transport.rank, 1.0), strict=True)).backward()
            try:
                optimizer.max_grad_norm = {6: 5.0, 9: 0.0}.get(step, optimizer.max_grad_norm)
            except RuntimeError as error:
                said.append(str(error))
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.stats.clip_factor < 0.5 if step >= 6 else optimizer.stats.clip_factor == 1.0
        return said

    for said in run_ranks(2, ours):
        assert len(said) == 1 and "it was 5.0, comes after a backward pass has sent gradients" in said[0]


def zero_one(params: list[nn.Parameter], transport: SimTransport, longest: int, **options: float) -> onebit.ZeroOneAdam:
    return onebit.ZeroOneAdam(
        params, lr=1e-2, transport=transport, compression="always", bucket_cap_mb=1e-3, var_freeze_step=4,
        local_step_scaler=4, local_step_clipper=longest, **options,
    )  # fmt: skip


def test_ranks_that_have_clipped_apart_send_once() -> None:
    """After local steps ranks remember different factors: a run without such steps that resumes theirs must not let
    them decide whether a step is sent twice."""

    def ours(transport: SimTransport) -> tuple[list[Tensor], bool]:
        params = [nn.Parameter(torch.ones(n)) for n in SIZES]
        optimizer, generator = zero_one(params, transport, 4, max_grad_norm=1.0), torch.Generator()
        generator.manual_seed(transport.rank)

        def step() -> None:
            size = 1.0 + 5.0 * transport.rank
            sum((p * size * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(30):
            step()
        optimizer.sync()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = zero_one(params, transport, 1, max_grad_norm=1.0)
        optimizer.load_state_dict(state)
        again = copy.deepcopy(optimizer.state_dict())
        for _ in range(20):
            step()
        return [p.detach().clone() for p in params], bool(again["onebit"]["had_local_steps"])

    (one, had), (other, _) = run_ranks(2, ours, timeout_s=20)
    assert had and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_clipping_does_not_begin_after_backward_if_it_waits_for_the_norm() -> None:
    """With local steps the vote comes before the first bucket, and some have left."""
    params = [nn.Parameter(torch.ones(n)) for n in SIZES]
    optimizer, refused = zero_one(params, SimTransport(), 4), 0
    for step in range(40):
        sum((p * x).sum() for p, x in zip(params, gradients(step, 0, 1.0), strict=True)).backward()
        rule = optimizer.rule
        sends_momentum = not (rule.is_silent() or any(map(rule.averages_gradients, optimizer.buckets)))
        if optimizer._driver.launched and sends_momentum:
            with pytest.raises(RuntimeError, match=r"it was 0\.0, comes after a backward pass has sent gradients"):
                optimizer.max_grad_norm = 5.0
            refused += 1
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.stats.clip_factor == 1.0
    assert refused > 2
