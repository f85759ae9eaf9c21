"""The CUDA source gives the reference's bytes and floats, emulated on the host, and compiles for GPUs without one.

What no test here can show: that a GPU computes what the compiled code says, and how fast. scripts/gpu_check.py does,
where there is one. Tolerance: none.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kernel_cases
import pytest
import torch
from emulated_cuda import COMPILER, Libraries, emulated

from onebit.comm import SignCodec, kernels
from onebit.comm.kernels import cupy

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc on the path: CUDA's compiler (no GPU, no driver)")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler named c++")


# Emulated


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return Libraries(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def emulation(libraries: Libraries) -> Iterator[None]:
    with emulated(libraries):
        yield


@needs_compiler
@pytest.mark.processes
@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_emulated(name: str) -> None:
    kernel_cases.CASES[name](cupy)


# Compiled for GPUs that are not here


@functools.cache
def compiled_for(capability: int, block: int) -> tuple[str, bytes, str]:
    """What the compiler says of each kernel, the machine code, and its PTX."""
    options = [option for option in cupy.OPTIONS if not option.startswith("--std")]
    command = [
        str(NVCC), "-std=c++17", *options, f"-DONEBIT_BLOCK={block}", f"-arch=sm_{capability}", "-cubin", "--keep",
        "--resource-usage", "-Werror=all-warnings", "kernels.cu",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernels.cu").write_text(cupy.source())
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        made = (folder / "kernels.cubin").read_bytes(), (folder / "kernels.ptx").read_text()
    return done.stdout + done.stderr, *made


@needs_nvcc
@pytest.mark.processes
@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.thorough) for other in (80, 100))])
def test_compiles_without_spilling(capability: int) -> None:
    """c stays in registers, of which 80 let 768 threads run on a multiprocessor: see the source's header."""
    said, cubin, _ = compiled_for(capability, 256)
    assert cubin[:4] == b"\x7fELF"
    kernels = re.findall(r"Compiling entry function '(\w+)'", said)
    assert len(kernels) == 30, kernels
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert stacks == [("0", "0", "0")] * 30, said
    registers = dict(zip(kernels, map(int, re.findall(r"Used (\d+) registers", said)), strict=True))
    assert max(registers.values()) <= 80, registers


@needs_nvcc
@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize("block", (16, 512, 576))
def test_compiles_for_every_kind_of_block(block: int) -> None:
    """Those without signs alone; the largest whose c is kept in registers, of which smaller ones need fewer; the first
    whose c is not."""
    said, *_ = compiled_for(90, block)
    assert len(re.findall("Compiling entry function", said)) == (30 if block % 64 == 0 else 10)
    assert set(re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)) == {("0", "0")}, said


@needs_nvcc
@pytest.mark.processes
def test_compiles_to_operations_that_round_once() -> None:
    *_, ptx = compiled_for(90, 256)
    for sloppy in (r"\bfma\b", r"\bmad\.\w+\.f32", r"\.approx", r"\.full", r"\.ftz"):
        assert not re.findall(sloppy, ptx), sloppy
    for exact in ("div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "add.rn.f32"):
        assert exact in ptx


def test_the_launches_fit_the_source() -> None:
    source = cupy.source()
    assert re.findall(r"kThreads = (\d+);", source) == [str(cupy.THREADS)]
    there = {path.name: path.read_bytes() for path in (ROOT / "csrc").glob("*.cu")}
    assert {path.name: path.read_bytes() for path in cupy.SOURCES} == there
    assert "#include" not in source, "there are no headers at run time"


# Selection


def test_without_cupy_asking_for_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.why_not.cache_clear()
    monkeypatch.setattr(cupy.importlib.util, "find_spec", lambda name: None)
    try:
        codec = SignCodec(kernel="cupy")
        with pytest.raises(ImportError, match=r"pip install 'onebit\[cupy\]'"):
            codec.decode(torch.zeros(1, 48, dtype=torch.uint8), torch.zeros(1, 256))
    finally:
        cupy.why_not.cache_clear()


def test_cupy_serves_cuda_tensors_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy, "why_not", lambda: "")
    assert kernels.select("auto", torch.device("cuda")) is cupy
    assert kernels.select("auto", torch.device("cpu")) is not cupy
    with pytest.raises(ValueError, match="out must be on a cuda device, got cpu"):
        SignCodec(kernel="cupy").decode(torch.zeros(1, 48, dtype=torch.uint8), torch.zeros(1, 256))


def test_cupy_is_for_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.why_not.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    try:
        assert "NVIDIA" in cupy.why_not()
        assert kernels.select("auto", torch.device("cuda")) is not cupy
    finally:
        cupy.why_not.cache_clear()
