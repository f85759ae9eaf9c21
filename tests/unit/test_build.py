"""Installing without a compiler succeeds, says so in one line and runs the reference; nothing lands at top level.

These tests also run from an unpacked source distribution, where onebit/comm and onebit/zero are folders, not links.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from onebit.cli.cluster import available

ROOT = Path(__file__).parents[2]
FILES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md", "mkdocs.yml",
    "pyproject.toml", "setup.py",
)  # fmt: skip
FOLDERS = (".ci", "csrc", "docs", "onebit", "scripts", "tests")
READ_FILES = (  # tests that read other files than their own
    "unit/test_codec.py::test_frames_are_golden",
    "unit/test_cuda_source.py::test_the_launches_fit_the_source",
    "unit/test_docs.py::test_links_lead_somewhere",
    "unit/test_docs.py::test_names_in_the_code_are_there",
    "unit/test_structure.py::test_dependencies_point_one_way",
    "unit/test_zero_plan.py::test_all_contenders_are_recorded",
)
NOT_SOURCE = shutil.ignore_patterns("*.so", "__pycache__")
NOT_BUILT = ".cpp was not built, pure torch runs instead"
WITHOUT_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}

pytestmark = pytest.mark.processes

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
    """The repository's files, without anything built before."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    for name in ("comm", "zero", *FOLDERS):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=NOT_SOURCE)
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
    """The files themselves, where kernels/cupy.py looks for them: in a checkout they are links to csrc/."""
    for source in (ROOT / "csrc").glob("*.cu"):
        installed = site / "onebit" / "comm" / "kernels" / source.name
        assert not installed.is_symlink() and installed.read_bytes() == source.read_bytes()


def wheel_tag(site: Path) -> str:
    """What the installed wheel was for: Python, ABI and platform."""
    (about,) = site.glob("onebit-*.dist-info/WHEEL")
    (tag,) = re.findall("^Tag: (.*)$", about.read_text(), re.MULTILINE)
    return tag


def built(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.so"))


@pytest.mark.thorough
def test_without_a_compiler_the_install_succeeds_and_the_reference_runs(source: Path, tmp_path: Path) -> None:
    output = install(source, tmp_path / "site", WITHOUT_COMPILER)
    assert output.count(NOT_BUILT) == 2, output
    assert built(tmp_path / "site") == [] and wheel_tag(tmp_path / "site") == "py3-none-any"
    assert_holds_the_cuda_source(tmp_path / "site")

    site = {"PYTHONPATH": str(tmp_path / "site")}
    assert (tmp_path / "site" / "bin" / "onebit").is_file()
    assert "AdamW" in run(
        sys.executable, "-m", "onebit", "plan", "--params", "1m", "--hosts", "2", cwd=tmp_path, env=site
    )
    can_emulate = "import sys; from onebit.cli.cluster import available; sys.stdout.write(str(available()))"
    assert run(sys.executable, "-c", can_emulate, cwd=tmp_path, env=site) == str(available())  # from files of the wheel
    said = run(sys.executable, "-c", ENCODE, cwd=tmp_path, env=site)
    assert str(tmp_path / "site") in said
    assert "host tensors: reference (pure torch): the C++ kernel is not built" in said
    assert said.count("LOGGED onebit.comm.kernels.cpu") == 1, said
    assert "residual 0.0" in said


def test_an_editable_install_is_a_path_and_needs_no_compiler(source: Path, tmp_path: Path) -> None:
    """A line of a .pth, which mypy and pyright follow; they know nothing of an import hook."""
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    output = run(sys.executable, "-c", code, cwd=source, env=WITHOUT_COMPILER)
    assert output.count(NOT_BUILT) == 2, output
    (wheel,) = tmp_path.glob("onebit-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert [name.rpartition(".")[2] for name in names] == ["pth"]
        assert archive.read(names[0]).decode().split() == [str(source)]


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("c++") is None and "CXX" not in os.environ, reason="needs a C++ compiler")
def test_an_install_brings_the_kernel_and_no_top_level_comm(source: Path, tmp_path: Path) -> None:
    quick = tmp_path / "quick"  # what is called once need not be fast; the flags are those of setup.py
    quick.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    quick.chmod(0o755)
    output = install(source, tmp_path / "site", {"CC": str(quick), "CXX": str(quick)})
    assert NOT_BUILT not in output
    assert built(tmp_path / "site") == ["_host.so", "_kernels.so"]
    assert re.fullmatch(r"py3-none-(?!any).+", wheel_tag(tmp_path / "site")), "ctypes loads the kernel into any Python"
    top_level = {path.name for path in (tmp_path / "site").iterdir() if not path.name.endswith(".dist-info")}
    assert top_level - {"__pycache__"} == {"onebit", "bin"}
    assert [path.name for path in (tmp_path / "site/bin").iterdir()] == ["onebit"]  # the command

    said = run(sys.executable, "-c", ENCODE, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")})
    assert str(tmp_path / "site") in said
    assert "host tensors: C++" in said and "LOGGED" not in said
    assert_holds_the_cuda_source(tmp_path / "site")


@pytest.mark.thorough
def test_the_tests_run_from_a_source_distribution(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    run(sys.executable, "-c", code, cwd=source)
    with tarfile.open(next(tmp_path.glob("onebit-*.tar.gz"))) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.glob("onebit-*") if path.is_dir())
    for folder in FOLDERS:
        assert files_below(source / folder) <= files_below(unpacked / folder), folder
    assert (unpacked / "onebit" / "comm" / "kernels" / "cpu.py").exists() and not (unpacked / "comm").exists()

    tests = [f"tests/{name}" for name in READ_FILES]
    said = run(sys.executable, "-m", "pytest", *tests, cwd=unpacked, env={"PYTHONPATH": str(unpacked)})
    assert re.search(r"^\d+ passed in", said, re.MULTILINE), said


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def tool(name: str, *words: str) -> str:
    return run(str(Path(sys.executable).with_name(name)), *words, cwd=ROOT)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schema", "files"),
    [("github-workflows", tuple(f".github/workflows/{name}.yml" for name in ("ci", "release", "versions"))),
     ("github-issue-forms", (".github/ISSUE_TEMPLATE/bug.yml",)),
     ("citation-file-format", ("CITATION.cff",))],
)  # fmt: skip
def test_files_for_others_follow_their_schemas(schema: str, files: tuple[str, ...]) -> None:
    assert sorted(files) == sorted(str(path.relative_to(ROOT)) for path in files_beside(files[0]))
    tool("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def files_beside(file: str) -> list[Path]:
    """All of a folder of such files; of the root, the one."""
    folder = (ROOT / file).parent
    return [ROOT / file] if folder == ROOT else list(folder.iterdir())


@pytest.mark.processes
def test_one_wheel_is_built_for_each_platform() -> None:
    tool("validate-pyproject", "pyproject.toml")
    named = tool("cibuildwheel", "--print-build-identifiers", "--platform", "linux", "--archs", "x86_64,aarch64", ".")
    assert {"cp311-manylinux_x86_64", "cp311-manylinux_aarch64"} == set(re.findall(r"^cp\S+$", named, re.MULTILINE))


def test_the_workflows_call_the_commands_that_are_there() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"- run: (.*)$", text, re.MULTILINE)
    assert ".ci/run" in commands and os.access(ROOT / ".ci/run", os.X_OK)
    assert {command.removeprefix("make ") for command in commands if command != ".ci/run"} <= set(targets)
