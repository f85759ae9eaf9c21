"""The house rules that a machine can check: dependencies one way, no circles, nothing imported under a wrong name."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from count_house import circles

PACKAGE = Path(__file__).parents[2] / "onebit"
SCRIPTS = PACKAGE.parent / "scripts"
MAY_IMPORT = {
    "comm": {"comm"},
    "onebit": {"onebit", "comm"},
    "zero": {"zero", "onebit", "comm"},
    "cli": {"cli", "zero", "onebit", "comm"},
}


FACES = {
    PACKAGE / "__init__.py": {"zero"},  # offers it, and imports it when asked
    PACKAGE / "__main__.py": {"cli"},
}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def files_of(layer: str) -> list[Path]:
    """comm and zero are links in a checkout and folders in a source distribution; cli is a folder: not of onebit."""
    folder = PACKAGE if layer == "onebit" else PACKAGE / layer
    files = [
        path
        for path in folder.rglob("*.py")
        if layer != "onebit" or path.relative_to(folder).parts[0] not in MAY_IMPORT
    ]
    assert files
    return files


def imported_layers(path: Path) -> set[str]:
    """Which of the layers a file imports; relative imports are resolved by hand."""
    package = ["onebit", *path.relative_to(PACKAGE).parts[:-1]]
    layers = set()
    for node in nodes_of(path):
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
                layers.add(target[1] if len(target) > 1 and target[1] in MAY_IMPORT else "onebit")
    return layers


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_dependencies_point_one_way(layer: str) -> None:
    for path in files_of(layer):
        assert imported_layers(path) <= MAY_IMPORT[layer] | FACES.get(path, set()), path


def test_one_file_knows_the_versions_of_torch() -> None:
    """`comm/torch_versions.py`. A version that is no longer supported is then deleted in one place."""
    tests = re.compile(
        r"""\b(hasattr|getattr)\(\s*(torch|dist)\b[\w.]*(?<!torch\.ops\.mkldnn),\s*["']"""
        r"""|torch\.__version__|triton\.__version__\s*[<>=]|\bTorchVersion\b|torch_versions\.TORCH\b"""
        r"""|except ImportError.*\n\s*(from|import) torch"""
    )
    only_said = PACKAGE / "cli/doctor/installed.py"
    files = {path for layer in MAY_IMPORT for path in files_of(layer)} - {PACKAGE / "comm/torch_versions.py", only_said}
    assert {str(path): found[0] for path in files if (found := tests.search(path.read_text()))} == {}


def test_the_reference_imports_nothing_of_ours() -> None:
    """It is the tests' oracle: what it shared with the optimizers, both could have wrong."""
    for path in (PACKAGE / "reference").glob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                assert [alias.name for alias in node.names] in (["numpy"], ["math"]), path
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and (path.parent / f"{node.module}.py").exists(), path


_FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
_TYPED = {"arange", "as_tensor", "randint", "randperm"}
"""Of those, what has a type by itself: whole numbers, or that of what it is given."""


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_every_tensor_says_its_dtype_and_device(layer: str) -> None:
    """Else torch.set_default_dtype and set_default_device, which are the user's, would choose them."""
    silent = []
    for path in files_of(layer):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in _FACTORIES}:
                said, name = {keyword.arg for keyword in node.keywords}, ast.unparse(node.func).removeprefix("torch.")
                if not said >= {"device"} | (set() if name in _TYPED else {"dtype"}):
                    silent.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not silent, "\n".join(silent)


ROOMS = {
    "train": {"train"},
    "bench": {"bench", "train"},
    "time_to_loss": {"time_to_loss", "bench", "study", "train"},
    "study": {"study", "bench", "train"},
    "faults": {"faults", "bench", "train"},
    "gpu_check": {"gpu_check", "bench", "study", "faults", "train"},
}
"""Which rooms of scripts/ may import which."""


def module_names(layer: str) -> dict[str, Path]:
    """The modules of a layer by dotted name; a package is its `__init__.py`. Of scripts: the rooms, no commands."""
    if layer == "scripts":
        root, files = SCRIPTS, [path for room in ROOMS for path in (SCRIPTS / room).rglob("*.py")]
    else:
        root, files = PACKAGE.parent, files_of(layer)
    dotted = {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


def imports_at_once(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those that run when the module is imported: in no function, and not for type checkers alone."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_at_once(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from imports_at_once(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from imports_at_once(handler.body)


def imported_modules(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Of these modules the ones that `name` needs before it is whole. Packages around them do not count."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in imports_at_once(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join(base + (node.module.split(".") if node.module else []))
        for alias in node.names:
            found.add(f"{source}.{alias.name}" if f"{source}.{alias.name}" in modules else source)
    return {other for other in found if other in modules and other != name}


@pytest.mark.parametrize("layers", [("onebit", "comm", "zero", "cli"), ("scripts",)], ids=lambda layers: layers[0])
def test_no_imports_go_in_circles(layers: tuple[str, ...]) -> None:
    modules = {name: path for layer in layers for name, path in module_names(layer).items()}
    graph = {name: imported_modules(name, path, modules) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_modules_know_each_other_by_type() -> None:
    """Imports for type checkers and in functions included."""
    assert circles(SCRIPTS.parent) == []


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_scripts_import_one_way(room: str) -> None:
    for path in (SCRIPTS / room).rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported = node.module.split(".")[0]
                assert imported not in ROOMS or imported in ROOMS[room], path


@pytest.mark.processes
@pytest.mark.parametrize("name", ["comm", "zero"])
def test_the_folders_refuse_to_be_imported_under_the_wrong_name(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    run = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0 and f"this package is onebit.{name}" in run.stderr


IMPORTS = """
import json, sys, threading
hook, facts = sys.excepthook, {}

def note(what):
    facts[what] = list(sys.modules)

import onebit
note("onebit")
facts["threads"], facts["has nothing"] = threading.active_count(), hasattr(onebit, "nothing")
import torch.distributed
facts["has a group"] = torch.distributed.is_initialized()
import onebit.comm.transports.mpi, onebit.comm.transports.torch_distributed
note("transports")
facts["keeps the hook"] = sys.excepthook is hook
onebit.ddp_hook
note("ddp_hook")
zero = onebit.zero
from onebit.zero.config.optimizers import OPTIMIZERS
note("zero")
import onebit.zero.inference
note("inference")
import onebit.zero.initializing
note("initializing")
facts["absent"] = [name for name in [*zero.__all__, "nothing"] if not hasattr(zero, name)]
facts["modules"] = [name for name in zero.__all__ if not callable(getattr(zero, name))]
note("engine")
print(json.dumps(facts))
"""


@functools.cache
def imports() -> dict:
    """What a new interpreter has imported after one import and the next, and what else has come of it."""
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.processes
def test_importing_has_no_side_effects() -> None:
    facts = imports()
    absent = {"mpi4py", "cupy", "triton.language", "onebit.zero", "onebit.cli", "rich", "comm"}
    assert not absent & set(facts["onebit"]) and facts["threads"] == 1
    assert not facts["has a group"] and not facts["has nothing"]


@pytest.mark.processes
def test_importing_transports_starts_neither_mpi_nor_hooks() -> None:
    assert "mpi4py" not in imports()["transports"] and imports()["keeps the hook"]


@pytest.mark.processes
def test_the_hook_of_ddp_is_imported_when_it_is_asked_for() -> None:
    name = "onebit.integrations.ddp_hook"
    assert name not in imports()["transports"] and name in imports()["ddp_hook"]


@pytest.mark.processes
def test_the_engines_names_are_imported_one_by_one() -> None:
    facts = imports()
    assert not {"onebit.zero.engine", "onebit.zero.forms"} & set(facts["zero"])
    assert "onebit.zero.engine" in facts["engine"] and facts["absent"] == ["nothing"]
    assert facts["modules"] == ["data", "data_efficiency", "fsdp", "grid", "tensor"]


@pytest.mark.processes
def test_no_framework_is_imported() -> None:
    assert not {"accelerate", "transformers", "lightning"} & set(imports()["engine"])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "without"), [("inference", "onebit.zero.engine"), ("initializing", "onebit.zero.deepspeed")]
)
def test_rooms_come_without_those_above_them(module: str, without: str) -> None:
    assert not [name for name in imports()[module] if name.startswith(without)]


def test_types_are_checked_against_the_oldest_python() -> None:
    """mypy knows which names the standard library of a version lacks; ruff takes the version of requires-python."""
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'^requires-python = ">=(.*)"$', text, re.MULTILINE)
    assert re.findall(r'^python_version = "(.*)"$', text, re.MULTILINE) == [oldest]
