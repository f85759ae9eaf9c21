"""What users' scripts brought: every test marked `stranger(kind, case)`, on an older revision and on this one.

    python scripts/strangers.py --base d6719c2 --record scripts/records/strangers_2026-11.md

The tests are this tree's; the package is the older revision's, then this one's. Each test function runs in a process
apart, so that a hang or a segmentation fault is an outcome like another. Exit status 1 if a case fails on this tree.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.record import here
from provenance import add_record
from reports import publish, table
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("runs a file", "hangs", "wrong without a word", "blames the wrong thing", "breaks")
COMPILED = ("comm/kernels/_kernels.so", "onebit/host/_host.so")
MOST_CHARACTERS = 110


@dataclass(frozen=True)
class Case:
    """A marked test function. case: what happened, begun by the number of the point."""

    kind: str
    case: str
    test: str


def cases(tests: Path) -> list[Case]:
    """All marked functions, by kind and point."""
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.stranger":
                    kind, case = (ast.literal_eval(argument) for argument in mark.args)
                    found.append(Case(kind, case, f"{path}::{node.name}"))  # type: ignore[attr-defined]
    return sorted(found, key=lambda each: (KINDS.index(each.kind), _point(each.case), each.case))


def _point(case: str) -> int:
    number = re.match(r"\d+", case)
    return int(number[0]) if number else 0


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A work tree of a revision, with libraries to load and the reference that this tree's tests compare with."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            if subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", revision, "--", "csrc"]).returncode == 0:
                for name in COMPILED:
                    if (ROOT / name).exists():
                        shutil.copy(ROOT / name, tree / name)
            else:
                build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
                subprocess.run(build, cwd=tree, check=True)
            shutil.copytree(ROOT / "onebit/reference", tree / "onebit/reference", dirs_exist_ok=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def outcome(test: str, tree: Path, timeout_s: float) -> str:
    """How a test ends with the package of this tree: "passed", or in words."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--timeout", str(timeout_s), test]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory() as folder:  # not in a checkout: python -m imports from there first
        started = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            said, _ = started.communicate(timeout=60 + 3 * timeout_s)  # pytest-timeout cannot end every hang
        except subprocess.TimeoutExpired:
            started.kill()
            started.communicate()
            return "hung"
    if started.returncode < 0:
        return f"killed by signal {-started.returncode}"
    return "passed" if started.returncode == 0 else told(said)


def told(said: str) -> str:
    """A failed run of pytest in one line: how many cases failed, and the first one's error."""
    if "Timeout" in said and re.search(r"Failed: Timeout|Timeout \(?>", said):
        return "hung"
    counts = re.search(r"(?:(\d+) failed)?(?:, )?(?:(\d+) passed)?[^\n]* in [\d.]+s", said)
    failed, passed = (int(number or 0) for number in counts.groups()) if counts else (0, 0)
    error = re.search(r"^E +(\S.*)$", said, re.MULTILINE)
    line = " ".join(error[1].split()).replace("|", "/") if error else "no error was printed"
    line = re.sub(r"/\S*/pytest-of-[^/\s]+/", "", line)  # where this machine has its temporary files
    line = line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 3] + "..."
    return f"{failed} of {failed + passed} fail: {line}" if passed or failed > 1 else f"fails: {line}"


def report(rows: Sequence[tuple[Case, str, str]], base: str) -> str:
    """A table for each kind, and counts of all."""
    every, before, now = (
        Counter(case.kind for case, *ends in rows if take(ends))
        for take in (lambda _: True, lambda ends: ends[0] != "passed", lambda ends: ends[1] != "passed")
    )
    counts = [(kind, every[kind], before[kind], now[kind]) for kind in KINDS]
    counts.append(("all", every.total(), before.total(), now.total()))
    parts = ["# Strangers' scripts: before and after", here(), f"Before: {base}."]
    parts.append(table(("kind", "cases", "wrong before", "wrong now"), counts))
    for kind in KINDS:
        of_kind = [(case.case, old, new) for case, old, new in rows if case.kind == kind]
        parts += [f"## {kind.capitalize()}", table(("point and case", "before", "now"), of_kind, names=3)]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--base", default="d6719c2", help="the older revision (default: %(default)s)")
    add("--only", default="", metavar="TEXT", help="the cases that contain this")
    add("--timeout", type=float, default=60.0, metavar="S", help="of one test (default: %(default)s)")
    add_record(parser)
    args = parser.parse_args(argv)
    chosen = [case for case in cases(ROOT / "tests") if args.only in case.case]
    rows = []
    with checkout(args.base) as tree:
        for case in track(chosen, "Running"):
            rows.append((case, *(outcome(case.test, where, args.timeout) for where in (tree, ROOT))))
    publish(args, report(rows, args.base))
    return int(any(new != "passed" for *_, new in rows))


if __name__ == "__main__":
    sys.exit(main())
