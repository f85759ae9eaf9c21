"""What a step without warm-up asks of a device: operations, messages and waits, counted and held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from family import flat, fresh, loss_of, same, snapshot, train
from muon_of import muon_of
from step_counts import CountedTransport, counted, watching
from torch import nn

import onebit
import onebit.optimizer
import onebit.zero.sharded.votes
from onebit.agreement.step_vote import DesyncError
from onebit.comm import SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

BUCKETS, WARM = 8, 2
ZERO_ONE = {"lr": 0.01, "var_freeze_step": WARM, "var_update_scaler": 1}
LOCAL = ZERO_ONE | {"local_step_scaler": 3, "local_step_clipper": 4}
# In the phase: at most so many fused calls, small operations, messages, and waits for the device.
REPLICATED: dict[str, tuple[Callable, dict, str, tuple[int, int, int, int]]] = {
    "Adam": (onebit.OnebitAdam, {"freeze_step": WARM}, "compressed", (24, 12, 17, 1)),
    "Adam, clipped": (onebit.OnebitAdam, {"freeze_step": WARM, "max_grad_norm": 1.0}, "compressed", (40, 24, 17, 1)),
    "Adam, unclipped": (onebit.OnebitAdam, {"freeze_step": WARM, "max_grad_norm": 1e6}, "compressed", (32, 24, 17, 1)),
    "Muon": (muon_of, {"freeze_step": WARM}, "compressed", (24, 419, 17, 1)),
    "Lamb": (onebit.OnebitLamb, {"freeze_step": WARM}, "compressed", (32, 238, 18, 1)),
    "0/1 Adam": (onebit.ZeroOneAdam, ZERO_ONE | {"local_step_clipper": 1}, "compressed", (32, 11, 17, 1)),
    "0/1 Adam, after local steps": (onebit.ZeroOneAdam, LOCAL, "compressed", (32, 36, 18, 2)),
    "0/1 Adam, a local step": (onebit.ZeroOneAdam, LOCAL, "local", (8, 10, 0, 1)),
    "0/1 Adam, a clipped local step": (onebit.ZeroOneAdam, LOCAL | {"max_grad_norm": 1.0}, "local", (8, 75, 0, 2)),
}
# The votes, which the norms go into on the device, are read with a look at all that came down, before parameters move.
SHARDED: dict[str, tuple[Callable, dict, tuple[int, int, int, int]]] = {
    "stage 0": (ShardedOnebitAdam, {"stage": 0, "overlap": False}, (32, 154, 17, 1)),
    "stage 1": (ShardedOnebitAdam, {"overlap": False}, (32, 179, 17, 1)),
    "stage 1, overlapped": (ShardedOnebitAdam, {}, (40, 143, 17, 1)),
    "stage 1, clipped": (ShardedOnebitAdam, {"max_grad_norm": 1.0}, (40, 236, 17, 1)),
    "stage 2": (ShardedOnebitAdam, {"stage": 2}, (32, 452, 24, 1)),
    "Lamb, stage 2": (ShardedOnebitLamb, {"stage": 2}, (32, 860, 32, 1)),
    "Lamb, stage 1": (ShardedOnebitLamb, {}, (40, 551, 25, 1)),
    "0/1 Adam, stage 1": (ShardedZeroOneAdam, {}, (40, 143, 17, 1)),
}


@pytest.fixture
def reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose tensors the transport reaches."""
    for module in (onebit.optimizer, onebit.zero.sharded.votes):
        monkeypatch.setattr(module, "reads_late", lambda transport, device: True)


def counts_of(kind: Callable, options: dict, phase: str) -> tuple[int, int, int, int]:
    """Of rank 0's last step in this phase, with a parameter in each of 8 buckets."""

    def rank(transport: SimTransport) -> dict[str, tuple[int, int, int, int]]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(16, 64, generator=generator)) for _ in range(BUCKETS)]
        counting = CountedTransport(transport.network, transport.rank)
        optimizer = kind(params, transport=counting, bucket_cap_mb=16 * 64 * 4 / 2**20, **{"lr": 0.01} | options)
        assert len(optimizer.buckets) == BUCKETS
        found = {}
        for _ in range(9 if "local_step_scaler" in options else 6):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            on_host = getattr(optimizer, "steps", None) or [
                step for bucket in optimizer.buckets for step in bucket.steps
            ]
            with counted(on_host) as counts:
                optimizer.step()
            found[optimizer.stats.phase] = counts.totals
        return found

    with watching():
        return run_ranks(2, rank)[0][phase]


def check_at_most(found: tuple[int, ...], most: tuple[int, ...]) -> None:
    assert all(n <= limit for n, limit in zip(found, most, strict=True)), (
        f"fused calls, small operations, messages, waits: {found}; at most {most}"
    )


@pytest.mark.usefixtures("reads_late")
@pytest.mark.parametrize("form", REPLICATED)
def test_a_replicated_step_waits_for_the_device_once(form: str) -> None:
    kind, options, phase, most = REPLICATED[form]
    check_at_most(counts_of(kind, options, phase), most)


def test_on_the_host_votes_are_read_before_the_verdict() -> None:
    kind, options, phase, (fused, small, messages, _) = REPLICATED["Adam"]
    check_at_most(counts_of(kind, options, phase), (fused, small, messages, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("reads_late")
@pytest.mark.parametrize("form", SHARDED)
def test_a_sharded_step_looks_once_at_all_that_came_down(form: str) -> None:
    kind, options, most = SHARDED[form]
    check_at_most(counts_of(kind, options | {"warmup_steps": WARM}, "compressed"), most)


@pytest.mark.parametrize(("stage", "most"), [(1, (40, 98, 17, 2)), (2, (32, 140, 24, BUCKETS + 1))])
def test_on_the_host_a_vote_is_waited_for_before_its_buckets_go_on(stage: int, most: tuple[int, int, int, int]) -> None:
    options = {"stage": stage, "warmup_steps": WARM}
    check_at_most(counts_of(ShardedOnebitAdam, options, "compressed"), most)


# ---------------------------------------------------------------- votes read late decide what votes read early decide


@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_a_vote_read_late_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(transport: SimTransport) -> tuple[list, dict]:
        net, optimizer = fresh(transport, name)
        return train(transport, range(12), net, optimizer), snapshot(optimizer)

    early = run_ranks(2, rank)
    monkeypatch.setattr(onebit.optimizer, "reads_late", lambda transport, device: True)
    assert same(early, run_ranks(2, rank))


@pytest.mark.usefixtures("reads_late")
def test_votes_read_late_skip_on_all_ranks_where_one_has_no_finite_gradient() -> None:
    def rank(transport: SimTransport) -> int:
        net, optimizer = fresh(transport)
        train(transport, range(8), net, optimizer)
        before, state = flat(net), snapshot(optimizer)
        optimizer.zero_grad()
        loss_of(net, 8, transport.rank).backward()
        if transport.rank == 1:
            next(net.parameters()).grad[0, 0] = float("nan")
        optimizer.step()
        assert torch.equal(flat(net), before) and same(snapshot(optimizer)["state"], state["state"])
        train(transport, range(9, 11), net, optimizer)
        assert not torch.equal(flat(net), before)
        return optimizer.stats.skipped_steps

    assert run_ranks(3, rank) == [1, 1, 1]


@pytest.mark.usefixtures("reads_late")
def test_votes_read_late_send_changed_gradients_once_more() -> None:
    def rank(transport: SimTransport, factor: float) -> torch.Tensor:
        net, optimizer = fresh(transport, overlap=factor == 2.0)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            if step == 7 and transport.rank == 0:
                for p in net.parameters():
                    p.grad.mul_(2.0)
            optimizer.step()
        assert optimizer.stats.resent_steps == (factor == 2.0)
        return flat(net)

    resent, sent_once = (run_ranks(2, lambda transport, f=f: rank(transport, f)) for f in (2.0, 1.0))
    assert same(resent, sent_once)


@pytest.mark.usefixtures("reads_late")
def test_votes_read_late_refuse_different_learning_rates_before_anything_is_written() -> None:
    def rank(transport: SimTransport) -> None:
        net, optimizer = fresh(transport)
        train(transport, range(8), net, optimizer)
        before = flat(net)
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + transport.rank)
        with pytest.raises(DesyncError, match="different values of lr in parameter group 0"):
            train(transport, range(8, 9), net, optimizer)
        assert torch.equal(flat(net), before)

    run_ranks(2, rank)
