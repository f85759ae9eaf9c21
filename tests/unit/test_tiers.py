"""Each tier runs all tests of the one before it, and a new test runs without a word about tiers."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiers import PROCESS_FOLDERS, TIERS

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
        for item in session.items:
            if item.get_closest_marker("sampled"):
                for value in ((name, repr(value)) for name, value in item.callspec.params.items()):
                    sampled.setdefault(item.nodeid.partition("[")[0], {}).setdefault(tier, set()).add(value)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.outcomes[report.nodeid] = report.outcome

folder, *options = sys.argv[1:]
found, sampled = {}, {}
for tier in TIERS:
    recorder = Recorder()
    pytest.main([folder, "--rootdir", folder, "--tier", tier, "-p", "no:cacheprovider", *options], [recorder])
    found[tier] = recorder.outcomes
lacking = {test: sorted(values["all"] - values["usual"]) for test, values in sampled.items()}
print()
print(json.dumps([found, {test: values for test, values in lacking.items() if values}]))
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

@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [1, 2, 3, 4])
def test_samples(case):
    pass
"""


def outcomes(folder: Path, *options: str) -> tuple[dict[str, dict[str, str]], dict[str, list]]:
    """Of each tier, its tests: `file::test` and how it ended, empty where it was collected only.

    And by name of the sampled tests, the values of parameters, as pairs, that no case of the sample has.
    """
    code = f"TIERS, BACKSLASH = {TIERS!r}, chr(92)\n{RUN}"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder), *options], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found, lacking = json.loads(ended.stdout.splitlines()[-1])
    return found, lacking


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_each_tier_has_all_tests_of_the_one_before_and_more() -> None:
    collected, lacking = outcomes(TESTS, "--collect-only")
    assert lacking == {}
    found = {tier: set(names) for tier, names in collected.items()}
    for smaller, larger in pairwise(TIERS):
        assert found[smaller] and found[smaller] < found[larger], sorted(found[smaller] - found[larger])
    folders = {name.partition("/")[0] for name in found["all"]}
    assert folders == {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert {name.partition("/")[0] for name in found["usual"]} == folders
    assert {name.partition("/")[0] for name in found["fast"]} == folders - set(PROCESS_FOLDERS)


@pytest.mark.processes
def test_a_new_test_need_not_say_its_tier(tmp_path: Path) -> None:
    """Where it starts processes its folder says so; elsewhere it fails until it does."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for folder in ("support", *FOLDERS):
        (tmp_path / folder).mkdir()
    shutil.copy(TESTS / "support" / "tiers.py", tmp_path / "support")
    for folder in FOLDERS:
        (tmp_path / folder / f"test_in_{folder}.py").write_text(NEW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    processes\n    slow\n    thorough\n    sampled\n")
    found, lacking = outcomes(tmp_path)

    unit = {"plain": "passed", "that_starts_a_process": "failed", "cases[1]": "passed"}
    unit |= {"samples[1]": "passed", "samples[4]": "passed"}
    usual = {"that_says_so": "passed", "slow": "passed"}
    thorough = {"cases[2]": "passed", "samples[2]": "passed", "samples[3]": "passed"}
    elsewhere = unit | {"that_starts_a_process": "passed"} | usual

    def named(folder: str, tests: dict[str, str]) -> dict[str, str]:
        return {f"{folder}/test_in_{folder}.py::test_{name}": outcome for name, outcome in tests.items()}

    assert lacking == {
        f"{folder}/test_in_{folder}.py::test_samples": [["case", "2"], ["case", "3"]] for folder in FOLDERS
    }
    assert found["fast"] == named("unit", unit)
    expected = named("unit", unit | usual)
    for folder in PROCESS_FOLDERS:
        expected |= named(folder, elsewhere)
    assert found["usual"] == expected
    for folder in FOLDERS:
        expected |= named(folder, thorough)
    assert found["all"] == expected


def test_every_tier_has_a_command() -> None:
    """And continuous integration runs the last one."""
    makefile = (TESTS.parent / "Makefile").read_text()
    command = r"^(test\S*): .*\n\t\$\(PYTEST\) --tier (\w+)(?: --numprocesses \d)? \$\(ARGS\)$"
    targets = re.findall(command, makefile, re.MULTILINE)
    assert targets == [("test", "usual"), ("test-fast", "fast"), ("test-all", "all")]
    assert re.findall(r"^make (test\S*)$", (TESTS.parent / ".ci" / "run").read_text(), re.MULTILINE) == ["test-all"]


@pytest.mark.parametrize("case", [1, 2])
def test_a_test_that_names_no_seed_has_one_of_its_name(request: pytest.FixtureRequest, case: int) -> None:
    seed = zlib.crc32(request.node.nodeid.encode())
    assert torch.initial_seed() == seed and random.random() == random.Random(seed).random()
