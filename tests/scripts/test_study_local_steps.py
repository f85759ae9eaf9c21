"""`study.py local-steps`: every method trains, the table has a row for each, and what was run is not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from study.local_steps import WAYS, main, report

TRAIN = ["--task", "digits", "--steps", "12", "--every", "4", "--lrs", "1e-2", "2e-2", "--ranks", "2"]


@pytest.mark.thorough
def test_every_method_has_a_row_with_its_bits_and_its_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "runs" / "local.jsonl"
    main([*TRAIN, "--results", str(results)])
    said, sweep = capsys.readouterr().out.split("All rates")
    lines = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    rows = {cells[0]: [cell.strip() for cell in cells] for cells in lines[2:]}
    assert all(f"\n| {method} | " in sweep for method in WAYS)
    assert rows.keys() == WAYS.keys()
    assert float(rows["local"][2]) == pytest.approx(64 / 4, rel=0.05)
    assert float(rows["one bit"][2]) == pytest.approx(2.125 / 4, rel=0.1)  # 27 k parameters: the vote counts
    assert float(rows["DiLoCo, int8"][2]) == pytest.approx(2 * 8.0625 / 4, rel=0.05)
    assert "%" in rows["local"][5] and "%" in rows["one bit"][6]
    written = results.read_text()
    assert len(written.splitlines()) == 2 * len(WAYS) and json.loads(written.splitlines()[0])["loss"] > 0
    main([*TRAIN, "--results", str(results)])
    assert results.read_text() == written


def test_methods_are_compared_at_the_rates_that_all_of_them_had() -> None:
    """By hand: of three rates two are shared; at the third AdamW would be better. In brackets seeds, where few."""
    job = {"task": "digits", "ranks": 2, "steps": 9, "rows": 4, "bits": 1.0}
    runs = [
        job | {"method": method, "every": every, "lr": lr, "seed": seed, "loss": loss}
        for method, every, lr, seed, loss in (
            ("AdamW", 8, 0.1, 0, 2.0), ("AdamW", 8, 0.1, 1, 4.0), ("AdamW", 4, 0.2, 0, 3.0), ("AdamW", 4, 0.2, 1, 5.0),
            ("AdamW", 4, 0.3, 0, 1.0), ("local", 4, 0.1, 0, 3.0), ("local", 4, 0.1, 1, 6.0), ("local", 4, 0.2, 0, 9.0),
        )
    ]  # fmt: skip
    text = "\n".join(report(runs))
    assert "each method at its best rate of 0.1, 0.2." in text
    assert "| AdamW |  | 1.000 | 0.1 | 3.0000 |  |  |" in text
    assert "| local | 4 | 1.000 | 0.1 | 4.5000 | +50.0% (+50.0% to +50.0%) |  |" in text
    assert "| AdamW |  | 3.0000 | 4.0000 | 1.0000 (1) |" in text and "| local | 4 | 4.5000 | 9.0000 (1) |  |" in text


def test_each_task_and_each_number_of_rows_has_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = ["--task", "digits", "byte-lm", "--rows", "1", "2", "--methods", "AdamW", "local"]
    once = ["--steps", "3", "--every", "2", "--lrs", "1e-3", "--ranks", "2"]

    def told() -> str:
        """The report without its title and the sentence on the machine, which names its load."""
        return capsys.readouterr().out.strip().split("\n\n", 2)[2]

    main([*several, *once, "--results", str(tmp_path / "local.jsonl")])
    tables = told().split("\n\n| method | H | bits")
    heads = [part.splitlines()[-1] for part in tables[:-1]]
    assert [head.split(", 3 steps")[0] for head in heads] == [
        f"{task}, 2 workers of {rows} rows" for task in ("digits", "byte-lm") for rows in (1, 2)
    ]
    rows = [line for line in (tmp_path / "local.jsonl").read_text().splitlines() if '"local"' in line]
    losses = [json.loads(line)["loss"] for line in rows]
    assert len(set(losses)) == len(losses) == 4  # each table's own
    held = ["--steps", "3", "--every", "2", "--ranks", "2", "--results", str(tmp_path / "local.jsonl")]
    report_only = ["--report-only", *several, *held]
    main(report_only)
    assert told().split("\n\n| method | H | bits") == tables
    main([*report_only, "--methods", "AdamW"])  # with any H
    table = told()
    assert "| AdamW |" in table and "| local |" not in table
    main([*report_only, "--every", "4"])
    assert told() == table
    with pytest.raises(SystemExit):
        main([*report_only, "--rows", "4"])
    assert "holds no run of some task" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(report_only[:-2])
    assert "--report-only reads what --results holds" in capsys.readouterr().err
