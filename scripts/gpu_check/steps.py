"""Whole steps of a model that fills the card: seconds on the device, seconds of the host, and launches.

A step's traffic is a copy within the device, so its seconds are what the optimizer itself costs beside torch's AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from bench.host_time import ALWAYS, LOCAL, RANKS, WARM, Side
from bench.silent import Silent
from bench.timing import Timing
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from gpu_check.section import Setting
from gpu_check.speed import transformer_shapes
from onebit import LocalSteps, OnebitAdam, ZeroOneAdam
from onebit.zero import ShardedOnebitAdam

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def _ours(name: str, kind: Callable[..., Optimizer], **options: object) -> Side:
    return Side(name, lambda params: kind(params, lr=1e-4, transport=Silent(0, RANKS), **options))


SIDES = (
    Side("AdamW(fused=True)", lambda params: AdamW(params, lr=1e-4, fused=True)),
    Side("AdamW(foreach=True)", lambda params: AdamW(params, lr=1e-4, foreach=True)),
    _ours("OnebitAdam, warm-up", OnebitAdam, freeze_step=2**30, **ALWAYS),
    _ours("OnebitAdam", OnebitAdam, freeze_step=WARM, **ALWAYS),
    _ours("OnebitAdam, max_grad_norm", OnebitAdam, freeze_step=WARM, max_grad_norm=1.0, **ALWAYS),
    _ours("OnebitAdam, bucket_cap_mb=128", OnebitAdam, freeze_step=WARM, bucket_cap_mb=128, **ALWAYS),
    _ours("ZeroOneAdam, a local step", ZeroOneAdam, **LOCAL),
    _ours("ShardedOnebitAdam, stage 1", ShardedOnebitAdam, warmup_steps=WARM),
    _ours("ShardedOnebitAdam, stage 1, overlap=False", ShardedOnebitAdam, warmup_steps=WARM, overlap=False),
    Side(
        "LocalSteps of AdamW(fused=True), between rounds",
        lambda params: LocalSteps(AdamW(params, lr=1e-4, fused=True), 8, transport=Silent(0, RANKS)),
    ),
)


def steps_table(setting: Setting) -> list[str]:
    """Gradients are there before each step, in float32; what a hook sends during backward is not in it."""
    device, repeats = setting.device, max(3, setting.repeats // 3)
    shapes = transformer_shapes(setting.model)
    size = f"{sum(torch.Size(shape).numel() for shape in shapes) / 1e6:.0f} million in {len(shapes)} tensors"
    lines = [f"| step of {size} | ms of device and host | ms of the host | launches |", "|---|---:|---:|---:|"]
    for side in SIDES:
        params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        optimizer = side.make(params)
        for _ in range(4 * WARM):
            _step(optimizer, params, device)
        found = [_step(optimizer, params, device) for _ in range(repeats)]
        whole, host = (Timing.of(column) for column in zip(*found, strict=True))
        lines.append(f"| {side.name} | {whole} | {host} | {_launches(optimizer, params, device)} |")
        del optimizer, params
    return lines


def _set_gradients(params: Sequence[Tensor]) -> None:
    for p in params:
        p.grad = torch.randn_like(p)


def _step(optimizer: Optimizer, params: Sequence[Tensor], device: torch.device) -> tuple[float, float]:
    """Seconds until the device has taken the step, and until `step()` returned."""
    _set_gradients(params)
    _wait(device)
    began = time.perf_counter()
    optimizer.step()
    returned = time.perf_counter()
    _wait(device)
    ended = time.perf_counter()
    optimizer.zero_grad()
    return ended - began, returned - began


def _launches(optimizer: Optimizer, params: Sequence[Tensor], device: torch.device) -> str:
    """Kernels that one step launched; a dash where there is no GPU."""
    if device.type != "cuda":
        return "-"
    _set_gradients(params)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        optimizer.step()
        _wait(device)
    return str(sum(event.count for event in recorded.key_averages() if event.key in LAUNCHES))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
