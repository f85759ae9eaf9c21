"""What communication hooks of DistributedDataParallel cost in loss: ours beside PowerSGD's, the dense mean, no wrapper.

    torchrun --nproc-per-node 2 scripts/study.py ddp-hooks --record scripts/records/ddp_hooks_2026-11.md

All train the byte LM with AdamW on the same batches, by the same learning rates; every hook leaves gradients as they
are for the same first steps. Bits are what a rank sends per parameter in a later step. All ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from bench.record import here
from provenance import add_record
from reports import gap_text, publish, table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from train.model import decay_groups
from train.schedule import train_steps

import onebit
from onebit import comm
from study.catalog import load_task
from study.run import WEIGHT_DECAY
from study.tasks import Batch, Task


@dataclass(frozen=True)
class Settings:
    """What all runs have in common. start: steps in which gradients travel in full. rows: of a rank's batch."""

    steps: int
    start: int
    lr: float
    rows: int = 8
    seeds: int = 3


class LossOf(nn.Module):
    """DDP averages the gradients of what its forward computes: the loss."""

    def __init__(self, task: Task, model: nn.Module):
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Batch) -> Tensor:
        return self.task.loss(self.model, batch)


@dataclass
class Wrapped:
    """What computes a loss, an optimizer, and what a rank sent in the last step, in bits per parameter."""

    loss: nn.Module
    optimizer: torch.optim.Optimizer
    bits: Callable[[], float]


def _dense_bits() -> float:
    return 64.0 * (dist.get_world_size() - 1) / dist.get_world_size()


def _ddp(module: LossOf) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(decay_groups(module.model, WEIGHT_DECAY), lr=1.0)
    return DistributedDataParallel(module), optimizer


def dense(module: LossOf, settings: Settings) -> Wrapped:
    return Wrapped(*_ddp(module), _dense_bits)


def power_sgd(rank: int) -> Callable[[LossOf, Settings], Wrapped]:
    """torch's hook, with its own warm start, error feedback and least rate of compression."""

    def wrap(module: LossOf, settings: Settings) -> Wrapped:
        wrapped, optimizer = _ddp(module)
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=settings.start)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return Wrapped(wrapped, optimizer, lambda: _dense_bits() / state.compression_stats()[0])

    return wrap


def ours(codec: comm.Codec) -> Callable[[LossOf, Settings], Wrapped]:
    def wrap(module: LossOf, settings: Settings) -> Wrapped:
        wrapped, optimizer = _ddp(module)
        state = onebit.DDPHookState(wrapped, start_step=settings.start, codec=codec)
        wrapped.register_comm_hook(state, onebit.ddp_hook)
        return Wrapped(wrapped, optimizer, lambda: state.bits_per_parameter)

    return wrap


def unwrapped(module: LossOf, settings: Settings) -> Wrapped:
    groups = decay_groups(module.model, WEIGHT_DECAY)
    optimizer = onebit.OnebitAdam(groups, freeze_step=settings.start, compression="always", transport=comm.init())
    return Wrapped(module, optimizer, lambda: optimizer.stats.bits_per_parameter)


WAYS: dict[str, Callable[[LossOf, Settings], Wrapped]] = {
    "DDP, no hook": dense,
    "PowerSGD, rank 4": power_sgd(4),
    "PowerSGD, rank 1": power_sgd(1),
    "onebit.ddp_hook, log4": ours(comm.Log4Codec()),
    "onebit.ddp_hook": ours(comm.SignCodec()),
    "no DDP: OnebitAdam": unwrapped,
}


@dataclass
class Found:
    losses: list[float] = field(default_factory=list)
    bits: float = 0.0
    seconds: float = 0.0


def train(task: Task, way: str, settings: Settings, seed: int, found: Found) -> None:
    """One run; its validation loss."""
    model, began = task.build(seed), time.perf_counter()
    wrapped = WAYS[way](LossOf(task, model), settings)

    def loss_of(step: int) -> Tensor:
        return wrapped.loss(task.batch(seed, step, dist.get_rank(), settings.rows))

    for _ in train_steps(wrapped.optimizer, settings.steps, loss_of, settings.lr):
        pass
    found.seconds += time.perf_counter() - began
    found.bits = wrapped.bits()
    found.losses.append(task.evaluate(model))


def report(all_found: dict[str, Found], settings: Settings) -> str:
    plain, rows = all_found["DDP, no hook"].losses, []
    for way, found in all_found.items():
        gap = "" if way == "DDP, no hook" else gap_text(found.losses, plain)
        cells = [way, f"{statistics.mean(found.losses):.4f}", gap, f"{found.bits:.2f}"]
        rows.append([*cells, f"1/{_dense_bits() / found.bits:.0f}"])
    return f"""# Hooks of DDP

{here()}

The byte LM (0.12 M parameters) with AdamW on {dist.get_world_size()} ranks, {settings.steps} steps of {settings.rows}
rows a rank, the first {settings.start} with gradients in full; peak learning rate {settings.lr:g}. Validation loss in
nats per byte, mean of {settings.seeds} seeds; its gap to DDP's run of the same seed, mean and extremes. Bits: what a
rank sends per parameter in each later step.

{table(("way", "loss", "gap", "bits", "of DDP's"), rows)}
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py ddp-hooks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=int, default=100, help="steps in which gradients travel in full")
    parser.add_argument("--lr", type=float, default=4e-3, help="the peak")
    parser.add_argument("--seeds", type=int, default=3)
    add_record(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    comm.init()
    settings, task = Settings(args.steps, args.warmup, args.lr, seeds=args.seeds), load_task("byte-lm")
    all_found = {way: Found() for way in WAYS}
    for way, found in all_found.items():
        for seed in range(settings.seeds):
            train(task, way, settings, seed, found)
            if dist.get_rank() == 0:
                print(f"{way}, seed {seed}: {found.losses[-1]:.4f}, {found.seconds:.0f} s so far", flush=True)
    if dist.get_rank() == 0:
        publish(args, report(all_found, settings))
