"""The Triton kernel gives the reference's bytes and floats in Triton's interpreter, and compiles for GPUs without one.

What no test here can show: that a GPU computes what the compiled code says. scripts/gpu_check.py does, where there is
one. Tolerance: none.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import fused_cases
import kernel_cases
import pytest
import torch
from kernel_inputs import frames_for, function
from ranks import python_of_forks
from torch import Tensor

from onebit.comm import EncodeOutput, MomentumInputs, ParamUpdate, Segments, SignCodec, Variance, kernels
from onebit.comm.kernels import reference
from onebit.comm.kernels.operands import GradientSum, LocalStep, OwnerStep
from onebit.comm.kernels.triton import why_not

pytestmark = pytest.mark.processes  # interpreters and compilers

CASES = Path(__file__).parents[1] / "support" / "triton_cases.py"
CHECK = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
needs_triton = pytest.mark.skipif(bool(why_not()), reason=f"needs Triton: {why_not()}")
not_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles: run it without TRITON_INTERPRET=1"
)


# In the interpreter


@functools.cache
def interpreted() -> dict[str, str]:
    """What was wrong with each case."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, str(CASES)], env=env, capture_output=True, text=True, timeout=240)
    if run.returncode:
        return dict.fromkeys(kernel_cases.CASES, run.stderr)
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_interpreted(name: str) -> None:
    problem = interpreted()[name]
    assert not problem, problem


# Compiled for GPUs that are not here


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def rows(block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(2, 2 * block, dtype=dtype)


def owed(block: int, dtype: torch.dtype | None = torch.float32) -> Tensor | None:
    return None if dtype is None else rows(block, dtype)


def counts(block: int) -> Tensor:
    return torch.full((2, 2), block, dtype=torch.int32)


def pieces(block: int, dtypes: tuple[torch.dtype, ...]) -> tuple[list[Tensor], Segments]:
    """One tensor of each type, a block long, which start at multiples of 16 bytes where there is one type alone."""
    start = 0 if len(dtypes) == 1 else 1
    tensors = [torch.zeros(block + start, dtype=dtype)[start:] for dtype in dtypes]
    return tensors, Segments(tuple(range(len(dtypes))), (block,) * len(dtypes), block)


def encode(block: int, *, error: torch.dtype | None = torch.float32, scale: str = "rms", counted: bool = True) -> None:
    out = frames_for(2, 2 * block, block), counts(block) if counted else None
    backend().encode(rows(block), owed(block, error), *out, block=block, scale=scale)


def encode_steps(block: int, *, frame: str) -> None:
    frames = frames_for(2, 2 * block, block, frame=frame)
    function(backend(), "encode", frame)(rows(block), rows(block), frames, counts(block), block=block)


def decode(block: int, *, frame: str = "rms", weight: float = 1.0, keep: float = 0.0) -> None:
    frames = frames_for(2, 2 * block, block, frame=frame)
    function(backend(), "decode", frame)(frames, rows(block), block=block, weight=weight, keep=keep)


def decode_mean(block: int, *, frame: str = "rms") -> None:
    frames = frames_for(2, 2 * block, block, frame=frame)
    function(backend(), "decode_mean", frame)(frames, rows(block)[0], block=block)


def encode_mean(block: int) -> None:
    out = EncodeOutput(rows(block)[:1], frames_for(1, 2 * block, block), counts(block)[:1], rows(block)[:1])
    backend().encode_mean(frames_for(3, 2 * block, block), out, block=block, scale="rms")


def encode_momentum(
    block: int,
    *,
    packed: bool = True,
    variance: bool = False,
    dtypes: tuple[torch.dtype, ...] = FLOATS[:1],
    error: torch.dtype = torch.float32,
) -> None:
    tensors, segments = pieces(block, dtypes)
    D = Variance(rows(block), torch.zeros(2, 2), 1.25, 1e-8) if variance else rows(block)
    old = frames_for(2, 2 * block, block) if packed else rows(block)
    momentum = MomentumInputs(tensors, segments, D, old, fused_cases.WEIGHTS)
    out = EncodeOutput(rows(block, error), frames_for(2, 2 * block, block), counts(block), rows(block, error))
    backend().encode_momentum(momentum, out, block=block, scale="rms")


def encode_gradients(
    block: int,
    *,
    returned: float | None = 0.9,
    dtypes: tuple[torch.dtype, ...] = FLOATS[:1],
    owed: torch.dtype = FLOATS[0],
) -> None:
    tensors, segments = pieces(block, dtypes)
    sent = frames_for(2, 2 * block, block)
    step = GradientSum(tensors, segments, rows(block, owed), sent, counts(block), 0.1, 0.5, returned)
    backend().encode_gradients(step, block=block, scale="rms")


def apply(block: int, *, dtypes: tuple[torch.dtype, ...] = FLOATS[:1], frame: str = "rms") -> None:
    tensors, segments = pieces(block, dtypes)
    update = ParamUpdate(tensors, segments, torch.zeros(len(dtypes)), torch.zeros(len(dtypes)))
    function(backend(), "apply", frame)(frames_for(2, 2 * block, block, frame=frame), 2 * block, update, block=block)


def local_step(block: int, *, dtypes: tuple[torch.dtype, ...] = FLOATS[:1]) -> None:
    (tensors, segments), flats = pieces(block, dtypes), [rows(block) for _ in range(4)]
    D = Variance(flats[0], torch.zeros(2, 2), 1.25, 1e-8)
    made_of = MomentumInputs(tensors, segments, D, flats[1], fused_cases.WEIGHTS)
    backend().local_step(LocalStep(made_of, flats[2], flats[3], tensors, weight=0.01, kept=0.999), block=block)


def correct_residual(block: int, *, residual: torch.dtype = torch.float32) -> None:
    (tensors, segments), flats = pieces(block, FLOATS), [rows(block) for _ in range(3)]
    D = Variance(flats[0], torch.zeros(2, 2), 1.25, 1e-8) if residual == torch.float32 else flats[0]
    made_of = MomentumInputs(tensors, segments, D, flats[1], fused_cases.WEIGHTS)
    backend().correct_residual(made_of, 0.7, flats[2].to(residual), block=block)


def momentum_sums(block: int, *, packed: bool) -> None:
    (tensors, segments), flats = pieces(block, FLOATS), [rows(block) for _ in range(2)]
    D = flats[0] if packed else Variance(flats[0], torch.zeros(2, 2), 1.25, 1e-8)
    old = frames_for(2, 2 * block, block) if packed else flats[1]
    made_of = MomentumInputs(tensors, segments, D, old, fused_cases.WEIGHTS)
    backend().momentum_sums(made_of, torch.zeros(2, 2, 2), block=block)


def owner_step(block: int, *, each: bool = False) -> None:
    chunk = [rows(block)[0] for _ in range(4)]
    corrections = torch.ones(2, 2) if each else (1.5, 2.5)
    numbers = {"weight": 0.1, "own": 0.5, "common": 0.5, "eps": 1e-8, "floor": 0.01, "inverse_limit": 0.2}
    D = chunk[3] if each else None
    counted, sums = counts(block)[0], torch.zeros(2, 4)
    frames = frames_for(3, 2 * block, block)
    backend().owner_step(
        OwnerStep(frames, 1, *chunk[:1], counted, *chunk[1:3], D, sums, corrections, **numbers), block=block
    )


# 64: the same operations as in 256, the usual block, a quarter as often; compiles in a quarter of the time.
COMPILED: dict[str, tuple[Callable[[int], None], int]] = {
    "encode": (encode, 256),
    "encode without error and counts": (partial(encode, error=None, counted=False), 64),
    "encode, bfloat16 error, mean_abs": (partial(encode, error=torch.bfloat16, scale="mean_abs"), 64),
    "encode, large blocks": (encode, 2048),
    "decode": (decode, 256),
    "decode, keep·out + weight·value": (partial(decode, weight=0.1, keep=0.9), 256),
    "decode_mean": (decode_mean, 256),
    "encode_mean": (encode_mean, 64),
    "encode_mean, large blocks": (encode_mean, 2048),
    "encode_momentum": (encode_momentum, 64),
    "encode_momentum, a variance, float32 momentum": (partial(encode_momentum, packed=False, variance=True), 64),
    "encode_momentum, every type": (partial(encode_momentum, dtypes=FLOATS, error=torch.bfloat16), 64),
    "encode_momentum, large blocks": (encode_momentum, 2048),
    "encode_gradients": (encode_gradients, 256),
    "encode_gradients, what is owed stays": (partial(encode_gradients, returned=None), 64),
    "encode_gradients, every type": (partial(encode_gradients, dtypes=FLOATS, owed=torch.bfloat16), 64),
    "encode_gradients, large blocks": (encode_gradients, 2048),
    "apply": (apply, 256),
    "apply, every type": (partial(apply, dtypes=FLOATS), 256),
    "int4_apply": (partial(apply, frame="int4"), 256),
    "local_step": (local_step, 256),
    "local_step, every type": (partial(local_step, dtypes=FLOATS), 64),
    "correct_residual": (correct_residual, 256),
    "correct_residual, bfloat16": (partial(correct_residual, residual=torch.bfloat16), 64),
    "momentum_sums": (partial(momentum_sums, packed=True), 256),
    "momentum_sums, a variance, float32 momentum": (partial(momentum_sums, packed=False), 64),
    "owner_step": (owner_step, 256),
    "owner_step, corrections of each block": (partial(owner_step, each=True), 64),
    "int8_encode": (partial(encode_steps, frame="int8"), 256),
    "int8_encode, large blocks": (partial(encode_steps, frame="int8"), 2048),
    "int8_decode": (partial(decode, frame="int8", weight=0.1, keep=0.9), 256),
    "int8_decode_mean": (partial(decode_mean, frame="int8"), 256),
    "int4_encode": (partial(encode_steps, frame="int4"), 256),
    "int4_encode, large blocks": (partial(encode_steps, frame="int4"), 2048),
    "int4_decode": (partial(decode, frame="int4", weight=0.1, keep=0.9), 256),
    "int4_decode_mean": (partial(decode_mean, frame="int4"), 256),
    "log4_encode": (partial(encode_steps, frame="log4"), 256),
    "log4_encode, large blocks": (partial(encode_steps, frame="log4"), 2048),
    "log4_decode": (partial(decode, frame="log4", weight=0.1, keep=0.9), 256),
    "log4_decode_mean": (partial(decode_mean, frame="log4"), 256),
}


def backend() -> ModuleType:
    from onebit.comm.kernels.triton import backend

    return backend


class NoGpu:
    """In the place of Triton's driver: kernels are compiled for a GPU of this compute capability, and not launched."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> object:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """The backend takes host tensors and compiles what it would launch on them; the list is of what was compiled."""
    import triton

    from onebit.comm.kernels.triton import lanes

    compiled = []
    run = triton.JITFunction.run

    def compile_alone(kernel: Any, *args: Any, **options: Any) -> None:
        compiled.append(run(kernel, *args, **options | {"warmup": True}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", compile_alone)
        patch.setattr(triton.runtime.driver, "_active", NoGpu(capability))
        patch.setitem(vars(lanes.EDGE), "device", "cpu")
        yield compiled


def ptx_of(name: str, capability: int) -> str:
    """Compile a case for compute capability 8.0, 9.0, … down to machine code, as its launch would; its PTX.

    In blocks of 256, the usual ones, for 9.0 alone; otherwise in blocks of 64.
    """
    call, block = COMPILED[name]
    with compiling(capability) as compiled:
        call(64 if capability != 90 and block == 256 else block)
    (binary,) = compiled
    assert binary.asm["cubin"][:4] == b"\x7fELF"
    ptx = binary.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    return str(ptx)


@needs_triton
@not_interpreted
@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, 90) for name in COMPILED]
    + [pytest.param(name, (80, 100)[k % 2], marks=pytest.mark.thorough) for k, name in enumerate(COMPILED)],
)
def test_compiles_to_operations_that_round_once(name: str, capability: int) -> None:
    """All for one generation; half of them for the one before it, the others for the one after it."""
    ptx = ptx_of(name, capability)
    for sloppy in (r"\bfma\b", r"\bmad\.\w+\.f32", r"\.approx", r"\.full", r"\.ftz"):
        assert not re.findall(sloppy, ptx), sloppy


@needs_triton
@not_interpreted
@pytest.mark.parametrize(
    "name", [name for name in COMPILED if "every type" not in name and name != "encode, bfloat16 error, mean_abs"]
)
def test_floats_move_16_bytes_at_a_time(name: str) -> None:
    """Of rows that start at multiples of 16 bytes, which torch's allocations and the optimizers' buckets do."""
    ptx = ptx_of(name, 90)
    assert "st.global.v4.b32" in ptx or "stays" in name or "sums" in name  # signs, or two floats a block, alone
    assert "encode" not in name or "ld.global.v4.b32" in ptx


@needs_triton
@not_interpreted
@pytest.mark.parametrize(("name", "inputs"), [("encode_momentum", 3), ("apply", 1)])
def test_gradients_and_parameters_too(name: str, inputs: int) -> None:
    """Each row of a block: the gradient, D, and the error; 16 elements for each of 4 threads of a parameter's word."""
    ptx = ptx_of(name, 90)
    rows = 4 if name == "encode_momentum" else 2
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= inputs * rows


@needs_triton
@not_interpreted
def test_sizes_do_not_make_other_kernels() -> None:
    """One row of one block, of one tensor, runs what three rows run: to compile a kernel takes seconds."""
    hashes = []
    for K, J, S in ((1, 1, 1), (3, 4, 12)):
        case = fused_cases.Case(K, J, 64, (64,) * S, (torch.float32,) * S)
        case_segments = Segments(tuple(range(S)), case.numels, 64)
        tensors, ones, residual = fused_cases.tensors_of(case, 0), torch.ones(S), torch.zeros(K, case.N)
        frames, sent = fused_cases.frames_of(case, 0), fused_cases.garbage(case, K)
        momentum = MomentumInputs(tensors, case_segments, torch.ones(K, case.N), frames, fused_cases.WEIGHTS)
        with compiling(90) as compiled:
            backend().encode_momentum(momentum, EncodeOutput(None, sent, None, residual), block=64, scale="rms")
            backend().encode_mean(frames, EncodeOutput(None, sent[:1], None, residual[:1]), block=64, scale="rms")
            backend().decode_mean(frames, residual[0], block=64)
            backend().decode(frames, residual, block=64, weight=1.0, keep=0.0)
            backend().apply(frames, case.N, ParamUpdate(tensors, case_segments, ones, ones), block=64)
            made_of = MomentumInputs(tensors, case_segments, torch.ones(K, case.N), residual, fused_cases.WEIGHTS)
            backend().local_step(LocalStep(made_of, residual, None, tensors, weight=0.01, kept=0.999), block=64)
            numbers = {"weight": 0.1, "own": 0.5, "common": 0.5, "eps": 1e-8, "floor": 0.01, "inverse_limit": 0.2}
            chunk = [torch.zeros(case.N) for _ in range(3)]
            counted, sums = torch.full((J,), 64, dtype=torch.int32), torch.zeros(J, 4)
            owned = OwnerStep(frames, K - 1, chunk[0], counted, *chunk[1:], None, sums, (1.0, 1.0), **numbers)
            backend().owner_step(owned, block=64)
        hashes.append([binary.hash for binary in compiled])
    assert hashes[0] == hashes[1]


# Selection


CACHED = (kernels.triton.why_not, kernels.cupy.why_not)


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cupy, "why_not", lambda: "CuPy is not installed")


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


@pytest.mark.usefixtures("not_installed")
def test_without_triton_the_reference_serves_cuda_tensors_and_asking_for_triton_says_what_to_install() -> None:
    assert kernels.select("auto", torch.device("cuda")) is reference
    assert "CUDA tensors: reference (pure torch): CuPy is not installed" in kernels.describe()
    assert "Triton is not installed" in kernels.describe()
    codec = SignCodec(kernel="triton")
    with pytest.raises(ImportError, match=r"pip install 'onebit\[triton\]'"):
        codec.decode(torch.zeros(1, 48, dtype=torch.uint8), torch.zeros(1, 256))


@needs_triton
@not_interpreted
@pytest.mark.usefixtures("no_cupy")
def test_triton_serves_cuda_tensors_where_it_is_installed_and_cupy_is_not() -> None:
    from onebit.comm.kernels.triton import backend as triton

    assert kernels.select("auto", torch.device("cuda")) is triton
    assert kernels.select("auto", torch.device("cpu")) is not triton
    assert kernels.select("reference", torch.device("cuda")) is reference
    assert f"CUDA tensors: {kernels.triton.describe()}" in kernels.describe()
    with pytest.raises(ValueError, match="out must be on a cuda device, got cpu"):
        SignCodec(kernel="triton").decode(torch.zeros(1, 48, dtype=torch.uint8), torch.zeros(1, 256))


# The script for a machine with a GPU


@needs_triton
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_check_for_gpus_can_be_rehearsed(tmp_path: Path) -> None:
    record = tmp_path / "record.md"
    tiny = ["--blocks", "64", "--sizes", "0", "70", "--steps", "4", "--elements", "500", "--repeats", "1"]
    tiny += ["--block", "64", "--model", "300", "--lengths", "128"]
    # Of the others test_gpu_check.py has what runs on the host.
    sections = ["kernels", "optimizers", "speed", "model", "steps", "waits", "attention", "attention_speed"]
    run = subprocess.run(
        [sys.executable, str(CHECK), "--rehearse", *tiny, "--record", str(record), "--sections", *sections],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for line in (
        "| decode | triton |",
        "| encode_momentum, float32 gradient | triton |",
        "| OnebitAdam | triton |",
        "held",
    ):
        assert line in record.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_check_for_gpus_says_that_it_needs_one() -> None:
    run = subprocess.run([python_of_forks(), CHECK], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "needs a CUDA device" in run.stdout
