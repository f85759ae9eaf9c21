"""How often the host waits for the device in a compressed step, from a profile."""

from __future__ import annotations

import collections

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_check.section import Setting
from onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from onebit.comm import SignCodec, SimTransport

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
STEP = "gpu_check: step"


def waits_table(setting: Setting) -> list[str]:
    """Per compressed step of one rank, whose collectives copy on the device."""
    steps = 1 if setting.is_rehearsal else 5
    lines = ["| optimizer | kernel | waits of the host per step | which |", "|---" * 4 + "|"]
    for kind in (OnebitAdam, OnebitLamb, ZeroOneAdam):
        for name in setting.kernels:
            waits = waits_in_steps(kind, SignCodec(setting.block, kernel=name), setting.device, steps)
            which = ", ".join(f"{count / steps:g} {event}" for event, count in waits.most_common()) or "none"
            lines.append(f"| {kind.__name__} | {name} | {waits.total() / steps:g} | {which} |")
    return lines


def waits_in_steps(
    kind: type[torch.optim.Optimizer], codec: SignCodec, device: torch.device, steps: int
) -> collections.Counter[str]:
    width = 256 if device.type == "cuda" else 16
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(device)
    options = {} if kind is ZeroOneAdam else {"freeze_step": 2}
    optimizer = kind(model.parameters(), lr=1e-4, transport=SimTransport(), codec=codec, **options)
    x = torch.randn(64, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with record_function(STEP):
            optimizer.step()

    for _ in range(4):
        step()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as recorded:
        for _ in range(steps):
            step()
    events = recorded.events()
    assert events is not None
    spans = [event.time_range for event in events if event.name == STEP and "CPU" in str(event.device_type)]
    assert len(spans) == steps, f"{len(spans)} steps in the profile, not {steps}"
    return collections.Counter(
        event.name
        for event in events
        if event.name in WAITS and any(span.start <= event.time_range.start <= span.end for span in spans)
    )
