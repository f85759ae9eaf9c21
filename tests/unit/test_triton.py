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
from collections.abc import Iterator
from pathlib import Path

import gpu_cases
import pytest
import torch

from onebit.comm import SignCodec, kernels
from onebit.comm.kernels import reference

CASES = Path(__file__).parents[1] / "support" / "triton_cases.py"
CHECK = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'onebit[triton]'"
)
not_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="compiles: run it without TRITON_INTERPRET=1"
)


# In the interpreter


PROCESSES = 2


@functools.cache
def interpreted() -> dict[str, str]:
    """What was wrong with each case. Processes side by side, each with its share of them."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    shares = [list(gpu_cases.CASES)[k::PROCESSES] for k in range(PROCESSES)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, str(CASES), *names], env=env, **pipes) for names in shares]
    results: dict[str, str] = {}
    try:
        for run, names in zip(runs, shares, strict=True):
            said, complaint = run.communicate(timeout=240)
            results |= json.loads(said.splitlines()[-1]) if run.returncode == 0 else dict.fromkeys(names, complaint)
    finally:
        for run in runs:
            run.kill()
    return results


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", gpu_cases.CASES)
def test_interpreted(name: str) -> None:
    problem = interpreted()[name]
    assert not problem, problem


# Compiled for GPUs that are not here

ENCODE = dict(x="*fp32", x_stride="i64", error="*fp32", error_stride="i64", words="*i64", words_stride="i64",
              codes="*i8", codes_stride="i64", halves="*i16", halves_stride="i64", halves_per_row="i32", counts="*i32",
              counts_stride="i64", K="i32", J="i32")  # fmt: skip
DECODE = dict(words="*i64", words_stride="i64", codes="*i64", codes_stride="i64", halves="*i16", halves_stride="i64",
              out="*fp32", out_stride="i64", K="i32", words_per_row="i32", units_per_row="i32", weight="fp32",
              keep="fp32", share="fp32")  # fmt: skip
INT8_DECODE = DECODE | dict(codes="*i8")
SIGN_256 = dict(BLOCK=256, U=16, IS_SIGN=True)
INT8_256 = dict(BLOCK=256, U=64, IS_SIGN=False)
MEAN = ENCODE | dict(received="*i64", received_stride="i64", received_halves="*i16", received_halves_stride="i64",
                     share="fp32", residual="*fp32")  # fmt: skip
TENSORS = dict(owners="*i32", grads="*i64", params="*i64", layout="*i64", S="i32")
MOMENTUM = ENCODE | TENSORS | dict(
    D="*fp32", floor="*fp32", correction="fp32", eps="fp32", m_words="*i64", m_words_stride="i64", m_halves="*i16",
    m_halves_stride="i64", m="*fp32", keep="fp32", add="fp32", own="fp32", unscale="fp32", residual="*fp32",
)  # fmt: skip
APPLY = DECODE | TENSORS | dict(weight="*fp32", keep="*fp32")
FLOAT32, BFLOAT16, FLOAT16 = 2, 4, 8
ENCODE_256 = dict(BLOCK=256, P=32, MEAN_ABS=False, KEEP=True)
ENCODE_64 = ENCODE_256 | dict(BLOCK=64)  # the same operations, a quarter as often: compiles in a quarter of the time
MOMENTUM_64 = ENCODE_64 | dict(KINDS=FLOAT32, ALIGNED=True)
LARGE = dict(BLOCK=2048, P=32, MEAN_ABS=False, KEEP=False)
COMPILED: dict[str, tuple[str, dict[str, str], dict[str, object]]] = {
    "encode": ("encode_blocks", ENCODE, ENCODE_256),
    "encode without error and counts": ("encode_blocks", ENCODE, ENCODE_64 | dict(error=None, counts=None)),
    "encode, bfloat16 error, mean_abs": (
        "encode_blocks",
        ENCODE | dict(error="*i16"),
        ENCODE_64 | dict(MEAN_ABS=True),
    ),
    "encode, large blocks": ("encode_blocks", ENCODE, LARGE),
    "decode": ("decode_units", DECODE, SIGN_256 | dict(WEIGHTED=False, READS_OUT=False)),
    "decode, keep·out + weight·value": ("decode_units", DECODE, SIGN_256 | dict(WEIGHTED=True, READS_OUT=True)),
    "decode_mean": ("decode_mean_units", DECODE, SIGN_256),
    "encode_mean": ("encode_mean_blocks", MEAN, ENCODE_64),
    "encode_momentum": ("encode_momentum_blocks", MOMENTUM, MOMENTUM_64 | dict(floor=None, m=None)),
    "encode_momentum, a variance, float32 momentum": (
        "encode_momentum_blocks",
        MOMENTUM,
        MOMENTUM_64 | dict(m_words=None, m_halves=None),
    ),
    "encode_momentum, every type": (
        "encode_momentum_blocks",
        MOMENTUM | dict(error="*i16", residual="*i16"),
        MOMENTUM_64 | dict(floor=None, m=None, KINDS=FLOAT32 | BFLOAT16 | FLOAT16, ALIGNED=False),
    ),
    "encode_momentum, large blocks": (
        "encode_momentum_blocks",
        MOMENTUM,
        LARGE | dict(floor=None, m=None, KINDS=FLOAT32, ALIGNED=True),
    ),
    "apply": ("apply_words", APPLY, dict(BLOCK=256, W=16, KINDS=FLOAT32, ALIGNED=True)),
    "apply, every type": (
        "apply_words",
        APPLY,
        dict(BLOCK=256, W=16, KINDS=FLOAT32 | BFLOAT16 | FLOAT16, ALIGNED=False),
    ),
    "int8_encode": ("int8_encode_blocks", ENCODE, dict(BLOCK=256, P=32, KEEP=True)),
    "int8_decode": ("decode_units", INT8_DECODE, INT8_256 | dict(WEIGHTED=True, READS_OUT=True)),
    "int8_decode_mean": ("decode_mean_units", INT8_DECODE, INT8_256),
}


def ptx_of(name: str, capability: int) -> str:
    """Compile a case for compute capability 8.0, 9.0, … down to machine code; its PTX.

    In blocks of 256, the usual ones, for 9.0 alone; otherwise in blocks of 64.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from onebit.comm.kernels.triton import apply as triton_apply
    from onebit.comm.kernels.triton import backend as kernel
    from onebit.comm.kernels.triton import decode as triton_decode
    from onebit.comm.kernels.triton import int8 as triton_int8
    from onebit.comm.kernels.triton import lanes as triton_lanes
    from onebit.comm.kernels.triton import mean as triton_mean
    from onebit.comm.kernels.triton import momentum as triton_momentum

    function, types, constants = COMPILED[name]
    if capability != 90 and constants["BLOCK"] == 256:
        constants = constants | {"BLOCK": 64}
    modules = (kernel, triton_apply, triton_decode, triton_int8, triton_mean, triton_momentum)
    compiled = next(getattr(module, function) for module in modules if hasattr(module, function))
    signature = {arg: "constexpr" if arg in constants else types[arg] for arg in compiled.arg_names}
    aligned = [arg for arg in ("x", "x_stride", "error", "error_stride", "words", "codes", "codes_stride", "halves",
                               "out", "out_stride", "D", "m", "residual")
               if signature.get(arg, "constexpr") != "constexpr"]  # fmt: skip
    source = ASTSource(
        fn=compiled,
        signature=signature,
        constexprs=constants,
        attrs={(compiled.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=triton_lanes.OPTIONS)
    assert binary.asm["cubin"][:4] == b"\x7fELF"
    ptx = binary.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    return str(ptx)


@needs_triton
@not_interpreted
@pytest.mark.parametrize("capability", (80, 90, 100))
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_operations_that_round_once(name: str, capability: int) -> None:
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
    assert "st.global.v4.b32" in ptx
    assert "encode" not in name or "ld.global.v4.b32" in ptx


@needs_triton
@not_interpreted
@pytest.mark.parametrize(("name", "inputs"), [("encode_momentum", 3), ("apply", 1)])
def test_gradients_and_parameters_too(name: str, inputs: int) -> None:
    """Each row of a block: the gradient, D, and the error; 16 elements for each of 4 threads of a parameter's word."""
    ptx = ptx_of(name, 90)
    rows = 4 if name == "encode_momentum" else 2
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= inputs * rows


# Selection


CACHED = (kernels._why_no_triton, kernels._triton, kernels.cupy.why_not)


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.cupy, "why_not", lambda: "CuPy is not installed")


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
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
    assert f"CUDA tensors: {triton.describe()}" in kernels.describe()
    with pytest.raises(ValueError, match="out must be on a cuda device, got cpu"):
        SignCodec(kernel="triton").decode(torch.zeros(1, 48, dtype=torch.uint8), torch.zeros(1, 256))


# The script for a machine with a GPU


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_check_for_gpus_can_be_rehearsed(tmp_path: Path) -> None:
    record = tmp_path / "record.md"
    tiny = ["--blocks", "64", "--sizes", "0", "70", "--steps", "4", "--elements", "500", "--repeats", "1"]
    tiny += ["--block", "64", "--model", "300"]
    run = subprocess.run(
        [sys.executable, str(CHECK), "--rehearse", *tiny, "--record", str(record)],
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
    run = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "needs a CUDA device" in run.stdout
