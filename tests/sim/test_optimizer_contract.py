"""The family as torch.optim.Optimizers: groups, hooks, dtypes, checkpoints, gradients that are missing or bad."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import pytest
import torch
from muon_of import muon_of
from torch import Tensor, nn

import onebit
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates
from onebit.comm import IdentityCodec, Int8Codec, SignCodec, SimTransport, run_ranks
from onebit.optimizer import CompressedOptimizer

FREEZE = 5


_GLOBAL_RNG = threading.Lock()  # ranks are threads: seeding and drawing must not interleave


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    with _GLOBAL_RNG:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3)).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(8, 20, generator=generator).to(dtype),
        torch.randint(0, 3, (8,), generator=generator),
    )


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank, next(net.parameters()).dtype)
    return nn.functional.cross_entropy(net(x).float(), y)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def train(transport: SimTransport, steps: range, net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    out = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step, transport.rank).backward()
        optimizer.step()
        out.append(flat(net).clone())
    return out


# Every optimizer of the family, so that 20 steps of a test see all its rounds.
FAMILY: dict[str, tuple[Callable[..., CompressedOptimizer], dict]] = {
    "OnebitAdam": (onebit.OnebitAdam, {"lr": 0.01, "freeze_step": FREEZE}),
    "OnebitMuon": (muon_of, {"lr": 0.01, "freeze_step": FREEZE}),
    "OnebitLamb": (onebit.OnebitLamb, {"lr": 0.02, "freeze_step": FREEZE}),
    "ZeroOneAdam": (
        onebit.ZeroOneAdam,
        {"lr": 0.01, "var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4},
    ),
}


def make(name: str, net: nn.Module, transport: SimTransport, **options: object) -> CompressedOptimizer:
    kind, defaults = FAMILY[name]
    return kind(net.parameters(), transport=transport, **defaults | options)


def fresh(
    transport: SimTransport, name: str = "OnebitAdam", **options: object
) -> tuple[nn.Module, CompressedOptimizer]:
    net = model()
    return net, make(name, net, transport, **options)


def snapshot(optimizer: CompressedOptimizer) -> dict:
    return copy.deepcopy(optimizer.state_dict())


def same(a: object, b: object) -> bool:
    """Bitwise, through nested containers."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def averaged_gradients(nets: nn.Module, step: int, world_size: int) -> None:
    """p.grad ← mean over the ranks' losses, in one process."""
    nets.zero_grad()
    for rank in range(world_size):
        (loss_of(nets, step, rank) / world_size).backward()


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


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_replicas_stay_bit_identical(dtype: torch.dtype, name: str) -> None:
    def ours(transport: SimTransport) -> list[Tensor]:
        net = model(seed=transport.rank, dtype=dtype)  # other initial values on each rank: rank 0's count
        optimizer = make(name, net, transport, check_replicas_every=1)
        assert torch.equal(flat(net), flat(model(seed=0, dtype=dtype)))
        steps = [(train(transport, range(k, k + 1), net, optimizer)[0], optimizer.stats.phase) for k in range(20)]
        return [weights for weights, phase in steps if phase != "local"]

    results = run_ranks(4, ours)
    assert all(same(result, results[0]) for result in results)
    assert results[0][-1].dtype == dtype and results[0][-1].isfinite().all()
    assert len(results[0]) > FREEZE + 3 and not torch.equal(results[0][FREEZE + 3], results[0][-1])


def test_low_precision_parameters_follow_the_float32_ones() -> None:
    """The update is computed in float32 and rounded once: bf16 parameters stay within a few of their roundings."""

    def ours(transport: SimTransport, dtype: torch.dtype) -> Tensor:
        net = model().to(torch.bfloat16).to(dtype)
        optimizer = onebit.OnebitAdam(net.parameters(), lr=1e-2, freeze_step=FREEZE, transport=transport)
        return train(transport, range(8), net, optimizer)[-1].float()

    exact, rounded = (
        run_ranks(2, lambda transport, d=d: ours(transport, d))[0] for d in (torch.float32, torch.bfloat16)
    )
    assert (exact - rounded).abs().median() < 2e-3


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [0, 2, FREEZE, FREEZE + 1, 11])
def test_resume_equals_no_interruption(stop: int, error_dtype: torch.dtype, name: str) -> None:
    """To the bit: parameters and the whole optimizer state; through torch.save with weights_only."""

    def ours(transport: SimTransport) -> bool:
        options = {"error_dtype": error_dtype, "max_grad_norm": 0.5 if stop == 2 else 0.0}
        net, optimizer = fresh(transport, name, **options)
        expected = train(transport, range(15), net, optimizer)[-1]
        net2, optimizer2 = fresh(transport, name, **options)
        train(transport, range(stop), net2, optimizer2)
        file = io.BytesIO()
        torch.save({"model": net2.state_dict(), "optimizer": optimizer2.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        net3, optimizer3 = fresh(transport, name, **options)
        train(transport, range(50, 50 + (stop * 7) % 9), net3, optimizer3)  # some other past, in some other phase
        net3.load_state_dict(saved["model"])
        optimizer3.load_state_dict(saved["optimizer"])
        train(transport, range(stop, 15), net3, optimizer3)
        assert optimizer3.error_norm_ratio() == optimizer.error_norm_ratio()
        return torch.equal(flat(net3), expected) and same(optimizer3.state_dict(), optimizer.state_dict())

    assert run_ranks(2, ours) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
def test_auto_freeze_resumes_too(name: str) -> None:
    def ours(transport: SimTransport) -> tuple[bool, list[str]]:
        net, optimizer = fresh(transport, name, freeze_step="auto")
        phases, saved = [], {}
        for step in range(120):
            if step in (90, 104, 105, 110):
                saved[step] = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            train(transport, range(step, step + 1), net, optimizer)
            phases.append(optimizer.stats.phase)
        for step, (weights, state) in saved.items():
            net2, optimizer2 = fresh(transport, name, freeze_step="auto")
            net2.load_state_dict(weights)
            optimizer2.load_state_dict(state)
            train(transport, range(step, 120), net2, optimizer2)
            if not (torch.equal(flat(net), flat(net2)) and same(optimizer.state_dict(), optimizer2.state_dict())):
                return False, phases
        return True, phases

    results = run_ranks(2, ours)
    assert [equal for equal, _ in results] == [True, True]
    phases = results[0][1]
    assert phases.index("compressed") == 101 and [k for k, what in enumerate(phases) if what == "refresh"] == [
        104,
        108,
        112,
    ]


def _break_world(state: dict) -> None:
    state["onebit"]["world_size"] = 4


def _break_rank(state: dict) -> None:
    state["onebit"]["rank"] = 1


def _break_shape(state: dict) -> None:
    state["state"][0]["denominator"] = torch.ones(3, 3)


def _break_dtype(state: dict) -> None:
    state["state"][0]["worker_error"] = state["state"][0]["worker_error"].to(torch.bfloat16)


def _break_groups(state: dict) -> None:
    state["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_break_world, "world_size is 4 there and 1 here"),
        (_break_rank, "rank is 1 there and 0 here"),
        (_break_shape, r"denominator of .* has shape \(3, 3\), the parameter \(33, 20\)"),
        (_break_dtype, "worker_error of .* is torch.bfloat16, expected torch.float32"),
        (_break_groups, r"it has groups of \[5\] parameters, this optimizer of \[6\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_untouched(damage: Callable[[dict], None], message: str) -> None:
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


def test_closure_gives_its_loss() -> None:
    transport = SimTransport()
    net, optimizer = fresh(transport)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0, 0)
        loss.backward()
        return loss

    before = loss_of(net, 0, 0).detach()
    assert torch.equal(optimizer.step(closure).detach(), before)


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


# -------------------------------------------------------------------------------- missing, empty, frozen


@pytest.mark.parametrize("name", FAMILY)
def test_a_gradient_that_is_missing_on_one_rank_holds_nobody_up(name: str) -> None:
    """Buckets leave during backward on one rank and in step() on the other: both must send the same sequence."""

    def ours(transport: SimTransport) -> Tensor:
        net, optimizer = fresh(transport, name, bucket_cap_mb=0.003)
        assert len(optimizer.buckets) > 2
        for step in range(3 * FREEZE):
            x, y = batch(step, transport.rank)
            skips = transport.rank == 1 and step % 3 == 2  # the layer in the middle
            out = net[4](net[3](net[1](net[0](x)))) if skips else net(x)
            nn.functional.cross_entropy(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, onebit.ZeroOneAdam):
            optimizer.sync()
        return flat(net)

    first, second = run_ranks(2, ours, timeout_s=20)
    assert torch.equal(first, second)


def test_parameters_without_a_gradient() -> None:
    """None on all ranks: not moved. None on one rank: a zero there. Empty and frozen parameters: left alone."""

    def ours(transport: SimTransport) -> None:
        used, unused, sometimes = (nn.Parameter(torch.ones(5)) for _ in range(3))
        empty, frozen = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(5), requires_grad=False)
        optimizer = onebit.OnebitAdam(
            [used, unused, empty, frozen, sometimes], lr=0.1, weight_decay=0.5, freeze_step=2, transport=transport
        )
        for _ in range(6):
            optimizer.zero_grad()
            loss = (used * 2).sum() + empty.sum()
            if transport.rank == 1:
                loss = loss + sometimes.sum()
            loss.backward()
            optimizer.step()
        assert torch.equal(unused, torch.ones(5)) and torch.equal(frozen, torch.ones(5)) and empty.numel() == 0
        assert (used < 0.9).all() and (sometimes < 0.9).all() and (sometimes > -2).all()

    run_ranks(2, ours)


def test_warmup_counts_a_missing_gradient_as_zero() -> None:
    def ours(transport: SimTransport) -> Tensor:
        p = nn.Parameter(torch.ones(3))
        optimizer = onebit.OnebitAdam([p], lr=0.1, freeze_step=100, transport=transport, warmup_codec=IdentityCodec())
        for _ in range(3):
            p.grad = torch.full((3,), 4.0) if transport.rank == 0 else None
            optimizer.step()
        return p.detach()

    reference = nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([reference], lr=0.1)
    for _ in range(3):
        reference.grad = torch.full((3,), 2.0)
        adamw.step()
    for result in run_ranks(2, ours):
        torch.testing.assert_close(result, reference.detach(), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("freeze_step", [10, "auto"])
@pytest.mark.parametrize("kind", ["OnebitAdam", "ZeroOneAdam"])
def test_rows_that_wake_up_late_neither_explode_nor_stand_still(kind: str, freeze_step: int | str) -> None:
    """An embedding whose upper half is first used after the freeze moves its rows as far as the lower half's.

    In "auto" that is between two refreshes. `test_onebit_lamb.py` has LAMB's case.
    """
    first = 15 if freeze_step == 10 else 106

    def ours(transport: SimTransport) -> tuple[float, float]:
        table = nn.Embedding(16, 256, _weight=torch.randn(16, 256, generator=torch.Generator().manual_seed(0)))
        late = nn.Parameter(torch.zeros(300))
        before = table.weight.detach().clone()
        options = {"freeze_step": freeze_step} if kind == "OnebitAdam" else {"var_update_scaler": 2}
        optimizer = getattr(onebit, kind)(
            [table.weight, late], lr=0.01, weight_decay=0.0, transport=transport, **options
        )
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(first + 15):
            optimizer.zero_grad()
            rows = torch.randint(0, 8, (16,), generator=generator) + (8 if step >= first else 0)
            target = torch.ones(256) * (1 if step % 2 else 0.8)
            loss = ((table(rows) - target) ** 2).sum()
            if step >= first:
                loss = loss + ((late - 1) ** 2).sum()
            loss.backward()
            optimizer.step()
            if step < first:
                assert torch.equal(table.weight[8:], before[8:])
        moved = (table.weight.detach() - before)[8:].abs()
        return float(moved.max()), float(late.detach().mean())

    for largest, late in run_ranks(2, ours):
        assert 0.01 < largest < 1.0
        assert 0.001 < late < 1.5


@pytest.mark.parametrize("name", FAMILY)
def test_where_a_mask_is_zero_nothing_moves(name: str) -> None:
    """The peer's `exp_avg_mask`, one for a group or one per parameter, decay included; also after a resume."""

    def ours(transport: SimTransport) -> None:
        table, bias = nn.Parameter(torch.ones(6, 100)), nn.Parameter(torch.ones(40))
        mask = torch.ones(6, 1)
        mask[4:] = 0.0
        kind, defaults = FAMILY[name]

        def build() -> CompressedOptimizer:
            groups = [{"params": [table, bias], "exp_avg_mask": [mask, torch.ones(40)]}]
            return kind(groups, transport=transport, weight_decay=0.1, **defaults)

        optimizer = build()
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(24):
            if step == 12:
                state, optimizer = copy.deepcopy(optimizer.state_dict()), build()
                optimizer.load_state_dict(state)
            for p in (table, bias):
                p.grad = 1.0 + 0.5 * torch.randn(p.shape, generator=generator)
            optimizer.step()
        assert torch.equal(table[4:], torch.ones(2, 100)) and (bias < 0.99).all()
        # Muon gives all directions of a matrix one length, those of the noise too: single elements go astray.
        assert table[:4].mean() < 0.97 if name == "OnebitMuon" else (table[:4] < 0.99).all()

    run_ranks(2, ours)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", FAMILY)
def test_loading_between_backward_and_step_forgets_what_was_decided(name: str, max_grad_norm: float) -> None:
    """A kind of step is decided in backward, and nothing sent yet, where one clips or is silent."""

    def work(transport: SimTransport) -> None:
        net, optimizer = fresh(transport, name, max_grad_norm=max_grad_norm)
        kept = []
        for step in range(16):
            kept.append((snapshot(optimizer), copy.deepcopy(net.state_dict())))
            train(transport, range(step, step + 1), net, optimizer)
        for abandoned in (3, 10, 13):
            for step in (2, 7, 9, 11):
                optimizer.load_state_dict(copy.deepcopy(kept[abandoned][0]))
                optimizer.zero_grad()
                loss_of(net, abandoned, transport.rank).backward()
                state, weights = copy.deepcopy(kept[step])
                net.load_state_dict(weights)
                optimizer.load_state_dict(state)
                train(transport, range(step, step + 2), net, optimizer)
                assert same(snapshot(optimizer), kept[step + 2][0]), (abandoned, step)

    run_ranks(2, work)


@pytest.mark.parametrize("name", FAMILY)
def test_the_mask_given_at_construction_outlives_a_checkpoint(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another mask than the checkpoint's, one where it has none, and none where it has one, which is said."""
    kind, defaults = FAMILY[name]
    first, second = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])

    def trained(mask: Tensor | None, state: dict | None) -> tuple[list[bool], dict]:
        p = nn.Parameter(torch.ones(3))
        group = {"params": [p]} if mask is None else {"params": [p], "exp_avg_mask": mask}
        optimizer = kind([group], transport=SimTransport(), **defaults)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(2):
            p.grad = torch.ones(3)
            optimizer.step()
        return (p.detach() != 1.0).tolist(), copy.deepcopy(optimizer.state_dict())

    for saved, here in ((first, second), (None, second), (first, None)):
        moves, _ = trained(here, trained(saved, None)[1])
        assert moves == ([True] * 3 if here is None else here.bool().tolist())
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "exp_avg_mask of group 0 in this state is not taken over" in said[0]


@pytest.mark.parametrize(
    ("masks", "message"), [(torch.ones(7), "does not broadcast"), ([torch.ones(3)] * 2, "2 masks for 1 parameters")]
)
def test_a_mask_that_does_not_fit_is_refused(masks: Tensor | list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onebit.OnebitAdam([{"params": [nn.Parameter(torch.ones(3))], "exp_avg_mask": masks}], transport=SimTransport())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen", "auto", "ZeroOneAdam"])
def test_gradients_that_grow_a_thousandfold_move_nothing_a_thousand_times_as_far(kind: str) -> None:
    """As in attention that wakes up: the variance is steps old and knows nothing of it. Adam itself moves by 6.6 lr.

    Where a variance is frozen for good, a gradient weighs 1 - β2 in it: no more than √(4/(1 - β2)) = 63 lr. A weight
    that keeps to 12 lr there costs up to 1 % of loss (scripts/records/study_2026-11.md).
    """

    def ours(transport: SimTransport) -> float:
        p = nn.Parameter(torch.zeros(1024))
        options: dict = {"freeze_step": 20 if kind == "frozen" else "auto"}
        optimizer = (
            onebit.ZeroOneAdam([p], lr=1e-3, weight_decay=0.0, transport=transport)
            if kind == "ZeroOneAdam"
            else onebit.OnebitAdam([p], lr=1e-3, weight_decay=0.0, transport=transport, **options)
        )
        generator, largest = torch.Generator().manual_seed(transport.rank), 0.0
        for step in range(150):
            before = p.detach().clone()
            p.grad = (1e-3 if step < 115 else 1.0) * (1.0 + 0.3 * torch.randn(1024, generator=generator))
            optimizer.step()
            largest = max(largest, float((p.detach() - before).abs().max()) / 1e-3)
        return largest

    for largest in run_ranks(4, ours):
        assert 1.0 < largest < (64.0 if kind == "frozen" else 12.0)


@pytest.mark.parametrize("name", FAMILY)
def test_blocks_of_another_size(name: str) -> None:
    """All that travels is cut alike; a codec of gradients that is not is refused."""

    def ours(transport: SimTransport) -> Tensor:
        net = model()
        return train(transport, range(14), net, make(name, net, transport, codec=SignCodec(64)))[-1]

    results = run_ranks(2, ours)
    assert results[0].isfinite().all()
    option = "variance_codec" if name == "ZeroOneAdam" else "warmup_codec"
    with pytest.raises(ValueError, match="has blocks of 256, the one-bit codec of 64; give both the same"):
        make(name, model(), SimTransport(), codec=SignCodec(64), **{option: Int8Codec(256)})


def test_elements_of_unlike_size_move_alike_after_the_freeze() -> None:
    """Gradients of 0.01 to 1 in one block: Adam moves each by about lr a step, and so must its one-bit form.

    With the momentum compressed as it is, the small ones moved by up to 10 lr, and runs diverged.
    """
    sizes = torch.logspace(-2, 0, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))].repeat(4)

    def ours(transport: SimTransport) -> float:
        p = nn.Parameter(torch.zeros(1024))
        optimizer = onebit.OnebitAdam([p], lr=1e-3, weight_decay=0.0, freeze_step=20, transport=transport)
        generator, largest = torch.Generator().manual_seed(transport.rank), 0.0
        for step in range(60):
            before = p.detach().clone()
            p.grad = sizes * (1.0 + 0.3 * torch.randn(1024, generator=generator))
            optimizer.step()
            if step >= 20:
                largest = max(largest, float((p.detach() - before).abs().max()) / 1e-3)
        return largest

    for largest in run_ranks(4, ours):
        assert 0.5 < largest < 2.0


# -------------------------------------------------------------------------------- bad gradients


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
@pytest.mark.parametrize("bad_step", [2, 9])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_makes_all_skip_and_leaves_no_trace(bad: float, bad_step: int, name: str) -> None:
    """Also with clipping on; the run goes on as if the step had not been."""

    def ours(transport: SimTransport, max_grad_norm: float) -> bool:
        net, optimizer = fresh(transport, name, max_grad_norm=max_grad_norm)
        clean_net, clean = fresh(transport, name, max_grad_norm=max_grad_norm)
        train(transport, range(bad_step), net, optimizer)
        before, weights = snapshot(optimizer), flat(net).clone()
        optimizer.zero_grad()
        loss = loss_of(net, 77, transport.rank)
        (loss * (bad if transport.rank == 1 else 1.0)).backward()
        optimizer.step()
        assert optimizer.stats.skipped_steps == 1
        before["onebit"]["skipped_steps"] = 1
        assert same(before, optimizer.state_dict()) and torch.equal(flat(net), weights)
        train(transport, range(bad_step, 12), net, optimizer)
        train(transport, range(12), clean_net, clean)
        return torch.equal(flat(net), flat(clean_net))

    for max_grad_norm in (0.0, 0.2):
        assert run_ranks(2, lambda transport, c=max_grad_norm: ours(transport, c)) == [True, True]


@pytest.mark.parametrize("name", FAMILY)
def test_a_gradient_that_no_variance_can_hold_is_skipped_without_a_trace(name: str) -> None:
    """Finite, but its square is not: the variance was infinite from there on, and nothing moved any more."""

    def ours(transport: SimTransport) -> bool:
        net, optimizer = fresh(transport, name)
        clean_net, clean = fresh(transport, name)
        train(transport, range(2), net, optimizer)
        for p in net.parameters():
            p.grad = torch.full_like(p, 9e19 if transport.rank else 1.0)
        optimizer.step()
        assert optimizer.stats.skipped_steps == 1
        train(transport, range(2, 12), net, optimizer)
        train(transport, range(12), clean_net, clean)
        return torch.equal(flat(net), flat(clean_net))

    assert run_ranks(2, ours) == [True, True]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("at", [2, 12])
def test_a_gradient_whose_squares_overflow_is_clipped_or_skipped(at: int, name: str) -> None:
    """Finite, but its norm is not in float32: the factor was NaN, behind the verdict, and so were all parameters."""

    def ours(transport: SimTransport) -> None:
        net, optimizer = fresh(transport, name, max_grad_norm=1.0)
        train(transport, range(at), net, optimizer)
        for p in net.parameters():
            p.grad = torch.full_like(p, 1e30)
        optimizer.step()
        train(transport, range(at + 1, at + 4), net, optimizer)
        assert flat(net).isfinite().all() and optimizer.stats.skipped_steps <= 1

    run_ranks(2, ours)


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
def test_a_norm_given_in_the_loop_clips_as_one_given_at_construction(name: str) -> None:
    """Before the first step, as a framework's clip_grad_norm_ gives it; and anew with every step."""

    def ours(transport: SimTransport) -> bool:
        net, optimizer = fresh(transport, name)
        other_net, other = fresh(transport, name, max_grad_norm=0.2)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            optimizer.max_grad_norm = 0.2
            optimizer.step()
        train(transport, range(12), other_net, other)
        assert optimizer.stats.clip_factor < 1.0
        return torch.equal(flat(net), flat(other_net)) and optimizer.max_grad_norm == 0.2

    assert run_ranks(2, ours) == [True, True]


def test_a_first_norm_that_comes_too_late_is_refused_and_changes_nothing() -> None:
    def ours(transport: SimTransport) -> bool:
        net, optimizer = fresh(transport)
        clean_net, clean = fresh(transport)
        train(transport, range(11), net, optimizer)
        optimizer.zero_grad()
        loss_of(net, 11, transport.rank).backward()
        assert optimizer._launched
        with pytest.raises(RuntimeError, match=rf"rank {transport.rank}: max_grad_norm=0.2 comes after a backward"):
            optimizer.max_grad_norm = 0.2
        with pytest.raises(ValueError, match="at least 0"):
            optimizer.max_grad_norm = float("nan")
        optimizer.step()
        train(transport, range(12), clean_net, clean)
        return torch.equal(flat(net), flat(clean_net)) and optimizer.max_grad_norm == 0

    assert run_ranks(2, ours) == [True, True]


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(4, 8, sparse=True)
    optimizer = onebit.OnebitAdam(table.named_parameters(), freeze_step=1, transport=SimTransport())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight has a torch.sparse_coo gradient; .*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_unsupported_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"weights is {dtype}; onebit trains float32, bfloat16 and float16"):
        onebit.OnebitAdam(
            [("weights", nn.Parameter(torch.ones(3, dtype=dtype)))], freeze_step=1, transport=SimTransport()
        )


@pytest.mark.parametrize("what", ["shape", "order", "option", "missing"])
def test_ranks_that_disagree_are_told_at_construction(what: str) -> None:
    def ours(transport: SimTransport) -> str:
        odd = transport.rank == 2
        params = [("wide", nn.Parameter(torch.ones(4, 3))), ("long", nn.Parameter(torch.ones(7)))]
        if what == "shape" and odd:
            params[1] = ("long", nn.Parameter(torch.ones(8)))
        if what == "order" and odd:
            params.reverse()
        if what == "missing" and odd:
            params.pop()
        with pytest.raises(ValueError) as caught:
            onebit.OnebitAdam(params, freeze_step=3 if what == "option" and odd else 2, transport=transport)
        return str(caught.value)

    expected = {
        "shape": "entry 1 is long: torch.float32 (7,) requires_grad=True on rank 0 and long: torch.float32 (8,)",
        "order": "entry 0 is wide: torch.float32 (4, 3) requires_grad=True on rank 0 and long: torch.float32 (7,)",
        "option": "freeze_step=2",
        "missing": "entry 1 is long: torch.float32 (7,) requires_grad=True on rank 0 and option",
    }[what]
    for rank, message in enumerate(run_ranks(3, ours)):
        assert message.startswith(f"rank {rank}: ") and expected in message and "on rank 2" in message


def test_a_replica_that_drifts_stops_the_run_by_name() -> None:
    def ours(transport: SimTransport) -> str:
        net = model()
        optimizer = onebit.OnebitAdam(
            net.named_parameters(), lr=0.01, freeze_step=2, transport=transport, check_replicas_every=4
        )
        train(transport, range(3), net, optimizer)
        if transport.rank == 1:
            with torch.no_grad():
                net[2].weight[0, 0] += 1e-6
        with pytest.raises(onebit.ReplicaError) as caught:
            train(transport, range(3, 4), net, optimizer)
        return str(caught.value)

    for message in run_ranks(3, ours):
        assert "after step 4 rank [1] holds other values than rank 0 in 2.weight" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "must not be negative"),
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\)"),
        ({"freeze_step": 0}, "at least 1"),
        ({"freeze_step": "soon"}, '"auto"'),
        ({"amsgrad": True}, "amsgrad"),
        ({"error_dtype": torch.int8}, "error_dtype"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onebit.OnebitAdam([nn.Parameter(torch.ones(3))], **{"freeze_step": 2, "transport": SimTransport()} | options)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [onebit.OnebitAdam, onebit.zero.ShardedOnebitAdam])
def test_a_bad_bucket_size_is_refused_before_anything_is_joined(
    kind: type, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebit.comm.init", lambda: pytest.fail("joined the launcher's ranks"))
    with pytest.raises(ValueError, match="bucket_cap_mb must be above 0 and finite"):
        kind([nn.Parameter(torch.ones(3))], bucket_cap_mb=cap)


@pytest.mark.parametrize("name", FAMILY)
def test_a_bad_variance_floor_names_the_optimizer_that_got_it(name: str) -> None:
    kind, defaults = FAMILY[name]
    with pytest.raises(ValueError, match=f"^{name}: variance_floor must not be negative"):
        kind([nn.Parameter(torch.ones(3))], transport=SimTransport(), **defaults | {"variance_floor": -1.0})


# -------------------------------------------------------------------------------- overlap, accumulation, clipping


class Recorder(SimTransport):
    """A SimTransport that notes when its operations are launched."""

    def __init__(self, transport: SimTransport):
        super().__init__(transport.network, transport.rank)
        self.events: list[str] = []

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor):
        self.events.append("phase 1")
        return super().all_to_all(out_WB, in_WB)


def test_buckets_leave_during_backward_and_change_nothing() -> None:
    def ours(transport: SimTransport) -> bool:
        recorder = Recorder(transport)
        net, optimizer = fresh(recorder, bucket_cap_mb=0.004)
        assert len(optimizer.buckets) > 2
        net[0].weight.register_hook(lambda _: recorder.events.append("first layer's backward"))
        train(recorder, range(9), net, optimizer)
        recorder.events.clear()
        optimizer.zero_grad()
        loss_of(net, 9, transport.rank).backward()
        assert recorder.events[0] == "phase 1"
        assert recorder.events.index("first layer's backward") >= 1
        optimizer.step()
        plain_net, plain = fresh(transport, bucket_cap_mb=0.004, overlap=False)
        transport._operations = recorder._operations
        train(transport, range(10), plain_net, plain)
        return torch.equal(flat(net), flat(plain_net))

    assert run_ranks(2, ours) == [True, True]


@pytest.mark.parametrize("says_so", [True, False])
def test_accumulation_sends_once_and_sums(says_so: bool) -> None:
    """Three passes per step send as many bytes as one, by no_sync() or by counting, and give the same as their sum."""

    def ours(transport: SimTransport, passes: int) -> tuple[Tensor, list[int]]:
        net, optimizer = fresh(transport, bucket_cap_mb=0.004)
        sent = []
        for step in range(8):
            optimizer.zero_grad()
            losses = [loss_of(net, 3 * step + k, transport.rank) for k in range(3)]
            if passes == 1:
                torch.stack(losses).sum().backward()
            else:
                for k, loss in enumerate(losses):
                    if says_so and k < 2:
                        with optimizer.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
            optimizer.step()
            sent.append(optimizer.stats.sent_bytes)
        return flat(net), sent

    one = run_ranks(2, lambda transport: ours(transport, 1))[0]
    many = run_ranks(2, lambda transport: ours(transport, 3))[0]
    assert many[1] == one[1]
    torch.testing.assert_close(many[0], one[0], atol=3e-3, rtol=0)  # summed in another order: a sign may flip


@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_clipping_means_the_same_before_and_after_the_freeze(noise: float) -> None:
    """After the freeze the factor is that of the mean gradient's true norm within 15 %, for like and unlike workers."""
    n, size, steps = 4, 4096, 60

    def gradient(step: int, rank: int) -> Tensor:
        mean = torch.randn(size, generator=torch.Generator().manual_seed(7)) * (1 + 0.005 * step)
        return mean + noise * torch.randn(size, generator=torch.Generator().manual_seed(100 * step + rank + 1))

    def ours(transport: SimTransport) -> list[float]:
        p = nn.Parameter(torch.zeros(size))
        optimizer = onebit.OnebitAdam(
            [p], lr=1e-3, freeze_step=30, transport=transport, max_grad_norm=1.0, warmup_codec=IdentityCodec()
        )
        factors = []
        for step in range(steps):
            p.grad = gradient(step, transport.rank)
            optimizer.step()
            factors.append(optimizer.stats.clip_factor)
        return factors

    factors = run_ranks(n, ours)[0]
    for step, factor in enumerate(factors):
        true = 1.0 / float(sum(gradient(step, rank) for rank in range(n)).div(n).norm())
        assert factor == pytest.approx(true, rel=1e-5 if step < 30 else 0.15)


def test_clipping_survives_a_spike_after_the_freeze() -> None:
    """One worker's gradient times 1000 for one step: the parameters move no further than in an ordinary step or two."""

    def ours(transport: SimTransport) -> float:
        p = nn.Parameter(torch.zeros(1024))
        optimizer = onebit.OnebitAdam(
            [p], lr=1e-3, freeze_step=10, transport=transport, max_grad_norm=40.0, weight_decay=0.0
        )
        generator = torch.Generator().manual_seed(transport.rank)
        for step in range(40):
            p.grad = 1.0 + 0.1 * torch.randn(1024, generator=generator)
            if step == 20 and transport.rank == 1:
                p.grad *= 1000
            optimizer.step()
        return float(p.detach().abs().max())

    assert run_ranks(2, ours)[0] < 40 * 1e-3 * 2


def test_gradscaler_and_overflow() -> None:
    """The scale is taken out in step(); an overflow on one rank makes both skip."""

    def ours(transport: SimTransport, scaled: bool) -> tuple[Tensor, int]:
        net, optimizer = fresh(transport, overlap=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(9):
            optimizer.zero_grad()
            loss = loss_of(net, step, transport.rank)
            if scaled and step == 7 and transport.rank == 0:
                loss = loss * float("inf")
            if not scaled and step == 7:
                continue
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return flat(net), optimizer.stats.skipped_steps

    plain, _ = run_ranks(2, lambda transport: ours(transport, False))[0]
    for weights, skipped in run_ranks(2, lambda transport: ours(transport, True)):
        assert skipped == 1
        torch.testing.assert_close(weights, plain, atol=1e-6, rtol=0)


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
        assert bits[1] == pytest.approx(2 * (8 + 16 / 256) * share, rel=0.01)
        assert 2.0 * share <= bits[3] <= 2.2 * share
