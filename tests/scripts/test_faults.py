"""The harness that injects faults: its verdicts, its strikes, and a few faults of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from faults.case import (
    AS_PROMISED,
    CRASH,
    HUNG,
    LATE,
    MISNAMED,
    NAMELESS,
    OTHER,
    REFUSED,
    SILENT,
    End,
    Promise,
    judge,
    ranks_named,
)
from faults.running import latest_lines

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults.py"
FINE = End("returned", value="bits")
TOLD = End("raised", "PeerError: rank 0: rank [1] is missing", seconds=2.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("PeerError: rank 0: nothing from rank [1, 2] for 5 s", {1, 2}),
        ("PeerError: rank 12: Missing: ranks 1, 2 and 3; look", {1, 2, 3}),
        ("DesyncError: rank 0: lr: 0.1 on rank 0, 0.2 on rank 1", {0, 1}),
        ("ValueError: rank 2: nobody is named", set()),
        ("RuntimeError: connection closed by peer [127.0.0.1]:12", set()),
    ],
)
def test_the_ranks_that_an_error_names(text: str, named: set[int]) -> None:
    assert ranks_named(text) == named


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (TOLD, AS_PROMISED),
        (FINE, SILENT),
        (End("running"), HUNG),
        (End("died", number=6), CRASH),
        (End("died", number=11), CRASH),
        (End("died", number=9), NAMELESS),
        (End("raised", TOLD.text, seconds=7.0), LATE),
        (End("raised", "PeerError: rank 0: somebody is missing", seconds=2.0), NAMELESS),
        (End("raised", "PeerError: rank 0: rank 2 is missing", seconds=2.0), MISNAMED),
        (End("raised", "PeerError: rank 0: rank [1, 2] is missing", seconds=2.0), MISNAMED),
        (End("raised", "KeyError: 'rank 1'", seconds=2.0), OTHER),
    ],
)
def test_the_verdict_where_an_error_is_promised(end: End, verdict: str) -> None:
    promise = Promise("PeerError: ", frozenset({1}), within_s=5.0)
    assert judge("a fault", {0: end, 1: End("running"), 3: TOLD}, promise, victims={1}).verdict == verdict


def test_the_worst_of_all_ranks_counts_and_the_victims_own_end_where_it_is_a_crash() -> None:
    promise, late = Promise("PeerError: ", frozenset({1}), within_s=5.0), End("raised", TOLD.text, seconds=7.0)
    ends = [({0: late, 1: FINE, 2: TOLD}, LATE), ({0: late, 1: FINE, 2: FINE}, SILENT), ({0: late, 1: FINE}, LATE)]
    for end, verdict in [
        *ends,
        ({0: TOLD, 1: End("died", number=11)}, CRASH),
        ({0: TOLD, 1: End("running")}, AS_PROMISED),
    ]:
        assert judge("a fault", end, promise, victims={1}).verdict == verdict
    assert judge("a fault", {0: TOLD, 1: FINE, 2: late}, promise, victims={1}).seconds == 7.0


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (FINE, AS_PROMISED),
        (End("returned", value="other"), SILENT),
        (TOLD, REFUSED),
        (End("running"), HUNG),
        (End("died", number=1), REFUSED),
    ],
)
def test_the_verdict_where_nothing_shall_be_lost(end: End, verdict: str) -> None:
    found = judge("a fault", {0: FINE, 1: end}, Promise(), is_right=lambda rank, value: value == "bits")
    assert found.verdict == verdict and found.seconds is None


def test_of_a_case_that_ran_twice_the_last_run_counts() -> None:
    """Also where a run between them was cut off before its end."""

    def fault(case: str, name: str) -> dict:
        return {"what": "fault", "section": "saves", "case": case, "fault": name}

    def end(case: str) -> dict:
        return {"what": "case", "section": "saves", "case": case}

    lines = [fault("a", "1"), end("a"), fault("b", "2"), end("b"), fault("a", "3"), fault("a", "4"), end("a")]
    assert [line["fault"] for line in latest_lines(lines) if line["what"] == "fault"] == ["3", "4", "2"]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_some_faults_of_most_kinds_are_as_promised(tmp_path: Path) -> None:
    """What the long run does to everything, done to a few.

    sim/test_storms.py has storms, unit/test_rendezvous.py starts, sim/test_membership.py members that come and go.
    """
    raw, record = tmp_path / "faults.jsonl", tmp_path / "faults.md"
    sections = {"saves", "damage", "frames", "disagreement", "peers"}
    command = [sys.executable, SCRIPT, "--quick", "--quiet", "--results", raw, "--record", record, "--section"]
    run = subprocess.run([*command, *sections], capture_output=True, text=True, timeout=240)
    assert run.returncode in (0, 1), run.stderr[-2000:]
    lines = [json.loads(line) for line in raw.read_text().splitlines() if line]
    faults = [line for line in lines if line["what"] == "fault"]
    assert {line["section"] for line in faults} == sections
    assert sum(line["count"] for line in faults) > 400
    assert not [line for line in faults if line["verdict"] == CRASH]
    assert "| hostile frames |" in record.read_text()
