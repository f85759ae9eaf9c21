"""Change one thing in the code at a time, and see which test notices.

    python -m pip install pytest-cov
    python -m pytest tests/unit tests/sim -m "not processes" --cov=onebit --cov=comm --cov=zero --cov-context=test
    python scripts/mutants.py onebit/step/*.py onebit/layout/*.py --coverage .coverage --seed 39 --draw 25

Each drawn mutant is made in a copy of HEAD, and the tests that ran its line (those that ran its file, if the line runs
at import) follow until one fails: one of each test file, then the others. A mutant that no test kills is an equivalent
one, or a hole in the tests: a person decides.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from provenance import ROOT, checkout

OPPOSITE = {ast.Eq: ast.NotEq, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Is: ast.IsNot, ast.In: ast.NotIn}
OPPOSITE |= {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.FloorDiv: ast.Mod, ast.And: ast.Or, ast.BitAnd: ast.BitOr}
OPPOSITE |= {new: old for old, new in OPPOSITE.items()}
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}


class Mutant(NamedTuple):
    """Bytes [start, end) of a file, `old`, become `new`."""

    line: int
    start: int
    end: int
    old: str
    new: str


def mutants(source: bytes) -> list[Mutant]:
    """All of a module: an operator, condition, number or name exchanged; a call, raise, assignment or value dropped."""
    starts, found = [0, *accumulate(map(len, source.splitlines(keepends=True)))], []
    for node, new in _changed(ast.parse(source)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutant(node.lineno, start, end, source[start:end].decode(), new))
    return found


def _changed(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Each node below that changes, and its new text. Python 3.11 has wrong places for what is in an f-string."""
    for name, value in () if isinstance(node, ast.JoinedStr) else ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list", "exc", "msg"):
                yield from ((child, new) for new in _texts(child))
                yield from _changed(child)
        if name == "test" and not isinstance(value, ast.Compare):
            yield value, f"(not ({ast.unparse(value)}))"


def _texts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            yield f"({ast.unparse(ast.Compare(node.left, [OPPOSITE[type(op)]()], node.comparators))})"
        case ast.BinOp(op=op) if type(op) in OPPOSITE:
            yield f"({ast.unparse(ast.BinOp(node.left, OPPOSITE[type(op)](), node.right))})"
        case ast.BoolOp(op=op):
            yield f"({ast.unparse(ast.BoolOp(OPPOSITE[type(op)](), node.values))})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield repr(value + 1)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in EXCHANGED:
            yield re.sub(rf"{name}$", EXCHANGED[name], ast.unparse(node))
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "return None"
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


def by_line(coverage: Path, path: Path) -> dict[int, list[str]]:
    """The tests that ran each line of a file, in the order to run them in; as line 0, those that ran any."""
    from coverage import CoverageData  # comes with pytest-cov

    data = CoverageData(str(coverage))
    data.read()
    (name,) = (name for name in data.measured_files() if Path(name).resolve() == path.resolve())
    ran = {n: {test.rpartition("|")[0] for test in tests} - {""} for n, tests in data.contexts_by_lineno(name).items()}
    lines = Counter(test for tests in ran.values() for test in tests)
    turn, taken = dict[str, int](), Counter[str]()
    for test in sorted(lines, key=lambda test: (lines[test], test)):  # the most specific first
        turn[test] = taken[test.partition("::")[0]]
        taken[test.partition("::")[0]] += 1
    return {n: sorted(tests, key=lambda test: (turn[test], test)) for n, tests in {**ran, 0: lines.keys()}.items()}


def outcome(tree: Path, path: Path, mutant: Mutant, tests: list[str]) -> str:
    """What tests find of a mutant of a file of the tree: "killed by NAME" or "survived"."""
    (tree / ".tests").write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "--timeout=60", "@.tests"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    source = (tree / path).read_bytes()
    (tree / path).write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    ended = subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True)
    (tree / path).write_bytes(source)
    if " not found: " in ended.stderr:
        raise ValueError(f"the coverage is of another revision; make it anew: {ended.stderr}")
    killer = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ended.stdout, re.MULTILINE)
    return "survived" if ended.returncode == 0 else f"killed by {killer[1] if killer else 'the end of the process'}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="draw mutants of these files of the tree")
    parser.add_argument("--coverage", type=Path, required=True, help="take from this file which test ran which line")
    parser.add_argument("--seed", type=int, default=0, help="draw by this seed (default: %(default)s)")
    parser.add_argument("--draw", type=int, default=25, help="draw this many mutants (default: %(default)s)")
    options = parser.parse_args(arguments)
    paths = [file.resolve().relative_to(ROOT) for file in sorted(options.files)]
    every = [(path, mutant) for path in paths for mutant in mutants((ROOT / path).read_bytes())]
    drawn = sorted(random.Random(options.seed).sample(every, min(options.draw, len(every))))
    with checkout("HEAD") as tree:
        for path, mutant in drawn:
            tests = by_line(options.coverage, ROOT / path)
            end = outcome(tree, path, mutant, tests.get(mutant.line) or tests[0])
            print(f"{path}:{mutant.line}: {mutant.old} -> {mutant.new}: {end}", flush=True)


if __name__ == "__main__":
    main()
