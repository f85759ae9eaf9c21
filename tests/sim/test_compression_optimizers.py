"""Compressed models under every optimizer, in plain loops: ranks (threads) that read the same train as one alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compression_cases import GPT_TECHNIQUES, config, gpt, gpt_loss, technique, windows
from torch import Tensor, nn
from train.model import next_byte_loss

import onebit
from onebit.comm import SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam
from onebit.zero.compression import CompressionScheduler, init_compression, redundancy_clean

STEPS = 8
Make = Callable[[nn.Module, SimTransport], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "OnebitAdam": lambda m, t: onebit.OnebitAdam(
        m.parameters(), lr=5e-3, freeze_step=3, transport=t, compression="always", codec=onebit.comm.SignCodec(64)
    ),
    "ZeroOneAdam": lambda m, t: onebit.ZeroOneAdam(
        m.parameters(), lr=5e-3, var_freeze_step=3, local_step_scaler=2, local_step_clipper=2, transport=t,
        compression="always", codec=onebit.comm.SignCodec(64),
    ),
    "OnebitMuon": lambda m, t: onebit.OnebitMuon(
        onebit.muon_groups(m, head=None), lr=5e-3, transport=t, compression="always", codec=onebit.comm.SignCodec(64)
    ),
    "ShardedOnebitAdam": lambda m, t: ShardedOnebitAdam(m.parameters(), lr=5e-3, transport=t, block=64, warmup_steps=3),
}  # fmt: skip


def run(make: Make, ranks: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each rank: the trained state, logits before and after cleaning."""

    def train(transport: SimTransport) -> tuple[Tensor, Tensor, Tensor]:
        model = init_compression(gpt(), config(**GPT_TECHNIQUES))
        optimizer: Any = make(model, transport)
        CompressionScheduler(model).attach(optimizer)
        for k in range(STEPS):
            gpt_loss(model, k).backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        onebit.sync_buffers(model, transport)
        state = torch.cat([x.detach().double().flatten() for x in model.state_dict().values()])
        with torch.no_grad():
            before = model.eval()(windows(99)[:, :-1])
            return state, before, redundancy_clean(model)(windows(99)[:, :-1])

    return run_ranks(ranks, train, timeout_s=60)


def masks_after_local_steps(transport: SimTransport, *, synchronises: bool) -> Tensor:
    """Switched on where replicas have read apart and not met since the step before."""
    chosen = technique(["blocks"], {"dense_ratio": 0.5}, schedule_offset=6)  # between two exchanges
    model = init_compression(gpt(), config(sparse_pruning=chosen))
    optimizer: Any = OPTIMIZERS["ZeroOneAdam"](model, transport)
    scheduler = CompressionScheduler(model, None if synchronises else lambda: None)
    scheduler.attach(optimizer)
    for k in range(6):
        gpt_loss(model, 2 * k + transport.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([x.flatten() for name, x in model.named_buffers() if name.endswith(".mask")])


@pytest.mark.slow
def test_masks_are_chosen_of_the_same_weights_on_all_ranks() -> None:
    one, other = run_ranks(2, lambda t: masks_after_local_steps(t, synchronises=True), timeout_s=60)
    assert torch.equal(one, other) and 2 * int(one.sum()) == one.numel()
    one, other = run_ranks(2, lambda t: masks_after_local_steps(t, synchronises=False), timeout_s=60)
    assert not torch.equal(one, other)  # what would become of it


def loss_of(logits: Tensor) -> float:
    return next_byte_loss(logits, windows(99)).item()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_train_as_one_alone(name: str) -> None:
    ranks, (alone,) = run(OPTIMIZERS[name], 2), run(OPTIMIZERS[name], 1)
    assert torch.equal(ranks[0][0], ranks[1][0]) and torch.equal(ranks[0][2], ranks[1][2])
    for state, before, after in (*ranks, alone):
        assert torch.isfinite(state).all()
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    losses = [loss_of(before) for _, before, _ in (ranks[0], alone)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)  # scales are of other elements
    assert max(losses) < loss_of(gpt()(windows(99)[:, :-1])) - 0.01
