"""The family of optimizers, a small model and its batches, for tests over all of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from muon_of import muon_of
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport
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
