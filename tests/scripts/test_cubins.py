"""Occupancy on paper: the rules of allocation against NVIDIA's own tables, and the source against ours."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from bench import cubins
from bench import kernels as cpu_kernels
from bench.cubins import GPUS, KERNELS, Compiled, resident_threads

A100, H100, B200 = GPUS


@pytest.mark.parametrize(
    ("registers", "expected"), [(24, 2048), (32, 2048), (33, 1536), (40, 1536), (64, 1024), (72, 896), (255, 256)]
)
def test_registers_bound_resident_threads(registers: int, expected: int) -> None:
    """As NVIDIA's occupancy calculator says for blocks of 128 threads."""
    for gpu in GPUS:
        assert resident_threads(Compiled(registers, 0, 0), gpu) == expected


def test_shared_memory_and_blocks_bound_them_too() -> None:
    assert resident_threads(Compiled(32, 48 * 1024, 0), A100) == 3 * 128  # 164 KiB hold three times 49
    assert resident_threads(Compiled(32, 48 * 1024, 0), H100) == 4 * 128
    assert resident_threads(Compiled(16, 0, 0), H100, threads=32) == 32 * 32


def test_littles_law() -> None:
    assert H100.needed_in_flight == pytest.approx(3.35e12 * 800e-9 / 132)


def test_bytes_are_those_of_the_cpu_kernels_benchmark() -> None:
    N = 256 * 64
    measured = {
        row.name.split(",")[0].replace("fused encode", "encode"): row.bytes_moved / N
        for rows in (cpu_kernels.sign_operations, cpu_kernels.step_operations, cpu_kernels.int8_operations)
        for row in reversed(rows(N, 256, "auto"))
    }
    names = {
        "sign_encode": "encode",
        "sign_decode": "decode",
        "sign_decode_mean": "decode_mean",
        "sign_encode_mean": "encode_mean",
        "sign_encode_momentum_packed_variance": "encode_momentum",
        "sign_encode_gradients_returning": "encode_gradients",
        "sign_apply": "apply",
        "local_step_variance": "local_step",
        "int8_encode": "int8 encode",
        "int8_decode": "int8 decode",
        "int8_decode_mean": "int8 decode_mean",
    }
    for name, row in names.items():
        assert KERNELS[name].bytes_per_element == pytest.approx(measured[row], rel=0.01), name


def test_what_nvcc_says_is_read() -> None:
    said = """
ptxas info    : 77 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers
"""
    assert cubins.read_usage(said) == {"one": Compiled(40, 512, 16), "two": Compiled(31, 0, 0)}
    with pytest.raises(ValueError, match="names no kernel"):
        cubins.read_usage("nvcc fatal: nothing")
    with pytest.raises(ValueError, match="registers and spills"):
        cubins.read_usage("Compiling entry function 'one' for 'sm_90'")


def test_the_batch_is_the_sources() -> None:
    source = cubins.cupy.source()
    assert re.search(r"kBatch = kRows % 8 == 0 \? 8", source) and "kRows = kBlock / kLanes" in source
    assert set(re.findall(r"ONEBIT_KERNEL (\w+)\(", source)) - {"NAME"} <= KERNELS.keys()


def test_without_nvcc_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="nvcc is not on the path"):
        cubins.main([])


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the path: CUDA's compiler (no GPU, no driver)")
def test_a_row_for_every_kernel() -> None:
    lines = [
        line
        for line in cubins.report(H100, 25e6).splitlines()
        if line.startswith(("| sign", "| local", "| correct", "| int"))
    ]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == list(KERNELS)
    in_flight = {line.split(" | ")[0].strip("| "): int(line.split(" | ")[6]) for line in lines}
    assert in_flight["sign_encode_momentum"] == 1024 * 32 * 4 // 1024
