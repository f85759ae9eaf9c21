"""Kernels in GB/s beside a device-to-device copy, in turn, and a whole model against torch, operation by operation.

The operations are those of `bench.py kernels`. Shape legend: N elements, S segments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from bench.operations import WEIGHTS, Rows, operations
from bench.timing import Timing, in_turn, seconds
from torch import Tensor

from gpu_check.section import Setting
from onebit.comm import SignCodec, kernels
from onebit.comm.kernels.operands import EncodeOutput, MomentumInputs, ParamUpdate, Segments

TARGET = 0.85


def time_in_turn(calls: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[Timing]:
    """Of each call, after two to warm up, in seconds of the device (of the host where there is no GPU)."""
    for call in calls:
        call()
    clock = seconds if device.type != "cuda" else functools.partial(_seconds, device=device)
    return [Timing.of(spent) for spent in in_turn(dict(enumerate(calls)), repeats, clock).values()]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def speed_table(setting: Setting) -> list[str]:
    names, device, block, repeats = setting.kernels, setting.device, setting.block, setting.repeats
    rows = Rows.made(device, setting.elements, block)
    lines = ["| operation | kernel | ms | GB/s | copy ms | copy GB/s | of copy |", "|---" * 7 + "|"]
    source, target = torch.randn(rows.N, device=device), torch.empty(rows.N, device=device)
    for operation in operations(rows):
        for name in (*names, "reference"):
            call = functools.partial(operation.call, kernels.select(name, device, operation.frame))
            timing, copying = time_in_turn((call, lambda: target.copy_(source)), repeats, device)
            rate, copy_rate = operation.moved / timing.median / 1e6, 8 * rows.N / copying.median / 1e6
            share = f"{rate / copy_rate:.2f}" + (
                "" if rate >= TARGET * copy_rate or name == "reference" else " (below)"
            )
            lines.append(
                f"| {operation.name} | {name} | {timing} | {rate:.1f} | {copying} | {copy_rate:.1f} | **{share}** |"
            )
    return lines


def transformer_shapes(elements: int) -> list[tuple[int, ...]]:
    """Parameters of an encoder as wide as BERT large, as many layers as fit into `elements`; at least one tensor."""
    width = 1024
    layer: list[tuple[int, ...]] = [(width, width), (width,)] * 4
    layer += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)] + [(width,)] * 4
    per_layer = sum(torch.Size(shape).numel() for shape in layer)
    embedding: list[tuple[int, ...]] = [(30522, width), (512, width)]
    left = elements - sum(torch.Size(shape).numel() for shape in embedding)
    return embedding + layer * (left // per_layer) if left >= 0 else [(elements,)]


def model_table(setting: Setting) -> list[str]:
    """One row of all parameters: encode_momentum, then apply from its own frame, as a single rank does."""
    names, device, block, repeats = setting.kernels, setting.device, setting.block, max(1, setting.repeats // 5)
    numels = [torch.Size(shape).numel() for shape in transformer_shapes(setting.model)]
    firsts, at = [], 0
    for numel in numels:
        firsts.append(at)
        at += -(-numel // block)
    N, segments = at * block, Segments(tuple(firsts), tuple(numels), block)
    lines = ["| parameters and gradients | kernel | encode ms | decode and update ms | together, × the reference |"]
    lines.append("|---" * 5 + "|")
    codec = SignCodec(block)
    D, error, residual = torch.rand(1, N, device=device) + 1e-3, *(torch.zeros(1, N, device=device) for _ in range(2))
    old, frames = (torch.zeros(1, codec.frame_bytes(N), dtype=torch.uint8, device=device) for _ in range(2))
    S, outgoing = len(numels), EncodeOutput(error, frames, None, residual)
    weight, keep = torch.full((S,), -1e-3, device=device), torch.full((S,), 0.999, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        params, grads = ([torch.randn(n, device=device, dtype=dtype) for n in numels] for _ in range(2))

        def encode(kernel: ModuleType, grads: list[Tensor] = grads) -> None:
            momentum = MomentumInputs(grads, segments, D, old, WEIGHTS)
            kernel.encode_momentum(momentum, outgoing, block=block, scale="rms")

        def update(kernel: ModuleType, params: list[Tensor] = params) -> None:
            kernel.apply(frames, N, ParamUpdate(params, segments, weight, keep), block=block)

        timings = {}
        for name in ("reference", *names):
            calls = [functools.partial(f, kernels.select(name, device)) for f in (encode, update)]
            timings[name] = time_in_turn(calls, repeats, device)
        whole = sum(timing.median for timing in timings["reference"])
        for name, (encoding, updating) in timings.items():
            times = whole / (encoding.median + updating.median)
            kind = f"{sum(numels) / 1e6:.0f} million {str(dtype).removeprefix('torch.')} in {S} tensors"
            lines.append(f"| {kind} | {name} | {encoding} | {updating} | {times:.1f} |")
    return lines
