"""Everything that only a machine with a GPU can show: kernels bit for bit, optimizers, GB/s against a copy.

    python scripts/gpu_check.py --record scripts/records/gpu_<device>_<yyyy-mm>.md

1. Every kernel for CUDA tensors gives the reference's bytes and floats, those of the reference on the host.
2. Each optimizer, in fp32 and bf16 on simulated ranks, ends with the same bits on all ranks and with every kernel.
3. Encode and decode in GB/s beside a device-to-device copy, in turn, so that whatever disturbs one disturbs both.

Exits with 1 where something differs, and at once where there is no GPU. `--rehearse` runs 1 and 2 on
the host in Triton's interpreter (set TRITON_INTERPRET=1), and 3 for its form only.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from bench_kernels import Timing, commit
from torch import Tensor, nn

from onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from onebit.comm import SignCodec, SimTransport, kernels, run_ranks
from onebit.comm.kernels import reference

KERNELS = ("triton",)
SCALES = ("rms", "mean_abs")
ROWS_OF_MEAN = 4
SPECIAL = (
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e30, -1e-30, 1e-23, 1.8e19, 3e38,
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of one check. problem: empty where it held."""

    name: str
    problem: str


def outcome(name: str, check: Callable[[], None]) -> Outcome:
    try:
        check()
        return Outcome(name, "")
    except Exception as error:
        traceback.print_exc()
        return Outcome(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


# 1. Kernels


def random(*shape: int, seed: int) -> Tensor:
    """Values of many sizes, some of them zeros of either sign."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=g) * 10 ** torch.randint(-4, 4, shape, generator=g).float()
    values[torch.rand(shape, generator=g) < 0.05] *= 0.0
    return values


def assert_same(what: str, got: Tensor, expected: Tensor) -> None:
    """Bit for bit; but a NaN equals a NaN, for a device's own may have other bits than the host's."""
    got, expected = got.cpu(), expected.cpu()
    different = got != expected
    if got.dtype == torch.float32:
        different = (got.view(torch.int32) != expected.view(torch.int32)) & ~(got.isnan() & expected.isnan())
    if different.any():
        raise AssertionError(
            f"{what}: {int(different.sum())} of {got.numel()} differ, first at {different.nonzero()[0]}"
        )


def check_kernel(kernel: ModuleType, device: torch.device, block: int, K: int, J: int) -> None:
    """encode, decode and decode_mean of one shape, over all options and kinds of input."""
    N = J * block
    plain = random(K, N, seed=J)
    special = plain.clone()
    if N:
        at = torch.arange(0, N, 97)
        special[:, at] = torch.tensor(SPECIAL)[torch.arange(len(at)) % len(SPECIAL)]
    edges = torch.tensor([0, 1, 15, 16, 17, block - 1, block], dtype=torch.int32)
    ragged = edges[torch.arange(K * J) % len(edges)].view(K, J)
    errors = (None, random(K, N, seed=1), random(K, N, seed=2).bfloat16())
    for x in (plain, special):
        for error in errors:
            for counts in (None, ragged):
                for scale in SCALES:
                    _check_encode(kernel, device, x, error, counts, block, scale)
    frames = torch.empty(K, SignCodec(block).frame_bytes(N), dtype=torch.uint8)
    reference.encode(special.clone(), None, frames, None, block=block, scale="rms")
    for weight, keep in ((1.0, 0.0), (0.1, 0.0), (0.1, 0.9), (-1.0, 1.0), (1.0, 1e-60)):
        expected, got = plain.clone(), plain.to(device, copy=True)
        reference.decode(frames, expected, block=block, weight=weight, keep=keep)
        kernel.decode(frames.to(device), got, block=block, weight=weight, keep=keep)
        assert_same(f"decode, weight={weight}, keep={keep}", got, expected)
    mean, got_mean = torch.empty(N), torch.empty(N, device=device)
    reference.decode_mean(frames, mean, block=block)
    kernel.decode_mean(frames.to(device), got_mean, block=block)
    assert_same("decode_mean", got_mean, mean)


def _check_encode(
    kernel: ModuleType,
    device: torch.device,
    x_KN: Tensor,
    error_KN: Tensor | None,
    counts_KJ: Tensor | None,
    block: int,
    scale: str,
) -> None:
    K, N = x_KN.shape
    name = f"encode, scale={scale}, error={error_KN.dtype if error_KN is not None else None}, " + (
        "full" if counts_KJ is None else "ragged"
    )
    residual, frames = x_KN.clone(), torch.full((K, SignCodec(block).frame_bytes(N)), 0xAB, dtype=torch.uint8)
    got_residual, got_frames = x_KN.to(device, copy=True), torch.full_like(frames, 0xCD).to(device)
    reference.encode(residual, error_KN, frames, counts_KJ, block=block, scale=scale)
    there = [None if t is None else t.to(device) for t in (error_KN, counts_KJ)]
    kernel.encode(got_residual, there[0], got_frames, there[1], block=block, scale=scale)
    assert_same(f"frames of {name}", got_frames, frames)
    assert_same(f"residuals of {name}", got_residual, residual)


def kernel_checks(device: torch.device, blocks: Sequence[int], elements: Sequence[int]) -> Iterator[Outcome]:
    for name in ("reference", *KERNELS):
        kernel = kernels.select(name, device)
        for block in blocks:
            for n in elements:
                for K in (1, 3):
                    J = -(-n // block)
                    title = f"{name}: {K} × {J} blocks of {block}"
                    yield outcome(title, functools.partial(check_kernel, kernel, device, block, K, J))


# 2. Optimizers


def train(
    kind: str, kernel: str, dtype: torch.dtype, device: torch.device, steps: int, overlap: bool, ranks: int = 2
) -> list[Tensor]:
    """Each rank's parameters after some steps of a small regression, its own data on each."""

    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(32, 77), nn.Tanh(), nn.Linear(77, 5)).to(device, dtype)

    def rank(link: SimTransport) -> Tensor:
        model = copy.deepcopy(start)  # the ranks are threads, which share torch's random generator
        common = dict(link=link, codec=SignCodec(kernel=kernel), overlap=overlap)
        optimizer: torch.optim.Optimizer
        if kind == "OnebitAdam":
            optimizer = OnebitAdam(model.parameters(), lr=1e-2, freeze_step=steps // 3, **common)
        elif kind == "OnebitLamb":
            optimizer = OnebitLamb(model.parameters(), lr=1e-2, freeze_step=steps // 3, **common)
        else:
            optimizer = ZeroOneAdam(model.parameters(), lr=1e-2, **common)
        g = torch.Generator().manual_seed(1 + link.rank)
        losses = []
        for _ in range(steps):
            x = torch.randn(64, 32, generator=g).to(device, dtype)
            loss = (model(x) - x[:, :5].sin()).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        third = max(1, steps // 3)
        if not sum(losses[-third:]) < sum(losses[:third]):
            raise AssertionError(f"rank {link.rank}: the loss did not fall: {losses[0]:.4g} to {losses[-1]:.4g}")
        return torch.cat([p.detach().float().flatten() for p in model.parameters()])

    return run_ranks(ranks, rank)


def check_optimizer(
    kind: str, kernel: str, dtype: torch.dtype, device: torch.device, steps: int, overlap: bool
) -> None:
    with_kernel = train(kind, kernel, dtype, device, steps, overlap)
    with_reference = train(kind, "reference", dtype, device, steps, overlap)
    if kind != "ZeroOneAdam":  # whose ranks may end between two synchronizations
        assert_same("parameters of rank 1 against rank 0", with_kernel[1], with_kernel[0])
    for r, (got, expected) in enumerate(zip(with_kernel, with_reference, strict=True)):
        assert_same(f"parameters of rank {r} against those with the reference kernel", got, expected)


def optimizer_checks(device: torch.device, steps: int) -> Iterator[Outcome]:
    for kernel in KERNELS:
        for kind in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"):
            for dtype in (torch.float32, torch.bfloat16):
                for overlap in (False, True):
                    title = f"{kernel}: {kind}, {dtype}{', sent during backward' if overlap else ''}, {steps} steps"
                    check = functools.partial(check_optimizer, kind, kernel, dtype, device, steps, overlap)
                    yield outcome(title, check)


# 3. Speed


def time_in_turn(calls: Sequence[Callable[[], object]], repeats: int, device: torch.device) -> list[Timing]:
    """Of each call, after two to warm up, in seconds of the device (of the host where there is no GPU)."""
    for call in calls * 2:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for spent, call in zip(seconds, calls, strict=True):
            spent.append(_seconds(call, device))
    return [Timing.of(spent) for spent in seconds]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def speed_table(device: torch.device, elements: int, block: int, repeats: int) -> list[str]:
    codec = SignCodec(block)
    N = -(-elements // block) * block
    B = codec.frame_bytes(N)
    x, error, out = (torch.randn(1, N, device=device) for _ in range(3))
    counts = torch.full((1, N // block), block, dtype=torch.int32, device=device)
    frames = torch.empty(1, B, dtype=torch.uint8, device=device)
    received = torch.empty(ROWS_OF_MEAN, B, dtype=torch.uint8, device=device)
    for k in range(ROWS_OF_MEAN):
        reference.encode(torch.randn(1, N, device=device), None, received[k : k + 1], None, block=block, scale="rms")
    lines = ["| kernel | operation | ms | GB/s | copy ms | copy GB/s | of copy |", "|---" * 7 + "|"]
    for name in (*KERNELS, "reference"):
        kernel = kernels.select(name, device)

        def encode(e: Tensor | None, c: Tensor | None, kernel: ModuleType = kernel) -> Callable[[], None]:
            return lambda: kernel.encode(x, e, frames, c, block=block, scale=codec.scale)

        def decode(weight: float, keep: float, kernel: ModuleType = kernel) -> Callable[[], None]:
            return lambda: kernel.decode(received[:1], out, block=block, weight=weight, keep=keep)

        def mean(kernel: ModuleType = kernel) -> None:
            kernel.decode_mean(received, out[0], block=block)

        for title, moved, call in (
            ("encode, float32 error", 12 * N + B, encode(error, None)),
            ("encode, float32 error, counts", 12 * N + B + 4 * N // block, encode(error, counts)),
            ("encode, bfloat16 error", 10 * N + B, encode(error.bfloat16(), None)),
            ("decode", 4 * N + B, decode(1.0, 0.0)),
            ("decode, 0.9·out + 0.1·value", 8 * N + B, decode(0.1, 0.9)),
            (f"decode_mean, K={ROWS_OF_MEAN}", 4 * N + ROWS_OF_MEAN * B, mean),
        ):
            timing, copying = time_in_turn((call, lambda: out.copy_(error)), repeats, device)
            rate, copy_rate = moved / timing.median / 1e6, 8 * N / copying.median / 1e6
            share = f"**{rate / copy_rate:.2f}**"
            lines.append(f"| {name} | {title} | {timing} | {rate:.1f} | {copying} | {copy_rate:.1f} | {share} |")
    return lines


# The record


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a rehearsal on the host ({platform.machine()}): no number here says anything about a GPU"
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}.{properties.minor}"
    return f"{properties.name}, {memory}; CUDA {torch.version.cuda}"


def record(argv: Sequence[str], args: argparse.Namespace, device: torch.device) -> tuple[str, int]:
    """The text, and how many checks failed."""
    outcomes = [*kernel_checks(device, args.blocks, args.sizes), *optimizer_checks(device, args.steps)]
    failed = [o for o in outcomes if o.problem]
    table = speed_table(device, args.elements, args.block, args.repeats)
    listed = "\n".join(f"- FAILED {o.name}: {o.problem}" if o.problem else f"- {o.name}" for o in outcomes)
    text = f"""# The sign kernels on a GPU

- command: `python scripts/gpu_check.py {shlex.join(argv)}`
- commit {commit()}, {time.strftime("%Y-%m-%d")}; Python {platform.python_version()}, torch {torch.__version__}
- {device_name(device)}
- kernels: {kernels.describe()}

## Speed

{args.elements} elements, blocks of {args.block}; {args.repeats} repetitions of operation and copy in turn, timed with
events on the device; median (quartiles). GB/s counts the floats and frames a call must move; the copy moves 8 bytes per
element.

{chr(10).join(table)}

## Checks: {len(outcomes) - len(failed)} of {len(outcomes)} held

Bit for bit against the reference on the host (kernels), or against the same run with the reference kernel and between
the ranks (optimizers; `ZeroOneAdam` not between ranks, which may end between two synchronizations).

{listed}
"""
    return text, len(failed)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [0, 1, 1000, 100_000, 3_000_000]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="elements per row of the checks")
    blocks = [64, 192, 256, 512, 1024]
    parser.add_argument("--blocks", type=int, nargs="+", default=blocks, help="elements per scale in the checks")
    parser.add_argument("--steps", type=int, default=30, help="of each optimizer (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the speed table (default: %(default)s)")
    parser.add_argument("--block", type=int, default=256, help="of the speed table (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="of the speed table (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the text there, in Markdown")
    parser.add_argument("--rehearse", action="store_true", help="on host tensors, in Triton's interpreter")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if not args.rehearse and not torch.cuda.is_available():
        print(f"gpu_check needs a CUDA device; torch {torch.__version__} sees none. --rehearse tries it out without.")
        return 2
    text, failed = record(argv, args, torch.device("cpu" if args.rehearse else "cuda"))
    print(text)
    if args.record is not None:
        args.record.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
