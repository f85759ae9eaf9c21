"""Clipped steps leave during backward with an expected factor, and the worker error makes up for the difference."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from family_contract import owed, run_world
from torch import Tensor, nn

import onebit
from onebit.comm import EncodeOutput, MomentumInputs, SignCodec, SimTransport, Transport, run_ranks
from onebit.model_parallel import ModelParallelGroup
from onebit.optimizer import CompressedOptimizer
from onebit.step.replicated import Replicated

KINDS = [onebit.OnebitAdam, onebit.OnebitLamb, onebit.OnebitMuon, onebit.ZeroOneAdam]
BETA1, FREEZE, STEPS, MOST = 0.9, 6, 24, 2.0
SPIKE = 16
SIZES = (64, 700, 3, 129)


def gradients(step: int, rank: int, spike: float) -> list[Tensor]:
    """Of unlike size in each step; one rank has a spike."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    size = (1.0 + 0.1 * (step % 3)) * (spike if (step, rank) == (SPIKE, 1) else 1.0)
    return [size * (0.3 + torch.randn(n, generator=g)) for n in SIZES]


def new(
    kind: type, params: list[nn.Parameter], transport: Transport, max_norm: float, **options: object
) -> CompressedOptimizer:
    options |= {"max_grad_norm": max_norm, "bucket_cap_mb": 1e-3, "compression": "always"}
    freeze = "var_freeze_step" if issubclass(kind, onebit.ZeroOneAdam) else "freeze_step"
    groups = [{"params": part, "use_muon": use} for part, use in ((params[:1], True), (params[1:], False))]
    given = groups if issubclass(kind, onebit.OnebitMuon) else params
    return kind(given, lr=1e-2, transport=transport, **options, **{freeze: FREEZE})


def starting_point() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn((8, 8) if n == 64 else n, generator=g)) for n in SIZES]


def backward(params: list[nn.Parameter], step: int, rank: int, spike: float) -> None:
    pairs = zip(params, gradients(step, rank, spike), strict=True)
    sum((p * x.view_as(p)).sum() for p, x in pairs).backward()


def train(
    transport: SimTransport, max_norm: float, spike: float = 50.0, resume_at: int = -1, kind: type = onebit.OnebitAdam
) -> tuple[list[Tensor], list[tuple[float, float | None, int, int]]]:
    """Parameters at the end; of each step the factor, the norm, how many buckets had left in backward, and resends."""
    params = starting_point()
    optimizer, told = new(kind, params, transport, max_norm), []
    for step in range(STEPS):
        if step == resume_at:
            state = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = new(kind, params, transport, max_norm)
            optimizer.load_state_dict(state)
        backward(params, step, transport.rank, spike)
        left, resends, again = optimizer._driver.launched, [], optimizer._driver.resend
        optimizer._driver.resend = lambda resends=resends, again=again: (resends.append(1), again())
        optimizer.step()
        optimizer.zero_grad()
        optimizer._driver.resend = again
        told.append((optimizer.stats.clip_factor, optimizer.stats.grad_norm, left, len(resends)))
    return [p.detach().clone() for p in params], told


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_leaves_early_and_is_clipped_by_its_own_norm(kind: type) -> None:
    """By a loop in float64, from the norms alone: the factors, and which steps are sent once more."""
    max_norm = 20.0
    ranks = run_ranks(2, lambda transport: train(transport, max_norm, kind=kind))
    params, told = ranks[0]
    assert all(torch.equal(a, b) for a, b in zip(params, ranks[1][0], strict=True))
    assert [each[:2] for each in told] == [each[:2] for each in ranks[1][1]]
    average = weight = 0.0
    for step, (factor, norm, left, resends) in enumerate(told):
        assert norm is not None and factor == pytest.approx(min(1.0, max_norm / (norm + 1e-6)), rel=1e-12)
        assert (left > 0) == (step > 0)  # the first step counts passes
        expected = average / weight if weight else 1.0
        is_dense = kind is not onebit.ZeroOneAdam and step < FREEZE
        if is_dense or kind is not onebit.ZeroOneAdam:
            assert resends == (0 if is_dense else expected > MOST * factor)
        average, weight = BETA1 * average + (1 - BETA1) * factor, BETA1 * weight + 1 - BETA1
    assert told[SPIKE][0] < 0.2 and sum(each[3] for each in told) <= 2


class Waiting:
    """An optimizer whose steps leave when their norm is known."""

    _clips_before_sending = CompressedOptimizer._estimates_norm


def total(optimizer: CompressedOptimizer, world_size: int) -> Tensor:
    """This rank's share of the momentum that all ranks have, and of their errors.

    Of matrices the momentum alone, in which a gradient gets its own factor: the move that it made stays as it was sent.
    """
    rule, held, errors = optimizer.rule, [], owed(optimizer)
    for bucket in optimizer.buckets:
        if isinstance(optimizer, onebit.ZeroOneAdam):
            m = bucket.flat["exp_avg_update"] * rule._weights[bucket.group_index]
        elif bucket.group.get("use_muon"):
            m = bucket.flat["momentum_buffer"]
            done = sum(map(len, held))
            errors[done : done + bucket.layout.parameter_numel] = 0.0
        else:
            m = rule.last_average(bucket)
        held += [view.double().reshape(-1) / world_size for view in bucket.layout.views(m)]
    return torch.cat(held) + errors


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "local_size"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_added(kind: type, nodes: int, local_size: int, dtype: torch.dtype) -> None:
    """Momentum + error of all ranks are those of ranks that wait for the norm, step by step from the same state."""
    world_size, compressed = nodes * local_size, range(FREEZE + 3, FREEZE + 10)
    waiting, sizes = type("Waiting", (Waiting, kind), {}), SIZES if kind is onebit.OnebitMuon else SIZES[::-1]

    def ours(transport: Transport) -> list[tuple[Tensor, Tensor, Tensor, float]]:
        params, found = starting_point(), []
        optimizer = new(kind, params, transport, 20.0, error_dtype=dtype)
        for step in range(compressed.stop):
            twins = [nn.Parameter(p.detach().clone()) for p in params]
            if step in compressed:
                state, errors = copy.deepcopy(optimizer.state_dict()), owed(optimizer)
                twin = new(waiting, twins, transport, 20.0, error_dtype=dtype)
                twin.load_state_dict(state)
            backward(params, step, transport.rank, 50.0)
            optimizer.step()
            if step in compressed:
                backward(twins, step, transport.rank, 50.0)
                assert not twin._driver.launched
                twin.step()
                assert twin.stats.clip_factor == optimizer.stats.clip_factor
                totals = (total(each, world_size) for each in (optimizer, twin))
                found.append((*totals, errors, twin.stats.clip_factor))
            optimizer.zero_grad()
        return found

    ranks = run_world((nodes, local_size), ours)
    differ = 0
    for of_ranks in zip(*ranks, strict=True):
        early, late, errors, _ = (sum(each) for each in zip(*of_ranks, strict=True))
        for mine, wanted, error in zip(*(x.split(sizes) for x in (early, late, errors)), strict=True):
            tolerance = (1e-6 if dtype == torch.float32 else 1e-2) * float(wanted.abs().max() + error.abs().max())
            assert (mine - wanted).abs().max() < tolerance
        differ += not torch.equal(of_ranks[0][0], of_ranks[0][1])
    assert differ > len(compressed) // 2


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
    monkeypatch.setattr("onebit.optimizer.MOST_TOO_LARGE", MOST)
    monkeypatch.setattr(CompressedOptimizer, "_clips_before_sending", CompressedOptimizer._estimates_norm)
    once, known = run_ranks(2, lambda transport: train(transport, 20.0, kind=kind))[0]
    assert all(torch.equal(a, b) for a, b in zip(twice, once, strict=True))
    assert [each[:2] for each in told] == [each[:2] for each in known]
    assert all(left > 0 and resends for *_, left, resends in told[STEPS - 5 :])
    assert not any(left or resends for *_, left, resends in known[STEPS - 5 :])


@pytest.mark.parametrize("kind", KINDS)
def test_the_norms_sums_come_with_the_frames(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass, and to the bit those of a pass of their own."""
    together, told = run_ranks(2, lambda transport: train(transport, 20.0, kind=kind))[0]
    monkeypatch.setattr(Replicated, "sums_gradients", property(lambda self: False, lambda self, value: None))
    apart, known = run_ranks(2, lambda transport: train(transport, 20.0, kind=kind))[0]
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert [each[:2] for each in told] == [each[:2] for each in known]


def test_no_pass_is_made_for_the_norm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = []
    monkeypatch.setattr(SignCodec, "momentum_sums", lambda *args: alone.append(args))
    run_ranks(2, lambda transport: train(transport, 20.0))
    assert not alone


@pytest.mark.parametrize("taken", ["", "parts", "masks"])
def test_sums_that_no_vote_takes_are_not_computed(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a model add up sums in float64, and masked momenta are no products: each computes its own."""
    encode, have_sums = SignCodec.encode_momentum, []

    def note(codec: SignCodec, momentum: MomentumInputs, out: EncodeOutput) -> None:
        have_sums.append(out.sums_KJ2 is not None)
        encode(codec, momentum, out)

    monkeypatch.setattr(SignCodec, "encode_momentum", note)

    def ours(transport: SimTransport) -> None:
        params, options = starting_point(), {}
        given = [{"params": p, "exp_avg_mask": torch.ones_like(p)} for p in params] if taken == "masks" else params
        if taken == "parts":
            options["model_parallel_group"] = ModelParallelGroup(SimTransport(), stages=transport)
            transport = SimTransport()
        optimizer = new(onebit.OnebitAdam, given, transport, 20.0, **options)
        for step in range(FREEZE + 2):
            backward(params, step, transport.rank, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, ours)
    assert have_sums and set(have_sums) == {not taken}


def test_gradients_that_change_after_they_were_sent_have_a_norm_of_their_own() -> None:
    def ours(transport: SimTransport, factor: float) -> list[float | None]:
        """Each gradient times this factor, in backward or after it."""
        params = starting_point()
        optimizer, norms = new(onebit.OnebitAdam, params, transport, 20.0), []
        for step in range(STEPS):
            backward(params, step, transport.rank, 1.0)
            if step == STEPS - 1 and factor != 1.0:
                torch._foreach_mul_([p.grad for p in params], factor)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.stats.grad_norm)
        assert optimizer.stats.resent_steps == (factor != 1.0)
        return norms

    *before, plain = run_ranks(2, lambda transport: ours(transport, 1.0))[0]
    *same, doubled = run_ranks(2, lambda transport: ours(transport, 2.0))[0]
    assert before == same and plain is not None
    # The estimate is ‖g‖²/n and a product with the momentum: it grows by more than √2, and by less than 2.
    assert doubled is not None and math.sqrt(2.0) * plain < doubled < 2.001 * plain


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_gradients_that_change_after_they_were_sent_give_the_bits_of_no_overlap(kind: type) -> None:
    def ours(transport: SimTransport, overlap: bool) -> tuple[list[Tensor], int]:
        params = starting_point()
        optimizer = new(kind, params, transport, 20.0, overlap=overlap)
        for step in range(STEPS):
            backward(params, step, transport.rank, 1.0)
            if step % 4 == 3:
                torch._foreach_mul_([p.grad for p in params], 0.9)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in params], optimizer.stats.resent_steps

    resent, count = run_ranks(2, lambda transport: ours(transport, True))[0]
    plain, none = run_ranks(2, lambda transport: ours(transport, False))[0]
    assert count > none == 0
    assert all(torch.equal(a, b) for a, b in zip(resent, plain, strict=True))


@pytest.mark.parametrize("delay", [0, 1])
def test_what_a_step_is_clipped_by_is_remembered(delay: int) -> None:
    def ours(transport: SimTransport) -> tuple[float, float]:
        params, average = starting_point(), 0.0
        optimizer = new(onebit.OnebitAdam, params, transport, 20.0, delay=delay)
        for step in range(20):
            backward(params, step, transport.rank, 50.0)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.stats.clip_factor == pytest.approx(20.0 / (optimizer.stats.grad_norm + 1e-6), rel=1e-12)
            average = BETA1 * average + (1 - BETA1) * optimizer.stats.clip_factor
        optimizer.sync()
        return average, optimizer.clipper.average[0]

    for expected, got in run_ranks(2, ours):
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("at", [4, SPIKE, SPIKE + 1])
def test_a_resumed_run_goes_on_to_the_bit(at: int) -> None:
    without, told = run_ranks(2, lambda transport: train(transport, 20.0))[1]
    resumed, again = run_ranks(2, lambda transport: train(transport, 20.0, resume_at=at))[1]
    assert all(torch.equal(a, b) for a, b in zip(without, resumed, strict=True))
    assert [each[:2] for each in told] == [each[:2] for each in again]


def test_a_spike_that_is_not_finite_is_skipped_by_all() -> None:
    skipped = run_ranks(2, lambda transport: train(transport, 20.0, spike=float("inf")))
    assert all(torch.equal(a, b) for a, b in zip(skipped[0][0], skipped[1][0], strict=True))
    assert all(x.isfinite().all() for x in skipped[0][0])
    assert [norm for _, norm, *_ in skipped[0][1]].count(None) == 1


def test_clipping_may_begin_and_end_after_backward() -> None:
    def ours(transport: SimTransport) -> None:
        params = [nn.Parameter(torch.ones(n)) for n in SIZES]
        optimizer = onebit.OnebitAdam(
            params, lr=1e-2, freeze_step=2, transport=transport, bucket_cap_mb=1e-3, compression="always"
        )
        for step in range(12):
            sum((p * x).sum() for p, x in zip(params, gradients(step, transport.rank, 1.0), strict=True)).backward()
            optimizer.max_grad_norm = {6: 5.0, 9: 0.0}.get(step, optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            assert (optimizer.stats.clip_factor < 0.5) == (6 <= step < 9)

    run_ranks(2, ours)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_of_some_steps_gives_the_bits_of_no_overlap(kind: type) -> None:
    """As accelerate clips. So does a run that is resumed, whose first step leaves after backward."""

    def ours(transport: SimTransport, overlap: bool) -> list[Tensor]:
        params = starting_point()
        optimizer = new(kind, params, transport, 0.0, overlap=overlap)
        for step in range(STEPS):
            backward(params, step, transport.rank, 1.0)
            optimizer.max_grad_norm = 20.0 if step % 3 else 0.0
            optimizer.step()
            optimizer.zero_grad()
            assert (optimizer.stats.clip_factor < 1.0) == (step % 3 > 0)
        return [p.detach().clone() for p in params]

    early, late = (run_ranks(2, lambda transport, on=on: ours(transport, on))[0] for on in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))


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
            with pytest.raises(RuntimeError, match=r"max_grad_norm=5\.0 comes after a backward pass has sent"):
                optimizer.max_grad_norm = 5.0
            refused += 1
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.stats.clip_factor == 1.0
    assert refused > 2
