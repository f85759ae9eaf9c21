"""scripts/predict.py: its tables say what the lines say, and one small case runs."""

from __future__ import annotations

import json
from pathlib import Path

import predict
import pytest

from onebit.cli.cluster import available


def line(contender: str, predicted_s: float, **more: object) -> dict:
    case = {"hosts": 2, "rate": "100mbit", "params": 4e6, "compute_s": 0.1}
    return {**case, "contender": contender, "predicted_s": predicted_s, "measured_s": 1.0, **more}


def test_a_case_holds_with_all_of_its_contenders() -> None:
    lines = [line("a", 1.09), line("b", 0.91), line("a", 1.11, hosts=4), line("b", 1.0, hosts=4)]
    text = predict.report(lines, "python x", 1.0)
    assert "1 of 2 cases with all of their contenders (50%; wanted 80%), 3 of 4 predictions (75%)" in text
    assert text.count("!") == 1 and "| 4 | 100mbit | 4.00 | 0.1 | a | 1.110 | 1.000 | +11.0% ! |" in text


def test_there_are_thirty_cases_and_every_contender_is_in_some() -> None:
    args = predict.parse_args([])
    networks = len(args.rates) * len(args.hosts)
    cases = [case for k in range(networks) for case in predict.cases_of(args, k)]
    assert len(cases) == 30
    seen = {name for _, _, names in cases for name in names}
    assert seen == {*predict.ALWAYS, *predict.IN_TURN}


@pytest.mark.net
@pytest.mark.thorough
def test_one_case_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := available():
        pytest.skip(f"emulated hosts: {reason}")
    monkeypatch.setattr(predict, "COMPUTES", ((2e5, 0.05),))
    file = tmp_path / "predict.md"
    arguments = ["--rates", "100mbit", "--hosts", "2", "--models", "2e5", "--methods", "OnebitAdam", "--repeats", "2"]
    assert predict.main([*arguments, "--record", str(file)]) in (0, 1)  # a busy machine may be off
    (said,) = [json.loads(text) for text in file.with_suffix(".jsonl").read_text().splitlines()]
    assert said["contender"] == "OnebitAdam" and said["compute_s"] == 0.05
    assert 0.5 < said["predicted_s"] / said["measured_s"] < 2
    assert said["measured_s"] > 0.05 and "OnebitAdam" in file.read_text()
