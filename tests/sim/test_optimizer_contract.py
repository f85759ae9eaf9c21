"""The family as torch.optim.Optimizers: AdamW at first, groups, checkpoints, options, bytes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from family import FAMILY, FREEZE, averaged_gradients, flat, fresh, model, same, snapshot, train
from family_contract import check_replicas, check_resume
from torch import Tensor, nn

import onebit
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates, long_warmup
from onebit.checkpoint import optimizer_state
from onebit.comm import IdentityCodec, SimTransport, run_ranks

# -------------------------------------------------------------------------------- warm-up is AdamW


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_warmup_is_adamw_on_the_averaged_gradient(world_size: int, max_grad_norm: float) -> None:
    """First batch included, two groups, a scheduler that edits lr live; to 1e-6."""

    def groups(net: nn.Module) -> list[dict]:
        params = list(net.parameters())
        return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 0.003, "eps": 1e-5}]

    reference = model()
    adamw = torch.optim.AdamW(groups(reference), lr=0.01, betas=(0.8, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda k: 1 / (1 + k))
    for step in range(12):
        averaged_gradients(reference, step, world_size)
        if max_grad_norm:
            nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
        adamw.step()
        schedule.step()

    def ours(transport: SimTransport) -> Tensor:
        net = model()
        optimizer = onebit.OnebitAdam(
            groups(net),
            lr=0.01,
            betas=(0.8, 0.99),
            freeze_step=100,
            warmup_codec=IdentityCodec(),
            transport=transport,
            max_grad_norm=max_grad_norm,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
        for step in range(12):
            train(transport, range(step, step + 1), net, optimizer)
            scheduler.step()
        return flat(net)

    for result in run_ranks(world_size, ours):
        torch.testing.assert_close(result, flat(reference), atol=1e-6, rtol=0)


def test_loads_the_state_of_adamw_and_goes_on_as_it_would() -> None:
    net = model()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.01)
    transport = SimTransport()
    train(transport, range(4), net, adamw)
    other = copy.deepcopy(net)
    optimizer = onebit.OnebitAdam(
        other.parameters(), freeze_step=100, transport=transport, warmup_codec=IdentityCodec()
    )
    optimizer.load_state_dict(adamw.state_dict())
    expected = train(transport, range(4, 8), net, adamw)[-1]
    torch.testing.assert_close(train(transport, range(4, 8), other, optimizer)[-1], expected, atol=1e-6, rtol=0)


# -------------------------------------------------------------------------------- replicas, resume


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in FAMILY]
    + [("OnebitAdam", torch.bfloat16), ("OnebitMuon", torch.bfloat16)]
    + [("OnebitLamb", torch.float16), ("ZeroOneAdam", torch.float16)],
)
def test_replicas_stay_bit_identical(name: str, dtype: torch.dtype) -> None:
    check_replicas(name, (3, None), dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "stop"),
    [(name, stop) for name in FAMILY for stop in (2, 11)]
    + [("OnebitAdam", 0), ("OnebitAdam", FREEZE), ("OnebitLamb", FREEZE)]
    + [("ZeroOneAdam", stop) for stop in (0, 9, 12, 13, 14, 18)],
)
def test_resume_equals_no_interruption(name: str, stop: int, error_dtype: torch.dtype) -> None:
    check_resume(name, (2, None), stop, error_dtype=error_dtype, max_grad_norm=0.5 if stop == 2 else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "stops"), [("OnebitAdam", 40, (3, 5, 7, 30)), ("OnebitLamb", 120, (90, 104, 105, 110))]
)
def test_auto_freeze_resumes_too(name: str, steps: int, stops: tuple[int, ...]) -> None:
    def ours(transport: SimTransport) -> tuple[bool, list[str]]:
        net, optimizer = fresh(transport, name, freeze_step="auto")
        phases, saved = [], {}
        for step in range(steps):
            if step in stops:
                saved[step] = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            train(transport, range(step, step + 1), net, optimizer)
            phases.append(optimizer.stats.phase)
        for step, (weights, state) in saved.items():
            net2, optimizer2 = fresh(transport, name, freeze_step="auto")
            net2.load_state_dict(weights)
            optimizer2.load_state_dict(state)
            train(transport, range(step, steps), net2, optimizer2)
            if not (torch.equal(flat(net), flat(net2)) and same(optimizer.state_dict(), optimizer2.state_dict())):
                return False, phases
        return True, phases

    results = run_ranks(2, ours)
    assert [equal for equal, _ in results] == [True, True]
    phases = results[0][1]
    dense = (DenseSteps() if name == "OnebitAdam" else long_warmup()).is_dense
    assert [k for k, what in enumerate(phases) if what != "compressed"] == list(filter(dense, range(steps)))
    assert "warmup" in phases and "refresh" in phases


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state["onebit"].update(shard=1, shards=2), "shard is 1 there and 0 here"),
        (lambda state: state["onebit"].update(codec="log4"), "codec is log4 there and sign here"),
        (
            lambda state: state["state"][0].update(denominator=torch.ones(3, 3)),
            r"denominator of .* has shape \(3, 3\), the parameter \(33, 20\)",
        ),
        (
            lambda state: state["state"][0].update(worker_error=state["state"][0]["worker_error"].bfloat16()),
            "worker_error of .* is torch.bfloat16, expected torch.float32",
        ),
        (
            lambda state: state["param_groups"][0]["params"].pop(),
            r"it has groups of \[5\] parameters, this optimizer of \[6\]",
        ),
    ],
    ids=["shard", "codec", "shape", "dtype", "groups"],
)
def test_a_state_that_does_not_fit_is_refused_untouched(damage: Callable[[dict], object], message: str) -> None:
    transport = SimTransport()
    net, optimizer = fresh(transport)
    train(transport, range(8), net, optimizer)
    before = snapshot(optimizer)
    broken = snapshot(optimizer)
    damage(broken)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(broken)
    assert same(before, optimizer.state_dict())


def test_state_dict_and_step_hooks_run() -> None:
    transport = SimTransport()
    net, optimizer = fresh(transport)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    train(transport, range(1), net, optimizer)

    def rename(_: object, state: dict) -> dict:
        return {key.removeprefix("my_"): value for key, value in state.items()}

    saved = {f"my_{key}": value for key, value in optimizer.state_dict().items()}
    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.load_state_dict(saved)
    assert calls == ["pre", "post", "saved"]


def test_a_group_added_later_warms_up_for_as_long() -> None:
    def ours(transport: SimTransport) -> list[str]:
        net = model()
        params = list(net.parameters())
        optimizer = onebit.OnebitAdam(params[:4], lr=0.01, freeze_step=3, transport=transport, check_replicas_every=1)
        train(transport, range(5), net, optimizer)
        optimizer.add_param_group({"params": params[4:], "lr": 0.005})
        phases = []
        for step in range(5, 12):
            train(transport, range(step, step + 1), net, optimizer)
            phases.append(optimizer.buckets[-1].phase)
        assert optimizer.stats.phase == "compressed"
        return phases

    for phases in run_ranks(2, ours):
        assert phases == ["warmup"] * 2 + ["compressed"] * 5


@pytest.mark.parametrize("name", FAMILY)
def test_a_frozen_group_added_later_changes_nothing(name: str) -> None:
    def ours(transport: SimTransport, adds: bool) -> Tensor:
        net, optimizer = fresh(transport, name)
        train(transport, range(5), net, optimizer)
        if adds:
            frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
            optimizer.add_param_group({**optimizer.param_groups[0], "params": [frozen]})
        train(transport, range(5, 14), net, optimizer)
        return flat(net)

    without, added = (run_ranks(2, lambda transport, adds=adds: ours(transport, adds)) for adds in (False, True))
    assert torch.equal(without[0], added[0])


def test_a_group_added_later_does_not_change_what_a_dead_parameter_waits_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter without a gradient has the mean denominator of those it was frozen with, at a refresh too."""
    rule = DenseSteps("auto", warmup=6, refreshes=VarianceUpdates(2))
    monkeypatch.setattr("onebit.onebit_adam.DenseSteps", lambda _: rule)
    live, dead, late = (nn.Parameter(torch.zeros(256)) for _ in range(3))
    optimizer = onebit.OnebitAdam([live, dead], transport=SimTransport())
    for step in range(23):
        if step == 8:
            optimizer.add_param_group({"params": [late]})
        live.grad, dead.grad, late.grad = torch.ones(256), torch.zeros(256), torch.full((256,), 1e-3)
        optimizer.step()
        if step == 6:
            before = optimizer.state[dead]["denominator"].clone()
    assert optimizer.stats.phase == "refresh" and {bucket.phase for bucket in optimizer.buckets} == {"compressed"}
    torch.testing.assert_close(optimizer.state[dead]["denominator"], before)
    torch.testing.assert_close(before, torch.ones(256), atol=0, rtol=1e-3)  # int8


# -------------------------------------------------------------------------------- bytes


def test_state_needs_no_more_than_adamw() -> None:
    """Measured, bytes per parameter, 4 ranks, bf16 errors: at most AdamW's 8."""

    def ours(transport: SimTransport) -> tuple[float, float]:
        p = nn.Parameter(torch.zeros(1 << 16))
        optimizer = onebit.OnebitAdam([p], freeze_step=1, transport=transport, error_dtype=torch.bfloat16)
        warm = optimizer.state_bytes() / p.numel()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.stats.phase == "warmup" and optimizer.buckets[0].phase == "compressed"
        return warm, optimizer.state_bytes() / p.numel()

    warm, compressed = run_ranks(4, ours)[0]
    assert warm == 8.0
    assert compressed <= 7.0


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sends_at_most_2_2_bits_per_parameter_after_the_freeze(world_size: int) -> None:
    def ours(transport: SimTransport) -> list[float]:
        net = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.LayerNorm(512), nn.Linear(512, 256))
        optimizer = onebit.OnebitAdam(net.parameters(), freeze_step=2, transport=transport, check_replicas_every=1)
        bits = []
        for step in range(4):
            optimizer.zero_grad()
            net(torch.arange(8) + step).sum().backward()
            optimizer.step()
            bits.append(optimizer.stats.bits_per_parameter)
        return bits

    share = (world_size - 1) / world_size
    for bits in run_ranks(world_size, ours):
        assert bits[1] == pytest.approx(2 * (4 + 16 / 256) * share, rel=0.01)
        assert 2.0 * share <= bits[3] <= 2.2 * share


def test_loading_lets_go_of_a_buckets_old_state_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else old and new state are held at once: 8 bytes per parameter of a fresh optimizer, more of another."""
    params = [nn.Parameter(torch.ones(300)) for _ in range(3)]
    optimizer = onebit.OnebitAdam(params, transport=SimTransport(), bucket_cap_mb=1e-3)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    old = [weakref.ref(optimizer.state[bucket.params[0]]["exp_avg"]) for bucket in optimizer.buckets]
    restore, seen = optimizer_state.restore_bucket, []

    def watched(*args: object) -> None:
        seen.append([ref() is not None for ref in old])
        restore(*args)

    monkeypatch.setattr(optimizer_state, "restore_bucket", watched)
    optimizer.load_state_dict(state)
    assert seen == [[True, True, True], [False, True, True], [False, False, True]]
