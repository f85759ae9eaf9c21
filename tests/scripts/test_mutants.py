"""Mutants of small sources by hand, what tests find of one, and the order in which tests run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mutants import ROOT, by_line, mutants, outcome


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("r = x < y", {("x < y", "(x <= y)")}),
        ("r = β[1] + y", {("1", "2"), ("β[1] + y", "(β[1] - y)")}),  # places are in bytes
        ("if x is None: f()", {("x is None", "(x is not None)"), ("f()", "pass")}),
        ("if x:\n    raise ValueError(1 + y)", {("x", "(not (x))"), ("raise ValueError(1 + y)", "pass")}),
        ("r = x and y.amin(0.0, z=True)", {("x and y.amin(0.0, z=True)", "(x or y.amin(0.0, z=True))")}
         | {("y.amin", "y.amax"), ("0.0", "1.0"), ("True", "False")}),
        ("def f(x: int | None = 2) -> int | None:\n    return g(x)", {("2", "3"), ("return g(x)", "return None")}),
        ("x.y = z\nx += z\nx = z", {("x.y = z", "pass"), ("x += z", "pass")}),
        ('r = f"{y + 1}"', set()),
    ],
)  # fmt: skip
def test_what_changes(source: str, expected: set[tuple[str, str]]) -> None:
    assert {(mutant.old, mutant.new) for mutant in mutants(source.encode())} == expected


def test_every_mutant_compiles() -> None:
    source = (ROOT / "onebit/step/clip.py").read_bytes()
    for mutant in mutants(source):
        compile(source[: mutant.start] + mutant.new.encode() + source[mutant.end :], "clip.py", "exec")


def test_a_test_kills_a_mutant_whose_result_it_compares(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def f():\n    return 1\n")
    (tmp_path / "test_f.py").write_text("import code\ndef test_a(): code.f()\ndef test_b(): assert code.f() == 1\n")
    (one,) = (mutant for mutant in mutants((tmp_path / "code.py").read_bytes()) if mutant.old == "1")
    assert outcome(tmp_path, Path("code.py"), one, ["test_f.py::test_a"]) == "survived"
    tests = ["test_f.py::test_a", "test_f.py::test_b"]
    assert outcome(tmp_path, Path("code.py"), one, tests) == "killed by test_f.py::test_b"
    assert (tmp_path / "code.py").read_text() == "def f():\n    return 1\n"


def test_one_test_of_each_file_runs_first_and_the_most_specific_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = {1: [""], 2: ["a.py::wide|run", "a.py::narrow|run", "b.py::wide|setup"], 3: ["a.py::wide|run"]}
    ran[4] = ["b.py::wide|run"]
    data = SimpleNamespace(read=lambda: None, measured_files=lambda: [str(tmp_path / "x.py")])
    data.contexts_by_lineno = lambda name: ran
    monkeypatch.setitem(sys.modules, "coverage", SimpleNamespace(CoverageData=lambda name: data))
    found = by_line(tmp_path / ".coverage", tmp_path / "x.py")
    every = ["a.py::narrow", "b.py::wide", "a.py::wide"]
    assert found == {1: [], 2: every, 3: ["a.py::wide"], 4: ["b.py::wide"], 0: every}
