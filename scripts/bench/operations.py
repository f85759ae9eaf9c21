"""What every kernel can do, over one row: the bytes that it must move, and the plainest torch call that moves them.

Shape legend: K rows, N elements, J blocks, B bytes, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TypedDict

import torch
from torch import Tensor

from onebit.comm import CODECS, SignCodec
from onebit.comm.kernels import reference
from onebit.comm.kernels.operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
    MomentumInputs,
    MomentumWeights,
    OwnerStep,
    ParamUpdate,
    Segments,
    Variance,
)

ROWS_OF_MEAN = 4
WEIGHTS = MomentumWeights(keep=0.9, add=0.1, own=1e-3)
ADD, FILL, SCALE = "torch.add(x, error, out=x)", "out.fill_()", "out.mul_(0.9)"
MULTIPLY, MOMENTUM = "torch.mul(error, 0.5, out=out)", "torch.addcmul(error, x, y, out=out)"
STEP = f"three passes of {MOMENTUM}"


@dataclass(frozen=True)
class Operation:
    """moved: bytes of floats and frames that one call must read and write. floor: the plainest call of torch that moves
    as many floats of float32. frame: whose kernels `call` takes."""

    name: str
    moved: int
    floor: str
    call: Callable[[ModuleType], object]
    frame: str = "sign"


def operations(rows: Rows) -> Iterator[Operation]:
    """Over one row. A generator, so that what one operation alone needs is freed after it."""
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
    def made(cls, device: torch.device, elements: int, block: int) -> Rows:
        """Random ones, of this many elements, rounded up to whole blocks."""
        N = -(-elements // block) * block
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

    yield Operation("encode, float32 error", 12 * N + B, ADD, encode(rows.error_1N, None))
    moved = 12 * N + B + rows.counts_1J.nbytes
    yield Operation("encode, float32 error, counts", moved, ADD, encode(rows.error_1N, rows.counts_1J))
    yield Operation("encode, bfloat16 error", 10 * N + B, ADD, encode(rows.error_1N.bfloat16(), None))
    yield Operation("decode", 4 * N + B, FILL, decode(1.0, 0.0))
    yield Operation("decode, 0.9·out + 0.1·value", 8 * N + B, SCALE, decode(0.1, 0.9))


def _mean_operations(rows: Rows) -> Iterator[Operation]:
    outgoing, sign = rows.outgoing, rows.sign
    for K in (1, ROWS_OF_MEAN):
        received_KB = rows.received_KB[:K]
        yield Operation(
            f"decode_mean, K={K}",
            4 * rows.N + K * rows.B,
            FILL,
            lambda kernel, received_KB=received_KB: kernel.decode_mean(received_KB, rows.out_1N[0], block=rows.block),
        )
        yield Operation(
            f"encode_mean, K={K}",
            8 * rows.N + (K + 1) * rows.B,
            MULTIPLY,
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
        yield Operation(f"encode_momentum, {kind} gradient", (12 + size) * N + 2 * B, MOMENTUM, momentum(D, packed))
        if dtype == torch.float32:
            moved = (16 + size) * N + B
            yield Operation(
                "encode_momentum, a variance, float32 momentum", moved, MOMENTUM, momentum(variance, rows.x_1N)
            )
        zeros, frames = torch.zeros(1, N, device=device), rows.received_KB[:1].clone()
        sums = GradientSum(grads, segments, zeros, frames, None, add=0.1, returned=0.9)
        yield Operation(
            f"encode_gradients, {kind} gradient",
            (8 + size) * N + B,
            ADD,
            lambda kernel, sums=sums: kernel.encode_gradients(sums, **sign),
        )
        yield Operation(f"apply, {kind} parameters", 2 * size * N + B, SCALE, apply)


def _step_operations(rows: Rows) -> Iterator[Operation]:
    N, J, device = rows.N, rows.N // rows.block, rows.x_1N.device
    grad, param, variance = (torch.rand(N, device=device) + 1e-3 for _ in range(3))
    segments = Segments((0,), (N,), rows.block)
    each = Variance(variance.view(1, N), torch.zeros(1, J, device=device), 1.5, 1e-8)
    made_of = MomentumInputs([grad], segments, each, torch.zeros(1, N, device=device), WEIGHTS)
    local = LocalStep(made_of, torch.zeros(1, N, device=device), None, [param], weight=1e-3, kept=0.999)
    yield Operation("local_step, a variance", 32 * N, STEP, lambda kernel: kernel.local_step(local, block=rows.block))
    sums_J4, direction = torch.empty(J, 4, device=device), torch.empty(N, device=device)
    owned = OwnerStep(
        rows.received_KB, 0, grad, rows.counts_1J[0], variance, direction, None, sums_J4, (1.0, 1.0),
        weight=0.01, own=0.3, common=0.6, eps=1e-8, floor=0.01, inverse_limit=0.2,
    )  # fmt: skip
    moved = 16 * N + rows.received_KB.nbytes + rows.counts_1J.nbytes + sums_J4.nbytes
    yield Operation(
        f"owner_step, W={ROWS_OF_MEAN}", moved, MOMENTUM, lambda kernel: kernel.owner_step(owned, block=rows.block)
    )


def _rounding_operations(rows: Rows, frame: str) -> Iterator[Operation]:
    N, block = rows.N, rows.block
    B = CODECS[frame](block).frame_bytes(N)
    received_KB = torch.zeros(ROWS_OF_MEAN, B, dtype=torch.uint8, device=rows.x_1N.device)
    frames_1B = received_KB[:1]

    def encode(kernel: ModuleType) -> None:
        getattr(kernel, f"{frame}_encode")(rows.x_1N, rows.error_1N, frames_1B, rows.counts_1J, block=block)

    def decode(kernel: ModuleType) -> None:
        getattr(kernel, f"{frame}_decode")(frames_1B, rows.out_1N, block=block, weight=0.1, keep=0.9)

    def decode_mean(kernel: ModuleType) -> None:
        getattr(kernel, f"{frame}_decode_mean")(received_KB, rows.out_1N[0], block=block)

    yield Operation(f"{frame}_encode, float32 error", 12 * N + B, ADD, encode, frame)
    yield Operation(f"{frame}_decode, 0.9·out + 0.1·value", 8 * N + B, SCALE, decode, frame)
    yield Operation(f"{frame}_decode_mean, K={ROWS_OF_MEAN}", 4 * N + ROWS_OF_MEAN * B, FILL, decode_mean, frame)
    if frame != "int4":
        return
    segments, one = Segments((0,), (N,), block), torch.ones(1, device=rows.x_1N.device)
    update = ParamUpdate([rows.out_1N[0]], segments, one, one)
    masters = MasterStep(
        rows.x_1N[0], rows.error_1N[0], [rows.out_1N[0]], segments, rows.counts_1J[0], frames_1B, -1e-3, 0.999
    )
    yield Operation(
        "int4_apply", 8 * N + B, SCALE, lambda kernel: kernel.int4_apply(frames_1B, N, update, block=block), frame
    )
    yield Operation(
        "int4_step_masters", 16 * N + B, MOMENTUM, lambda kernel: kernel.int4_step_masters(masters, block=block), frame
    )
