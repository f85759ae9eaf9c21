"""Each tier runs all tests of the one before it, and a new test runs without a word about tiers."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from tiers import PROCESS_FOLDERS, TIERS, pairwise

TESTS = Path(__file__).parents[1]
FOLDERS = ("unit", *PROCESS_FOLDERS)
RUN = """
import json, sys, pytest

class Recorder:
    def __init__(self):
        self.outcomes = {}

    def pytest_collection_finish(self, session):
        # pytest escapes the names of parameters once more in each collection of one process
        self.outcomes = {item.nodeid.replace(BACKSLASH, ""): "" for item in session.items}

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.outcomes[report.nodeid] = report.outcome

folder, *options = sys.argv[1:]
found = {}
for tier in TIERS:
    recorder = Recorder()
    pytest.main([folder, "--rootdir", folder, "--tier", tier, "-p", "no:cacheprovider", *options], [recorder])
    found[tier] = recorder.outcomes
print()
print(json.dumps(found))
"""
NEW = """
import subprocess, sys, pytest

def start():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_plain():
    pass

def test_that_starts_a_process():
    start()

@pytest.mark.processes
def test_that_says_so():
    start()

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_cases(case):
    pass

@pytest.mark.pairwise
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("c", [1, 2])
def test_pairs(a, b, c):
    pass
"""


def outcomes(folder: Path, *options: str) -> dict[str, dict[str, str]]:
    """Of each tier, its tests: `file::test` and how it ended, empty if it was only collected."""
    code = f"TIERS, BACKSLASH = {TIERS!r}, chr(92)\n{RUN}"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder), *options], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_every_folder_of_tests_is_of_the_tiers() -> None:
    assert {path.parent.name for path in TESTS.glob("*/test_*.py")} == {*FOLDERS, "sim"}


@pytest.mark.processes
def test_a_new_test_need_not_say_its_tier(tmp_path: Path) -> None:
    """Where it starts processes its folder says so; elsewhere it fails until it does."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for folder in ("support", *FOLDERS):
        (tmp_path / folder).mkdir()
    shutil.copy(TESTS / "support" / "tiers.py", tmp_path / "support")
    for folder in FOLDERS:
        (tmp_path / folder / f"test_in_{folder}.py").write_text(NEW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    processes\n    slow\n    thorough\n    pairwise\n")
    found = outcomes(tmp_path)

    unit = {"plain": "passed", "that_starts_a_process": "failed", "cases[1]": "passed"}
    unit |= {f"pairs[{case}]": "passed" for case in ("1-1-1", "2-1-2", "1-2-2", "2-2-1")}
    usual = {"that_says_so": "passed", "slow": "passed"}
    thorough = {"cases[2]": "passed"}
    elsewhere = unit | {"that_starts_a_process": "passed"} | usual

    def named(folder: str, tests: dict[str, str]) -> dict[str, str]:
        return {f"{folder}/test_in_{folder}.py::test_{name}": outcome for name, outcome in tests.items()}

    assert found["fast"] == named("unit", unit)
    expected = named("unit", unit | usual)
    for folder in PROCESS_FOLDERS:
        expected |= named(folder, elsewhere)
    assert found["usual"] == expected
    for folder in FOLDERS:
        expected |= named(folder, thorough)
    assert found["all"] == expected
    assert set(found["fast"]) < set(found["usual"]) < set(found["all"])


def test_any_two_values_meet_in_pairwise_cases() -> None:
    axes = {"a": range(4), "b": range(3), "c": range(2), "d": range(2)}
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    product = [case for case in product if case["a"] or case["b"]]  # two that never meet
    chosen = [product[k] for k in pairwise(product)]
    assert len(chosen) <= 13
    for one, other in itertools.combinations(axes, 2):
        met, all_of_them = ({(case[one], case[other]) for case in cases} for cases in (chosen, product))
        assert met == all_of_them
    assert pairwise([]) == set()


def test_every_tier_has_a_command() -> None:
    """And continuous integration runs the last one."""
    makefile = (TESTS.parent / "Makefile").read_text()
    command = r"^(test\S*): .*\n\t\$\(PYTEST\) --tier (\w+)(?: --numprocesses \d)?[^\n]* \$\(ARGS\)$"
    targets = re.findall(command, makefile, re.MULTILINE)
    assert targets == [("test", "usual"), ("test-fast", "fast"), ("test-all", "all")]
    assert re.findall(r"^make (test\S*)$", (TESTS.parent / ".ci" / "run").read_text(), re.MULTILINE) == ["test-all"]


@pytest.mark.parametrize("case", [1, 2])
def test_a_test_that_names_no_seed_has_one_of_its_name(request: pytest.FixtureRequest, case: int) -> None:
    seed = zlib.crc32(request.node.nodeid.encode())
    assert torch.initial_seed() == seed and random.random() == random.Random(seed).random()
