"""The study of weights in few bits, for a few steps: every form has a line, and is run once."""

from __future__ import annotations

from pathlib import Path

import pytest
from study.calibration import FORMS, main


def test_every_form_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--task", "byte-lm", "--seeds", "1", "--steps", "20", "--results", str(tmp_path / "runs.jsonl")]
    main(argv)
    first = capsys.readouterr().out
    assert all(f"| byte-lm | 119,104 | {form} |" in first for form in FORMS)
    assert "| float32 | " in first and "| +0.00% (+0.00% to +0.00%) |" in first
    lines = (tmp_path / "runs.jsonl").read_text()
    main(argv)
    assert (tmp_path / "runs.jsonl").read_text() == lines
