"""The correction of local steps: what it cancels, what it learns from, and that it costs no byte more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import IdentityCodec, SignCodec, SimTransport, hierarchical, run_ranks

D, WORLD = 200, 4


def quadratic(rank: int) -> tuple[Tensor, Tensor]:
    """Curvature and minimum of a rank's own loss, each [D]: other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return 0.2 + 1.8 * torch.rand(D, generator=generator), torch.randn(D, generator=generator)


def common_minimum() -> Tensor:
    curvatures, minima = (torch.stack(each).double() for each in zip(*map(quadratic, range(WORLD)), strict=True))
    return (curvatures * minima).sum(0) / curvatures.sum(0)


def train(
    transport: SimTransport,
    steps: int,
    *,
    inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.1,
    every: int = 8,
    after: Callable[[int, onebit.LocalSteps], None] = lambda step, optimizer: None,
    **options: Any,
) -> tuple[onebit.LocalSteps, nn.Parameter]:
    """One rank's way down its own quadratic."""
    p = nn.Parameter(torch.zeros(D))
    curvature, minimum = quadratic(transport.rank)
    optimizer = onebit.LocalSteps(inner([p], lr=lr), every, transport=transport, **options)
    for step in range(steps):
        p.grad = curvature * (p.detach() - minimum)
        optimizer.step()
        after(step, optimizer)
    return optimizer, p


def distance(correction_steps: int, codec: Any) -> float:
    """From the minimum of the mean loss, behind a round."""

    def ours(transport: SimTransport) -> Tensor:
        return train(transport, 400, codec=codec, correction_steps=correction_steps)[1].detach()

    found = run_ranks(WORLD, ours)[0].double()
    return float((found - common_minimum()).norm() / common_minimum().norm())


@pytest.mark.slow
def test_it_cancels_the_drift_of_ranks_with_different_losses() -> None:
    """Local gradient descent ends where the ranks' drifts cancel, which is no minimum of anything; corrected, at it."""
    assert distance(0, IdentityCodec()) > 0.1
    assert distance(24, IdentityCodec()) < 1e-3


@pytest.mark.slow
def test_it_gets_nearer_in_one_bit_too() -> None:
    assert distance(24, SignCodec(block=64)) < 0.5 * distance(0, SignCodec(block=64))


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 2}])
def test_the_ranks_corrections_cancel(options: dict[str, Any]) -> None:
    """In full: what one rank is to move further, others are to move less."""

    def ours(transport: SimTransport) -> tuple[Tensor, float]:
        curvature, minimum = quadratic(transport.rank)
        params = [nn.Parameter(torch.zeros(D)) for _ in range(2)]
        optimizer = onebit.LocalSteps(
            torch.optim.SGD([{"params": [p]} for p in params], lr=0.1),
            8,
            transport=transport,
            codec=IdentityCodec(),
            correction_steps=24,
            **options,
        )
        for _ in range(50):
            for p in params:
                p.grad = curvature * (p.detach() - minimum)
            optimizer.step()
        found = torch.cat([bucket.correction for bucket in optimizer.buckets])  # type: ignore[misc]
        return found, float(found.abs().max())

    corrections, largest = zip(*run_ranks(WORLD, ours), strict=True)
    assert min(largest) > 0.1
    assert float(torch.stack(corrections).double().sum(0).abs().max()) < 1e-5


def test_weights_that_travel_whole_teach_the_same_as_differences() -> None:
    """Without compression w travels in place of its difference; owing nothing, both say the same of each rank."""

    def ours(transport: SimTransport, **options: Any) -> Tensor:
        return train(transport, 24, correction_steps=24, **options)[1].detach()

    whole = run_ranks(WORLD, lambda transport: ours(transport, codec=IdentityCodec()))
    apart = run_ranks(WORLD, lambda transport: ours(transport, codec=IdentityCodec(), outer_lr=1.0 - 1e-7))
    for one, other in zip(whole, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_it_costs_no_byte_between_nodes() -> None:
    def ours(transport: SimTransport, correction_steps: int) -> int:
        optimizer, _ = train(hierarchical(transport, 2), 16, correction_steps=correction_steps)
        return optimizer.stats.sent_bytes_inter_node

    without, with_it = (run_ranks(WORLD, lambda transport, steps=steps: ours(transport, steps)) for steps in (0, 24))
    assert without == with_it and min(without) > 0


def test_a_rank_that_is_away_learns_nothing_until_its_difference_counts() -> None:
    def ours(transport: SimTransport) -> list[bool]:
        optimizer, _ = train(transport, 8, correction_steps=24)
        kept = [bucket.correction.clone() for bucket in optimizer.buckets]  # type: ignore[union-attr]

        def is_kept() -> bool:
            return all(torch.equal(bucket.correction, v) for bucket, v in zip(optimizer.buckets, kept, strict=True))  # type: ignore[arg-type]

        found = []
        for is_away in (True, False):
            optimizer.is_away = is_away and transport.rank == 1
            for _ in range(8):
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p) * (1 + transport.rank)
                optimizer.step()
            found.append(is_kept())
        return found

    found = run_ranks(3, ours)
    assert found[1] == [True, False] and found[0] == found[2] == [False, False]


def test_parameters_without_a_gradient_stay() -> None:
    """What a correction has learnt of them does not move them while they are frozen."""

    def ours(transport: SimTransport) -> bool:
        optimizer, p = train(transport, 16, correction_steps=24)
        before, p.grad = p.detach().clone(), None
        assert optimizer.buckets[0].correction.any()  # type: ignore[union-attr]
        optimizer.step()
        return torch.equal(p.detach(), before)

    assert all(run_ranks(2, ours))


def test_parameters_that_were_not_finite_begin_without_it() -> None:
    def ours(transport: SimTransport) -> tuple[bool, bool]:
        def spoil(step: int, optimizer: onebit.LocalSteps) -> None:
            if step == 14 and transport.rank == 1:
                optimizer.param_groups[0]["params"][0].data[3] = float("nan")

        optimizer, p = train(transport, 16, correction_steps=24, after=spoil)
        return bool(optimizer.buckets[0].correction.any()), bool(p.isfinite().all())  # type: ignore[union-attr]

    assert run_ranks(3, ours) == [(True, True), (False, True), (True, True)]


def test_a_round_that_comes_early_teaches_no_more_than_its_share() -> None:
    """`sync` behind one step brings errors of whole rounds: held against one step they would be 8 times as large."""

    def ours(transport: SimTransport) -> float:
        optimizer, p = train(transport, 64, correction_steps=24, codec=SignCodec(block=64))
        before = optimizer.buckets[0].correction.clone()  # type: ignore[union-attr]
        p.grad = torch.zeros_like(p)
        optimizer.step()
        said = optimizer.buckets[0].ef.worker.abs().max()
        optimizer.sync()
        learnt = (optimizer.buckets[0].correction - before).abs().max()  # type: ignore[operator]
        return float(learnt / (0.3 * 2 * (said + 0.1) / (8 * 0.1)))

    assert all(0.0 < each < 1.5 for each in run_ranks(2, ours))


def test_a_run_whose_rate_has_fallen_is_resumed_to_the_bit() -> None:
    """The correction is in units of the largest rate so far, which the state holds."""

    def ours(transport: SimTransport) -> bool:
        def fall(step: int, optimizer: onebit.LocalSteps) -> None:
            if step == 20:
                optimizer.param_groups[0]["lr"] = 0.01

        straight, p = train(transport, 28, correction_steps=24, after=fall)
        resumed, q = train(transport, 0, lr=0.01, correction_steps=24)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        curvature, minimum = quadratic(transport.rank)
        for _ in range(20):
            for each, optimizer in ((p, straight), (q, resumed)):
                each.grad = curvature * (each.detach() - minimum)
                optimizer.step()
        return torch.equal(p.detach(), q.detach())

    assert all(run_ranks(2, ours))


def test_a_state_without_it_is_refused_by_name() -> None:
    def ours(transport: SimTransport) -> str:
        plain, _ = train(transport, 4)
        corrected, _ = train(transport, 4, correction_steps=24)
        with pytest.raises(ValueError, match=r"no correction of shape \(200,\)") as refused:
            corrected.load_state_dict(copy.deepcopy(plain.state_dict()))
        plain.load_state_dict(copy.deepcopy(corrected.state_dict()))
        return str(refused.value)

    assert all("rank" in each for each in run_ranks(2, ours))


def test_fewer_steps_than_none_are_refused() -> None:
    with pytest.raises(ValueError, match="correction_steps and check_replicas_every at least 0, got 1, 0, -1"):
        run_ranks(1, lambda transport: train(transport, 0, correction_steps=-1))


@pytest.mark.parametrize("steps", ["80", 80.0, True])
def test_what_is_no_number_of_steps_is_refused_by_name(steps: Any) -> None:
    with pytest.raises(TypeError, match="correction_steps must be an integer, got"):
        run_ranks(1, lambda transport: train(transport, 0, correction_steps=steps))


@pytest.mark.parametrize("every", [1, 8, 64])
def test_a_round_teaches_by_its_steps_and_never_more_than_a_third(every: int) -> None:
    """Two ranks pull apart by 1 per rate and step, from nothing: v is κ of it behind the first round."""

    def ours(transport: SimTransport) -> float:
        p = nn.Parameter(torch.zeros(D))
        inner = torch.optim.SGD([p], lr=0.5)
        optimizer = onebit.LocalSteps(inner, every, transport=transport, codec=IdentityCodec(), correction_steps=80)
        for _ in range(every):
            p.grad = torch.full_like(p, float(2 * transport.rank - 1))
            optimizer.step()
        return float(optimizer.buckets[0].correction[0])  # type: ignore[index]

    share = min(0.3, every / 80)
    assert run_ranks(2, ours) == pytest.approx([-share, share])


def test_a_rate_that_fell_to_nothing_may_rise_again() -> None:
    """What is owed from large steps, held against tiny ones, would be moves of a thousand steps at large rates."""

    def ours(transport: SimTransport) -> float:
        p = nn.Parameter(torch.zeros(D))
        curvature, minimum = quadratic(transport.rank)
        inner = torch.optim.SGD([p], lr=0.1)
        optimizer = onebit.LocalSteps(inner, 8, transport=transport, correction_steps=24)
        most = 0.0
        for step in range(256):
            inner.param_groups[0]["lr"] = 0.1 if step % 64 < 32 else 1e-7
            p.grad = curvature * (p.detach() - minimum)
            optimizer.step()
            most = max(most, float(p.detach().abs().max()))
        return most

    assert max(run_ranks(WORLD, ours)) < 10.0


def test_a_rate_of_0_teaches_nothing() -> None:
    def ours(transport: SimTransport) -> bool:
        optimizer, p = train(transport, 16, lr=0.0, correction_steps=24)
        return bool(optimizer.buckets[0].correction.isfinite().all()) and not p.any()  # type: ignore[union-attr]

    assert all(run_ranks(2, ours))


@pytest.mark.slow
def test_master_weights_are_corrected() -> None:
    """And moves of an inner optimizer with momentum, whose length is not the learning rate's."""

    def ours(transport: SimTransport) -> Tensor:
        p = nn.Parameter(torch.zeros(D, dtype=torch.bfloat16))
        curvature, minimum = quadratic(transport.rank)
        inner = torch.optim.SGD([p], lr=0.02, momentum=0.8)
        optimizer = onebit.LocalSteps(inner, 8, transport=transport, correction_steps=80, codec=IdentityCodec())
        for _ in range(800):
            p.grad = (curvature * (p.detach().float() - minimum)).to(torch.bfloat16)
            optimizer.step()
        return p.detach().double()

    first, *others = run_ranks(WORLD, ours)
    assert all(torch.equal(first, each) for each in others)
    assert float((first - common_minimum()).norm() / common_minimum().norm()) < 0.02
