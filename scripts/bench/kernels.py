"""The C++ kernels against its floor and against the pure-torch reference, on this machine.

    python scripts/bench.py kernels --record scripts/records/kernels_cpu_2026-11.md

The floor of an operation is the plainest torch call that moves the same floats: encode reads x and error and writes x,
as torch.add(x, error, out=x) does. Kernel, floor and reference run in turn, so that a noisy machine disturbs all three.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from reports import publish, table

from bench.operations import ADD, FILL, MOMENTUM, MULTIPLY, SCALE, STEP, Rows, operations
from bench.record import here, parser_of
from bench.timing import Timing, in_turn, seconds
from onebit.comm import kernels
from onebit.comm.kernels import cpu, library

CPU = torch.device("cpu")
SWEEP = (4096, 16384, 32768, 65536, 131072, 1048576)
HEADS = (
    "operation", "threads", "kernel ms", "GB/s", "floor", "floor ms", "kernel / floor", "reference ms",
    "reference / kernel",
)  # fmt: skip


def floors_of(rows: Rows) -> Mapping[str, Callable[[], object]]:
    """By what operations call them."""
    x, error, out, y = rows.x_1N, rows.error_1N, rows.out_1N, torch.rand_like(rows.x_1N)
    return {
        ADD: lambda: torch.add(x, error, out=x),
        FILL: lambda: out.fill_(0.5),
        SCALE: lambda: out.mul_(0.9),
        MULTIPLY: lambda: torch.mul(error, 0.5, out=out),
        MOMENTUM: lambda: torch.addcmul(error, x, y, out=out),
        STEP: lambda: [torch.addcmul(error, x, y, out=out) for _ in range(3)],
    }


def measure(args: argparse.Namespace) -> Iterator[list[object]]:
    """A row for each operation and number of threads. The reference, slow and steady, has repetitions of its own."""
    rows = Rows.made(CPU, args.elements, args.block)
    floors = floors_of(rows)
    for threads in args.threads:
        torch.set_num_threads(threads)
        for each in operations(rows):
            ours, reference = (
                partial(each.call, kernels.select(name, CPU, each.frame)) for name in (cpu.NAME, "reference")
            )
            spent = in_turn({"floor": floors[each.floor], "kernel": ours}, args.repeats)
            slow = Timing.of([seconds(reference) for _ in range(args.reference_repeats)])
            floor, kernel = Timing.of(spent["floor"]), Timing.of(spent["kernel"])
            cells = [each.name, threads, kernel, f"{each.moved / kernel.median / 1e6:.1f}", each.floor]
            cells += [floor, f"**{kernel.median / floor.median:.2f}**", slow, f"{slow.median / kernel.median:.1f}"]
            yield cells


def sweep(args: argparse.Namespace) -> str:
    """Two threads against one, by size: where `library.ELEMENTS_PER_THREAD` comes from."""
    rows = []
    for elements in SWEEP:
        encode = partial(next(operations(Rows.made(CPU, elements, args.block))).call, kernels.select(cpu.NAME, CPU))
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
Kernel: {cpu.describe()}.
GB/s counts the floats and frames a call must move; a write-only call also reads what it overwrites, uncounted. The
floors are of float32 also where an error, gradients or parameters are in bfloat16.

{table(HEADS, measure(args))}

Two threads against one, both forced. In use the kernel takes one thread per {library.ELEMENTS_PER_THREAD} elements.

{unconditional_sweep(args)}
"""
    publish(args, text)
