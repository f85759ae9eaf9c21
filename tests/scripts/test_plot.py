"""The picture of runs is drawn whatever they hold."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from train.plot import Run, main
from train.report import COLUMNS, read_csv


def write_run(path: Path, steps: int, *, has_wire: bool = True, validates: bool = True) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for step in range(steps):
            looks = validates and step % 5 == 4
            writer.writerow(
                {
                    "step": step,
                    "loss": 5.0 / (1 + step),
                    "val_loss": 5.5 / (1 + step) if looks else "",
                    "lr": 1e-3,
                    "sent_bytes": 1000,
                    "bits_per_parameter": 8.0 if step < 5 else 1.1,
                    "comm_ms": 2.0,
                    "step_s": 0.01,
                    "error_norm_ratio": 0.3 if looks else "",
                    "phase": "warmup" if step < 5 else "compressed",
                    "skipped": 0,
                    "wire_bytes": 1100 if has_wire else "",
                }
            )


def test_a_picture_of_long_and_short_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "long.csv", 20)
    write_run(tmp_path / "short.csv", 1, has_wire=False, validates=False)
    main([str(tmp_path / "long.csv"), str(tmp_path / "short.csv"), "--out", str(tmp_path / "runs" / "loss.png")])
    assert (tmp_path / "runs" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_add_up_and_losses_keep_their_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "run.csv", 10)
    run = Run("run", read_csv(tmp_path / "run.csv"))
    assert run.is_wire and run.megabytes == pytest.approx([1100e-6 * (k + 1) for k in range(10)])
    assert run.validated() == ([4, 9], [1.1, 0.55])


def test_a_file_without_a_step_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "empty.csv", 0)
    with pytest.raises(ValueError, match="empty: no step is in this file"):
        main([str(tmp_path / "empty.csv"), "--out", str(tmp_path / "loss.png")])
