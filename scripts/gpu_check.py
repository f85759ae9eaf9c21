"""Everything that only a machine with a GPU can show: kernels bit for bit, optimizers, GB/s against a copy.

    python scripts/gpu_check.py --record scripts/records/gpu_<device>_<yyyy-mm>.md

1. Every kernel for CUDA tensors gives the reference's bytes and floats, those of the reference on the host: sign
   frames, int8 frames, and the fused steps over sign frames.
2. Each optimizer, in fp32 and bf16 on simulated ranks, ends with the same bits on all ranks and with every kernel.
3. Each kernel in GB/s beside a device-to-device copy, in turn, so that whatever disturbs one disturbs both.
4. A whole model, `--model` elements in a transformer's shapes: encode, then decode and update, against the same in
   torch, operation by operation.
5. How often the host waits for the device in a compressed step of each optimizer, from a profile.

Exits with 1 where something differs, and at once where there is no GPU. `--rehearse` runs 1 and 2 on
the host in Triton's interpreter (set TRITON_INTERPRET=1), and the others for their form only.

Shape legend: K rows, N elements, J blocks, B bytes, W ranks.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import itertools
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from bench.kernels import Timing
from provenance import record_path, revision, write_record
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from onebit.comm import Int8Codec, SignCodec, SimTransport, kernels, run_ranks
from onebit.comm.kernels import reference
from onebit.comm.kernels.operands import EncodeOutput, MomentumInputs, MomentumWeights, ParamUpdate, Segments, Variance

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import fused_cases

KERNELS = ("cupy", "triton")
FRAMES = ("rms", "mean_abs", "int8")
ERRORS = (None, torch.float32, torch.bfloat16)
ROWS_OF_MEAN = 4
TARGET = 0.85
WEIGHTS = MomentumWeights(keep=0.9, add=0.1, own=1e-3)
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


def function(kernel: ModuleType, name: str, frame: str) -> Callable[..., None]:
    """The kernel's encode, decode or decode_mean for a frame, without its scale option."""
    if frame == "int8":
        return getattr(kernel, f"int8_{name}")
    return functools.partial(kernel.encode, scale=frame) if name == "encode" else getattr(kernel, name)


def frames_of(frame: str, K: int, N: int, block: int) -> Tensor:
    codec = Int8Codec(block) if frame == "int8" else SignCodec(block)
    return torch.full((K, codec.frame_bytes(N)), 0xAB, dtype=torch.uint8)


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
    for frame in FRAMES:
        for x in (plain, special):
            for error in errors:
                for counts in (None, ragged):
                    _check_encode(kernel, device, x, error, counts, block, frame)
    for frame in ("rms", "int8"):
        frames = frames_of(frame, K, N, block)
        function(reference, "encode", frame)(special.clone(), None, frames, None, block=block)
        decode, expected_decode = (function(module, "decode", frame) for module in (kernel, reference))
        for weight, keep in ((1.0, 0.0), (0.1, 0.0), (0.1, 0.9), (-1.0, 1.0), (1.0, 1e-60)):
            expected, got = plain.clone(), plain.to(device, copy=True)
            expected_decode(frames, expected, block=block, weight=weight, keep=keep)
            decode(frames.to(device), got, block=block, weight=weight, keep=keep)
            assert_same(f"decode of {frame}, weight={weight}, keep={keep}", got, expected)
        mean, got_mean = torch.empty(N), torch.empty(N, device=device)
        function(reference, "decode_mean", frame)(frames, mean, block=block)
        function(kernel, "decode_mean", frame)(frames.to(device), got_mean, block=block)
        assert_same(f"decode_mean of {frame}", got_mean, mean)


def _check_encode(
    kernel: ModuleType,
    device: torch.device,
    x_KN: Tensor,
    error_KN: Tensor | None,
    counts_KJ: Tensor | None,
    block: int,
    frame: str,
) -> None:
    K, N = x_KN.shape
    name = f"encode of {frame}, error={error_KN.dtype if error_KN is not None else None}, " + (
        "full" if counts_KJ is None else "ragged"
    )
    residual, frames = x_KN.clone(), frames_of(frame, K, N, block)
    got_residual, got_frames = x_KN.to(device, copy=True), torch.full_like(frames, 0xCD).to(device)
    function(reference, "encode", frame)(residual, error_KN, frames, counts_KJ, block=block)
    there = [None if t is None else t.to(device) for t in (error_KN, counts_KJ)]
    function(kernel, "encode", frame)(got_residual, there[0], got_frames, there[1], block=block)
    assert_same(f"frames of {name}", got_frames, frames)
    assert_same(f"residuals of {name}", got_residual, residual)


def fused_cases_for(blocks: Sequence[int], elements: Sequence[int]) -> Iterator[fused_cases.Case]:
    """Those of the tests in such blocks, and larger ones: tensors of every type, their ends around block borders."""
    yield from (case for case in fused_cases.CASES if case.block in blocks and case.numels)
    types = (torch.float32, torch.bfloat16, torch.float16, None, torch.float32)
    for block in blocks:
        for n in elements:
            if n > block:
                numels = (n, 1, block, n // 3 + 1, block - 1)
                filled = sum(-(-numel // block) + 1 for numel in numels)
                yield fused_cases.Case(3, -(-filled // 3), block, numels, types)


def check_fused(kernel: ModuleType, device: torch.device, case: fused_cases.Case) -> None:
    is_on_the_host = device.type == "cpu"  # a rehearsal, slow enough with a third of them
    for k, (packed, variance) in enumerate(itertools.product((False, True), repeat=2)):
        for error in ERRORS if not is_on_the_host else ERRORS[k % 3 :][:1]:
            fused_cases.check_encode_momentum(
                kernel.encode_momentum, case, error=error, packed=packed, variance=variance, scale=FRAMES[k % 2],
                device=str(device),
            )  # fmt: skip
    for k, rows in enumerate((1, 2, 5)):
        for error in ERRORS if not is_on_the_host else ERRORS[k:][:1]:
            fused_cases.check_encode_mean(
                kernel.encode_mean, case, rows=rows, error=error, scale=FRAMES[k % 2], device=str(device)
            )
    fused_cases.check_apply(kernel.apply, case, device=str(device))


def kernel_checks(
    names: Sequence[str], device: torch.device, blocks: Sequence[int], elements: Sequence[int]
) -> Iterator[Outcome]:
    for name in ("reference", *names):
        kernel = kernels.select(name, device)
        for block in blocks:
            for n in elements:
                for K in (1, 3):
                    J = -(-n // block)
                    title = f"{name}: {K} × {J} blocks of {block}"
                    yield outcome(title, functools.partial(check_kernel, kernel, device, block, K, J))
        for case in fused_cases_for(blocks, elements):
            title = f"{name}: fused, {case.K} × {case.J} blocks of {case.block}, {len(case.numels)} tensors"
            yield outcome(title, functools.partial(check_fused, kernel, device, case))


# 2. Optimizers


def train(
    kind: str, codec: SignCodec, dtype: torch.dtype, device: torch.device, steps: int, overlap: bool, ranks: int = 2
) -> list[Tensor]:
    """Each rank's parameters after some steps of a small regression, its own data on each."""

    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(32, 77), nn.Tanh(), nn.Linear(77, 5)).to(device, dtype)

    def rank(transport: SimTransport) -> Tensor:
        model = copy.deepcopy(start)  # the ranks are threads, which share torch's random generator
        common = dict(transport=transport, codec=codec, overlap=overlap)
        optimizer: torch.optim.Optimizer
        if kind == "OnebitAdam":
            optimizer = OnebitAdam(model.parameters(), lr=1e-2, freeze_step=steps // 3, **common)
        elif kind == "OnebitLamb":
            optimizer = OnebitLamb(model.parameters(), lr=1e-2, freeze_step=steps // 3, **common)
        else:
            optimizer = ZeroOneAdam(model.parameters(), lr=1e-2, **common)
        g = torch.Generator().manual_seed(1 + transport.rank)
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
            raise AssertionError(f"rank {transport.rank}: the loss did not fall: {losses[0]:.4g} to {losses[-1]:.4g}")
        return torch.cat([p.detach().float().flatten() for p in model.parameters()])

    return run_ranks(ranks, rank)


def check_optimizer(
    kind: str, codec: SignCodec, dtype: torch.dtype, device: torch.device, steps: int, overlap: bool
) -> None:
    with_kernel = train(kind, codec, dtype, device, steps, overlap)
    with_reference = train(kind, replace(codec, kernel="reference"), dtype, device, steps, overlap)
    if kind != "ZeroOneAdam":  # whose ranks may end between two synchronizations
        assert_same("parameters of rank 1 against rank 0", with_kernel[1], with_kernel[0])
    for r, (got, expected) in enumerate(zip(with_kernel, with_reference, strict=True)):
        assert_same(f"parameters of rank {r} against those with the reference kernel", got, expected)


def optimizer_checks(names: Sequence[str], device: torch.device, block: int, steps: int) -> Iterator[Outcome]:
    for kernel in names:
        for kind in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam"):
            for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
                for overlap in (False, True) if device.type == "cuda" else (kind == "OnebitAdam",):
                    title = f"{kernel}: {kind}, {dtype}{', sent during backward' if overlap else ''}, {steps} steps"
                    codec = SignCodec(block, kernel=kernel)
                    check = functools.partial(check_optimizer, kind, codec, dtype, device, steps, overlap)
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


@dataclass(frozen=True)
class Operation:
    """moved: bytes of floats and frames that one call must read and write."""

    name: str
    moved: int
    call: Callable[[ModuleType], object]


def operations(device: torch.device, N: int, block: int) -> Iterator[Operation]:
    """Over one row of N elements. A generator, so that what one operation alone needs is freed behind it."""
    codec, int8 = SignCodec(block), Int8Codec(block)
    B, B8, J = codec.frame_bytes(N), int8.frame_bytes(N), N // block
    x, error, out = (torch.randn(1, N, device=device) for _ in range(3))
    counts = torch.full((1, J), block, dtype=torch.int32, device=device)
    frames, frames8 = (torch.empty(1, b, dtype=torch.uint8, device=device) for b in (B, B8))
    outgoing = EncodeOutput(error, frames, counts, out)
    received = torch.empty(ROWS_OF_MEAN, B, dtype=torch.uint8, device=device)
    for k in range(ROWS_OF_MEAN):
        reference.encode(torch.randn(1, N, device=device), None, received[k : k + 1], None, block=block, scale="rms")
    sign = {"block": block, "scale": codec.scale}

    def encode(e: Tensor | None, c: Tensor | None) -> Callable[[ModuleType], None]:
        return lambda kernel: kernel.encode(x, e, frames, c, **sign)

    def decode(weight: float, keep: float) -> Callable[[ModuleType], None]:
        return lambda kernel: kernel.decode(received[:1], out, block=block, weight=weight, keep=keep)

    yield Operation("encode, float32 error", 12 * N + B, encode(error, None))
    yield Operation("encode, float32 error, counts", 12 * N + B + 4 * J, encode(error, counts))
    yield Operation("encode, bfloat16 error", 10 * N + B, encode(error.bfloat16(), None))
    yield Operation("decode", 4 * N + B, decode(1.0, 0.0))
    yield Operation("decode, 0.9·out + 0.1·value", 8 * N + B, decode(0.1, 0.9))
    for K in (1, ROWS_OF_MEAN):
        yield Operation(
            f"decode_mean, K={K}",
            4 * N + K * B,
            lambda kernel, K=K: kernel.decode_mean(received[:K], out[0], block=block),
        )
        yield Operation(
            f"encode_mean, K={K}",
            8 * N + (K + 1) * B,
            lambda kernel, K=K: kernel.encode_mean(received[:K], outgoing, **sign),
        )

    segments, D = Segments((0,), (N,), block), torch.rand(1, N, device=device) + 1e-3
    variance = Variance(D, torch.zeros(1, J, device=device), 1.5, 1e-8)
    weight, keep = torch.full((1,), -1e-3, device=device), torch.full((1,), 0.999, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        grads = [torch.randn(N, device=device, dtype=dtype)]

        def momentum(d: Tensor | Variance, m: Tensor, grads: list[Tensor] = grads) -> Callable[[ModuleType], None]:
            made_of = MomentumInputs(grads, segments, d, m, WEIGHTS)
            return lambda kernel: kernel.encode_momentum(made_of, outgoing, **sign)

        size, kind = grads[0].element_size(), str(dtype).removeprefix("torch.")
        yield Operation(f"encode_momentum, {kind} gradient", (12 + size) * N + 2 * B, momentum(D, received[:1]))
        if dtype == torch.float32:
            moved = (16 + size) * N + B
            yield Operation("encode_momentum, a variance, float32 momentum", moved, momentum(variance, x))
        yield Operation(
            f"apply, {kind} parameters",
            2 * size * N + B,
            lambda kernel, p=grads: kernel.apply(received[:1], N, ParamUpdate(p, segments, weight, keep), block=block),
        )
    yield Operation(
        "int8_encode, float32 error",
        12 * N + B8,
        lambda kernel: kernel.int8_encode(x, error, frames8, counts, block=block),
    )
    yield Operation(
        "int8_decode, 0.9·out + 0.1·value",
        8 * N + B8,
        lambda kernel: kernel.int8_decode(frames8, out, block=block, weight=0.1, keep=0.9),
    )


def speed_table(names: Sequence[str], device: torch.device, elements: int, block: int, repeats: int) -> list[str]:
    N = -(-elements // block) * block
    lines = ["| operation | kernel | ms | GB/s | copy ms | copy GB/s | of copy |", "|---" * 7 + "|"]
    source, target = torch.randn(N, device=device), torch.empty(N, device=device)
    for operation in operations(device, N, block):
        for name in (*names, "reference"):
            call = functools.partial(operation.call, kernels.select(name, device))
            timing, copying = time_in_turn((call, lambda: target.copy_(source)), repeats, device)
            rate, copy_rate = operation.moved / timing.median / 1e6, 8 * N / copying.median / 1e6
            share = f"{rate / copy_rate:.2f}" + (
                "" if rate >= TARGET * copy_rate or name == "reference" else " (below)"
            )
            lines.append(
                f"| {operation.name} | {name} | {timing} | {rate:.1f} | {copying} | {copy_rate:.1f} | **{share}** |"
            )
    return lines


# 4. A whole model


def transformer_shapes(elements: int) -> list[tuple[int, ...]]:
    """Parameters of an encoder as wide as BERT large, as many layers as fit into `elements`; at least one tensor."""
    width = 1024
    layer: list[tuple[int, ...]] = [(width, width), (width,)] * 4
    layer += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)] + [(width,)] * 4
    per_layer = sum(torch.Size(shape).numel() for shape in layer)
    embedding: list[tuple[int, ...]] = [(30522, width), (512, width)]
    left = elements - sum(torch.Size(shape).numel() for shape in embedding)
    return embedding + layer * (left // per_layer) if left >= 0 else [(elements,)]


def model_table(names: Sequence[str], device: torch.device, elements: int, block: int, repeats: int) -> list[str]:
    """One row of all parameters: encode_momentum, then apply from its own frame, as a single rank does."""
    numels = [torch.Size(shape).numel() for shape in transformer_shapes(elements)]
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


# 5. Waiting

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
STEP = "gpu_check: step"


def waits_table(names: Sequence[str], device: torch.device, block: int, steps: int) -> list[str]:
    """Per compressed step of one rank, whose collectives copy on the device."""
    lines = ["| optimizer | kernel | waits of the host per step | which |", "|---" * 4 + "|"]
    for kind in (OnebitAdam, OnebitLamb, ZeroOneAdam):
        for name in names:
            waits = waits_in_steps(kind, SignCodec(block, kernel=name), device, steps)
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


# The record


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a rehearsal on the host ({platform.machine()}): no number here says anything about a GPU"
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, compute capability {properties.major}.{properties.minor}"
    return f"{properties.name}, {memory}; CUDA {torch.version.cuda}"


def why_not_there(name: str, device: torch.device) -> str:
    try:
        kernels.select(name, device)
    except ImportError as error:
        return str(error)
    return ""


def record(argv: Sequence[str], args: argparse.Namespace, device: torch.device) -> tuple[str, int]:
    """The text, and how many checks failed."""
    names = args.kernels or (["triton"] if args.rehearse else list(KERNELS))
    outcomes = [Outcome(f"{name} is there", why_not_there(name, device)) for name in names]
    names = [name for name in names if not why_not_there(name, device)]
    outcomes += kernel_checks(names, device, args.blocks, args.sizes)
    outcomes += optimizer_checks(names, device, args.block, args.steps)
    failed = [o for o in outcomes if o.problem]
    table = speed_table(names, device, args.elements, args.block, args.repeats)
    model = model_table(names, device, args.model, args.block, max(1, args.repeats // 5))
    waits = waits_table(names, device, args.block, 1 if args.rehearse else 5)
    listed = "\n".join(f"- FAILED {o.name}: {o.problem}" if o.problem else f"- {o.name}" for o in outcomes)
    text = f"""# The kernels on a GPU

- command: `python scripts/gpu_check.py {shlex.join(argv)}`
- commit {revision()}, {time.strftime("%Y-%m-%d")}; Python {platform.python_version()}, torch {torch.__version__}
- {device_name(device)}
- kernels: {kernels.describe()}

## Speed

{args.elements} elements, blocks of {args.block}; {args.repeats} repetitions of operation and copy in turn, timed with
events on the device; median (quartiles). GB/s counts the floats and frames a call must move; the copy moves 8 bytes per
element. The target is {TARGET} of the copy; "(below)": missed.

{chr(10).join(table)}

## A whole model

One rank: `encode_momentum` over all parameters, then `apply` from its frame; {max(1, args.repeats // 5)} repetitions.
The reference is the same in torch, operation by operation.

{chr(10).join(model)}

## Waiting

Calls in which the host waits for the device, in `step()`, of one rank in the compressed phase; 5 steps of a profile.

{chr(10).join(waits)}

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
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help="which (default: all; rehearsed: triton)")
    parser.add_argument("--model", type=int, default=340_000_000, help="elements of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each optimizer (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the speed table (default: %(default)s)")
    parser.add_argument("--block", type=int, default=256, help="elements per scale elsewhere (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="of the speed table (default: %(default)s)")
    parser.add_argument("--record", type=record_path, metavar="FILE", help="also write the text there, in Markdown")
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
        write_record(args.record, text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
