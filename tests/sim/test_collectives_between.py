"""A collective of the script's own between backward() and step(), beside gradients that some ranks lack.

A rank whose buckets are complete sends in backward, its peer in step(), and in between both meet in the script's
collective: nobody may wait for a peer before step().
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from family import FAMILY
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport, hierarchical, run_ranks
from onebit.comm.transports.simulated import SimNetwork
from onebit.dense import DenseAverager

LEVELS = ["OnebitAdam, delayed", "OnebitAdam, two levels"]
STAGES = [f"ShardedOnebitAdam, stage {stage}" for stage in (0, 1, 2)]
STAGES += ["ShardedOnebitLamb, stage 2", "ShardedZeroOneAdam, stage 1"]
SHORT = {"warmup_steps": 3}


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 2 waits in backward for peers that are slow; here they lack gradients, and it would wait in vain."""
    monkeypatch.setattr("onebit.zero.sharded.optimizer.PATIENCE_S", 0.02, raising=False)


class Dropping(nn.Module):
    """Layers of which one rank leaves out another in each step, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        for p in self.parameters():
            p.data = 0.2 * torch.randn(p.shape, generator=draw)

    def forward(self, x: Tensor, dropped: int | None) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k != dropped:
                x = x + torch.tanh(layer(x))
        return x


class Averaged(torch.optim.AdamW):
    """AdamW on means that are sent during backward."""

    def __init__(self, params: list[nn.Parameter], transport: SimTransport):
        super().__init__(params, lr=0.01)
        self._averager = DenseAverager(params, transport, bucket_cap_mb=0.003)

    def step(self) -> None:  # type: ignore[override]
        self._averager.finish()
        super().step()


def made(name: str, net: nn.Module, transport: SimTransport) -> torch.optim.Optimizer:
    params, small = list(net.parameters()), {"bucket_cap_mb": 0.003, "compression": "always"}
    if name == "DenseAverager":
        return Averaged(params, transport)
    if ", stage " in name:
        kind, _, stage = name.partition(", stage ")
        options = {"lr": 0.01, "bucket_cap_mb": 0.003, "stage": int(stage), "transport": transport}
        return getattr(onebit.zero, kind)(params, **options, **({} if "Lamb" in kind else SHORT))
    if name == "OnebitAdam, delayed":
        return onebit.OnebitAdam(params, lr=0.01, freeze_step=4, delay=1, transport=transport, **small)
    if name == "OnebitAdam, two levels":
        return onebit.OnebitAdam(params, lr=0.01, freeze_step=4, transport=hierarchical(transport, 2), **small)
    kind, options = FAMILY[name]
    return kind(params, transport=transport, **options, **small)


def trained(transport: SimTransport, own: SimTransport | None, name: str, passes: int = 1) -> Tensor:
    """The parameters after some steps, in which ranks leave out layers of their own drawing."""
    net = Dropping()
    optimizer = made(name, net, transport)
    draw, batches = (torch.Generator().manual_seed(seed + transport.rank) for seed in (100, 200))
    for _ in range(14):
        for k in range(passes):
            dropped = int(torch.randint(-3, 6, (), generator=draw))
            out = net(torch.randn(4, 24, generator=batches), dropped if dropped >= 0 else None)
            loss = (out - 1.0).square().mean()
            with optimizer.no_sync() if k + 1 < passes else nullcontext():
                loss.backward()
        if own is not None:
            own.all_reduce(loss.detach().clone()).wait()
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(optimizer, "sync"):
        optimizer.sync()
    return torch.cat([p.detach().view(-1) for p in net.parameters()])


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "passes"),
    [
        *((name, 1) for name in ("OnebitAdam", "ZeroOneAdam", "OnebitLamb", *LEVELS, *STAGES, "DenseAverager")),
        ("OnebitAdam", 2),
        ("ShardedOnebitAdam, stage 2", 2),
    ],
)
def test_it_changes_nothing(name: str, passes: int) -> None:
    """The same bits as without the collective, on all ranks."""
    W = 4 if name == "OnebitAdam, two levels" else 2

    def run(is_between: bool) -> list[Tensor]:
        network = SimNetwork(W, timeout_s=8.0)

        def ours(transport: SimTransport) -> Tensor:
            return trained(transport, SimTransport(network, transport.rank) if is_between else None, name, passes)

        return run_ranks(W, ours, timeout_s=8.0)

    plain, between = run(False), run(True)
    assert all(torch.equal(each, plain[0]) for each in between + plain)
    assert bool(plain[0].isfinite().all())


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam", "ShardedOnebitAdam, stage 2"])
def test_it_may_travel_over_the_optimizers_own_transport(name: str) -> None:
    """What hooks launch has a channel apart: ranks need not agree on what comes first."""
    apart = run_ranks(2, lambda transport: trained(transport, None, name), timeout_s=8.0)
    shared = run_ranks(2, lambda transport: trained(transport, transport, name), timeout_s=8.0)
    assert all(torch.equal(each, apart[0]) for each in shared)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["OnebitAdam", "ShardedOnebitAdam, stage 2"])
def test_two_models_in_one_backward_pass(name: str) -> None:
    """Buckets of two optimizers over one transport leave in whichever order their gradients come."""

    def ours(transport: SimTransport) -> list[Tensor]:
        nets = [Dropping(), Dropping()]
        optimizers = [made(name, net, transport) for net in nets]
        draw = torch.Generator().manual_seed(transport.rank)
        for step in range(10):
            x, dropped = torch.randn(4, 24, generator=draw), 4 if (step + transport.rank) % 3 == 0 else None
            first, second = nets if (step + transport.rank) % 2 else reversed(nets)
            (second(first(x, dropped), None) - 1.0).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [torch.cat([p.detach().view(-1) for p in net.parameters()]) for net in nets]

    one, other = run_ranks(2, ours, timeout_s=8.0)
    assert all(map(torch.equal, one, other))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam", "OnebitAdam, delayed", "ShardedOnebitAdam, stage 2"])
def test_no_hook_waits_for_a_peer(name: str) -> None:
    """Backward ends on a rank whose peer has not begun its own."""
    ended = threading.Semaphore(0)  # counts: with a delay rank 0 ends a second backward before rank 1 begins its first

    def ours(transport: SimTransport) -> bool:
        net = Dropping()
        optimizer = made(name, net, transport)
        for step in range(8):
            optimizer.zero_grad()
            if transport.rank == 1:
                assert ended.acquire(timeout=10.0)
            (net(torch.full((4, 24), 1.0 + step), None) - 1.0).square().mean().backward()
            if transport.rank == 0:
                ended.release()
            optimizer.step()
        return True

    assert run_ranks(2, ours, timeout_s=8.0) == [True, True]
