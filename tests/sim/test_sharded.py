"""Sharded one-bit Adam: equal to its textbook loop, the same on every rank, and as small as it says."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from sharded_ranks import OPTIONS, SIZES, WARMUP, assert_state_is, gradient, initial, new, owners, take_steps, values
from torch import Tensor

from onebit.comm import Log4Codec, SimTransport, Work, run_ranks
from onebit.reference.codecs import four_log_bits
from onebit.reference.sharded import ShardedAdam as ShardedOracle
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb
from onebit.zero.sharded import masters
from onebit.zero.sharded.optimizer import WARMUP_STEPS, ShardedOnebitOptimizer

STEPS = 12
FORMS = {
    "int4 differences": {},
    "sign differences": {"differences": "sign"},
    "int4 updates": {"stage": 0, "updates": "int4"},
    "sign updates": {"stage": 0, "updates": "sign"},
    "clipped": {"max_grad_norm": 90.0},
    "several buckets": {"bucket_cap_mb": 600 * 4 / 2**20},
    "stage 2": {"stage": 2, "bucket_cap_mb": 600 * 4 / 2**20},
    "four-bit warm-up": {"warmup_codec": Log4Codec()},
    "four-bit warm-up, sign updates": {"stage": 0, "updates": "sign", "warmup_codec": Log4Codec()},
    "four-bit warm-up, clipped": {"max_grad_norm": 90.0, "warmup_codec": Log4Codec()},
    "four-bit warm-up, stage 2": {"stage": 2, "warmup_codec": Log4Codec(), "bucket_cap_mb": 600 * 4 / 2**20},
}

# Every form on three ranks; on one and four those that differ in what owners send down.
CASES = [(form, 3) for form in FORMS]
CASES += [(form, W) for W in (1, 4) for form in ("int4 differences", "sign updates", "clipped", "stage 2")]


def oracle_for(form: str, world_size: int, optimizers: list[ShardedOnebitAdam], **options: object) -> ShardedOracle:
    x0 = values(initial()).double().numpy()
    settings = {
        "down": "sign" if "sign" in form else "int4",
        "has_masters": "updates" not in form,
        "clip": 90.0 if "clipped" in form else 0.0,
        "warmup_bits": four_log_bits if "four-bit" in form else None,
    }
    return ShardedOracle(
        x0, world_size, SIZES, owners(optimizers), betas=(0.9, 0.99), warmup=WARMUP, **settings, **options
    )


def run_oracle(oracle: ShardedOracle, dtype: torch.dtype = torch.float32) -> None:
    for step in range(STEPS):
        grads = [torch.cat(gradient(step, rank)).to(dtype).double().numpy() for rank in range(oracle.workers)]
        oracle.step(np.stack(grads), lr=OPTIONS["lr"])


@pytest.mark.parametrize(("form", "world_size"), CASES)
def test_equals_the_textbook_loop(form: str, world_size: int) -> None:
    """Masters within float32; of the replicas, a few may be on the other side of a rounding of the int4 steps."""

    def work(transport: SimTransport) -> tuple[Tensor, ShardedOnebitAdam]:
        params, optimizer = new(transport, momentum_dtype=torch.float32, **FORMS[form])
        take_steps(params, optimizer, range(STEPS))
        return values(params), optimizer

    xs, optimizers = zip(*run_ranks(world_size, work), strict=True)
    oracle = oracle_for(form, world_size, list(optimizers))
    run_oracle(oracle)
    assert all(torch.equal(x, xs[0]) for x in xs)
    off = np.abs(xs[0].double().numpy() - oracle.x)
    assert np.sum(off > 1e-6) <= (0 if "sign" in form else 3) and off.max() < 2e-3
    assert np.abs(xs[0].double().numpy() - values(initial()).double().numpy()).mean() > 1e-2  # they have moved
    assert optimizers[0].stats.clip_factor == pytest.approx(oracle.factor, rel=1e-6)
    compares = oracle.has_masters or "sign" in form
    assert_state_is(oracle, optimizers, (1e-6 if oracle.has_masters else 1e-3) if compares else None)


@pytest.mark.parametrize("differences", ["int4", "sign"])
def test_in_bfloat16_it_follows_the_textbook_loop(differences: str) -> None:
    """Momentum and replicas rounded. A rounding of a scale that falls to the other side moves a block by 2⁻⁹ of it."""

    def work(transport: SimTransport) -> tuple[list[Tensor], ShardedOnebitAdam]:
        params, optimizer = new(transport, torch.bfloat16, differences=differences)
        take_steps(params, optimizer, range(STEPS))
        return [p.detach() for p in params], optimizer

    params, optimizers = zip(*run_ranks(3, work), strict=True)
    assert all(p.dtype == torch.bfloat16 for p in params[0])
    x0 = values(initial(torch.bfloat16)).double().numpy()
    down = {"betas": (0.9, 0.99), "warmup": WARMUP, "down": differences, "bf16_replica": True, "bf16_momentum": True}
    oracle = ShardedOracle(x0, 3, SIZES, owners(list(optimizers)), **down)
    run_oracle(oracle, torch.bfloat16)
    for mine in params[1:]:
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(mine, params[0], strict=True))
    off = values(params[0]).double().numpy() - oracle.x
    assert np.mean(off == 0) > 0.5 and np.linalg.norm(off) < 0.05 * np.linalg.norm(oracle.x - x0)


@pytest.mark.parametrize(("kind", "came_down"), [(ShardedOnebitAdam, 2), (ShardedOnebitLamb, 1)])
def test_at_stage_2_owners_send_down_during_backward(kind: type[ShardedOnebitOptimizer], came_down: int) -> None:
    """Of four buckets, when backward ends: the last has voted, one has gone up, of LAMB one has told its norms."""

    def work(transport: SimTransport) -> None:
        params = initial(sizes=(256, 256, 256, 256))
        optimizer = kind(params, transport=transport, stage=2, bucket_cap_mb=256 * 4 / 2**20, **OPTIONS)
        sent_down, all_gather = [], transport.all_gather
        down_bytes = optimizer.placement.config.codec_down.frame_bytes(optimizer.buckets[0].layout.chunk)

        def counted(out: Tensor, mine: Tensor) -> Work:
            if mine.nbytes == down_bytes:
                sent_down.append(len(optimizer._driver.tasks))
            return all_gather(out, mine)

        transport.all_gather = counted  # type: ignore[method-assign]
        torch.cat(params).square().sum().backward()
        assert len(sent_down) == came_down
        optimizer.step()
        assert len(sent_down) == 4

    run_ranks(2, work)


def test_parameters_that_change_between_backward_and_step_at_stage_2_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """The masters have taken a part of the step by then."""

    def work(transport: SimTransport) -> None:
        params, optimizer = new(transport, **FORMS["stage 2"])
        for step in range(2):
            torch.cat(params).square().sum().backward()
            if step == 1:
                with torch.no_grad():
                    params[0].add_(1.0)
            optimizer.step()

    run_ranks(2, work)
    assert sum("changed outside of step()" in record.message for record in caplog.records) == 2


def test_a_second_backward_pass_at_stage_2_is_refused() -> None:
    def work(transport: SimTransport) -> None:
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = ShardedOnebitAdam([p], transport=transport, stage=2)
        p.sum().backward()
        assert optimizer._driver.launched == 1
        with pytest.raises(RuntimeError, match="no_sync"):
            p.sum().backward()

    run_ranks(2, work)


def test_at_stage_2_only_the_bucket_with_the_bad_gradient_is_skipped() -> None:
    def work(transport: SimTransport) -> list[int]:
        params, optimizer = new(transport, **FORMS["stage 2"])
        before = [p.detach().clone() for p in params]

        def spoil(step: int, grads: list[Tensor]) -> None:
            if transport.rank == 0:
                grads[3][0] = float("nan")

        take_steps(params, optimizer, range(1), spoil)
        assert optimizer.stats.is_skipped
        assert [torch.equal(p, old) for p, old in zip(params, before, strict=True)] == [False, False, False, True]
        return [int(optimizer.state[p]["step"]) for p in params]

    assert run_ranks(2, work) == [[1, 1, 1, 0]] * 2


@pytest.mark.parametrize(
    ("kind", "form"),
    [(ShardedOnebitAdam, form) for form in ("int4 differences", "sign updates", "stage 2")]
    + [(ShardedOnebitLamb, "int4 differences")],
)
def test_a_parameter_that_nobody_has_a_gradient_for_is_left_alone(
    kind: type[ShardedOnebitOptimizer], form: str
) -> None:
    """With its state and its count; its first gradient, however late, is a first step of Adam's size."""

    def work(transport: SimTransport) -> float:
        params, optimizer = new(transport, kind=kind, weight_decay=0.1, **FORMS[form])
        for step in range(5):
            for p, g in zip(params, gradient(step, transport.rank), strict=True):
                p.grad = None if p is params[1] or (p is params[2] and transport.rank > 0) else g
            optimizer.step()
        assert torch.equal(params[1], initial()[1])
        assert [int(optimizer.state[p]["step"]) for p in params] == [5, 0, 5, 5]
        assert not optimizer.state[params[1]]["momentum"].any()
        before = params[1].detach().clone()
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
        return float((before - params[1].detach()).abs().max())

    moved = run_ranks(2, work)
    assert moved[0] == moved[1] > 0.0
    assert kind is ShardedOnebitLamb or moved[0] == pytest.approx(OPTIONS["lr"], rel=0.02)


def test_steps_without_a_gradient_are_no_steps_of_the_warm_up() -> None:
    """A parameter that has gradients in some steps moves as if it were alone and the others were not there.

    (In one bit its variance is made of its owner's gradient, and alone it may have another owner.)
    """
    seen = (0, 1, 4, 5)

    def work(transport: SimTransport, together: bool) -> tuple[Tensor, Tensor]:
        params = initial()
        mine = params if together else params[1:2]
        optimizer = ShardedOnebitAdam(mine, transport=transport, **OPTIONS | {"warmup_steps": 6})
        for step in range(6) if together else seen:
            for k, (p, g) in enumerate(zip(params, gradient(step, transport.rank), strict=True)):
                p.grad = g if k != 1 or step in seen else None
            optimizer.step()
        return params[1].detach(), optimizer.state[params[1]]["momentum"].clone()

    both = zip(*(run_ranks(3, lambda transport, t=t: work(transport, t)) for t in (True, False)), strict=True)
    for (x, momentum), (alone, its_momentum) in both:
        assert torch.equal(momentum, its_momentum)
        torch.testing.assert_close(x, alone, rtol=0, atol=1e-7)
        assert not torch.equal(x, initial()[1])


def test_no_element_moves_further_than_the_limit() -> None:
    """An owner whose own gradient is zero in a block, where others' are not: embedding rows absent from its batch."""

    def work(transport: SimTransport) -> float:
        p = torch.nn.Parameter(torch.zeros(4, 256))
        optimizer = ShardedOnebitAdam(
            [p], lr=1.0, weight_decay=0.0, transport=transport, update_limit=3.0, warmup_steps=0
        )
        worst = 0.0
        for step in range(20):
            p.grad = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
            p.grad[transport.rank] = 0.0  # the chunk it owns
            before = [bucket.owned.clone() for bucket in optimizer.buckets]
            optimizer.step()
            if step:
                worst = max(float((optimizer.buckets[0].owned - before[0]).abs().max()), worst)
        return worst

    assert all(0.5 < moved <= 3.0 * (1 + 1e-5) for moved in run_ranks(4, work))


@pytest.mark.parametrize(
    ("form", "most"), [("int4 differences", 5.3), ("sign differences", 2.2), ("sign updates", 2.2)]
)
def test_bytes_are_those_of_the_formula(form: str, most: float) -> None:
    """In the warm-up, and from its end on. Two parameters of whole blocks and one that is not, in one bucket."""
    W, sizes = 4, (64 * 256, 128 * 256, 100)
    blocks = 64 + 128 + 1
    chunk = -(-blocks // W)
    warm, up = (-(-(chunk * n + chunk * 2) // 16) * 16 for n in (256, 32))
    down = up if "sign" in form else -(-(chunk * 128 + chunk * 2) // 16) * 16

    def work(transport: SimTransport) -> list[int]:
        params, optimizer = new(transport, sizes=sizes, **{"warmup_steps": 2, **FORMS[form]})
        sent = []
        for step in range(5):
            before = transport.sent_bytes
            take_steps(params, optimizer, range(step, step + 1))
            sent.append(transport.sent_bytes - before)
            assert optimizer.stats.sent_bytes == sent[-1]
            assert optimizer.stats.bits_per_parameter == 8 * sent[-1] / sum(sizes)
            assert optimizer.stats.phase == ("warmup" if step < 2 else "compressed")
            assert step < 2 or optimizer.stats.bits_per_parameter <= most
        return sent

    vote = 26 + 48 + 1  # the step and its digest, six doubles, a bit for each of three parameters
    steps = [(W - 1) * (warm + down + vote)] * 2 + [(W - 1) * (up + down + vote)] * 3
    assert run_ranks(W, work) == [steps] * W


@pytest.mark.parametrize(("form", "most"), [("int4 differences", 5.3), ("sign differences", 2.2)])
@pytest.mark.parametrize("W", [4, 8])
def test_1500_steps_with_their_warm_up_stay_within_the_budget(form: str, most: float, W: int) -> None:
    """Bits per parameter and step that a rank sends. With more ranks the limit is (W-1)/W·2.42: 2.27 on 16 of them."""

    def work(transport: SimTransport) -> list[float]:
        params, optimizer = new(transport, sizes=(256 * 256,), **{"warmup_steps": 1, **FORMS[form]})
        bits = []
        for step in range(2):
            take_steps(params, optimizer, range(step, step + 1))
            bits.append(optimizer.stats.bits_per_parameter)
        return bits

    warm, steady = run_ranks(W, work)[0]
    assert steady < (WARMUP_STEPS * warm + (1500 - WARMUP_STEPS) * steady) / 1500 <= most


@pytest.mark.parametrize("clips", [False, True])
def test_state_is_as_small_as_said(clips: bool) -> None:
    """At N = 4, with the bfloat16 replica: 2 + 2 + 8/N bytes per parameter; clipping keeps the owners' last frames.

    In the warm-up 4/N more, the mean of what was sent last.
    """
    n = 256 * 4 * 50

    def work(transport: SimTransport) -> list[int]:
        params, optimizer = new(transport, torch.bfloat16, sizes=(n,), max_grad_norm=1.0 if clips else 0.0)
        held = []
        for steps in (range(WARMUP), range(WARMUP, WARMUP + 1)):
            take_steps(params, optimizer, steps)
            held.append(optimizer.state_bytes() + sum(p.nbytes for p in params))
        return held

    frames = n * (1 + 16 / 256) / 8 if clips else 0
    for warm, steady in run_ranks(4, work):
        assert warm == n * (2 + 2 + 8 / 4 + 4 / 4)
        assert steady <= n * (2 + 2 + 8 / 4) + frames + (64 if clips else 0)


def test_groups_have_their_own_options() -> None:
    """Two groups are two optimizers: the same bits."""
    options = [{"lr": 1e-2, "betas": (0.9, 0.99)}, {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}]

    def work(transport: SimTransport, together: bool) -> Tensor:
        params = initial()
        halves = [params[:2], params[2:]]
        if together:
            groups = [{"params": half, **option} for half, option in zip(halves, options, strict=True)]
            optimizers = [ShardedOnebitAdam(groups, transport=transport, warmup_steps=2)]
        else:
            pairs = zip(halves, options, strict=True)
            optimizers = [
                ShardedOnebitAdam(half, transport=transport, warmup_steps=2, **option) for half, option in pairs
            ]
        for step in range(4):
            for p, g in zip(params, gradient(step, transport.rank), strict=True):
                p.grad = g
            for optimizer in optimizers:
                optimizer.step()
        return values(params)

    one, two = (run_ranks(2, lambda transport, t=t: work(transport, t)) for t in (True, False))
    assert torch.equal(one[0], two[0])


@pytest.mark.slow
@pytest.mark.parametrize("has_offset", [False, True])
def test_ranks_that_differ_persistently_are_warned_about_once(
    has_offset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Noise around a small common mean, and the same with an offset of one rms of each rank's own."""

    def work(transport: SimTransport) -> ShardedOnebitAdam:
        p = torch.nn.Parameter(torch.zeros(2048))
        optimizer = ShardedOnebitAdam([p], transport=transport)
        own = torch.randn(2048, generator=torch.Generator().manual_seed(transport.rank))
        generator = torch.Generator().manual_seed(100 + transport.rank)
        for _ in range(105):
            p.grad = torch.randn(2048, generator=generator) + 0.1
            p.grad += own if has_offset else 0.0
            optimizer.step()
        return optimizer

    with caplog.at_level(logging.WARNING, logger="onebit.zero"):
        stats = run_ranks(4, work)[0].stats
    warnings = [record for record in caplog.records if "persist" in record.message]
    assert len(warnings) == has_offset
    if has_offset:
        assert stats.health > 0.5 and stats.offset > 0.25
    else:
        assert 0.15 < stats.health < 0.3 and abs(stats.offset) < 0.1


def test_agreement_is_no_offset() -> None:
    """Workers that all say the same are as healthy as can be, though their ratio is near 1."""

    def work(transport: SimTransport) -> ShardedOnebitAdam:
        p = torch.nn.Parameter(torch.zeros(2048))
        optimizer = ShardedOnebitAdam([p], transport=transport, warmup_steps=0)
        common = torch.randn(2048, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1 + transport.rank)
        for _ in range(60):
            p.grad = common + 0.1 * torch.randn(2048, generator=generator)
            optimizer.step()
        return optimizer

    stats = run_ranks(4, work)[0].stats
    assert stats.health > 0.7 and stats.agreement > 0.8 and abs(stats.offset) < 0.1


def test_parameters_edited_between_steps_are_noticed_and_can_be_adopted(caplog: pytest.LogCaptureFixture) -> None:
    params, optimizer = new(SimTransport(), weight_decay=0.0)
    with torch.no_grad():
        params[0].add_(1.0)  # before the first step: the masters are not there yet
    take_steps(params, optimizer, range(2))
    assert float(params[0].detach().mean()) > 0.9 and not caplog.records
    with torch.no_grad():
        params[0].add_(1.0)
    optimizer.adopt_parameters()
    take_steps(params, optimizer, range(2, 4))
    assert float(params[0].detach().mean()) > 1.9 and not caplog.records
    with torch.no_grad():
        params[0].add_(1.0)
    take_steps(params, optimizer, range(4, 8))
    assert float(params[0].detach().mean()) < 2.1 and "adopt_parameters" in caplog.text


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_parameters_that_are_elsewhere_during_backward_alone_end_where_they_would(shift: float) -> None:
    """As in SAM. At stage 2 owners step in backward; the differences that come down are not those of the shift."""

    def work(transport: SimTransport, stage: int) -> list[torch.Tensor]:
        params, optimizer = new(transport, stage=stage, bucket_cap_mb=1e-3)
        optimizer.adopt_parameters()  # or the first backward pass would take the masters
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + transport.rank)
            kept = [p.detach().clone() for p in params]
            with torch.no_grad():
                torch._foreach_add_(params, shift)
            sum(p.square().mean() + (p * torch.randn(p.shape, generator=generator)).mean() for p in params).backward()
            with torch.no_grad():
                torch._foreach_copy_(params, kept)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in params]

    whole, freed = (run_ranks(2, lambda transport, stage=stage: work(transport, stage)) for stage in (1, 2))
    assert all(torch.equal(p, q) for a, b in zip(whole, freed, strict=True) for p, q in zip(a, b, strict=True))


def test_parameters_are_compared_once_in_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bits in some steps: a pass over all of them, which took seconds for each of some hundred parameters."""
    params, optimizer = new(SimTransport(), stage=2)
    compared: list[int] = []
    of_bits = masters.replicas.fingerprints
    monkeypatch.setattr(masters.replicas, "fingerprints", lambda ps: compared.append(len(ps)) or of_bits(ps))
    for step in range(3):
        compared.clear()
        sum(p.square().sum() for p in params).backward()
        assert compared == [len(params)] * (step > 0)
        optimizer.step()
        optimizer.zero_grad()


def test_edits_of_parameters_behind_torchs_back_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """`p.data.clamp_()` between steps, as a Wasserstein GAN's critic has it: the masters undo it."""
    params, optimizer = new(SimTransport())
    take_steps(params, optimizer, range(2))
    assert not caplog.records
    params[0].data.clamp_(-0.01, 0.01)
    take_steps(params, optimizer, range(2, 3))
    assert "adopt_parameters" in caplog.text


@pytest.mark.parametrize("warmup_steps", [0, 1, 2])
def test_the_norm_includes_a_layer_that_had_no_gradient_in_the_step_before(warmup_steps: int) -> None:
    """Equal gradients on all ranks: the estimate, which then takes their product with the last mean, is their norm."""
    sizes = (300, 300)

    def work(transport: SimTransport) -> list[tuple[float | None, float]]:
        params, optimizer = new(transport, sizes=sizes, warmup_steps=warmup_steps, max_grad_norm=1e6)
        norms = []
        for step in range(9):
            params[0].grad = torch.ones(sizes[0])
            params[1].grad = torch.ones(sizes[1]) if step % 2 == 0 or step < 3 else None
            expected = sum(p.numel() for p in params if p.grad is not None) ** 0.5
            optimizer.step()
            norms.append((optimizer.stats.grad_norm, expected))
        return norms

    for norms in run_ranks(4, work):
        assert [norm for norm, _ in norms[1:]] == pytest.approx([norm for _, norm in norms[1:]], rel=0.01)
