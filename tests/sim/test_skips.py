"""A run that only skips comes to an end that names rank and parameter; skipped steps are voted on as others are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit import SkippedStepsError, zero
from onebit.agreement.skips import MOST_SKIPS, SkipLimit
from onebit.comm import SimTransport, run_ranks

FAMILY: dict[str, tuple[type, dict]] = {
    "OnebitAdam": (onebit.OnebitAdam, {"freeze_step": 2}),
    "OnebitLamb": (onebit.OnebitLamb, {"freeze_step": 2}),
    "ZeroOneAdam": (onebit.ZeroOneAdam, {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2}),
    "sharded, stage 0": (zero.ShardedOnebitAdam, {"stage": 0}),
    "sharded, stage 1": (zero.ShardedOnebitAdam, {}),
    "sharded, stage 2": (zero.ShardedOnebitAdam, {"stage": 2}),
    "sharded LAMB": (zero.ShardedOnebitLamb, {}),
    "sharded 0/1": (zero.ShardedZeroOneAdam, {"warmup_steps": 0, "local_step_scaler": 2, "local_step_clipper": 2}),
}


def make(name: str, transport: SimTransport, **options: object) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Two parameters in a bucket each; "second" leaves first."""
    params = [nn.Parameter(torch.linspace(-1.0, 1.0, 300)) for _ in range(2)]
    kind, defaults = FAMILY[name]
    named = zip(("first", "second"), params, strict=True)
    return params, kind(named, transport=transport, bucket_cap_mb=1e-3, **defaults | options)


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, rank: int, bad: int | None = None) -> None:
    """bad: which parameter's gradient is not finite."""
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    losses = [(p * torch.randn(300, generator=generator)).sum() for p in params]
    for k, loss in enumerate(losses):
        (loss * (float("nan") if k == bad else 1.0)).backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, 1) for name in FAMILY), ("OnebitAdam", 0), ("sharded, stage 1", 0), ("sharded, stage 2", 0)],
)
def test_too_many_skipped_steps_in_a_row_end_the_run_on_all_ranks_by_name(name: str, bad: int) -> None:
    def ours(transport: SimTransport) -> str:
        params, optimizer = make(name, transport, max_consecutive_skips=4)
        mine = bad if transport.rank == 1 else None
        for _ in range(4):
            step(params, optimizer, transport.rank)
        while optimizer.stats.skipped_steps < 3:
            step(params, optimizer, transport.rank, mine)
        for _ in range(2):
            step(params, optimizer, transport.rank)  # good again: the count begins anew
        with pytest.raises(SkippedStepsError) as caught:
            for _ in range(20):
                step(params, optimizer, transport.rank, mine)
        assert all(p.isfinite().all() for p in params)
        return str(caught.value)

    culprit = ("first", "second")[bad]
    for rank, message in enumerate(run_ranks(3, ours)):
        assert message.startswith(f"rank {rank}: 4 steps in a row were skipped")
        assert f"not finite: {culprit} on rank 1. " in message and "max_consecutive_skips=0" in message


def test_the_default_outlasts_every_loss_scale_and_nothing_forbids_to_skip_for_ever() -> None:
    params, optimizer = make("OnebitAdam", SimTransport())
    for _ in range(MOST_SKIPS - 1):
        step(params, optimizer, 0, 0)
    with pytest.raises(SkippedStepsError, match=f"rank 0: {MOST_SKIPS} steps in a row .*: first on rank 0"):
        step(params, optimizer, 0, 0)
    params, optimizer = make("OnebitAdam", SimTransport(), max_consecutive_skips=0)
    for _ in range(MOST_SKIPS + 1):
        step(params, optimizer, 0, 0)
    with pytest.raises(ValueError, match="max_consecutive_skips must be at least 0"):
        make("sharded LAMB", SimTransport(), max_consecutive_skips=-1)


def test_a_state_that_is_loaded_has_skipped_nothing() -> None:
    for name in FAMILY:
        params, optimizer = make(name, SimTransport(), max_consecutive_skips=2)
        step(params, optimizer, 0)
        state = copy.deepcopy(optimizer.state_dict())
        for _ in range(3):
            optimizer.load_state_dict(state)
            step(params, optimizer, 0, 1)


def test_every_part_of_a_model_hears_of_the_part_that_is_bad() -> None:
    """Pipeline stages or shards: each with replicas of its own, one of which has the gradient."""

    def ours(whole: SimTransport) -> str:
        limit = SkipLimit(1)
        with pytest.raises(SkippedStepsError) as caught:
            limit.observe(True, ["deep.weight", "deep.bias"] if whole.rank == 2 else [], SimTransport(), whole)
        return str(caught.value)

    for message in run_ranks(3, ours):
        assert "not finite: deep.weight and 1 more on rank 0. " in message


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "sharded 0/1"])
def test_replicas_are_voted_on_in_skipped_steps_too(name: str) -> None:
    """Skipped steps count: a run that only skips still hears of a replica that has drifted."""

    def ours(transport: SimTransport) -> int:
        options = {"local_step_clipper": 1} if name == "ZeroOneAdam" else {}
        params, optimizer = make(name, transport, check_replicas_every=6, **options)
        for _ in range(4):
            step(params, optimizer, transport.rank)
        if transport.rank == 1:
            params[0].data[0] += 1.0
        with pytest.raises(onebit.ReplicaError, match="holds other values than rank 0 in first"):
            for _ in range(20):
                step(params, optimizer, transport.rank, 1 if transport.rank == 0 else None)
        return optimizer.stats.skipped_steps

    assert run_ranks(2, ours) == [2, 2]


def flip(flat: Tensor) -> None:
    """The lowest bit of the first element."""
    words = flat.view(torch.uint8).view(-1)
    words[0] ^= 1


REPLICATED = [
    ("OnebitAdam", 1, lambda bucket: bucket.flat["exp_avg"], "exp_avg of the bucket that begins with second"),
    ("OnebitAdam", 1, lambda bucket: bucket.flat["exp_avg_sq"], "exp_avg_sq of"),
    ("OnebitAdam", 4, lambda bucket: bucket.flat["denominator"], "denominator of"),
    ("OnebitAdam", 4, lambda bucket: bucket.frames, "packed momentum of"),
    ("OnebitLamb", 4, lambda bucket: bucket.flat["denominator"], "denominator of"),
    ("ZeroOneAdam", 1, lambda bucket: bucket.flat["exp_avg_sq"], "exp_avg_sq of"),
    ("ZeroOneAdam", 1, lambda bucket: bucket.flat["exp_avg_update"], "exp_avg_update of"),
]


@pytest.mark.parametrize(("name", "steps", "tensor", "expected"), REPLICATED)
def test_a_bit_that_flips_in_replicated_state_is_found(name: str, steps: int, tensor: Callable, expected: str) -> None:
    def ours(transport: SimTransport) -> str:
        params, optimizer = make(name, transport)
        for _ in range(steps):
            step(params, optimizer, transport.rank)
        optimizer.check_replicas()
        if transport.rank == 1:
            flip(tensor(optimizer.buckets[0]))
        with pytest.raises(onebit.ReplicaError) as caught:
            optimizer.check_replicas()
        return str(caught.value)

    for message in run_ranks(2, ours):
        assert f"rank [1] holds other values than rank 0 in {expected}" in message


def test_the_engine_stops_with_a_dense_optimizer_as_well() -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "onebit": {"max_consecutive_skips": 3},
    }
    model = nn.Linear(3, 1)
    engine, *_ = zero.initialize(model=model, config=config)
    with pytest.raises(SkippedStepsError, match=r"3 steps in a row were skipped.* not finite: weight on rank 0\."):
        for _ in range(5):
            engine.backward(engine(torch.full((4, 3), float("inf"))).sum())
            engine.step()
    engine.close()
    assert engine.global_steps == 2 and all(p.isfinite().all() for p in model.parameters())
