"""The engine over members that come and go: replicas, counts and schedules are the same after every change."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from faults.member_runs import Hub, Run, founded
from test_membership import await_newcomers, net, parameters_of
from torch import Tensor

import onebit
from onebit import membership, zero
from onebit.comm import SimTransport
from onebit.membership import Members
from onebit.zero import members as member_engines

INF = float("inf")
ONE_BIT = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 4}}}
DELAYED = {
    **ONE_BIT,
    "onebit": {"compression": "always", "bucket_cap_mb": 0.001, "check_replicas_every": 5, "delay": 1},
}
DENSE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
LOCAL = {**DENSE, "onebit": {"local_steps": {"every": 4}, "bucket_cap_mb": 0.001}}
LATE = {**DENSE, "onebit": {"local_steps": {"every": 4, "fragments": 2, "delay": 2}, "bucket_cap_mb": 0.001}}
ON_HOST = {**DENSE, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
FORMS = pytest.mark.parametrize(
    "form",
    [ONE_BIT, DELAYED, DENSE, ON_HOST, LOCAL, LATE],
    ids=["one bit", "delayed", "dense", "dense on host", "local", "local, delayed"],
)
BLOCKS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
    "onebit": {"compression": "always", "bucket_cap_mb": 0.001, "check_replicas_every": 5},
}


def config_of(form: dict[str, Any]) -> dict[str, Any]:
    blocks = dict(BLOCKS)
    if form in (DENSE, ON_HOST):
        blocks["onebit"] = {"bucket_cap_mb": 0.001}
    return {**blocks, **form}


def engine_over(members: Members, config: dict[str, Any], **given: Any) -> Any:
    return zero.initialize(model=net(), config=config, grid=member_engines.grid_of(members), **given)[0]


def train(members: Members, hub: Hub, form: dict[str, Any], steps: int, newcomers: int = 0) -> list[Any]:
    """Parameters, learning rate and counts at the end."""
    engine = engine_over(members, config_of(form))
    member_engines.begin(engine)
    draw = torch.Generator().manual_seed(ord(members.rendezvous.name))
    while engine.global_steps < steps:
        if newcomers and engine.global_steps == 8:
            await_newcomers(members, hub, newcomers)
        for _ in range(2):
            x = torch.randn(4, 12, generator=draw)
            engine.backward((engine(x) - x).square().mean())
            engine.step()
    if hasattr(engine.optimizer, "sync"):
        engine.optimizer.sync()
    engine.optimizer.check_replicas()
    membership.end(engine.optimizer)
    counts = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
    return [parameters_of(engine.module), engine.get_lr(), counts, engine.scheduler.last_epoch]


def check_same(run: Run, steps: int) -> None:
    (params, *rest), *others = run.results.values()
    assert rest[1] == (steps, 2 * steps, 8 * steps, 0)
    assert all(torch.equal(params, theirs) and told == rest for theirs, *told in others)


@FORMS
def test_a_newcomer_takes_over_counts_and_schedule(form: dict[str, Any]) -> None:
    hub = Hub(2)
    run = founded(hub, lambda members: train(members, hub, form, 20, newcomers=1)).joined_by("n")
    assert set(run.results) == {"a", "b", "n"}
    check_same(run, 20)


@FORMS
def test_a_warm_up_leaves_no_trace(form: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """And nobody waits for it: see `test_membership.py`."""

    def work(members: Members, *, warms_up: bool) -> tuple[Tensor, int]:
        engine = engine_over(members, config_of(form))
        draw = torch.Generator().manual_seed(1)

        def backward() -> None:
            x = torch.randn(4, 12, generator=draw)
            engine.backward((engine(x) - x).square().mean())

        member_engines.begin(engine, warm_up=backward if warms_up else None)
        draw.manual_seed(2)
        for _ in range(8):
            backward()
            engine.step()
        membership.end(engine.optimizer)
        return parameters_of(engine.module), engine.micro_steps

    with_it, without = (
        founded(Hub(1), partial(work, warms_up=warms_up)).join().results["a"] for warms_up in (True, False)
    )
    assert torch.equal(with_it[0], without[0]) and with_it[1] == without[1] == 8
    assert "micro-batches ran between" not in caplog.text


@FORMS
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_random_changes_leave_engines_equal(form: dict[str, Any], seed: int) -> None:
    draw = np.random.default_rng(seed)

    def fuse() -> float:
        return INF if draw.random() < 0.3 else int(draw.integers(10, 500)) / 2

    hub = Hub(4)
    run = founded(hub, lambda members: train(members, hub, form, 40), [INF, fuse(), fuse(), fuse()])
    for name in "wxyz":
        run.start(name, fuse())
    run.join()
    check_same(run, 40)


@pytest.mark.parametrize("form", [ONE_BIT, DENSE], ids=["one bit", "dense"])
def test_one_member_trains_as_the_engine_alone(form: dict[str, Any]) -> None:
    hub = Hub(1)
    (params, *_), *_ = founded(hub, lambda members: train(members, hub, form, 12)).join().results.values()
    model = net()
    parts = {"lr": 1e-2, "weight_decay": 0.0}
    transport = SimTransport()
    if form is ONE_BIT:
        optimizer: Any = onebit.OnebitAdam(
            model.parameters(), transport=transport, freeze_step=4, max_grad_norm=1.0, bucket_cap_mb=0.001, **parts
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **parts)
    schedule = zero.lr_schedulers.WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=20)
    draw = torch.Generator().manual_seed(ord("a"))
    for _ in range(12):
        for _ in range(2):
            x = torch.randn(4, 12, generator=draw)
            ((model(x) - x).square().mean() / 2).backward()
        if form in (DENSE, ON_HOST):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    found: Tensor = parameters_of(model)
    assert torch.allclose(params, found, atol=1e-6)


@pytest.mark.parametrize(
    ("blocks", "form"),
    [
        ({**ONE_BIT, "zero_optimization": {"stage": 1}}, "inter_node"),
        ({**DENSE, "zero_optimization": {"stage": 2}}, "dense"),
        ({**ONE_BIT, "bf16": {"enabled": True}}, "intra_node"),
    ],
    ids=["stage 1", "stage 2, dense", "bf16"],
)
def test_other_forms_are_refused_by_name(blocks: dict[str, Any], form: str) -> None:
    members = Hub(1).members("a", [INF])
    with pytest.raises(ValueError, match=f"the form '{form}' cannot go on as its members come and go"):
        engine_over(members, {"train_micro_batch_size_per_gpu": 4, **blocks})
    members.close()


def test_tables_of_which_forward_writes_rows_are_refused() -> None:
    members = Hub(1).members("a", [INF])
    with pytest.raises(ValueError, match=r"renormalises rows of its table in forward \(max_norm\)"):
        zero.initialize(
            model=torch.nn.Embedding(4, 4, max_norm=1.0),
            config=config_of(DENSE),
            grid=member_engines.grid_of(members),
        )
    members.close()


def test_a_batch_for_ranks_that_stay_is_refused() -> None:
    members = Hub(1).members("a", [INF])
    block = {"enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2]}
    with pytest.raises(ValueError, match="elasticity chooses a batch for ranks that stay"):
        engine_over(members, {"elasticity": block, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})
    members.close()


def test_one_member_serves_alone() -> None:
    """The others train on meanwhile: nothing is exchanged for it."""

    def work(members: Members) -> int:
        engine = engine_over(members, config_of(LOCAL))
        member_engines.begin(engine)
        for _ in range(12):
            x = torch.ones(4, 12)
            engine.backward((engine(x) - x).square().mean())
            engine.step()
            if members.rank == 0 and engine.global_steps == 3:
                assert zero.init_inference(engine)(x).shape == x.shape
        engine.optimizer.sync()
        membership.end(engine.optimizer)
        assert members.roster is not None
        return members.roster.epoch

    assert founded(Hub(2), work).join().results == {"a": 1, "b": 1}


def test_data_that_is_divided_among_ranks_is_refused() -> None:
    members = Hub(1).members("a", [INF])
    with pytest.raises(ValueError, match=r"draw from .*MemberSampler"):
        engine_over(members, config_of(DENSE), training_data=list(range(8)))
    members.close()


def test_a_save_makes_buffers_equal_and_lands_no_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers within the ranks of this member, which alone takes part."""

    def work(members: Members) -> tuple[bool, list[Any]]:
        engine, met = engine_over(members, config_of(DELAYED)), list[Any]()
        member_engines.begin(engine)
        monkeypatch.setattr("onebit.zero.engine.sync_tensors", lambda *given: met.append(given[-1]))
        for _ in range(14):
            x = torch.ones(4, 12)
            engine.backward((engine(x) - x).square().mean())
            engine.step()
        engine.save_checkpoint(tmp_path)
        is_under_way = engine.optimizer.step_under_way is not None
        engine.synchronise()
        assert engine.optimizer.step_under_way is None
        return is_under_way, [
            transport is engine.grid.transports[axis]
            for transport, axis in zip(met, ("shard", "replica"), strict=False)
        ]

    assert founded(Hub(1), work).join().results == {"a": (True, [True, True])}


@FORMS
def test_a_founder_resumes_for_all(form: dict[str, Any], tmp_path: Any) -> None:
    """The first member saves; in another run one founder loads, and the others take over its state and counts."""

    def work(members: Members, loads: str, steps: int) -> list[Any]:
        engine = engine_over(members, config_of(form))
        if members.rendezvous.name == loads:
            engine.load_checkpoint(tmp_path)
        member_engines.begin(engine)
        first = engine.global_steps
        while engine.global_steps < steps:
            for _ in range(2):
                x = torch.ones(4, 12)
                engine.backward((engine(x) - x).square().mean())
                engine.step()
        if not loads and members.rank == 0:
            engine.save_checkpoint(tmp_path)
        if hasattr(engine.optimizer, "sync"):
            engine.optimizer.sync()
        membership.end(engine.optimizer)
        return [parameters_of(engine.module), first, engine.get_lr(), engine.global_samples]

    founded(Hub(2), lambda members: work(members, "", 6)).join()
    results = founded(Hub(3), lambda members: work(members, "b", 10)).join().results
    (params, first, *rest), *others = results.values()
    assert first == 6 and rest[-1] == 80
    assert all(torch.equal(params, theirs) and told == [first, *rest] for theirs, *told in others)
