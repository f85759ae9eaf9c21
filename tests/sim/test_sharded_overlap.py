"""Frames that go up during backward at stages 0 and 1 change no bit, whatever becomes of the step.

`test_late_votes.py` trains with them and without.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family import same
from sharded_ranks import new, state_of, take_steps, values
from test_late_votes import CAP, LEAVES, SIZES, read_late
from test_optimizer_overlap import Recorder
from torch import Tensor

from onebit.agreement.step_vote import DesyncError
from onebit.comm import SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb

STEPS = 9


@pytest.fixture(params=["votes read early", "votes read late"])
def votes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "votes read late":
        read_late(monkeypatch)


def backward(params: list[torch.nn.Parameter], step: int, rank: int) -> None:
    data = torch.Generator().manual_seed(100 * step + rank)
    targets = [torch.randn(p.shape, generator=data) for p in params]
    torch.stack([(p - t).square().sum() for p, t in zip(params, targets, strict=True)]).sum().backward()


@pytest.mark.parametrize("stage", [0, 1])
def test_frames_leave_during_backward(stage: int) -> None:
    """Behind the warm-up; the first layer's gradient, which comes last, is the last bucket's."""

    def work(transport: SimTransport) -> list[list[str]]:
        recorder = Recorder(transport)
        params, optimizer = new(recorder, sizes=SIZES, stage=stage, bucket_cap_mb=CAP, warmup_steps=4)
        assert len(optimizer.buckets) == 3
        params[0].register_hook(lambda _: recorder.events.append("first layer's backward"))
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            x = torch.zeros(())
            for p in params:  # a chain, so that gradients come last layer first
                x = (p * (1 + transport.rank + step) + x).square().mean()
            recorder.events.clear()
            x.backward()
            seen.append(list(recorder.events))
            optimizer.step()
        return seen

    for seen in run_ranks(2, work):
        assert all(events == ["first layer's backward"] for events in seen[:4])
        for events in seen[4:]:
            assert events == ["phase 1", "phase 1", "first layer's backward", "phase 1"]


STAGE_1: dict[str, tuple[type, dict[str, Any]]] = {
    "adam, stage 1": (ShardedOnebitAdam, {"warmup_steps": 3}),
    "lamb, stage 1": (ShardedOnebitLamb, {"weight_decay": 0.1, "warmup_steps": 3}),
}
EDITS: dict[str, tuple[Callable, int]] = {  # and how many steps are sent twice, of those that may be
    "clipped": (lambda params, _: torch.nn.utils.clip_grad_norm_(params, 0.5), 3),
    "edited behind torch's back": (lambda params, _: params[2].grad.data.mul_(0.5), 1),
    "dropped": (lambda params, _: setattr(params[1], "grad", None), 3),
    "spoilt": (lambda params, _: params[3].grad.__setitem__(5, float("nan")), 3),
    "scaled": (lambda _, optimizer: setattr(optimizer, "grad_scale", torch.tensor(4.0)), 3),
}


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.usefixtures("votes")
@pytest.mark.parametrize(
    ("edit", "leaf"),
    [(edit, "adam, stage 1") for edit in EDITS]
    + [
        ("clipped", "adam, stage 0"),
        ("spoilt", "adam, stage 0"),
        ("dropped", "lamb, stage 1"),
        ("scaled", "lamb, stage 1"),
    ],
)
def test_gradients_that_change_behind_backward_count_as_they_are(
    edit: str, leaf: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On one rank: all ranks send once more, and after three such steps in a row they send in step()."""
    act, resent = EDITS[edit]
    kind, own = {"adam, stage 0": LEAVES["adam, stage 0"], **STAGE_1}[leaf]

    def work(transport: SimTransport, overlap: bool) -> tuple[Tensor, list[Tensor], list[int]]:
        options = {"bucket_cap_mb": CAP, "max_consecutive_skips": 0, **own, "overlap": overlap}
        params, optimizer = new(transport, sizes=SIZES, kind=kind, **options)
        counts = []
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(params, step, transport.rank)
            if transport.rank == 1 and step >= 3:
                act(params, optimizer)
            optimizer.step()
            counts.append(optimizer.stats.resent_steps)
        assert optimizer.stats.skipped_steps == (STEPS - 3 if edit == "spoilt" else 0)
        return values(params), state_of(optimizer), counts

    with caplog.at_level(logging.WARNING):
        plain, early = (run_ranks(2, lambda transport, on=on: work(transport, on)) for on in (False, True))
    for (x, state, _), (y, other, counts) in zip(plain, early, strict=True):
        assert torch.equal(x, y) and same(state, other)
        assert counts[-1] == resent and counts[2] == 0
    assert ("are sent once more" in caplog.text) == (edit != "scaled")


@pytest.mark.parametrize("how", ["given up", "accumulated", "in no_sync"])
def test_backward_passes_that_are_not_the_last_of_their_step(how: str) -> None:
    def work(transport: SimTransport, overlap: bool) -> tuple[Tensor, list[Tensor], int, int]:
        params, optimizer = new(transport, sizes=SIZES, bucket_cap_mb=CAP, warmup_steps=3, overlap=overlap)
        for step in range(STEPS):
            optimizer.zero_grad()
            if how == "in no_sync":
                with optimizer.no_sync():
                    backward(params, 50 + step, transport.rank)
            else:
                backward(params, 50 + step, transport.rank)
            if how == "given up" and step == 5:
                optimizer.zero_grad()
            if how != "given up" or step == 5:
                backward(params, step, transport.rank)
            optimizer.step()
        return values(params), state_of(optimizer), optimizer.stats.resent_steps, transport.sent_bytes

    plain, early = (run_ranks(2, lambda transport, on=on: work(transport, on)) for on in (False, True))
    for (x, state, _, sent), (y, other, resent, sent_early) in zip(plain, early, strict=True):
        assert torch.equal(x, y) and same(state, other)
        assert resent == (how == "given up") and (sent == sent_early) == (not resent)


@pytest.mark.usefixtures("votes")
def test_a_state_is_saved_and_loaded_between_a_backward_pass_and_its_step() -> None:
    """What has gone up has changed nothing, and is forgotten where another state is loaded."""

    def work(transport: SimTransport) -> None:
        params, optimizer = new(transport, sizes=SIZES, bucket_cap_mb=CAP, warmup_steps=3)
        for step in range(6):
            optimizer.zero_grad()
            backward(params, step, transport.rank)
            if step == 5:
                state = copy.deepcopy(optimizer.state_dict())
                start = [p.detach().clone() for p in params]
            optimizer.step()
        after, kept = values(params), state_of(optimizer)
        optimizer.zero_grad()
        backward(params, 6, transport.rank)
        with torch.no_grad():
            for p, x in zip(params, start, strict=True):
                p.copy_(x)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        backward(params, 5, transport.rank)
        optimizer.step()
        assert torch.equal(values(params), after) and same(state_of(optimizer), kept)

    run_ranks(2, work)


@pytest.mark.usefixtures("votes")
@pytest.mark.parametrize(
    ("stage", "warmup_steps", "option"), [(0, 2, "lr"), (1, 2, "lr"), (2, 2, "lr"), (1, 0, "betas")]
)
def test_ranks_with_different_options_write_nothing(stage: int, warmup_steps: int, option: str) -> None:
    """Rates that differ before backward; or what a momentum weighs, once frames have gone up."""

    def work(transport: SimTransport) -> None:
        params, optimizer = new(transport, sizes=SIZES, stage=stage, bucket_cap_mb=CAP, warmup_steps=warmup_steps)
        take_steps(params, optimizer, range(3))
        before, state, group = values(params), state_of(optimizer), optimizer.param_groups[0]
        optimizer.zero_grad()
        if option == "lr":
            group["lr"] = 0.01 * (1 + transport.rank)
        with pytest.raises(DesyncError, match=rf"different values of {option}.* in parameter group 0"):
            backward(params, 3, transport.rank)
            if option == "betas":
                group["betas"] = (0.9 - 0.1 * transport.rank, 0.99)
            optimizer.step()
        assert torch.equal(values(params), before) and same(state_of(optimizer), state)

    run_ranks(2, work)


@pytest.mark.usefixtures("votes")
def test_a_momentums_weight_that_changes_behind_backward_counts_as_it_is() -> None:
    def work(transport: SimTransport, overlap: bool) -> tuple[Tensor, list[Tensor]]:
        params, optimizer = new(transport, sizes=SIZES, bucket_cap_mb=CAP, warmup_steps=3, overlap=overlap)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(params, step, transport.rank)
            optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * step, 0.99)
            optimizer.step()
        return values(params), state_of(optimizer)

    plain, early = (run_ranks(2, lambda transport, on=on: work(transport, on)) for on in (False, True))
    assert same(plain, early)
