"""scripts/release.py: a dry run from the tree to what is published, and what stops it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from release import main, notes, problems, problems_of_files

ROOT = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns(
    "*.so", "__pycache__", ".git", ".venv*", "build", "dist", "runs", "*.egg-info", ".*_cache"
)
OF_ONE = {
    "onebit/version.py": '"""Doc."""\n\nVERSION = "0.3.0"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 0.3.0\n",
    "CHANGELOG.md": "# Changelog\n\nWords.\n\n## 0.3.0, 2026-12-01\n\n- New.\n\n## 0.2.0, 2026-11-25\n\n- Old.\n",
    "tests/golden/released_0.3.0.zip": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that is ready for v0.3.0."""
    for name, text in OF_ONE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_prepared_tree_is_released_with_its_section(tree: Path) -> None:
    assert problems(tree, "v0.3.0") == [] and notes(tree, "0.3.0") == "- New.\n"


@pytest.mark.parametrize(
    ("name", "was", "becomes", "said"),
    [
        ("onebit/version.py", "0.3.0", "0.3.1", r"onebit/version.py has 0.3.1, the tag 0.3.0"),
        ("CITATION.cff", "\nversion: 0.3.0", "", "CITATION.cff has no version"),
        ("CHANGELOG.md", "## 0.3.0, 2026-12-01", "## Unreleased", "first section of CHANGELOG.md"),
        ("CHANGELOG.md", ", 2026-12-01", "", "first section of CHANGELOG.md"),
        ("CHANGELOG.md", "- New.", "", "or empty"),
    ],
)
def test_what_contradicts_the_tag_is_named(tree: Path, name: str, was: str, becomes: str, said: str) -> None:
    (tree / name).write_text((tree / name).read_text().replace(was, becomes))
    (found,) = problems(tree, "v0.3.0")
    assert said in found


def test_a_release_without_golden_files_and_another_tag_are_refused(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests/golden/released_0.3.0.zip").unlink()
    assert main(["check", "0.3.0"], tree) == 1
    said = capsys.readouterr().err
    assert "expected a tag such as v0.3.0, got '0.3.0'" in said and "released_0.3.0.zip is missing" in said


def test_files_of_another_version_or_without_kernels_are_refused(tmp_path: Path) -> None:
    for name in ("onebit-0.2.0.tar.gz", "onebit-0.3.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    with zipfile.ZipFile(tmp_path / "onebit-0.3.0-py3-none-linux_x86_64.whl", "w") as archive:
        archive.writestr("comm/__init__.py", "")
    said = "\n".join(problems_of_files(tmp_path, "0.3.0"))
    for part in (
        "onebit-0.2.0.tar.gz is not of onebit 0.3.0", "onebit-0.3.0.tar.gz is missing", "for a platform",
        "has no onebit/host/_host.so", "has comm at top level",
    ):  # fmt: skip
        assert part in said


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_dry_run_makes_what_would_be_published(tmp_path: Path) -> None:
    root = tmp_path / "a tree with spaces"
    shutil.copytree(ROOT, root, symlinks=True, ignore=NOT_SOURCE)
    changes = root / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("\n## ", "\n## Unreleased\n\n- Dry run.\n\n## ", 1))
    compiler = tmp_path / "compiler"  # libraries that nothing loads need no code; test_build.py compiles them
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)

    def run(*words: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"CC": str(compiler), "CXX": str(compiler)}
        done = subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("scripts/release.py", "prepare", "99.0.0")
    assert "nothing contradicts it" in run("scripts/release.py", "check", "v99.0.0")
    run("-m", "build", "--no-isolation")
    run("scripts/release.py", "collect", "v99.0.0")
    files = sorted((root / "dist").iterdir())
    sums = [line.split("  ") for line in (root / "release/SHA256SUMS").read_text().splitlines()]
    assert sums == [[hashlib.sha256(file.read_bytes()).hexdigest(), file.name] for file in files] and len(files) == 2
    assert (root / "release/NOTES.md").read_text() == "- Dry run.\n"
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "../release/SHA256SUMS"], cwd=root / "dist", check=True)
