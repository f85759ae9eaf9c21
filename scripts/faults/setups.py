"""Trainings over real processes, of every form: what the sections on peers, starts and cables break.

A `Setup` says how many ranks there are and what each of them opens: something that takes steps, has a fingerprint, and
closes. The same functions run in forks of one process (`peers.py`), under mpirun, and on emulated hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from faults.training import Training, fingerprint
from onebit import comm, zero
from onebit.comm import Transport
from onebit.zero import grid as grids

VOTE_EVERY = 4


class Run(Protocol):
    """One rank's training. transport: where it communicates with all others."""

    transport: Transport

    def step(self, number: int) -> None: ...

    def fingerprint(self) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """open(timeout_s): on every rank, once. ranks: how many; local: of them on each node, where that is said.

    is_by_fsdp: torch itself sends the most.
    """

    ranks: int
    open: Callable[[float], Run]
    local: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    is_by_fsdp: bool = False


@dataclass
class Plain:
    """An optimizer of the family over a transport."""

    transport: Transport
    training: Training

    def step(self, number: int) -> None:
        self.training.step(number)

    def fingerprint(self) -> str:
        return self.training.fingerprint()

    def close(self) -> None:
        self.transport.close()


def plain(name: str, backend: str = "gloo", levels: int = 1) -> Callable[[float], Plain]:
    def open_(timeout_s: float) -> Plain:
        transport = comm.init(backend, timeout_s=timeout_s, levels=levels)
        options: dict[str, object] = {"check_replicas_every": VOTE_EVERY}
        if not name.startswith("Sharded"):
            options["compression"] = "always"  # else a busy machine decides
        return Plain(transport, Training(name, transport, **options))

    return open_


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class EngineRun:
    """The engine, from a DeepSpeed configuration."""

    def __init__(self, config: dict, timeout_s: float, **sizes: int):
        self.grid = grids.start(timeout_s=timeout_s, **sizes)
        self.transport = self.grid.world
        common = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": None}
        self.engine, *_ = zero.initialize(model=Net(), config=common | config, grid=self.grid)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * number + self.grid.data[0])
        x = torch.randn(4, 12, generator=generator)
        loss = nn.functional.mse_loss(self.engine(x).float(), x[:, :4])
        self.engine.backward(loss)
        self.engine.step()

    def fingerprint(self) -> str:
        self.engine.synchronise()
        params = list(self.engine.module.parameters())
        return fingerprint([p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in params])

    def close(self) -> None:
        self.engine.close()


def engine(optimizer: str, stage: int, shard: int, **onebit_block: object) -> Callable[[float], EngineRun]:
    params: dict[str, object] = {"lr": 0.01}
    if optimizer == "OneBitAdam":
        params["freeze_step"] = 4
    config = {"optimizer": {"type": optimizer, "params": params}, "zero_optimization": {"stage": stage}}
    if onebit_block:
        config["onebit"] = onebit_block
    return lambda timeout_s: EngineRun(config, timeout_s, shard=shard)


PLAIN = {
    name: Setup(3, plain(name))
    for name in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam", "ShardedOnebitAdam", "ShardedOnebitLamb",
                 "ShardedZeroOneAdam", "AdamW")
}  # fmt: skip
TWO_LEVELS = Setup(4, plain("OnebitAdam", levels=2))
ENGINES = {
    "engine, OneBitAdam, stage 0": Setup(2, engine("OneBitAdam", 0, 1, compression="always")),
    "engine, OneBitAdam, stage 1 across nodes": Setup(2, engine("OneBitAdam", 1, 1)),
    "engine, OneBitAdam, stage 2 across nodes": Setup(2, engine("OneBitAdam", 2, 1)),
    "engine, OneBitAdam, stage 3 inside nodes": Setup(
        4, engine("OneBitAdam", 3, 2, compression="always"), is_by_fsdp=True
    ),
    "engine, AdamW, stage 2": Setup(2, engine("AdamW", 2, 2), is_by_fsdp=True),
    "engine, AdamW, stage 0": Setup(2, engine("AdamW", 0, 1)),
}
OVER_MPI = {name: Setup(3, plain(name, "mpi")) for name in ("OnebitAdam", "ShardedOnebitAdam")}
