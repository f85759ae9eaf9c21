"""The optimizers beside the three plain ones, on the device: their ranks' bits, and their loss beside the host's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import onebit
from gpu_check.checks import assert_same
from gpu_check.section import Outcome, Setting, outcome
from onebit.comm import Log4Codec, SignCodec, Transport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

Make = Callable[[Sequence[nn.Parameter], Transport, int], torch.optim.Optimizer]
RANKS, LARGEST_GAP = 3, 0.05  # of the mean of the last losses, to the host's


def _plain(kind: Callable[..., torch.optim.Optimizer], **options: object) -> Make:
    return lambda params, transport, block: kind(
        params,
        lr=1e-2,
        transport=transport,
        codec=SignCodec(block),
        compression="always",
        bucket_cap_mb=0.01,
        **options,
    )


def _sharded(kind: Callable[..., torch.optim.Optimizer], **options: object) -> Make:
    return lambda params, transport, block: kind(
        params, lr=1e-2, transport=transport, block=block, bucket_cap_mb=0.01, **options
    )


def _local(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda params, transport, block: onebit.LocalSteps(
        kind(params, lr=1e-2), 4, transport=transport, codec=SignCodec(block), bucket_cap_mb=0.01, **options
    )


def _four_bits(params: Sequence[nn.Parameter], transport: Transport, block: int) -> torch.optim.Optimizer:
    return _plain(onebit.OnebitAdam, warmup_codec=Log4Codec(block), freeze_step=8)(params, transport, block)


def _muon(kind: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Matrices by Muon, vectors by AdamW's rule."""
    return lambda params, **options: kind(
        [{"params": [p for p in params if (p.dim() > 1) is use], "use_muon": use} for use in (True, False)], **options
    )


FORMS: dict[str, Make] = {
    "OnebitAdam, clipped": _plain(onebit.OnebitAdam, max_grad_norm=0.5, freeze_step=8),
    "OnebitAdam, four-bit warm-up": _four_bits,
    "OnebitAdam, delay=1": _plain(onebit.OnebitAdam, delay=1, freeze_step=8),
    "OnebitAdam, momentum of moves": _plain(onebit.OnebitAdam, momentum_of="moves", freeze_step=8),
    "OnebitMuon": _plain(_muon(onebit.OnebitMuon)),
    "ZeroOneAdam, local steps": _plain(onebit.ZeroOneAdam, local_step_scaler=8, local_step_clipper=4),
    "sharded Adam, stage 0": _sharded(ShardedOnebitAdam, stage=0, warmup_steps=4),
    "sharded Adam, stage 1, clipped": _sharded(ShardedOnebitAdam, warmup_steps=4, max_grad_norm=0.5),
    "sharded Adam, stage 2, signs down": _sharded(ShardedOnebitAdam, stage=2, differences="sign", warmup_steps=4),
    "sharded LAMB, stage 1": _sharded(ShardedOnebitLamb, warmup_steps=4),
    "sharded 0/1 Adam, stage 2": _sharded(ShardedZeroOneAdam, stage=2, warmup_steps=4),
    "local steps in one bit": _local(torch.optim.AdamW),
    "local steps, two fragments, delay=1": _local(torch.optim.AdamW, fragments=2, delay=1),
    "local steps of Muon": _local(_muon(onebit.Muon)),
    "local steps of Lamb": _local(onebit.Lamb),
    "local steps of LaProp": _local(onebit.LaProp),
    "local steps of Lion": _local(lambda params, lr: onebit.Lion(params, lr=lr / 10)),
}


class Regression:
    """Parameters to train, the same on all ranks, and data that differ."""

    def __init__(self, rank: int, device: torch.device, dtype: torch.dtype = torch.float32):
        g = torch.Generator().manual_seed(0)
        start = [torch.randn(size, generator=g) / size[-1] ** 0.5 for size in ((64, 32), (64,), (8, 64), (8,))]
        self.params = [nn.Parameter(x.to(device, dtype)) for x in start]
        self._data = torch.Generator().manual_seed(1 + rank)

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """One step of the optimizer, and the loss before it."""
        W, b, V, c = self.params
        x = torch.randn(64, 32, generator=self._data).to(W)
        loss = ((x @ W.T + b).tanh() @ V.T + c - x[:, :8].sin()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def train_alone(
    make: Make, transport: Transport, device: torch.device, block: int, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, float]:
    """This rank's parameters, and the mean of its last losses."""
    task = Regression(transport.rank, device, dtype)
    optimizer = make(task.params, transport, block)
    losses = [task.step(optimizer) for _ in range(steps)]
    if hasattr(optimizer, "sync"):
        optimizer.sync()
    last = torch.stack(losses[-max(1, steps // 4) :]).mean()
    return parameters_to_vector(task.params).detach().float(), float(last)


def train(
    make: Make, device: torch.device, dtype: torch.dtype, block: int, steps: int, ranks: int = RANKS
) -> list[tuple[Tensor, float]]:
    """The same of simulated ranks."""
    return run_ranks(ranks, lambda transport: train_alone(make, transport, device, block, steps, dtype))


def check(make: Make, device: torch.device, dtype: torch.dtype, block: int, steps: int) -> None:
    here = train(make, device, dtype, block, steps)
    for r, (params, loss) in enumerate(here):
        assert_same(f"parameters of rank {r} against rank 0", params, here[0][0])
        if not bool(params.isfinite().all()) or not loss < float("inf"):
            raise AssertionError(f"rank {r}: parameters or loss ({loss}) are not finite")
    if device.type == "cpu":
        return
    host = train(make, torch.device("cpu"), dtype, block, steps)
    for r, ((_, loss), (_, expected)) in enumerate(zip(here, host, strict=True)):
        if abs(loss - expected) > LARGEST_GAP * expected:
            raise AssertionError(f"rank {r}: expected a loss near the host's {expected:.4g}, got {loss:.4g}")


def form_checks(setting: Setting) -> Iterator[Outcome]:
    for name, make in FORMS.items():
        for dtype in (torch.float32,) if setting.is_rehearsal else (torch.float32, torch.bfloat16):
            run = functools.partial(check, make, setting.device, dtype, setting.block, max(12, setting.steps))
            yield outcome(f"{name}, {str(dtype).removeprefix('torch.')}", run)
