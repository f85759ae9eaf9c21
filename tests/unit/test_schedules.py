"""DeepSpeed's schedules: equal to a table in float64, resumed to the bit, in as many groups as there are."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onebit
from onebit.comm import IdentityCodec, SimTransport
from onebit.zero import read_config
from onebit.zero.config.lr_schedules import Cycle
from onebit.zero.lr_schedulers import (
    SCHEDULERS,
    LRRangeTest,
    OneCycle,
    ScheduleLR,
    SchedulerChoice,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)


def adam(lrs: tuple[float, ...] = (1e-3,)) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs]
    return torch.optim.AdamW(groups, betas=(0.9, 0.97))


def rates(scheduler: ScheduleLR, steps: int) -> np.ndarray:
    """The rates with which `steps` steps are taken, one row per step."""
    rows = []
    for _ in range(steps):
        rows.append([float(group["lr"]) for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return np.array(rows)


# ---------------------------------------------------------------- the table: numpy, float64, none of our code


def batches(steps: int) -> np.ndarray:
    """n = -1, 0, 1, ...: the first step comes before the scheduler's first; it is taken as batch 0 is."""
    return np.maximum(np.arange(steps, dtype=np.float64) - 1, 0)


def rise(n: np.ndarray, warmup: int, kind: str) -> np.ndarray:
    N = max(2, warmup)
    curve = np.log1p(n) / np.log(N) if kind == "log" else n / N
    return np.where(n < N, curve, 1.0)


def fall(n: np.ndarray, warmup: int, total: int) -> np.ndarray:
    N = max(2, warmup)
    return np.where(n < N, 1.0, np.clip((total - n) / max(1, total - N), 0.0, None))


def cosine(n: np.ndarray, warmup: int, total: int, least: float) -> np.ndarray:
    N = max(2, warmup)
    angle = np.pi * np.minimum((n + 1 - N) / max(1, total - N), 1.0)
    return np.where(n < N, 1.0, least + (1.0 - least) * np.cos(angle / 2) ** 2)


def triangle(k: np.ndarray, first: int, second: int) -> np.ndarray:
    return np.interp(k, [0, first, first + second], [0.0, 1.0, 0.0])


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 10, 40])
def test_warmup_is_its_formula(kind: str, warmup: int) -> None:
    scheduler = WarmupLR(adam(), warmup_min_lr=1e-5, warmup_max_lr=3e-3, warmup_num_steps=warmup, warmup_type=kind)
    expected = 1e-5 + (3e-3 - 1e-5) * rise(batches(60), warmup, kind)
    np.testing.assert_allclose(rates(scheduler, 60)[:, 0], expected, rtol=1e-13, atol=1e-18)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("warmup, total", [(10, 50), (1, 50), (10, 5), (10, 10), (0, 1)])
def test_warmup_decay_is_its_formula(kind: str, warmup: int, total: int) -> None:
    scheduler = WarmupDecayLR(
        adam(), total_num_steps=total, warmup_min_lr=1e-5, warmup_max_lr=3e-3, warmup_num_steps=warmup, warmup_type=kind
    )
    n = batches(60)
    expected = 1e-5 + (3e-3 - 1e-5) * rise(n, warmup, kind) * fall(n, warmup, total)
    np.testing.assert_allclose(rates(scheduler, 60)[:, 0], expected, rtol=1e-12, atol=1e-18)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("warmup, total", [(10, 50), (1, 50), (10, 5), (10, 10)])
@pytest.mark.parametrize("start, least", [(0.0, 1e-4), (0.2, 0.1), (1.0, 0.0)])
def test_warmup_cosine_is_its_formula(kind: str, warmup: int, total: int, start: float, least: float) -> None:
    scheduler = WarmupCosineLR(
        adam((1e-3, 0.2)),
        total_num_steps=total,
        warmup_min_ratio=start,
        warmup_num_steps=warmup,
        cos_min_ratio=least,
        warmup_type=kind,
    )
    n = batches(60)
    ratio = np.where(n < max(2, warmup), start + (1.0 - start) * rise(n, warmup, kind), cosine(n, warmup, total, least))
    expected = np.stack([1e-3 * ratio, 0.2 * ratio], axis=1)
    # cos(x/2)² for (1 + cos x)/2: their rounding differs by an ulp of the peak.
    np.testing.assert_allclose(rates(scheduler, 60), expected, rtol=1e-12, atol=1e-17)


@pytest.mark.parametrize("first, second", [(10, None), (10, 25), (1, 1), (7, 3)])
@pytest.mark.parametrize("decay", [0, 4])
def test_one_cycle_is_its_formula(first: int, second: int | None, decay: int) -> None:
    optimizer = adam((1e-3, 5.0))
    scheduler = OneCycle(
        optimizer,
        cycle_min_lr=1e-4,
        cycle_max_lr=2e-3,
        decay_lr_rate=0.5,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        decay_step_size=decay,
        cycle_min_mom=0.8,
        cycle_max_mom=0.95,
        decay_mom_rate=0.001,
    )
    k, second = np.arange(60, dtype=np.float64), second or first
    past = np.clip(k - first - second, 0, None) / decay if decay else np.zeros(60)
    lr = (1e-4 + (2e-3 - 1e-4) * triangle(k, first, second)) / (1.0 + 0.5 * past)
    momentum = (0.95 - (0.95 - 0.8) * triangle(k, first, second)) * (1.0 + 0.001 * past)
    momenta = []
    for step in range(60):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([lr[step]] * 2, rel=1e-12)
        momenta.append(optimizer.param_groups[1]["betas"])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose([b1 for b1, _ in momenta], momentum, rtol=1e-12)
    assert {b2 for _, b2 in momenta} == {0.97}


def test_stairs_are_flat_and_reach_the_top() -> None:
    shape = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 12, "cycle_second_step_size": 8}
    cycle = Cycle(**shape, cycle_first_stair_count=4, cycle_second_stair_count=2)
    up, down = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [4, 2, 2, 2, 2, 0, 0, 0, 0]
    assert [cycle.rates(k, [0.0])[0] * 4 for k in range(21)] == [*up, *down]
    same = Cycle(**shape, cycle_first_stair_count=4)
    assert [same.rates(k, [0.0])[0] * 4 for k in range(12, 21)] == [4, 3, 3, 2, 2, 1, 1, 0, 0]


def test_momentum_of_sgd_is_cycled_and_none_is_refused() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    shape = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}
    scheduler = OneCycle(sgd, **shape)
    seen = []
    for _ in range(5):
        seen.append(sgd.param_groups[0]["momentum"])
        sgd.step()
        scheduler.step()
    assert seen == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9])
    other = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="no momentum to cycle"):
        OneCycle(other, **shape)
    OneCycle(other, **shape, cycle_momentum=False)


def test_a_momentum_of_1_is_refused_with_the_step() -> None:
    shape = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 1, "decay_step_size": 1}
    scheduler = OneCycle(adam(), **shape, decay_mom_rate=0.1)
    with pytest.raises(ValueError, match="at step 4; it must stay below 1"):
        rates(scheduler, 10)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test_is_its_formula(staircase: bool) -> None:
    scheduler = LRRangeTest(
        adam(),
        lr_range_test_min_lr=1e-4,
        lr_range_test_step_size=7,
        lr_range_test_step_rate=5.0,
        lr_range_test_staircase=staircase,
    )
    intervals = np.arange(30) / 7
    expected = 1e-4 * (1 + 5 * (np.floor(intervals) if staircase else intervals))
    np.testing.assert_allclose(rates(scheduler, 30)[:, 0], expected, rtol=1e-12)


def test_a_list_has_one_number_for_each_group() -> None:
    scheduler = WarmupLR(
        adam((1.0, 1.0)), warmup_min_lr=[0.0, 0.1], warmup_max_lr=[1.0, 0.2], warmup_num_steps=4, warmup_type="linear"
    )
    expected = np.stack([rise(batches(8), 4, "linear"), 0.1 + 0.1 * rise(batches(8), 4, "linear")], axis=1)
    np.testing.assert_allclose(rates(scheduler, 8), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="warmup_max_lr to have one number for each of 1 groups"):
        WarmupLR(adam(), warmup_max_lr=[1.0, 0.2])


def test_a_tensor_rate_is_written_in_place() -> None:
    lr = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=lr)
    scheduler = WarmupLR(optimizer, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    np.testing.assert_allclose(rates(scheduler, 8)[:, 0], rise(batches(8), 4, "linear"), rtol=1e-6)
    assert optimizer.param_groups[0]["lr"] is lr


# ---------------------------------------------------------------- the golden: DeepSpeed 0.19.6's own module

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "schedules_deepspeed_0.19.6.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['type']}-{'-'.join(case['params'])}")
def test_with_each_key_and_without_it_the_rates_are_deepspeeds(case: dict[str, Any]) -> None:
    optimizer, steps = adam(tuple(GOLDEN["lrs"])), GOLDEN["steps"]
    file = {"train_micro_batch_size_per_gpu": 1, "scheduler": {"type": case["type"], "params": case["params"]}}
    choice = read_config(file, world_size=1).scheduler
    assert choice is not None
    scheduler, taken, momenta = build_scheduler(choice, optimizer), [], []
    for step in range(max(steps) + 1):
        if step in steps:
            taken.append([group["lr"] for group in optimizer.param_groups])
            momenta.append([group["betas"][0] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    late = int("warmup_min_ratio" in case["params"])  # DeepSpeed takes the first step at 0: docs/differences.md
    np.testing.assert_allclose(taken[late:], case["rates"][late:], rtol=1e-12, atol=1e-18)
    if case["params"].get("cycle_momentum", case["type"] == "OneCycle"):  # its first step has cycle_min_mom
        np.testing.assert_allclose(momenta[1:], case["momenta"][1:], rtol=1e-12)
    elif case["type"] == "OneCycle":
        assert {b1 for row in momenta for b1 in row} == {0.9}


@pytest.mark.parametrize("case", GOLDEN["cases"][::5], ids=lambda case: f"{case['type']}-{'-'.join(case['params'])}")
def test_a_step_to_a_batch_ends_where_the_batches_one_by_one_do(case: dict[str, Any]) -> None:
    """DeepSpeed's step(last_batch_iteration) counts from 0, so that step(0) is the first step(). It goes back, too."""
    direct, counted = (SCHEDULERS[case["type"]](adam(tuple(GOLDEN["lrs"])), **case["params"]) for _ in range(2))
    rates = []
    for _ in range(20):
        counted.optimizer.step()
        counted.step()
        rates.append(counted.get_last_lr())
    direct.optimizer.step()
    for batch in (0, 19, 4, 5):
        direct.step(batch)
        assert direct.get_last_lr() == rates[batch] and direct.last_epoch == batch + 1


@pytest.mark.parametrize("params", [{}, {"warmup_max_lr": None}])
def test_a_warmup_without_a_top_rises_to_each_groups_own_rate_and_resumes(params: dict[str, Any]) -> None:
    scheduler = WarmupLR(adam((1e-5, 0.5)), warmup_num_steps=4, **params)
    assert rates(scheduler, 7)[-1].tolist() == [1e-5, 0.5]
    resumed = WarmupLR(adam((1.0, 1.0)), warmup_num_steps=4, **params)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.get_last_lr() == [1e-5, 0.5]


def test_a_decay_without_a_top_says_that_it_rises_to_deepspeeds_rate(caplog: pytest.LogCaptureFixture) -> None:
    def read(lr: float, **params: object) -> list[str]:
        caplog.clear()
        scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, **params}}
        adamw = {"type": "AdamW", "params": {"lr": lr}}
        read_config({"train_batch_size": 1, "optimizer": adamw, "scheduler": scheduler}, world_size=1)
        return [record.message for record in caplog.records if "WarmupDecayLR then rises" in record.message]

    caplog.set_level(logging.WARNING)
    assert len(read(1e-5)) == 1
    assert not read(1e-3) and not read(1e-5, warmup_max_lr=None) and not read(1e-5, warmup_max_lr=1e-3)


def test_a_parameter_without_its_name_is_refused() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        WarmupLR(adam(), 0.0)  # type: ignore[misc]


SCHEDULES = {
    "WarmupLR": {"warmup_max_lr": 3e-3, "warmup_num_steps": 7},
    "WarmupDecayLR": {"warmup_max_lr": 3e-3, "warmup_num_steps": 7, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 7, "total_num_steps": 20, "warmup_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 8, "decay_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 5},
}


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(SCHEDULES)), before=st.integers(0, 30), lrs=st.sampled_from([(1e-3,), (1e-3, 0.5)]))
def test_resumed_is_uninterrupted_to_the_bit(name: str, before: int, lrs: tuple[float, ...]) -> None:
    def start() -> ScheduleLR:
        optimizer = adam(lrs)
        kinds = {"WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR, "WarmupCosineLR": WarmupCosineLR}
        kinds |= {"OneCycle": OneCycle, "LRRangeTest": LRRangeTest}
        return kinds[name](optimizer, **SCHEDULES[name])

    whole = start()
    rates(whole, before)
    saved = io.BytesIO()
    torch.save(whole.state_dict(), saved)
    saved.seek(0)
    resumed = start()
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert resumed.get_last_lr() == whole.get_last_lr()
    for a, b in zip(whole.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
        assert (a["lr"], a["betas"]) == (b["lr"], b["betas"])
    np.testing.assert_array_equal(rates(whole, 20), rates(resumed, 20))


def test_a_state_of_other_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="it has 2 groups, the optimizer 1"):
        WarmupLR(adam()).load_state_dict(WarmupLR(adam((1.0, 2.0))).state_dict())


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match='warmup_type: expected one of "log", "linear", got "cubic"'):
        WarmupLR(adam(), warmup_type="cubic")
    with pytest.raises(TypeError, match="total_num_steps"):
        WarmupDecayLR(adam())
    with pytest.raises(ValueError, match="total_num_steps: expected an integer at least 1, got 0"):
        WarmupCosineLR(adam(), total_num_steps=0)
    with pytest.raises(ValueError, match="does not go with Warmup"):
        SchedulerChoice("OneCycle", WarmupLR.kind())


def test_a_one_bit_optimizer_follows_rate_and_momentum_as_adamw_does() -> None:
    cycle = Cycle(cycle_min_lr=0.0, cycle_max_lr=0.01, cycle_first_step_size=4, cycle_second_step_size=4)
    target = torch.linspace(-1, 1, 300)

    def train(make: Callable[[torch.nn.Parameter], torch.optim.Optimizer]) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(300))
        optimizer = make(p)
        scheduler = build_scheduler(SchedulerChoice("OneCycle", cycle), optimizer)
        places = []
        for _ in range(10):
            p.grad = (p - target).detach()
            optimizer.step()
            scheduler.step()
            places.append(p.detach().clone())
        return torch.stack(places)

    options = {"transport": SimTransport(), "freeze_step": 100, "warmup_codec": IdentityCodec(256), "weight_decay": 0.0}
    ours = train(lambda p: onebit.OnebitAdam([p], **options))
    theirs = train(lambda p: torch.optim.AdamW([p], weight_decay=0.0))
    assert (theirs[0] == 1.0).all() and (theirs[1] != 1.0).any()
    # A step moves by at most 0.01, of which float32 keeps seven digits.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
