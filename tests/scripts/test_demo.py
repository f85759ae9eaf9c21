"""The demo's tables: docs/results.md shows its output, and no gap without the baseline's better β2 and its noise."""

from __future__ import annotations

from pathlib import Path

import demo
import pytest

TRAFFIC = {
    "adamw": demo.Traffic(6.0, 48.0, None, 0.8, 0.8, 0.5),
    "onebit-adam": demo.Traffic(1.0, 1.6, None, 0.3, 0.2, 0.05),
}


def shown(page: Path) -> str:
    return page.read_text().partition(demo.BEGIN)[2].partition(demo.END)[0].strip()


@pytest.mark.skipif(not demo.RECORD.exists(), reason="needs scripts/records/demo.json: make demo ARGS=--write")
def test_the_results_show_the_demos_own_output() -> None:
    assert shown(demo.RESULTS) == demo.markdown(demo.read_record()).strip()


def test_what_is_written_is_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: between its marks, and nowhere else."""
    monkeypatch.setattr(demo, "RECORD", tmp_path / "demo.json")
    monkeypatch.setattr(demo, "RESULTS", tmp_path / "results.md")
    demo.RESULTS.write_text(f"before\n{demo.BEGIN}\nold\n{demo.END}\nafter\n")
    for loss in (2.5, 2.6):
        outcome = demo.Outcome("about", "loopback", 200, TRAFFIC, {method: [loss, 2.7] for method in demo.LOSSES})
        demo.write(outcome)
        assert demo.read_record() == outcome
        assert shown(demo.RESULTS) == demo.markdown(outcome).strip()
        assert demo.RESULTS.read_text().startswith("before\n") and demo.RESULTS.read_text().endswith("\nafter\n")


def test_the_results_have_the_marks() -> None:
    text = demo.RESULTS.read_text()
    assert text.count(demo.BEGIN) == text.count(demo.END) == 1


def test_losses_are_compared_with_the_better_baseline_and_its_noise() -> None:
    losses = {
        "adamw": [2.0, 2.2],
        "adamw, beta2 0.95": [2.0, 2.0],
        "onebit-adam": [2.1, 2.1],
        "onebit-adam, beta2 0.95": [1.9, 1.9],
    }
    assert [row[-1] for row in demo.loss_table(losses).rows] == ["+5.0 %", "+0.0 %", "+5.0 %", "-5.0 %"]
    assert "differ by 10.0 %" in demo.noise(losses)
    assert "--seeds 2" in demo.noise({"adamw": [2.0]})


def test_what_the_kernel_did_not_count_is_left_out() -> None:
    table = demo.traffic_table(TRAFFIC)
    assert [row[-1] for row in table.rows] == ["6.0 ×", "30.0 ×", "2.7 ×", "4.0 ×", "10.0 ×"]
    assert table.markdown().splitlines()[2] == "| bytes sent per parameter and step | 6.000 | 1.000 | 6.0 × |"


def test_the_readme_shows_rows_of_the_demos_own_output() -> None:
    readme = demo.RESULTS.parent.parent.joinpath("README.md").read_text()
    table = readme.partition("`make demo` prints")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) >= 5 and set(table) <= set(demo.traffic_table(demo.read_record().traffic).markdown().splitlines())
