"""Installing without a compiler succeeds, says so in one line and runs the reference; nothing lands at top level."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_BUILT = "onebit: the C++ kernel was not built"
WITHOUT_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}

pytestmark = pytest.mark.slow

ENCODE = """
import logging
logging.basicConfig(format="LOGGED %(name)s %(message)s")
import torch
import onebit, onebit.comm as comm
codec = comm.SignCodec()
for _ in range(3):
    x, frames = torch.ones(1, 256), torch.empty(1, codec.frame_bytes(256), dtype=torch.uint8)
    codec.encode(x, None, frames, None)
print(onebit.__file__)
print(comm.kernels.describe())
print("residual", float(x.abs().sum()))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The files that packaging reads, without anything built before."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    for name in ("comm", "zero", "onebit", "csrc"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def install(source: Path, target: Path, env: dict[str, str] | None = None) -> str:
    pip = (sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps")
    return run(*pip, "--target", str(target), str(source), cwd=source.parent, env=env)


def assert_holds_the_cuda_source(site: Path) -> None:
    """The file itself, where kernels/cupy.py looks for it: in a checkout it is a link to csrc/."""
    installed = site / "onebit" / "comm" / "kernels" / "frames.cu"
    assert not installed.is_symlink() and installed.read_bytes() == (ROOT / "csrc" / "frames.cu").read_bytes()


def built(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("_kernels*") if path.suffix != ".py")


def test_without_a_compiler_the_install_succeeds_and_the_reference_runs(source: Path, tmp_path: Path) -> None:
    output = install(source, tmp_path / "site", WITHOUT_COMPILER)
    assert output.count(NOT_BUILT) == 1, output
    assert built(tmp_path / "site") == []
    assert_holds_the_cuda_source(tmp_path / "site")

    said = run(sys.executable, "-c", ENCODE, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")})
    assert str(tmp_path / "site") in said
    assert "host tensors: reference (pure torch): the C++ kernel is not built" in said
    assert said.count("LOGGED onebit.comm.kernels.cpu") == 1, said
    assert "residual 0.0" in said


def test_without_a_compiler_an_editable_install_succeeds(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    output = run(sys.executable, "-c", code, cwd=source, env=WITHOUT_COMPILER)
    assert output.count(NOT_BUILT) == 1, output
    assert list(tmp_path.glob("onebit-*.whl"))


@pytest.mark.skipif(shutil.which("c++") is None and "CXX" not in os.environ, reason="needs a C++ compiler")
def test_an_install_brings_the_kernel_and_no_top_level_comm(source: Path, tmp_path: Path) -> None:
    output = install(source, tmp_path / "site")
    assert NOT_BUILT not in output
    assert len(built(tmp_path / "site")) == 1
    top_level = {path.name for path in (tmp_path / "site").iterdir() if not path.name.endswith(".dist-info")}
    assert top_level - {"__pycache__"} == {"onebit"}

    said = run(sys.executable, "-c", ENCODE, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")})
    assert str(tmp_path / "site") in said
    assert "host tensors: C++" in said and "LOGGED" not in said
    assert_holds_the_cuda_source(tmp_path / "site")


def test_the_source_distribution_holds_the_kernel(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    run(sys.executable, "-c", code, cwd=source)
    with tarfile.open(next(tmp_path.glob("onebit-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        links = [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
    assert {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()} <= names
    assert "onebit/comm/kernels/cpu.py" in names and "comm/kernels/cpu.py" not in names
    assert "onebit/comm/kernels/frames.cu" in names and not links
