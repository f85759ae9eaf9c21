"""The C++ kernel gives the reference's bytes and floats; the edge rejects what it cannot take; missing builds are said.

Tolerance: none. Floats are compared as int32, so that the sign of a zero counts; a NaN is a NaN, whatever its bits.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import decode_both, decode_mean_both, encode_both
from kernel_inputs import (
    ERRORS,
    assert_same,
    frames_for,
    load,
    misaligned,
    overlapping,
    random,
    random_counts,
    with_isa,
)

from onebit.comm import EncodeOutput, ParamUpdate, Segments, kernels
from onebit.comm.kernels import cpu, int4_reference, library, reference
from onebit.comm.kernels.library import ISAS, SharedLibrary

# The sign frame with its two scales, and the frames of whole steps.
FRAMES = ("rms", "mean_abs", "int8", "int4", "log4")
BLOCKS = {
    "rms": (64, 128, 192, 256),
    "mean_abs": (64, 128, 192, 256),
    "int8": (16, 48, 64, 256),
    "int4": (32, 64, 96, 256),
    "log4": (32, 64, 96, 256),
}
CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++")

each_frame = pytest.mark.parametrize("frame", FRAMES)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler named c++")
needs_build = pytest.mark.skipif(not cpu.is_built(), reason=f"needs the C++ kernel: {cpu.why_not()}")
_available = cpu.available_isas() if cpu.is_built() else ()
each_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=pytest.mark.skipif(isa not in _available, reason=f"needs a machine with {isa}"))
        for isa in ISAS[1:]
    ],
)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# Same bytes, same floats


@pytest.mark.slow
@needs_build
@each_isa
@pytest.mark.parametrize("frame", ("rms", "int8", "int4", "log4"))
def test_decode_takes_any_bits_and_any_scale(isa: str, frame: str) -> None:
    """All 65,536 scales, denormal, infinite and NaN ones too, and means of any three of them."""
    block, J = BLOCKS[frame][0], 21_846
    g = torch.Generator().manual_seed(0)
    frames = torch.randint(256, frames_for(3, J * block, block, frame=frame).shape, dtype=torch.uint8, generator=g)
    scales_at = J * block * {"int8": 8, "int4": 4, "log4": 4}.get(frame, 1) // 8
    scales = torch.randperm(3 * J, generator=g).to(torch.int16).view(3, J)
    frames[:, scales_at:][:, : 2 * J] = scales.view(torch.uint8)
    for weight, keep in ((1.0, 0.0), (0.3, 0.7)):
        decode_both(with_isa(isa), frames, random(3, J * block), block=block, frame=frame, weight=weight, keep=keep)
    decode_mean_both(with_isa(isa), frames, J * block, block=block, frame=frame)


@needs_build
@each_isa
def test_int8_ties_sizes_and_odd_nans_encode_as_in_the_reference(isa: str) -> None:
    """Every half step (a largest of 127 makes the scale a power of two), from denormal to huge; NaNs of any payload."""
    block = 512
    halves = torch.arange(-254, 258).clamp(max=254) / 2
    x = halves * torch.ldexp(torch.ones(270), torch.arange(-149, 121)).unsqueeze(1)
    assert x.isfinite().all()
    for near in (x, x * 0.0, x * (1 - 2**-23), x * (1 + 2**-23)):
        encode_both(with_isa(isa), near, None, None, block=block, frame="int8")
    steps = torch.arange(1, 1025, dtype=torch.int32).view(torch.float32).unsqueeze(1) * torch.ones(block)  # denormals
    encode_both(with_isa(isa), steps, None, None, block=block, frame="int8")
    x.view(torch.int32)[torch.arange(4), torch.arange(4) * 7] = torch.tensor(
        [0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32
    )
    frames = encode_both(with_isa(isa), x, None, None, block=block, frame="int8")
    assert reference.int8_scales(frames, block, block=block).isnan().sum() == 4


@needs_build
@each_isa
def test_int4_ties_sizes_and_overflows_encode_as_in_the_reference(isa: str) -> None:
    """Every half step (a largest of 7 makes the scale a power of two), from denormal to where 8·s is infinite."""
    block = 32
    halves = torch.arange(-16, 16).clamp(-14, 14) / 2
    x = halves * torch.ldexp(torch.ones(275), torch.arange(-149, 126)).unsqueeze(1)
    assert x.isfinite().all()
    for near in (x, x * 0.0, x * (1 - 2**-23), x[:-1] * (1 + 2**-23)):
        encode_both(with_isa(isa), near, None, None, block=block, frame="int4")
    largest = torch.finfo(torch.float32).max * (1 - torch.arange(2000) * 1e-4)
    huge = encode_both(with_isa(isa), largest.unsqueeze(1) * torch.ones(block), None, None, block=block, frame="int4")
    overflows = int4_reference.int4_scales(huge, block, block=block).isnan().sum()
    assert 0 < overflows < 2000


@needs_build
@each_isa
@settings(max_examples=60)
@given(data=st.data())
def test_any_small_input_encodes_as_in_the_reference(isa: str, data: st.DataObject) -> None:
    frame = data.draw(st.sampled_from(FRAMES))
    block = data.draw(st.sampled_from(BLOCKS[frame]))
    K, J = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    palette = data.draw(st.lists(st.floats(width=32), min_size=1, max_size=8))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x, error = (torch.from_numpy(rng.choice(np.array(palette, np.float32), (K, J * block))) for _ in range(2))
    counts = torch.from_numpy(rng.integers(0, block + 1, (K, J), dtype=np.int32)) if data.draw(st.booleans()) else None
    error_dtype = data.draw(st.sampled_from(ERRORS))
    error_KN = None if error_dtype is None else error.to(error_dtype)
    frames = encode_both(with_isa(isa), x, error_KN, counts, block=block, frame=frame)
    decode_mean_both(with_isa(isa), frames, J * block, block=block, frame=frame)


@pytest.mark.slow
@pytest.mark.pairwise
@needs_build
@each_isa
@each_frame
@pytest.mark.parametrize("threads", (1, 2, 3))
def test_threads_change_nothing(isa: str, frame: str, threads: int) -> None:
    torch.set_num_threads(threads)
    block, K = 256, 3
    N = -(-2 * threads * library.ELEMENTS_PER_THREAD // block + 1) * block  # decode_mean shares N, the others K·N
    x, error, counts = random(K, N), random(K, N, seed=1), random_counts(K, N // block, block)
    frames = encode_both(with_isa(isa), x, error, None, block=block, frame=frame)
    encode_both(with_isa(isa), x, error, counts, block=block, frame=frame)
    decode_both(with_isa(isa), frames, x, block=block, frame=frame, weight=0.1, keep=0.9)
    decode_mean_both(with_isa(isa), frames, N, block=block, frame=frame)


@needs_build
def test_ranks_as_threads_do_not_disturb_each_other() -> None:
    """Four Python threads, each with rows large enough to wake more: ctypes lets go of the GIL."""
    block, N = 256, 4 * library.ELEMENTS_PER_THREAD
    inputs = [random(1, N, seed=rank) for rank in range(4)]
    results = [(x.clone(), frames_for(1, N, block)) for x in inputs]

    def run(rank: int) -> None:
        x, frames = results[rank]
        cpu.encode(x, None, frames, None, block=block, scale="rms")

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    for x, (residual, frames) in zip(inputs, results, strict=True):
        expected = frames_for(1, N, block)
        reference.encode(x, None, expected, None, block=block, scale="rms")
        assert_same(frames, expected)
        assert_same(residual, x)


def test_reference_rounds_each_operation_once() -> None:
    """An oracle in numpy, whose float32 sqrt is the IEEE one, straight from rule 2 of reference.py."""
    block, J = 64, 20000
    x = random(1, J * block) + 1e-3
    frames = frames_for(1, J * block, block)
    reference.encode(x.clone(), None, frames, None, block=block, scale="rms")

    lanes = np.zeros((J, 16), np.float32)
    for group in np.moveaxis(x.numpy().reshape(J, block // 16, 16), 1, 0):
        lanes += group * group
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    scale = torch.from_numpy(np.sqrt(lanes[:, 0] / np.float32(block))).to(torch.bfloat16)
    assert torch.equal(reference.scales(frames, J * block, block=block)[0], scale)


def load_sanitized(monkeypatch: pytest.MonkeyPatch, module: ModuleType, source: str, folder: Path) -> None:
    """For this test, the library of `module` tells of undefined behaviour."""
    command = [str(COMPILER), "-O0", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-fsanitize=undefined"]
    if subprocess.run([*command, CSRC / source, "-o", folder / "sanitized.so"], timeout=60).returncode:
        pytest.skip("needs the sanitizer of the compiler: libubsan")
    load(monkeypatch, module, folder / "sanitized.so")


@pytest.mark.processes
@needs_build
@needs_compiler
def test_no_undefined_behaviour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under the sanitizer, also with no blocks, whose tensors have no memory, and with bytes that no encoder sends."""
    load_sanitized(monkeypatch, cpu, "kernels.cpp", tmp_path)
    for isa, frame, J in itertools.product(_available, FRAMES, (0, 1, 3)):
        block = BLOCKS[frame][0]
        x, counts = random(2, J * block), random_counts(2, J, block)
        for error in (None, random(2, J * block, seed=1), random(2, J * block, seed=1).bfloat16()):
            frames = encode_both(with_isa(isa), x, error, counts, block=block, frame=frame)
        for sent in (frames, torch.full_like(frames, 0x80), torch.full_like(frames, 0xFF)):
            decode_both(with_isa(isa), sent, x, block=block, frame=frame, weight=0.1, keep=0.9)
            decode_mean_both(with_isa(isa), sent, J * block, block=block, frame=frame)
        if frame == "rms":
            out = EncodeOutput(None, torch.empty_like(frames[:1]), counts[:1], torch.empty(1, J * block))
            cpu.encode_mean(frames, out, block=block, scale=frame, isa=isa)
            segments = Segments((), (), block)
            cpu.apply(
                frames, J * block, ParamUpdate([], segments, torch.empty(0), torch.empty(0)), block=block, isa=isa
            )
    assert "runtime error" not in capfd.readouterr().err


# Views, and what the edge rejects


x2, f2 = torch.zeros(2, 128), torch.zeros(2, 32, dtype=torch.uint8)
REJECTED_BY_ENCODE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x float64": (dict(x_KN=x2.double()), TypeError, "x must be torch.float32, got torch.float64"),
    "x flat": (dict(x_KN=x2.view(-1)), ValueError, "two dimensions"),
    "x transposed": (dict(x_KN=torch.zeros(128, 2).T), ValueError, "contiguous"),
    "x every other": (dict(x_KN=torch.zeros(2, 256)[:, ::2]), ValueError, "contiguous"),
    "x overlapping": (dict(x_KN=overlapping(2, 128)), ValueError, "overlap"),
    "x on meta": (dict(x_KN=x2.to("meta")), ValueError, "host"),
    "x misaligned": (dict(x_KN=misaligned(128), frames_KB=f2[:1]), ValueError, "multiple of 4 bytes"),
    "x not whole blocks": (dict(x_KN=torch.zeros(2, 100)), ValueError, "100 elements.*blocks of 64"),
    "error float16": (dict(error_KN=x2.half()), TypeError, "float32 or torch.bfloat16, got torch.float16"),
    "error shape": (dict(error_KN=x2[:1]), ValueError, r"shape \(2, 128\), got shape \(1, 128\)"),
    "error transposed": (dict(error_KN=torch.zeros(128, 2).T), ValueError, "contiguous"),
    "frames dtype": (dict(frames_KB=f2.view(torch.int8)), TypeError, "uint8"),
    "frames short": (dict(frames_KB=f2[:, :16]), ValueError, r"shape \(2, 32\), got shape \(2, 16\)"),
    "frames rows": (dict(frames_KB=f2[:1]), ValueError, r"shape \(2, 32\)"),
    "frames overlapping": (dict(frames_KB=f2[:1].expand(2, 32)), ValueError, "overlap"),
    "counts int64": (dict(counts_KJ=torch.ones(2, 2, dtype=torch.int64)), TypeError, "int32"),
    "counts shape": (dict(counts_KJ=torch.ones(2, 3, dtype=torch.int32)), ValueError, r"shape \(2, 2\)"),
    "block": (dict(block=32), ValueError, "multiple of 64"),
    "scale": (dict(scale="max"), ValueError, "scale must be"),
    "isa": (dict(isa="mmx"), ValueError, "isa must be one of"),
}


@needs_build
@pytest.mark.parametrize("case", REJECTED_BY_ENCODE)
def test_encode_rejects(case: str) -> None:
    wrong, error, message = REJECTED_BY_ENCODE[case]
    arguments: dict[str, Any] = dict(x_KN=x2, error_KN=None, frames_KB=f2, counts_KJ=None, block=64, scale="rms")
    arguments.update(wrong)
    refused(error, message, cpu.encode, **arguments)


@needs_build
def test_decode_rejects_what_encode_rejects() -> None:
    refused(TypeError, "out must be", cpu.decode, f2, x2.double(), block=64, weight=1.0, keep=0.0)
    refused(ValueError, "overlap", cpu.decode, f2, overlapping(2, 128), block=64, weight=1.0, keep=0.0)
    refused(ValueError, r"shape \(1, 32\)", cpu.decode, f2, x2[:1], block=64, weight=1.0, keep=0.0)
    refused(ValueError, "one dimension", cpu.decode_mean, f2, x2, block=64)
    refused(ValueError, "contiguous", cpu.decode_mean, f2, torch.zeros(256)[::2], block=64)
    refused(ValueError, "no rows", cpu.decode_mean, f2[:0], x2[0], block=64)


@needs_build
def test_int8_rejects_what_sign_rejects() -> None:
    x, frames = torch.zeros(2, 48), torch.zeros(2, 64, dtype=torch.uint8)
    cpu.int8_encode(x, None, frames, None, block=16)
    refused(ValueError, "multiple of 16, got 24", cpu.int8_encode, x, None, frames, None, block=24)
    with pytest.raises(ValueError, match=r"shape \(2, 64\), got shape \(2, 48\)"):
        cpu.int8_encode(x, None, frames[:, :48], None, block=16)
    refused(TypeError, "out must be", cpu.int8_decode, frames, x.double(), block=16, weight=1.0, keep=0.0)
    refused(ValueError, r"shape \(2, 64\), got shape \(2, 32\)", cpu.int8_decode_mean, frames[:, :32], x[0], block=16)


@needs_build
def test_an_instruction_set_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ISAS", (*ISAS, "of the future"))
    with pytest.raises(ValueError, match='"of the future" is not available on this machine, which has portable'):
        cpu.decode_mean(f2, x2[0].clone(), block=64, isa="of the future")


# What is built, and what is said where it is not


@needs_build
def test_describe_names_what_runs() -> None:
    torch.set_num_threads(2)
    assert cpu.describe() in {f"C++, {title}, up to {n}" for title in ("portable", "AVX2", "AVX-512") for n in
                              ("1 thread", "2 threads")}  # fmt: skip
    assert cpu.describe() in kernels.describe()


def opened(path: Path, abi_version: int = cpu._library.abi_version) -> SharedLibrary:
    return SharedLibrary(path, "onebit", abi_version, lambda built: None, logging.getLogger("a test"), "no kernels")


@needs_build
def test_a_library_of_another_abi_is_refused() -> None:
    assert not opened(cpu._library.path).why_not()
    built = cpu._library.abi_version
    other = opened(cpu._library.path, abi_version=999)
    assert f"has ABI {built} and this package needs 999; install a C++ compiler and reinstall" in other.why_not()
    assert not other.is_built()
    refused(ImportError, "needs 999", other.get)


def test_a_missing_or_broken_library_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "_kernels.so"
    assert "not built; install a C++ compiler" in opened(path).why_not()
    path.write_bytes(b"not a library")
    assert "cannot be loaded" in opened(path).why_not()


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load(monkeypatch, cpu, tmp_path / "_kernels.so")


@pytest.mark.usefixtures("not_built")
def test_without_the_library_the_reference_runs_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert kernels.select("auto", torch.device("cpu")) is reference
    assert [record.name for record in caplog.records] == [cpu.__name__]
    assert "reference (pure torch): the C++ kernel is not built" in kernels.describe()
    refused(ImportError, "is not built; install a C", kernels.select, "cpu", torch.device("cpu"))
