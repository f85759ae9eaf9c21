"""The table of users' cases: who is marked, and what is said of how a test ended."""

from __future__ import annotations

from pathlib import Path

import strangers
from strangers import KINDS, ROOT, Case, cases, report, told


def test_every_marked_test_has_a_kind_and_a_point() -> None:
    found = cases(ROOT / "tests")
    assert len(found) > 20 and {case.kind for case in found} <= set(KINDS)
    assert all(case.case[0].isdigit() and ": " in case.case for case in found)


def test_the_first_error_of_a_run_is_told() -> None:
    said = "E   AssertionError: a | b\nE   other\n=== short\n2 failed, 3 passed in 1.20s\n"
    assert told(said) == "2 of 5 fail: AssertionError: a / b"
    assert told("E   ValueError: x\n1 failed in 0.1s\n") == "fails: ValueError: x"
    assert told("E   Failed: Timeout (>60.0s) from pytest-timeout.\n1 failed in 60.1s\n") == "hung"
    assert len(told(f"E   {'x' * 400}\n1 failed in 1s\n")) < 130


def test_the_report_counts_by_kind() -> None:
    rows = [
        (Case("hangs", "2: waits", "t::a"), "hung", "passed"),
        (Case("breaks", "1: ends", "t::b"), "passed", "passed"),
        (Case("breaks", "3: ends", "t::c"), "fails: x", "fails: x"),
    ]
    text = report(rows, "abc")
    assert "| hangs | 1 | 1 | 0 |" in text and "| breaks | 2 | 1 | 1 |" in text and "| all | 3 | 2 | 1 |" in text
    assert "| 2: waits | hung | passed |" in text


def test_a_hang_and_a_signal_are_outcomes(tmp_path: Path) -> None:
    file = tmp_path / "test_ends.py"
    file.write_text(
        "import os, time\n"
        "def test_good():\n    pass\n"
        "def test_killed():\n    os.kill(os.getpid(), 11)\n"
        "def test_hangs():\n    time.sleep(60)\n"
    )
    ends = [strangers.outcome(f"{file}::test_{name}", ROOT, timeout_s=2.0) for name in ("good", "killed", "hangs")]
    assert ends == ["passed", "killed by signal 11", "hung"]
