"""docs/recipes.md: its scripts run as they are written there and print what stands below them.

Each needs its library: pip install -e '.[recipes]'. The scripts start two ranks, by torchrun or by Ray.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from ranks import free_port, python_of_forks

ROOT = Path(__file__).parents[2]
RECIPE = re.compile(
    r"^```python\n# (\w+\.py)\n(.*?)^```\n+^```sh\n(.*?)\n```\n+^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
RECIPES = {name: rest for name, *rest in RECIPE.findall((ROOT / "docs" / "recipes.md").read_text())}
PRINTED = re.compile(r"(step \d+): (?:loss (\S+), (\S+) bits per parameter|(\d+) % right)$", re.MULTILINE)


def libraries(code: str) -> set[str]:
    """The packages that a script imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_the_page_has_its_four_recipes() -> None:
    assert list(RECIPES) == ["ray_loop.py", "lora.py", "sft.py", "images.py"]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    code, command, shown = RECIPES[name]
    if absent := sorted(library for library in libraries(code) if importlib.util.find_spec(library) is None):
        pytest.skip(f"needs {', '.join(absent)}: pip install -e '.[recipes]'")
    (tmp_path / name).write_text(code)
    port = str(free_port())
    launcher, *words = shlex.split(command)
    modules = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
    run = subprocess.run(
        [python_of_forks(), *modules[launcher], *words],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PET_MASTER_PORT": port},
        capture_output=True, text=True, timeout=590,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    printed, expected = PRINTED.findall(run.stdout), PRINTED.findall(shown)
    assert expected and [row[0] for row in printed] == [row[0] for row in expected], run.stdout
    for row, other in zip(printed, expected, strict=True):
        numbers, others = ([float(number) for number in found[1:] if number] for found in (row, other))
        assert numbers == pytest.approx(others, rel=0.1, abs=0.02)
