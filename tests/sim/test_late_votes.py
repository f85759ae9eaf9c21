"""Votes that are read at the step's end decide what votes read before anything is sent decide, to the bit."""

from __future__ import annotations

import logging

import pytest
import torch
from family import same
from sharded_ranks import new, state_of, take_steps, values
from torch import Tensor, nn

import onebit.zero.sharded.votes
from onebit.comm import Log4Codec, SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

SIZES = (600, 7, 900, 300)
CAP = 700 * 4 / 2**20
LEAVES = {
    "adam": (ShardedOnebitAdam, {"stage": 2, "warmup_steps": 3}),
    "adam, four-bit warm-up": (ShardedOnebitAdam, {"stage": 2, "warmup_steps": 3, "warmup_codec": Log4Codec()}),
    "lamb": (ShardedOnebitLamb, {"stage": 2, "weight_decay": 0.1, "warmup_steps": 3}),
    "zero-one": (
        ShardedZeroOneAdam,
        {"stage": 2, "local_step_scaler": 2, "local_step_clipper": 4, "warmup_steps": 2},
    ),
    "adam, stage 0": (ShardedOnebitAdam, {"stage": 0, "warmup_steps": 3}),
    "adam, stage 1, clipped": (ShardedOnebitAdam, {"warmup_steps": 3, "max_grad_norm": 5.0}),
    "zero-one, stage 1, clipped": (
        ShardedZeroOneAdam,
        {"local_step_scaler": 2, "local_step_clipper": 4, "warmup_steps": 2, "max_grad_norm": 5.0},
    ),
}
# In which step which rank's gradient of which parameter is not there (None), or not finite.
EVENTS: dict[int, tuple[int | None, int, float | None]] = {
    0: (1, 3, float("nan")),
    1: (0, 0, None),
    2: (2, 2, float("inf")),
    3: (None, 1, None),
    4: (0, 2, float("nan")),  # the first that would be in one bit
    5: (2, 3, float("nan")),
    8: (1, 1, float("nan")),
    9: (2, 0, None),
}


def read_late(patch: pytest.MonkeyPatch) -> None:
    """As on a device whose tensors the transport reaches."""
    patch.setattr(onebit.zero.sharded.votes, "reads_late", lambda transport, device: True)


def trained(transport: SimTransport, leaf: str, **options: object) -> tuple[list[Tensor], list[Tensor], list[object]]:
    """Parameters, state, and the figures of all steps, of a run in which all `EVENTS` happen."""
    kind, own = LEAVES[leaf]
    params, optimizer = new(transport, torch.bfloat16, SIZES, kind, bucket_cap_mb=CAP, **own, **options)
    assert len(optimizer.buckets) > 2
    figures: list[object] = []
    for step in range(11):
        rank, k, factor = EVENTS.get(step, (-1, 0, 1.0))
        data = torch.Generator().manual_seed(100 * step + transport.rank)
        losses = []
        for number, p in enumerate(params):
            target = torch.randn(p.shape, generator=data)
            is_hit = number == k and rank in (None, transport.rank)
            if not is_hit or factor is not None:
                losses.append((p - target).square().sum() * (factor if is_hit else 1.0))
        torch.stack(losses).sum().backward()
        optimizer.step()
        stats = optimizer.stats
        figures.append(
            (stats.phase, stats.is_skipped, stats.skipped_steps, stats.health, stats.agreement, stats.offset)
        )
        figures.append((stats.clip_factor, stats.grad_norm, optimizer.clipper.average))
        figures.append([(bucket.is_warm, bucket.mean is None) for bucket in optimizer.buckets])
        assert all(bucket.gate is None for bucket in optimizer.buckets)
    return [p.detach().clone() for p in params], state_of(optimizer), figures


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
def test_when_votes_are_read_and_when_frames_leave_changes_no_bit(leaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, state and figures. Frames leave in backward or in step(); at stage 2 always in backward."""
    ways = [{}] if LEAVES[leaf][1].get("stage") == 2 else [{}, {"overlap": False}]
    expected, *others = (run_ranks(3, lambda transport, on=on: trained(transport, leaf, **on)) for on in ways)
    assert any(is_skipped for _, is_skipped, *_ in expected[0][2][::3])
    read_late(monkeypatch)
    others += [run_ranks(3, lambda transport, on=on: trained(transport, leaf, **on)) for on in ways]
    assert all(same(expected, other) for other in others)


@pytest.mark.parametrize(
    ("stage", "steps", "what"), [(1, [2, 2, 2, 2], "the step"), (2, [3, 3, 2, 3], "these parameters")]
)
def test_a_vote_read_late_names_the_parameter_on_its_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: int, steps: list[int], what: str
) -> None:
    read_late(monkeypatch)

    def work(transport: SimTransport) -> None:
        params, optimizer = new(transport, sizes=SIZES, stage=stage, bucket_cap_mb=CAP, warmup_steps=0)

        def spoil(step: int, grads: list[Tensor]) -> None:
            if transport.rank == 1 and step == 2:
                grads[2][5] = float("nan")

        take_steps(params, optimizer, range(3), spoil)
        assert optimizer.stats.is_skipped and [int(optimizer.state[p]["step"]) for p in params] == steps

    with caplog.at_level(logging.WARNING):
        run_ranks(2, work)
    assert f"rank 1: gradient not finite in parameter 2 of group 0; all ranks skip {what}" in caplog.text


def test_votes_are_read_early_in_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """There headers may differ: a rank that has finished has no numbers of its own."""

    def work(transport: SimTransport) -> tuple[Tensor, list[Tensor], int]:
        params, optimizer = new(transport, sizes=SIZES, stage=2, bucket_cap_mb=CAP, warmup_steps=2)
        with optimizer.join():
            for step in range(3 + transport.rank):
                take_steps(params, optimizer, range(step, step + 1))
                optimizer.param_groups[0]["lr"] *= 0.9
        return values(params), state_of(optimizer), optimizer.stats.shadow_steps

    early = run_ranks(3, work)
    assert [steps for *_, steps in early] == [2, 1, 0]
    read_late(monkeypatch)
    assert same(early, run_ranks(3, work))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_is_trained_all_at_once_is_refused(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    read_late(monkeypatch)

    def work(transport: SimTransport) -> None:
        params = [nn.Parameter(torch.ones(600)), nn.Parameter(torch.ones(7), requires_grad=False)]
        optimizer = ShardedOnebitAdam(params, transport=transport, stage=stage)
        for step in range(2):  # in which votes are read early
            params[0].grad = torch.full((600,), 1.0 + step + transport.rank)
            optimizer.step()
        before = params[0].detach().clone()
        optimizer.zero_grad()
        params[1].requires_grad_(transport.rank == 1)
        sum(p.sum() for p in params).backward()
        with pytest.raises(RuntimeError, match="parameter 1"):
            optimizer.step()
        assert torch.equal(params[0].detach(), before)

    run_ranks(2, work)
