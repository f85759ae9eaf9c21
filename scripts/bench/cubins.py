"""Occupancy and bytes of the CUDA kernels on paper, for GPUs that are not here: what nvcc makes of csrc/*.cu.

    python scripts/bench.py cubins --record scripts/records/cubins_2026-11.md

Registers, shared memory and spills are the compiler's. Resident threads follow from them by the CUDA programming
guide's rules of allocation. Bytes per element are those that a kernel has to move; their time is that at the GPU's
bandwidth. To use all of it, a multiprocessor needs bandwidth · latency / multiprocessors bytes in flight (Little's
law), and has those that its resident threads load before they use the first: kBatch elements of each input. A kernel
that loads signs alone is bound by its stores, which nothing waits for.

Needs nvcc on the path; no GPU, no driver.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reports import publish, table

from bench.record import here, parser_of
from onebit.comm.kernels import cupy

BLOCK = 256  # elements per scale
FRAMES_OF_MEAN = 4
REGISTERS, MOST_WARPS, MOST_BLOCKS = 65536, 64, 32  # of a multiprocessor, sm_80, sm_90 and sm_100 alike
WARP, SHARED_BY_BLOCK = 32, 1024  # threads; bytes that the system takes of each block's shared memory
LATENCY_S = 800e-9  # of a load, under load: assumed, not measured


@dataclass(frozen=True)
class Gpu:
    """As its maker's data sheet has it. shared: bytes of a multiprocessor."""

    name: str
    capability: int
    multiprocessors: int
    bytes_per_s: float
    shared: int

    @property
    def needed_in_flight(self) -> float:
        """Bytes of a multiprocessor, for its share of the bandwidth."""
        return self.bytes_per_s * LATENCY_S / self.multiprocessors


GPUS = (
    Gpu("A100 SXM, 80 GB", 80, 108, 2.039e12, 164 * 1024),
    Gpu("H100 SXM", 90, 132, 3.35e12, 228 * 1024),
    Gpu("B200", 100, 148, 8e12, 228 * 1024),
)


@dataclass(frozen=True)
class Streams:
    """What a kernel moves for each element: floats that it loads and stores, frames of sign, int8 and int4."""

    loads: int
    stores: int
    signs: int = 0
    bytes_: int = 0
    nibbles: int = 0
    per_block: int = 0  # floats

    @property
    def bytes_per_element(self) -> float:
        frames = self.signs * (BLOCK // 8 + 2) + self.bytes_ * (BLOCK + 2) + self.nibbles * (BLOCK // 2 + 2)
        return 4 * (self.loads + self.stores) + (frames + 4 * self.per_block) / BLOCK


K = FRAMES_OF_MEAN
KERNELS = {
    "sign_encode": Streams(2, 1, signs=1),
    "sign_decode": Streams(0, 1, signs=1),
    "sign_decode_mean": Streams(0, 1, signs=K),
    "sign_encode_mean": Streams(1, 1, signs=K + 1),
    "sign_encode_momentum": Streams(4, 1, signs=1),
    "sign_encode_momentum_variance": Streams(4, 1, signs=1, per_block=1),
    "sign_encode_momentum_packed": Streams(3, 1, signs=2),
    "sign_encode_momentum_packed_variance": Streams(3, 1, signs=2, per_block=1),
    "sign_encode_gradients": Streams(2, 0, signs=1),
    "sign_encode_gradients_returning": Streams(2, 1, signs=1),
    "sign_apply": Streams(1, 1, signs=1),
    "sign_owner_step": Streams(2, 3, signs=K, per_block=5),
    "local_step": Streams(5, 3),
    "local_step_variance": Streams(5, 3, per_block=1),
    "correct_residual": Streams(3, 1),
    "correct_residual_variance": Streams(3, 1, per_block=1),
    "sign_momentum_sums": Streams(3, 0, per_block=2),
    "sign_momentum_sums_variance": Streams(3, 0, per_block=3),
    "sign_momentum_sums_packed": Streams(2, 0, signs=1, per_block=2),
    "sign_momentum_sums_packed_variance": Streams(2, 0, signs=1, per_block=3),
    "int8_encode": Streams(2, 1, bytes_=1),
    "int8_decode": Streams(0, 1, bytes_=1),
    "int8_decode_mean": Streams(0, 1, bytes_=K),
    "int4_encode": Streams(2, 1, nibbles=1),
    "int4_decode": Streams(0, 1, nibbles=1),
    "int4_decode_mean": Streams(0, 1, nibbles=K),
}


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel; shared, spilled: bytes, of a launched block and of a thread."""

    registers: int
    shared: int
    spilled: int


def read_usage(said: str) -> dict[str, Compiled]:
    """By kernel, from the text of nvcc --resource-usage. Raises ValueError where it says nothing of any."""
    found = {}
    for part in said.split("Compiling entry function")[1:]:
        name = re.search(r"'(\w+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if name is None or registers is None or spills is None:
            raise ValueError(f"expected a kernel's registers and spills from nvcc --resource-usage, got {part!r}")
        shared = re.search(r"(\d+) bytes smem", part)
        found[name[1]] = Compiled(int(registers[1]), int(shared[1]) if shared else 0, sum(map(int, spills.groups())))
    if not found:
        raise ValueError(f"nvcc --resource-usage names no kernel: {said!r}")
    return found


def compiled_for(capability: int) -> dict[str, Compiled]:
    """csrc/*.cu with CuPy's options. Raises RuntimeError where nvcc fails."""
    options = [option for option in cupy.OPTIONS if not option.startswith("--std")]
    with tempfile.TemporaryDirectory() as folder:
        out, code = str(Path(folder) / "kernels.cubin"), Path(folder) / "kernels.cu"
        code.write_text(cupy.source())
        command = ["nvcc", "-std=c++17", *options, f"-DONEBIT_BLOCK={BLOCK}", f"-arch=sm_{capability}"]
        command += ["-cubin", "--resource-usage", "-o", out, str(code)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"nvcc for sm_{capability} ended with {done.returncode}: {done.stderr[-2000:]}")
    return read_usage(done.stdout + done.stderr)


def resident_threads(kernel: Compiled, gpu: Gpu, threads: int = cupy.THREADS) -> int:
    """Of a multiprocessor. Registers are given to warps in steps of 256, and to four warps alike."""
    of_warp = -(-kernel.registers // 8) * 8 * WARP
    warps = min(REGISTERS // of_warp // 4 * 4, MOST_WARPS)
    by_shared = gpu.shared // (kernel.shared + SHARED_BY_BLOCK)
    blocks = min(warps * WARP // threads, by_shared, MOST_BLOCKS)
    return blocks * threads


def bytes_in_flight(streams: Streams, threads: int) -> float:
    """That resident threads load before they use the first, signs left out: kBatch elements of each input."""
    batch = 8  # kBatch, where a thread has 16 elements of a block
    return threads * batch * (4 * streams.loads or streams.bytes_ + streams.nibbles / 2)


HEADS = (
    "kernel", "registers", "shared", "spilled", "resident threads", "of 2048", "KiB in flight",
    "bytes per element", "µs",
)  # fmt: skip


def report(gpu: Gpu, elements: float) -> str:
    """What a GPU would need, and a row for each kernel."""
    usage = compiled_for(gpu.capability)
    if usage.keys() != KERNELS.keys():
        raise RuntimeError(f"csrc/*.cu has other kernels than this module: {usage.keys() ^ KERNELS.keys()}")
    rows: list[list[object]] = []
    for name, streams in KERNELS.items():
        kernel, moved = usage[name], streams.bytes_per_element
        threads = resident_threads(kernel, gpu)
        cells = [name, kernel.registers, kernel.shared, kernel.spilled, threads, f"{threads / (MOST_WARPS * WARP):.0%}"]
        cells += [f"{bytes_in_flight(streams, threads) / 1024:.0f}", f"{moved:.2f}"]
        rows.append([*cells, f"{1e6 * moved * elements / gpu.bytes_per_s:.1f}"])
    return f"""## {gpu.name}, sm_{gpu.capability}

{gpu.multiprocessors} multiprocessors, {gpu.bytes_per_s / 1e12:g} TB/s: {gpu.needed_in_flight / 1024:.0f} KiB in flight
each.

{table(HEADS, rows)}
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("cubins", __doc__ or "")
    parser.add_argument("--elements", type=float, default=25e6)
    args = parser.parse_args(argv)
    if shutil.which("nvcc") is None:
        raise SystemExit("nvcc is not on the path: install CUDA's compiler (no GPU is needed)")
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    tables = [report(gpu, args.elements) for gpu in GPUS]
    about = f"""# The CUDA kernels on paper

{here()}

{version}. Blocks of {BLOCK} elements, means of {FRAMES_OF_MEAN} frames, float32 tensors, launched blocks of
{cupy.THREADS} threads; a load is assumed to take {1e9 * LATENCY_S:g} ns. µs: for {args.elements / 1e6:g} million
elements. No GPU has run this.
"""
    publish(args, "\n".join([about, *tables]))
