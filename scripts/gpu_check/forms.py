"""Optimizers on the device, on simulated ranks: their bits with each kernel, of all ranks, and their loss beside the
host's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import onebit
from gpu_check.checks import assert_same
from gpu_check.section import Outcome, Setting, outcome
from onebit.comm import Log4Codec, SignCodec, Transport, run_ranks
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

Make = Callable[[Sequence[nn.Parameter], Transport, SignCodec], torch.optim.Optimizer]
RANKS, LARGEST_GAP = 3, 0.05  # of the mean of the last losses, to the host's


def _plain(kind: Callable[..., torch.optim.Optimizer], **options: object) -> Make:
    return lambda params, transport, codec: kind(
        params, lr=1e-2, transport=transport, codec=codec, compression="always", bucket_cap_mb=0.01, **options
    )


def _sharded(kind: Callable[..., torch.optim.Optimizer], **options: object) -> Make:
    return lambda params, transport, codec: kind(
        params, lr=1e-2, transport=transport, block=codec.block, bucket_cap_mb=0.01, **options
    )


def _local(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda params, transport, codec: onebit.LocalSteps(
        kind(params, lr=1e-2), 4, transport=transport, codec=codec, bucket_cap_mb=0.01, **options
    )


def _four_bits(params: Sequence[nn.Parameter], transport: Transport, codec: SignCodec) -> torch.optim.Optimizer:
    return _plain(onebit.OnebitAdam, warmup_codec=Log4Codec(codec.block), freeze_step=8)(params, transport, codec)


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
        start = [torch.randn(size, generator=g) / size[-1] ** 0.5 for size in ((77, 32), (77,), (5, 77), (5,))]
        self.params = [nn.Parameter(x.to(device, dtype)) for x in start]
        self._data = torch.Generator().manual_seed(1 + rank)

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """One step of the optimizer, and the loss before it."""
        W, b, V, c = self.params
        x = torch.randn(64, 32, generator=self._data).to(W)
        loss = ((x @ W.T + b).tanh() @ V.T + c - x[:, :5].sin()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def train_alone(
    make: Make,
    transport: Transport,
    device: torch.device,
    codec: SignCodec,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, list[float]]:
    """This rank's parameters, and the losses of all steps."""
    task = Regression(transport.rank, device, dtype)
    optimizer = make(task.params, transport, codec)
    losses = [task.step(optimizer) for _ in range(steps)]
    if hasattr(optimizer, "sync"):
        optimizer.sync()
    return parameters_to_vector(task.params).detach().float(), torch.stack(losses).tolist()


def train(
    make: Make, device: torch.device, dtype: torch.dtype, codec: SignCodec, steps: int, ranks: int = RANKS
) -> list[tuple[Tensor, list[float]]]:
    """The same of simulated ranks. Raises AssertionError unless all of them end with the same bits."""
    found = run_ranks(ranks, lambda transport: train_alone(make, transport, device, codec, steps, dtype))
    for r, (params, _) in enumerate(found):
        assert_same(f"parameters of rank {r} against rank 0", params, found[0][0])
    return found


def check(make: Make, device: torch.device, dtype: torch.dtype, codec: SignCodec, steps: int) -> None:
    here, last = train(make, device, dtype, codec, steps), max(1, steps // 4)
    for r, (params, losses) in enumerate(here):
        if not bool(params.isfinite().all()) or not sum(losses[-last:]) < float("inf"):
            raise AssertionError(f"rank {r}: parameters or losses ({losses[-last:]}) are not finite")
    if device.type == "cpu":
        return
    host = train(make, torch.device("cpu"), dtype, codec, steps)
    for r, of_rank in enumerate(zip(here, host, strict=True)):
        loss, expected = (sum(losses[-last:]) / last for _, losses in of_rank)
        if abs(loss - expected) > LARGEST_GAP * expected:
            raise AssertionError(f"rank {r}: expected a loss near the host's {expected:.4g}, got {loss:.4g}")


def form_checks(setting: Setting) -> Iterator[Outcome]:
    for name, make in FORMS.items():
        for dtype in (torch.float32,) if setting.is_rehearsal else (torch.float32, torch.bfloat16):
            codec = SignCodec(setting.block)
            run = functools.partial(check, make, setting.device, dtype, codec, max(12, setting.steps))
            yield outcome(f"{name}, {str(dtype).removeprefix('torch.')}", run)


def check_kernel(make: Make, codec: SignCodec, dtype: torch.dtype, device: torch.device, steps: int) -> None:
    """Against the same training with the reference in the kernel's place."""
    with_kernel, with_reference = (
        train(make, device, dtype, each, steps, 2) for each in (codec, replace(codec, kernel="reference"))
    )
    third = max(1, steps // 3)
    for r, ((got, losses), (expected, _)) in enumerate(zip(with_kernel, with_reference, strict=True)):
        assert_same(f"parameters of rank {r} against those with the reference kernel", got, expected)
        if not sum(losses[-third:]) < sum(losses[:third]):
            raise AssertionError(f"rank {r}: the loss did not fall: {losses[0]:.4g} to {losses[-1]:.4g}")


def optimizer_checks(setting: Setting) -> Iterator[Outcome]:
    device, steps = setting.device, setting.steps
    for kernel in setting.kernels:
        for kind in (onebit.OnebitAdam, onebit.OnebitLamb, onebit.ZeroOneAdam):
            freeze = {} if kind is onebit.ZeroOneAdam else {"freeze_step": steps // 3}
            for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
                for overlap in (False, True) if device.type == "cuda" else (kind is onebit.OnebitAdam,):
                    sent = ", sent during backward" if overlap else ""
                    make, codec = _plain(kind, overlap=overlap, **freeze), SignCodec(setting.block, kernel=kernel)
                    run = functools.partial(check_kernel, make, codec, dtype, device, steps)
                    yield outcome(f"{kernel}: {kind.__name__}, {dtype}{sent}, {steps} steps", run)
