"""The house rules that a machine can check: dependencies one way, nothing imported under a wrong name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "onebit"
MAY_IMPORT = {"comm": {"comm"}, "onebit": {"onebit", "comm"}, "zero": {"zero", "onebit", "comm"}}


def files_of(layer: str) -> list[Path]:
    """comm and zero are links in a checkout and folders in a source distribution: no files of the layer onebit."""
    folder = PACKAGE if layer == "onebit" else PACKAGE / layer
    files = [
        path
        for path in folder.rglob("*.py")
        if layer != "onebit" or path.relative_to(folder).parts[0] not in MAY_IMPORT
    ]
    assert files
    return files


def imported_layers(path: Path) -> set[str]:
    """Which of comm, onebit, zero a file imports; relative imports are resolved by hand."""
    package = ["onebit", *path.relative_to(PACKAGE).parts[:-1]]
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == "onebit":
                layers.add(target[1] if len(target) > 1 and target[1] in ("comm", "zero") else "onebit")
    return layers


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_dependencies_point_one_way(layer: str) -> None:
    for path in files_of(layer):
        face = {"zero"} if path == PACKAGE / "__init__.py" else set()  # offers it, and imports it when asked
        assert imported_layers(path) <= MAY_IMPORT[layer] | face, path


@pytest.mark.parametrize("name", ["comm", "zero"])
def test_the_folders_refuse_to_be_imported_under_the_wrong_name(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    run = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0 and f"this package is onebit.{name}" in run.stderr


def test_importing_has_no_side_effects() -> None:
    code = (
        "import sys, threading; import onebit; "
        "assert threading.active_count() == 1; "
        "assert not {'mpi4py', 'cupy', 'triton.language', 'onebit.zero'} & set(sys.modules); "
        "import torch.distributed as d; assert not d.is_initialized(); assert 'comm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_engine_comes_with_the_package_when_it_is_asked_for() -> None:
    code = (
        "import onebit; assert not hasattr(onebit, 'nothing'); "
        "assert callable(onebit.zero.initialize) and onebit.zero.__name__ == 'onebit.zero'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_types_are_checked_against_the_oldest_python() -> None:
    """mypy knows which names the standard library of a version lacks; ruff takes the version of requires-python."""
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'^requires-python = ">=(.*)"$', text, re.MULTILINE)
    assert re.findall(r'^python_version = "(.*)"$', text, re.MULTILINE) == [oldest]
