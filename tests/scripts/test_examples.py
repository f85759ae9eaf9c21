"""The examples' table: docs/frameworks.md shows the record, each program says what it changes, and is short."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import examples
import pytest

ROW = examples.Row("Library", 2, [2.0, 2.1], [2.05, 2.05], 1.5, True, {"adamw": 1.0, "onebit": 1.0}, "three steps")
MOST_LINES, LARGEST_GAP = 90, 5.0


def shown(page: Path) -> str:
    return page.read_text().partition(examples.BEGIN)[2].partition(examples.END)[0].strip()


def test_the_page_shows_a_row_of_every_program_from_the_record() -> None:
    rows = examples.read_record()
    assert sorted(rows) == examples.names(), "python scripts/examples.py NAME --write"
    assert shown(examples.PAGE) == examples.markdown(rows)
    assert all((row.title, row.lines) == examples.read_docstring(name) for name, row in rows.items())


def test_every_recorded_run_was_taken_up_to_the_bit_and_learned_as_much() -> None:
    """The gap against AdamW is less than 5 %, or than how far AdamW's own seeds lie apart."""
    for name, row in examples.read_record().items():
        gap, spread = examples.gap_of(row.adamw, row.onebit)
        assert row.resumes and gap < max(LARGEST_GAP, spread), name


@pytest.mark.parametrize("name", examples.names())
def test_a_program_is_short_and_shows_its_change(name: str) -> None:
    title, lines = examples.read_docstring(name)
    assert title and 1 <= lines <= 4
    assert len((examples.PROGRAMS / f"{name}.py").read_text().splitlines()) <= MOST_LINES


def test_what_is_written_is_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: between its marks and nowhere else; rows of other programs stay."""
    monkeypatch.setattr(examples, "RECORD", tmp_path / "frameworks.json")
    monkeypatch.setattr(examples, "PAGE", tmp_path / "frameworks.md")
    assert examples.read_record() == {}
    examples.PAGE.write_text(f"before\n{examples.BEGIN}\nold\n{examples.END}\nafter\n")
    for name in ("other", "library"):
        examples.write(examples.read_record() | {name: ROW})
        assert examples.PAGE.read_text().startswith("before\n") and examples.PAGE.read_text().endswith("\nafter\n")
    assert shown(examples.PAGE) == examples.markdown({"library": ROW, "other": ROW})
    assert json.loads(examples.RECORD.read_text())["other"] == dataclasses.asdict(ROW)


def test_the_gap_is_of_means_and_stands_beside_adamws_own_spread() -> None:
    gap, spread = examples.gap_of([2.0, 2.1], [2.05, 2.05])
    assert gap == pytest.approx(0.0) and spread == pytest.approx(100 * 0.1 / 2.05)
    assert examples.gap_of([2.0], [3.0]) == (50.0, 0.0)
    assert examples.final_loss([9.0] * 18 + [1.0, 2.0]) == 1.5
    cells = dict(zip(examples.HEADINGS, ROW.cells("library"), strict=True))
    assert cells["gap"] == "+0.0 %" and cells["bits"] == "1.50" and cells["resumed"] == "same bits"
    lost = dataclasses.replace(ROW, resumes=False, onebit=[4.1])
    assert lost.cells("library")[5] == "+100.0 %" and lost.cells("library")[-1] == "other bits"


def test_a_program_without_its_change_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "PROGRAMS", tmp_path)
    (tmp_path / "bare.py").write_text('"""A program: without a diff."""\n')
    with pytest.raises(ValueError, match=r"bare\.py: its docstring must begin"):
        examples.read_docstring("bare")
