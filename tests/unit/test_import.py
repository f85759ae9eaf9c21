"""`import onebit` loads only itself: names load their modules when they are used, and type checkers see all of them."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import onebit
import onebit.zero

PACKAGE = Path(onebit.__file__).parent

COSTLY = {
    "cupy", "matplotlib", "mpi4py", "onebit.cli", "onebit.local", "onebit.zero", "rich", "ssl", "torch._dynamo",
    "torch._inductor", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor",
    "transformers", "triton", "unittest",
}  # fmt: skip
"""What one optimizer does not need, unless torch itself loads it."""


def loaded(*statements: str) -> list[set[str]]:
    """For each statement, the modules that it adds, in a fresh Python."""
    code = "import sys, json\nseen = set(sys.modules)\nadded = []\n"
    for statement in statements:
        code += f"{statement}\nadded.append(sorted(set(sys.modules) - seen)); seen |= set(sys.modules)\n"
    command = [sys.executable, "-c", code + "print(json.dumps(added))"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=100, check=True)
    return [set(names) for names in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.processes
def test_import_onebit_loads_nothing_else() -> None:
    (added,) = loaded("import onebit")
    assert {name for name in added if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "onebit",
        "onebit.version",
    }


@pytest.mark.processes
def test_an_optimizer_loads_what_it_needs() -> None:
    """Before, 124 modules of ours: those of local steps and of all other optimizers."""
    torch, ours = loaded("import torch", "import onebit; onebit.OnebitAdam")
    assert "onebit.onebit_adam" in ours and "torch" in torch
    assert {name for name in ours for costly in COSTLY if f"{name}.".startswith(f"{costly}.")} == set()
    assert ours.isdisjoint({"onebit.onebit_lamb", "onebit.onebit_muon", "onebit.zero_one_adam", "onebit.lion"})


@pytest.mark.processes
def test_training_does_not_import_the_compiler() -> None:
    """torch's own optimizers import it as they are constructed, which takes longer than importing torch."""
    imports = "import torch, onebit; from onebit.comm import SimTransport; p = torch.nn.Parameter(torch.ones(8))"
    step = "; p.grad = torch.ones(8); o.step(); o.zero_grad(); o.load_state_dict(o.state_dict())"
    made = ("onebit.OnebitAdam([p], lr=1e-3, transport=SimTransport())", "onebit.Lion([p], lr=1e-3)")
    _, *added = loaded(imports, *(f"o = {call}{step}" for call in made))
    assert not any("torch._dynamo" in names for names in added)


@pytest.mark.parametrize("package", [onebit, onebit.zero], ids=lambda package: package.__name__)
def test_type_checkers_see_what_is_loaded_on_use(package: ModuleType) -> None:
    """The imports below `if TYPE_CHECKING` give the objects that the package's __getattr__ gives."""
    (block,) = (
        node for node in ast.parse(Path(package.__file__ or "").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )  # fmt: skip
    seen = set()
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        source = importlib.import_module("." * node.level + (node.module or ""), package.__name__)
        for alias in node.names:
            name = alias.asname or alias.name
            assert getattr(package, name) is getattr(source, alias.name), name
            seen.add(name)
    assert seen >= set(package.__all__) - {"__version__"} and set(package.__all__) <= set(dir(package))


def test_submodules_are_attributes_as_if_they_were_imported() -> None:
    assert onebit.membership.connect is importlib.import_module("onebit.membership").connect
    assert onebit.host.adam_ is importlib.import_module("onebit.host").adam_
