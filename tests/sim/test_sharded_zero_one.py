"""Sharded 0/1 Adam: rounds of which nothing is heard, and of which nothing is lost."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from sharded_ranks import OPTIONS, SIZES, assert_state_is, gradient, initial, new, owners, state_of, take_steps, values
from torch import Tensor

from onebit.comm import Codec, Log4Codec, SimTransport, run_ranks
from onebit.reference.sharded import ShardedZeroOneAdam as ShardedZeroOneOracle
from onebit.zero import ShardedOnebitAdam, ShardedZeroOneAdam

CAP = 600 * 4 / 2**20
# H is 1 in steps 0 to 2, 2 from 3 on, 4 from 6 on; a cycle keeps the H that it began with.
CYCLES = [1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4]
SKIPPED = [False, False, False, True, False, True, False, *[True, True, True, False] * 2]
WARMUP = 2
SCHEDULE = {"local_step_scaler": 3, "local_step_clipper": 4, "warmup_steps": WARMUP}
FORMS = {
    "int4": {},
    "sign": {"differences": "sign"},
    "clipped": {"max_grad_norm": 100.0},
    "several buckets": {"bucket_cap_mb": CAP},
    "stage 2": {"stage": 2, "bucket_cap_mb": CAP},
}


@pytest.mark.parametrize(
    ("form", "world_size"), [(form, 2) for form in FORMS] + [(form, W) for W in (1, 4) for form in ("int4", "stage 2")]
)
def test_equals_the_textbook_loop(form: str, world_size: int) -> None:
    """Under a learning rate that changes within the cycles."""
    rates = [OPTIONS["lr"] * (1.0 - 0.05 * step) for step in range(len(CYCLES))]

    def work(transport: SimTransport) -> tuple[Tensor, ShardedZeroOneAdam]:
        options = SCHEDULE | FORMS[form]
        params, optimizer = new(transport, kind=ShardedZeroOneAdam, momentum_dtype=torch.float32, **options)
        for step, lr in enumerate(rates):
            optimizer.param_groups[0]["lr"] = lr
            before = values(params)
            take_steps(params, optimizer, range(step, step + 1))
            assert (optimizer.stats.phase, optimizer.stats.sent_bytes > 0) == (
                ("local", False) if SKIPPED[step] else ("warmup" if step < WARMUP else "compressed", world_size > 1)
            )
            assert torch.equal(values(params), before) == SKIPPED[step]
        return values(params), optimizer

    xs, optimizers = zip(*run_ranks(world_size, work), strict=True)
    assert all(torch.equal(x, xs[0]) for x in xs)
    oracle = ShardedZeroOneOracle(
        values(initial()).double().numpy(),
        world_size,
        SIZES,
        owners(optimizers),
        betas=OPTIONS["betas"],
        warmup=WARMUP,
        down="sign" if form == "sign" else "int4",
        clip=FORMS[form].get("max_grad_norm", 0.0),
    )
    for step, (lr, interval) in enumerate(zip(rates, CYCLES, strict=True)):
        grads = [torch.cat(gradient(step, rank)).double().numpy() for rank in range(world_size)]
        oracle.take(np.stack(grads), lr, interval)
    assert oracle.waited == 0
    off = np.abs(xs[0].double().numpy() - oracle.x)
    assert np.sum(off > 1e-6) <= (0 if form == "sign" else 3) and off.max() < 2e-3
    assert_state_is(oracle, optimizers)


@pytest.mark.parametrize("form", FORMS)
def test_without_skipped_steps_it_is_sharded_onebit_adam_to_the_bit(form: str) -> None:
    def work(transport: SimTransport, kind: type) -> tuple[Tensor, list[Tensor], int]:
        params, optimizer = new(transport, torch.bfloat16, kind=kind, **FORMS[form])
        take_steps(params, optimizer, range(8))
        return values(params), state_of(optimizer), optimizer.stats.sent_bytes

    pairs = zip(
        *(run_ranks(3, lambda transport, k=k: work(transport, k)) for k in (ShardedOnebitAdam, ShardedZeroOneAdam)),
        strict=True,
    )
    for (x, state, sent), (y, other, sent_too) in pairs:
        assert torch.equal(x, y) and sent == sent_too
        assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


@pytest.mark.parametrize("clipper", [1, 4])
def test_a_skipped_step_costs_neither_bytes_nor_memory(clipper: int) -> None:
    """A cycle of H sends what one step of sharded one-bit Adam does, and keeps as much."""
    sizes = (64 * 256, 100)

    def work(transport: SimTransport, kind: type, **options: object) -> tuple[int, int]:
        params, optimizer = new(transport, sizes=sizes, kind=kind, **options)
        before = transport.sent_bytes
        take_steps(params, optimizer, range(2 * clipper))
        return transport.sent_bytes - before, optimizer.state_bytes()

    options = {"local_step_clipper": clipper, "local_step_scaler": 1, "local_step_start": -10}
    unwarmed = {"warmup_steps": 0}
    skipping = run_ranks(4, lambda transport: work(transport, ShardedZeroOneAdam, **options, **unwarmed))
    every = run_ranks(4, lambda transport: work(transport, ShardedOnebitAdam, **unwarmed))
    assert [sent for sent, _ in skipping] == [sent // clipper for sent, _ in every]
    assert [state for _, state in skipping] == [state for _, state in every]


def test_nothing_is_skipped_in_the_warm_up() -> None:
    def work(transport: SimTransport) -> list[str]:
        skipping = {"local_step_scaler": 1, "local_step_clipper": 4, "warmup_steps": 4}
        params, optimizer = new(transport, kind=ShardedZeroOneAdam, **skipping)
        phases = []
        for step in range(11):
            take_steps(params, optimizer, range(step, step + 1))
            phases.append(optimizer.stats.phase)
        return phases

    for phases in run_ranks(2, work):
        assert phases[:4] == ["warmup"] * 4
        assert phases[4:] == ["local", "local", "local", "compressed", *["local"] * 3]


def test_the_mean_of_a_cycle_moves_as_far_as_its_steps() -> None:
    """A constant gradient: after cycles of four, masters are where four times as many steps would have led."""

    def work(transport: SimTransport, clipper: int) -> Tensor:
        params = initial()
        optimizer = ShardedZeroOneAdam(
            params, lr=1e-3, transport=transport, weight_decay=0.1, local_step_scaler=1, local_step_clipper=clipper,
            local_step_start=-10, warmup_steps=0,
        )  # fmt: skip
        for _ in range(40):
            for p in params:
                p.grad = torch.full_like(p, 0.3 * p.numel())
            optimizer.step()
        return values(params)

    every, skipping = (run_ranks(2, lambda transport, h=h: work(transport, h))[0] for h in (1, 4))
    moved = (every - values(initial())).norm()
    assert float(moved) > 0.5 and float((every - skipping).norm()) < 0.03 * float(moved)


def test_a_gradient_that_is_not_finite_in_a_skipped_step_is_left_out_by_its_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As if that rank had had none; at the end of the cycle all ranks skip, and the step after takes its place."""

    def work(transport: SimTransport, bad: bool) -> tuple[Tensor, list[Tensor]]:
        params, optimizer = new(transport, kind=ShardedZeroOneAdam, **SCHEDULE)

        def spoil(step: int, grads: list[Tensor]) -> None:
            if transport.rank == 1 and step in (7, 90):
                for g in grads:
                    g.fill_(float("nan") if bad else 0.0)

        take_steps(params, optimizer, range(10), spoil)
        if bad:
            before, kept = values(params), state_of(optimizer)
            take_steps(params, optimizer, range(90, 91), spoil)
            assert optimizer.stats.is_skipped and optimizer.stats.skipped_steps == 1 + (transport.rank == 1)
            assert torch.equal(values(params), before)
            assert all(torch.equal(a, b) for a, b in zip(state_of(optimizer), kept, strict=True))
        take_steps(params, optimizer, range(10, 15))
        return values(params), state_of(optimizer)

    never = run_ranks(3, lambda transport: work(transport, False))
    with caplog.at_level(logging.WARNING, logger="onebit.zero"):
        left_out = run_ranks(3, lambda transport: work(transport, True))
    assert any("rank 1: gradient not finite" in r.message and "leaves" in r.message for r in caplog.records)
    for (x, state), (y, other) in zip(never, left_out, strict=True):
        assert torch.equal(x, y) and all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


def test_what_a_parameter_got_in_a_skipped_step_is_sent_though_it_has_no_gradient_at_the_end() -> None:
    """And one that got none in the whole cycle, on any rank, is left alone."""

    def work(transport: SimTransport) -> list[int]:
        params, optimizer = new(
            transport, kind=ShardedZeroOneAdam, local_step_scaler=1, local_step_clipper=2, warmup_steps=0
        )
        for step in range(5):  # H = 1, then 2 twice
            for p, g in zip(params, gradient(step, transport.rank), strict=True):
                only_early = p is params[1] and (transport.rank > 0 or step not in (1, 3))
                p.grad = None if p is params[0] or only_early else g
            optimizer.step()
        assert torch.equal(params[0], initial()[0]) and not torch.equal(params[1], initial()[1])
        return [int(optimizer.state[p]["step"]) for p in params]

    assert run_ranks(2, work) == [[0, 2, 3, 3]] * 2


@pytest.mark.parametrize("gone_after", [0, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_without_gradients_does_not_hold_the_warm_up(stage: int, gone_after: int) -> None:
    """Of layers that are never used, or frozen in the warm-up, the count of steps stands still."""

    def work(transport: SimTransport) -> list[str]:
        options = {"local_step_scaler": 1, "local_step_clipper": 4, "warmup_steps": 4, "stage": stage}
        params, optimizer = new(transport, kind=ShardedZeroOneAdam, bucket_cap_mb=CAP, **options)
        assert len(optimizer.buckets) > 1
        gone, phases = set(optimizer.buckets[0].params), []
        for step in range(11):
            for p, g in zip(params, gradient(step, transport.rank), strict=True):
                p.grad = None if p in gone and step >= gone_after else g
            optimizer.step()
            phases.append(optimizer.stats.phase)
        return phases

    for phases in run_ranks(2, work):
        assert phases == ["warmup"] * 4 + ["local"] * 3 + ["compressed"] + ["local"] * 3


@pytest.mark.parametrize("warmup_codec", [None, Log4Codec()])
def test_a_bucket_that_gets_its_first_gradients_in_skipped_steps_warms_up_by_all_of_them(
    warmup_codec: Codec | None,
) -> None:
    """Of a cycle of four steps it lacks the first one. Gradients are the same number in all elements."""
    lr, gradient, beta1, beta2 = 1e-2, 2.0, 0.9, 0.99

    def work(transport: SimTransport) -> tuple[list[str], list[float]]:
        params = [torch.nn.Parameter(torch.zeros(256)) for _ in range(2)]
        optimizer = ShardedZeroOneAdam(
            params,
            lr=lr,
            betas=(beta1, beta2),
            weight_decay=0.0,
            transport=transport,
            bucket_cap_mb=256 * 4 / 2**20,
            warmup_steps=2,
            warmup_codec=warmup_codec,
            local_step_scaler=1,
            local_step_clipper=4,
            momentum_dtype=torch.float32,
        )
        late, phases, moved = optimizer.buckets[0].params[0], [], []
        assert len(optimizer.buckets) == 2
        for step in range(9):
            for p in params:
                p.grad = None if p is late and step < 3 else torch.full((256,), gradient)
            optimizer.step()
            phases.append(optimizer.stats.phase)
            moved.append(late.mean().item())
        return phases, moved

    means, m, v, x, expected = (0.75 * gradient, gradient), 0.0, 0.0, 0.0, []
    for k, (mean, steps) in enumerate(zip(means, (4, 1), strict=True), start=1):
        m, v = beta1 * m + (1 - beta1) * mean, beta2 * v + (1 - beta2) * mean**2
        x -= steps * lr * m / (1 - beta1**k) / (v / (1 - beta2**k)) ** 0.5
        expected.append(x)
    for phases, moved in run_ranks(2, work):
        assert phases == ["warmup"] * 2 + ["local"] * 3 + ["warmup"] * 2 + ["local"] * 2
        assert moved[:5] == [0.0] * 5
        assert moved[5:7] == pytest.approx(expected, rel=0.01)


def test_a_parameter_that_is_frozen_in_a_cycle_does_not_move() -> None:
    """Its gradients of the skipped steps wait until it is trained again."""

    def work(transport: SimTransport) -> None:
        options = {"local_step_scaler": 1, "local_step_clipper": 4, "local_step_start": -10, "warmup_steps": 0}
        params, optimizer = new(transport, kind=ShardedZeroOneAdam, **options)
        phases, frozen = [], params[0]
        before = frozen.detach().clone()
        for step in range(8):
            frozen.requires_grad_(not 2 <= step < 4)
            take_steps(params, optimizer, range(step, step + 1))
            phases.append(optimizer.stats.phase)
            assert torch.equal(frozen, before) == (step < 7)
        assert phases == ["local", "local", "local", "compressed"] * 2

    run_ranks(2, work)
