"""Buckets that leave during backward, accumulation, clipping and loss scales, for every optimizer of the family."""

from __future__ import annotations

import time

import pytest
import torch
from family import FAMILY, flat, fresh, loss_of, model, same, train
from torch import Tensor, nn

import onebit
from onebit.comm import IdentityCodec, SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam

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
        transport._numbering = recorder._numbering
        plain_net, plain = fresh(transport, bucket_cap_mb=0.004, overlap=False)
        train(transport, range(10), plain_net, plain)
        return torch.equal(flat(net), flat(plain_net))

    assert run_ranks(2, ours) == [True, True]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_counts_what_it_waits_for_the_others(overlap: bool, delay: int) -> None:
    """All of the time for which another rank is late, at whichever of a step's exchanges it is waited for."""
    LATE_S, STEPS = 0.2, 8

    def ours(transport: SimTransport) -> list[float]:
        net, optimizer = fresh(transport, bucket_cap_mb=0.004, overlap=overlap, delay=delay)
        waits = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, transport.rank).backward()
            if step >= STEPS - 3 and transport.rank == 1:
                time.sleep(LATE_S)
            optimizer.step()
            waits.append(1e-3 * optimizer.stats.comm_ms)
        return waits[-2:]  # with a delay the first late step is waited for in the second

    punctual, late = run_ranks(2, ours)
    assert all(waited > 0.5 * LATE_S for waited in punctual), punctual
    assert sum(late) < sum(punctual), late


@pytest.mark.parametrize("make", [*FAMILY, "sharded"])
def test_a_graph_from_before_the_step_is_refused(make: str) -> None:
    """As with torch's own optimizers, whose writes autograd counts; in every phase."""
    transport = SimTransport()
    if make == "sharded":
        net = model()
        optimizer = ShardedOnebitAdam(net.parameters(), lr=0.01, warmup_steps=5, transport=transport)
    else:
        net, optimizer = fresh(transport, make)
    for step in range(20):
        old = loss_of(net, step, 0)
        loss_of(net, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        optimizer.zero_grad()


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
    """The scale is taken out in step(), overlap or not; an overflow on one rank makes both skip."""

    def ours(transport: SimTransport, scaled: bool, overlap: bool = False) -> tuple[Tensor, int]:
        net, optimizer = fresh(transport, overlap=overlap)
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
    late, early = (run_ranks(2, lambda transport, on=on: ours(transport, True, on)) for on in (False, True))
    assert same(late, early)
    for weights, skipped in late:
        assert skipped == 1
        torch.testing.assert_close(weights, plain, atol=1e-6, rtol=0)
