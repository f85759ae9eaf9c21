"""The picture of runs is drawn whatever they hold."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from train.plot import Run, main
from train.report import COLUMNS, read_csv


def write_run(path: Path, steps: int, *, sent: int = 1000, has_wire: bool = True, validates: bool = True) -> None:
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
                    "sent_bytes": sent,
                    "bits_per_parameter": 8.0 if step < 5 else 1.1,
                    "comm_ms": 2.0,
                    "step_s": 0.01,
                    "error_norm_ratio": 0.3 if looks else "",
                    "phase": "warmup" if step < 5 else "compressed",
                    "skipped": 0,
                    "wire_bytes": sent * 11 // 10 if has_wire else "",
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


def write_nothing(path: Path) -> None:
    """No such file."""


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_nothing, "run.csv cannot be read: No such file or directory"),
        (lambda path: write_run(path, 0), "run.csv holds no step"),
        (lambda path: path.write_text("step,loss\n1,2.0\n"), "run.csv has no column val_loss"),
        (lambda path: path.write_bytes(bytes(range(256))), "run.csv cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_file_that_is_no_run_is_named_in_one_line(
    write: Callable[[Path], object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run.csv")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "run.csv"), "--out", str(tmp_path / "loss.png")])
    assert reason in capsys.readouterr().err and not (tmp_path / "loss.png").exists()


@pytest.mark.filterwarnings("error")
def test_runs_of_one_rank_are_drawn_though_they_send_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "alone.csv", 10, sent=0)
    main([str(tmp_path / "alone.csv"), "--out", str(tmp_path / "loss.png")])
    assert (tmp_path / "loss.png").exists()
