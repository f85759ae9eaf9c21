"""The C++ kernels against its floor and against the pure-torch reference, on this machine.

    python scripts/bench.py kernels --record scripts/records/kernels_cpu_2026-11.md

The floor of an operation is the plainest torch call that moves the same floats: encode reads x and error and writes x,
as torch.add(x, error, out=x) does. Kernel, floor and reference run in turn, so that a noisy machine disturbs all three.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from reports import publish, table
from torch import Tensor

from bench.record import here, parser_of
from bench.timing import Timing, in_turn, seconds
from onebit.comm import (
    EncodeOutput,
    GradientSum,
    Int8Codec,
    LocalStep,
    MomentumInputs,
    MomentumWeights,
    ParamUpdate,
    Segments,
    SignCodec,
    Variance,
)
from onebit.comm.kernels import cpu, library, reference
from onebit.comm.kernels.library import ISAS

ROWS_OF_MEAN = 4
SWEEP = (4096, 16384, 32768, 65536, 131072, 1048576)


@dataclass(frozen=True)
class Operation:
    """One row of the table. bytes_moved: of floats and frames, by the kernel, in one call."""

    name: str
    floor_name: str
    bytes_moved: int
    kernel: Callable[[], None]
    floor: Callable[[], object]
    reference: Callable[[], None]


def sign_operations(elements: int, block: int, isa: str) -> list[Operation]:
    """The sign frame's rows of the table, over one set of tensors, of `elements` rounded up to whole blocks."""
    codec = SignCodec(block)
    N = -(-elements // block) * block
    B = codec.frame_bytes(N)
    x, error, out = torch.randn(1, N), torch.randn(1, N), torch.empty(1, N)
    frames, received = torch.empty(1, B, dtype=torch.uint8), torch.empty(ROWS_OF_MEAN, B, dtype=torch.uint8)
    for k in range(ROWS_OF_MEAN):
        reference.encode(torch.randn(1, N), None, received[k : k + 1], None, block=block, scale=codec.scale)
    frames.copy_(received[:1])

    def encode(name: str, error_1N: Tensor) -> Operation:
        return Operation(
            name,
            "torch.add(x, error, out=x)",
            N * (8 + error_1N.element_size()) + B,
            lambda: cpu.encode(x, error_1N, frames, None, block=block, scale=codec.scale, isa=isa),
            lambda: torch.add(x, error, out=x),
            lambda: reference.encode(x, error_1N, frames, None, block=block, scale=codec.scale),
        )

    def decode(name: str, floor_name: str, floor: Callable[[], object], weight: float, keep: float) -> Operation:
        return Operation(
            name,
            floor_name,
            N * (8 if keep else 4) + B,
            lambda: cpu.decode(received[:1], out, block=block, weight=weight, keep=keep, isa=isa),
            floor,
            lambda: reference.decode(received[:1], out, block=block, weight=weight, keep=keep),
        )

    mean = Operation(
        f"decode_mean, K={ROWS_OF_MEAN}",
        "out.fill_()",
        N * 4 + ROWS_OF_MEAN * B,
        lambda: cpu.decode_mean(received, out[0], block=block, isa=isa),
        lambda: out.fill_(0.5),
        lambda: reference.decode_mean(received, out[0], block=block),
    )
    return [
        encode("fused encode, float32 error", error),
        encode("fused encode, bfloat16 error", error.bfloat16()),
        decode("decode", "out.fill_()", lambda: out.fill_(0.5), 1.0, 0.0),
        decode("decode, 0.9·out + 0.1·value", "out.mul_(0.9)", lambda: out.mul_(0.9), 0.1, 0.9),
        mean,
    ]


def step_operations(elements: int, block: int, isa: str) -> list[Operation]:
    """The fused steps' rows: what a compressed step of OnebitAdam does to a tensor that is one parameter."""
    codec = SignCodec(block)
    N = -(-elements // block) * block
    B, J = codec.frame_bytes(N), N // block
    grad, error, out, param = torch.randn(N), torch.randn(1, N), torch.empty(1, N), torch.randn(N)
    variance = Variance(torch.rand(1, N), torch.full((1, J), 1e-4), 1.5, 1e-8)
    received, frames = torch.empty(ROWS_OF_MEAN, B, dtype=torch.uint8), torch.empty(1, B, dtype=torch.uint8)
    for k in range(ROWS_OF_MEAN):
        reference.encode(torch.randn(1, N), None, received[k : k + 1], None, block=block, scale=codec.scale)
    one, weights = Segments((0,), (N,), block), MomentumWeights(0.9, 0.1, 1e-3)
    momentum = MomentumInputs([grad], one, variance, received[:1].clone(), weights)
    to = EncodeOutput(error, frames, None, out)
    update = ParamUpdate([param], one, torch.full((1,), -1e-3), torch.full((1,), 0.999))
    own_m, total = torch.rand(1, N), torch.zeros(1, N)
    alone = LocalStep(MomentumInputs([grad], one, variance, own_m, weights), total, None, [param], 1e-3, 0.999)
    owed = GradientSum([grad], one, torch.randn(1, N), frames.clone(), None, add=0.1, returned=0.9)
    scale = {"block": block, "scale": codec.scale}

    return [
        Operation(
            "encode_momentum",
            "torch.addcmul(error, grad, v, out=out)",
            N * 16 + J * 4 + 2 * B,
            lambda: cpu.encode_momentum(momentum, to, **scale, isa=isa),
            lambda: torch.addcmul(error[0], grad, variance.v_KN[0], out=out[0]),
            lambda: reference.encode_momentum(momentum, to, **scale),
        ),
        Operation(
            "encode_gradients",
            "torch.add(owed, grad, out=owed)",
            N * 12 + B,
            lambda: cpu.encode_gradients(owed, **scale, isa=isa),
            lambda: torch.add(own_m[0], grad, out=own_m[0]),
            lambda: reference.encode_gradients(owed, **scale),
        ),
        Operation(
            f"encode_mean, K={ROWS_OF_MEAN}",
            "torch.mul(error, 0.5, out=out)",
            N * 8 + (ROWS_OF_MEAN + 1) * B,
            lambda: cpu.encode_mean(received, to, **scale, isa=isa),
            lambda: torch.mul(error, 0.5, out=out),
            lambda: reference.encode_mean(received, to, **scale),
        ),
        Operation(
            "apply",
            "param.mul_(0.999)",
            N * 8 + B,
            lambda: cpu.apply(frames, N, update, block=block, isa=isa),
            lambda: param.mul_(0.999),
            lambda: reference.apply(frames, N, update, block=block),
        ),
        Operation(
            "local_step",
            "three passes of torch.addcmul(error, grad, v, out=out)",
            N * 32 + J * 4,
            lambda: cpu.local_step(alone, block=block, isa=isa),
            lambda: [torch.addcmul(error[0], grad, variance.v_KN[0], out=out[0]) for _ in range(3)],
            lambda: reference.local_step(alone, block=block),
        ),
    ]


def int8_operations(elements: int, block: int, isa: str) -> list[Operation]:
    """The int8 frame's rows, over one set of tensors, of `elements` rounded up to whole blocks."""
    N = -(-elements // block) * block
    B = Int8Codec(block).frame_bytes(N)
    x, error, out = torch.randn(1, N), torch.randn(1, N), torch.empty(1, N)
    frames, received = torch.empty(1, B, dtype=torch.uint8), torch.empty(ROWS_OF_MEAN, B, dtype=torch.uint8)
    for k in range(ROWS_OF_MEAN):
        reference.int8_encode(torch.randn(1, N), None, received[k : k + 1], None, block=block)
    return [
        Operation(
            "int8 fused encode, float32 error",
            "torch.add(x, error, out=x)",
            N * 12 + B,
            lambda: cpu.int8_encode(x, error, frames, None, block=block, isa=isa),
            lambda: torch.add(x, error, out=x),
            lambda: reference.int8_encode(x, error, frames, None, block=block),
        ),
        Operation(
            "int8 decode",
            "out.fill_()",
            N * 4 + B,
            lambda: cpu.int8_decode(received[:1], out, block=block, weight=1.0, keep=0.0, isa=isa),
            lambda: out.fill_(0.5),
            lambda: reference.int8_decode(received[:1], out, block=block, weight=1.0, keep=0.0),
        ),
        Operation(
            f"int8 decode_mean, K={ROWS_OF_MEAN}",
            "out.fill_()",
            N * 4 + ROWS_OF_MEAN * B,
            lambda: cpu.int8_decode_mean(received, out[0], block=block, isa=isa),
            lambda: out.fill_(0.5),
            lambda: reference.int8_decode_mean(received, out[0], block=block),
        ),
    ]


HEADS = (
    "operation", "threads", "kernel ms", "GB/s", "floor", "floor ms", "kernel / floor", "reference ms",
    "reference / kernel",
)  # fmt: skip


def measure(args: argparse.Namespace) -> Iterator[list[object]]:
    """A row for each operation and number of threads. The reference, slow and steady, has repetitions of its own."""
    kinds = (sign_operations, step_operations, int8_operations)
    operations = [each for kind in kinds for each in kind(args.elements, args.block, args.isa)]
    for threads in args.threads:
        torch.set_num_threads(threads)
        for each in operations:
            spent = in_turn({"floor": each.floor, "kernel": each.kernel}, args.repeats)
            slow = Timing.of([seconds(each.reference) for _ in range(args.reference_repeats)])
            floor, kernel = Timing.of(spent["floor"]), Timing.of(spent["kernel"])
            cells = [each.name, threads, kernel, f"{each.bytes_moved / kernel.median / 1e6:.1f}", each.floor_name]
            cells += [floor, f"**{kernel.median / floor.median:.2f}**", slow, f"{slow.median / kernel.median:.1f}"]
            yield cells


def sweep(args: argparse.Namespace) -> str:
    """Two threads against one, by size: where `library.ELEMENTS_PER_THREAD` comes from."""
    rows = []
    for elements in SWEEP:
        encode = sign_operations(elements, args.block, args.isa)[0].kernel
        spent: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(args.repeats):
            for threads in spent:
                torch.set_num_threads(threads)
                encode()  # wakes the threads
                spent[threads] += [seconds(encode) for _ in range(10)]
        one, two = (1e6 * statistics.median(spent[threads]) for threads in (1, 2))
        rows.append([elements, f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}"])
    return table(("elements", "encode µs, 1 thread", "2 threads", "ratio"), rows)


def unconditional_sweep(args: argparse.Namespace) -> str:
    threshold = library.ELEMENTS_PER_THREAD
    library.ELEMENTS_PER_THREAD = 1
    try:
        return sweep(args)
    finally:
        library.ELEMENTS_PER_THREAD = threshold


def main(argv: Sequence[str]) -> None:
    parser = parser_of("kernels", __doc__)
    parser.add_argument("--elements", type=int, default=25_000_000, help="parameters (default: %(default)s)")
    parser.add_argument("--block", type=int, default=256, help="elements per scale (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument("--repeats", type=int, default=40, help="of kernel and floor (default: %(default)s)")
    parser.add_argument("--reference-repeats", type=int, default=5, help="of the reference (default: %(default)s)")
    parser.add_argument("--isa", choices=ISAS, default="auto", help="instruction set (default: the best one)")
    args = parser.parse_args(argv)
    if args.reference_repeats < 1:
        parser.error(f"--reference-repeats {args.reference_repeats}: at least 1")
    if not cpu.is_built():
        parser.error(cpu.why_not())
    about = here()
    text = f"""# The C++ kernels on the host

{about}

{args.elements} elements, blocks of {args.block}; {args.repeats} repetitions of kernel and floor in turn,
{args.reference_repeats} of the reference; median (quartiles), ratios of medians.
Kernel: {cpu.describe()}, isa {args.isa}.
GB/s counts the floats and frames a call must move; a write-only call also reads what it overwrites, uncounted. The
floor of encode is torch's in-place add of the float32 error, 12 bytes per element, also for a bfloat16 error.

{table(HEADS, measure(args))}

Two threads against one, both forced. In use the kernel takes one thread per {library.ELEMENTS_PER_THREAD} elements.

{unconditional_sweep(args)}
"""
    publish(args, text)
