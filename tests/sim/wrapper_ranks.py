"""What ranks under torchrun do with a model that another library has wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from errors import error_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit import comm, zero


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
    generator = torch.Generator().manual_seed(10 * k + comm.init().rank)
    optimizer.zero_grad()
    model(torch.randn(8, 20, generator=generator)).square().mean().backward()
    optimizer.step()


def train(
    wrap: Callable[[nn.Module], nn.Module], at: int, kind: Callable[..., torch.optim.Optimizer], **options: object
) -> None:
    """Five steps; from step `at` on through the wrapper."""
    plain = net()
    optimizer = kind(plain.parameters(), transport=comm.init(), bucket_cap_mb=0.002, **options)
    model = plain
    for k in range(5):
        model = wrap(plain) if k == at else model
        step(model, optimizer, k)


def with_noop_hook(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, noop_hook)
    return wrapped


class Wrapped(DistributedDataParallel):
    """As frameworks derive theirs."""


def initialize(wrap: Callable[[nn.Module], nn.Module]) -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    zero.initialize(model=nn.Sequential(wrap(net())), config=config)


def fully_sharded(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    onebit.OnebitAdam(model.parameters(), transport=comm.init())


def local_steps(params: Iterable[nn.Parameter], **options: object) -> onebit.LocalSteps:
    return onebit.LocalSteps(torch.optim.SGD(params, lr=0.1), every=2, **options)  # type: ignore[arg-type]


CASES: dict[str, Callable[[], None]] = {
    "OnebitAdam": lambda: train(DistributedDataParallel, 0, onebit.OnebitAdam),
    "OnebitAdam, overlap=False": lambda: train(DistributedDataParallel, 0, onebit.OnebitAdam, overlap=False),
    "OnebitAdam, clipping": lambda: train(DistributedDataParallel, 0, onebit.OnebitAdam, max_grad_norm=1.0),
    "ZeroOneAdam": lambda: train(Wrapped, 0, onebit.ZeroOneAdam, local_step_clipper=2),
    "OnebitLamb, from step 3 on": lambda: train(DistributedDataParallel, 3, onebit.OnebitLamb),
    "LocalSteps": lambda: train(DistributedDataParallel, 0, local_steps),
    "stage 0": lambda: train(DistributedDataParallel, 0, zero.ShardedOnebitAdam, stage=0),
    "stage 1": lambda: train(DistributedDataParallel, 0, zero.ShardedOnebitLamb),
    "stage 2": lambda: train(DistributedDataParallel, 0, zero.ShardedOnebitAdam, stage=2),
    "told not to average": lambda: train(with_noop_hook, 0, onebit.OnebitAdam),
    "told not to average, stage 2": lambda: train(with_noop_hook, 0, zero.ShardedOnebitAdam, stage=2),
    "initialize": lambda: initialize(DistributedDataParallel),
    "FSDP1": lambda: fully_sharded(False),
    "FSDP1, original parameters": lambda: fully_sharded(True),
}


def errors() -> dict[str, str]:
    """What each case ends with on this rank."""
    comm.init()
    return {name: error_of(Exception, case) for name, case in CASES.items()}
