"""Kernels in GB/s beside a device-to-device copy, in turn, and a whole model against torch, operation by operation.

Shape legend: K rows, N elements, J blocks, B bytes, W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypedDict

import torch
from bench.timing import Timing, in_turn, seconds
from torch import Tensor

from gpu_check.section import Setting
from onebit.comm import CODECS, SignCodec, kernels
from onebit.comm.kernels import reference
from onebit.comm.kernels.operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MomentumInputs,
    MomentumWeights,
    OwnerStep,
    ParamUpdate,
    Segments,
    Variance,
)

ROWS_OF_MEAN = 4
TARGET = 0.85
WEIGHTS = MomentumWeights(keep=0.9, add=0.1, own=1e-3)


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


@dataclass(frozen=True)
class Operation:
    """moved: bytes of floats and frames that one call must read and write. frame: whose kernels `call` takes."""

    name: str
    moved: int
    call: Callable[[ModuleType], object]
    frame: str = "sign"


def operations(device: torch.device, N: int, block: int) -> Iterator[Operation]:
    """Over one row of N elements. A generator, so that what one operation alone needs is freed behind it."""
    rows = Rows.made(device, N, block)
    yield from _sign_operations(rows)
    yield from _mean_operations(rows)
    yield from _fused_operations(rows)
    yield from _step_operations(rows)
    for frame in ("int8", "int4"):
        yield from _rounding_operations(rows, frame)


@dataclass(frozen=True)
class Rows:
    """What the operations read and write. received_KB: frames of several ranks."""

    block: int
    x_1N: Tensor
    error_1N: Tensor
    out_1N: Tensor
    counts_1J: Tensor
    frames_1B: Tensor
    received_KB: Tensor

    @classmethod
    def made(cls, device: torch.device, N: int, block: int) -> Rows:
        """Random ones."""
        B = SignCodec(block).frame_bytes(N)
        x_1N, error_1N, out_1N = (torch.randn(1, N, device=device) for _ in range(3))
        counts_1J = torch.full((1, N // block), block, dtype=torch.int32, device=device)
        frames_1B = torch.empty(1, B, dtype=torch.uint8, device=device)
        received_KB = torch.empty(ROWS_OF_MEAN, B, dtype=torch.uint8, device=device)
        for k in range(ROWS_OF_MEAN):
            frame_1B, values_1N = received_KB[k : k + 1], torch.randn(1, N, device=device)
            reference.encode(values_1N, None, frame_1B, None, block=block, scale="rms")
        return cls(block, x_1N, error_1N, out_1N, counts_1J, frames_1B, received_KB)

    @property
    def N(self) -> int:
        return self.x_1N.shape[1]

    @property
    def B(self) -> int:
        return self.frames_1B.shape[1]

    @property
    def sign(self) -> SignOptions:
        return {"block": self.block, "scale": SignCodec(self.block).scale}

    @property
    def outgoing(self) -> EncodeOutput:
        return EncodeOutput(self.error_1N, self.frames_1B, self.counts_1J, self.out_1N)


class SignOptions(TypedDict):
    """Of every encode of sign frames."""

    block: int
    scale: str


def _sign_operations(rows: Rows) -> Iterator[Operation]:
    N, B, sign = rows.N, rows.B, rows.sign

    def encode(e: Tensor | None, c: Tensor | None) -> Callable[[ModuleType], None]:
        return lambda kernel: kernel.encode(rows.x_1N, e, rows.frames_1B, c, **sign)

    def decode(weight: float, keep: float) -> Callable[[ModuleType], None]:
        frame_1B = rows.received_KB[:1]
        return lambda kernel: kernel.decode(frame_1B, rows.out_1N, block=rows.block, weight=weight, keep=keep)

    yield Operation("encode, float32 error", 12 * N + B, encode(rows.error_1N, None))
    moved = 12 * N + B + rows.counts_1J.nbytes
    yield Operation("encode, float32 error, counts", moved, encode(rows.error_1N, rows.counts_1J))
    yield Operation("encode, bfloat16 error", 10 * N + B, encode(rows.error_1N.bfloat16(), None))
    yield Operation("decode", 4 * N + B, decode(1.0, 0.0))
    yield Operation("decode, 0.9·out + 0.1·value", 8 * N + B, decode(0.1, 0.9))


def _mean_operations(rows: Rows) -> Iterator[Operation]:
    outgoing, sign = rows.outgoing, rows.sign
    for K in (1, ROWS_OF_MEAN):
        received_KB = rows.received_KB[:K]
        yield Operation(
            f"decode_mean, K={K}",
            4 * rows.N + K * rows.B,
            lambda kernel, received_KB=received_KB: kernel.decode_mean(received_KB, rows.out_1N[0], block=rows.block),
        )
        yield Operation(
            f"encode_mean, K={K}",
            8 * rows.N + (K + 1) * rows.B,
            lambda kernel, received_KB=received_KB: kernel.encode_mean(received_KB, outgoing, **sign),
        )


def _fused_operations(rows: Rows) -> Iterator[Operation]:
    N, B, device = rows.N, rows.B, rows.x_1N.device
    outgoing, sign = rows.outgoing, rows.sign
    segments, D = Segments((0,), (N,), rows.block), torch.rand(1, N, device=device) + 1e-3
    variance = Variance(D, torch.zeros(1, N // rows.block, device=device), 1.5, 1e-8)
    weight, keep = torch.full((1,), -1e-3, device=device), torch.full((1,), 0.999, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        grads = [torch.randn(N, device=device, dtype=dtype)]

        def momentum(d: Tensor | Variance, m: Tensor, grads: list[Tensor] = grads) -> Callable[[ModuleType], None]:
            made_of = MomentumInputs(grads, segments, d, m, WEIGHTS)
            return lambda kernel: kernel.encode_momentum(made_of, outgoing, **sign)

        def apply(kernel: ModuleType, params: list[Tensor] = grads) -> None:
            update = ParamUpdate(params, segments, weight, keep)
            kernel.apply(rows.received_KB[:1], N, update, block=rows.block)

        size, kind = grads[0].element_size(), str(dtype).removeprefix("torch.")
        packed = rows.received_KB[:1]
        yield Operation(f"encode_momentum, {kind} gradient", (12 + size) * N + 2 * B, momentum(D, packed))
        if dtype == torch.float32:
            moved = (16 + size) * N + B
            yield Operation("encode_momentum, a variance, float32 momentum", moved, momentum(variance, rows.x_1N))
        zeros, frames = torch.zeros(1, N, device=device), rows.received_KB[:1].clone()
        owed = GradientSum(grads, segments, zeros, frames, None, add=0.1, returned=0.9)
        yield Operation(
            f"encode_gradients, {kind} gradient",
            (8 + size) * N + B,
            lambda kernel, owed=owed: kernel.encode_gradients(owed, **sign),
        )
        yield Operation(f"apply, {kind} parameters", 2 * size * N + B, apply)


def _step_operations(rows: Rows) -> Iterator[Operation]:
    N, J, device = rows.N, rows.N // rows.block, rows.x_1N.device
    grad, param, variance = (torch.rand(N, device=device) + 1e-3 for _ in range(3))
    segments = Segments((0,), (N,), rows.block)
    each = Variance(variance.view(1, N), torch.zeros(1, J, device=device), 1.5, 1e-8)
    made_of = MomentumInputs([grad], segments, each, torch.zeros(1, N, device=device), WEIGHTS)
    local = LocalStep(made_of, torch.zeros(1, N, device=device), None, [param], weight=1e-3, kept=0.999)
    yield Operation("local_step, a variance", 32 * N, lambda kernel: kernel.local_step(local, block=rows.block))
    sums_J4, direction = torch.empty(J, 4, device=device), torch.empty(N, device=device)
    owned = OwnerStep(
        rows.received_KB, 0, grad, rows.counts_1J[0], variance, direction, None, sums_J4, (1.0, 1.0),
        weight=0.01, own=0.3, common=0.6, eps=1e-8, floor=0.01, inverse_limit=0.2,
    )  # fmt: skip
    moved = 16 * N + rows.received_KB.nbytes + rows.counts_1J.nbytes + sums_J4.nbytes
    yield Operation(f"owner_step, W={ROWS_OF_MEAN}", moved, lambda kernel: kernel.owner_step(owned, block=rows.block))


def _rounding_operations(rows: Rows, frame: str) -> Iterator[Operation]:
    N, block = rows.N, rows.block
    frames_1B = torch.empty(1, CODECS[frame](block).frame_bytes(N), dtype=torch.uint8, device=rows.x_1N.device)

    def encode(kernel: ModuleType) -> None:
        getattr(kernel, f"{frame}_encode")(rows.x_1N, rows.error_1N, frames_1B, rows.counts_1J, block=block)

    def decode(kernel: ModuleType) -> None:
        getattr(kernel, f"{frame}_decode")(frames_1B, rows.out_1N, block=block, weight=0.1, keep=0.9)

    yield Operation(f"{frame}_encode, float32 error", 12 * N + frames_1B.nbytes, encode, frame)
    yield Operation(f"{frame}_decode, 0.9·out + 0.1·value", 8 * N + frames_1B.nbytes, decode, frame)


def speed_table(setting: Setting) -> list[str]:
    names, device, block, repeats = setting.kernels, setting.device, setting.block, setting.repeats
    N = -(-setting.elements // block) * block
    lines = ["| operation | kernel | ms | GB/s | copy ms | copy GB/s | of copy |", "|---" * 7 + "|"]
    source, target = torch.randn(N, device=device), torch.empty(N, device=device)
    for operation in operations(device, N, block):
        for name in (*names, "reference"):
            call = functools.partial(operation.call, kernels.select(name, device, operation.frame))
            timing, copying = time_in_turn((call, lambda: target.copy_(source)), repeats, device)
            rate, copy_rate = operation.moved / timing.median / 1e6, 8 * N / copying.median / 1e6
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
