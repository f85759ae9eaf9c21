"""The page of runs: one file that needs nothing else, whatever the runs hold."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from train.plot import main
from train.report import COLUMNS


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


def page_of(tmp_path: Path, *labels: str) -> str:
    out = tmp_path / "report.html"
    main([*(str(tmp_path / f"{label}.csv") for label in labels), "--out", str(out), "--title", "Runs & more"])
    return out.read_text()


def test_it_needs_nothing_else_and_tells_the_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "adamw.csv", 20)
    write_run(tmp_path / "one<bit>.csv", 40)
    page = page_of(tmp_path, "adamw", "one<bit>")
    assert not re.search(r'(?:src|href)="(?!#)', page) and "@import" not in page
    assert "Runs &amp; more" in page and "<td>one&lt;bit&gt;</td><td>40</td>" in page and "<bit>" not in page
    assert re.search(r"<td>adamw</td><td>20</td><td>0\.2500</td><td>0\.2750</td>.*<td>4\.53</td>|<td>2\.83</td>", page)
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 5
    for svg in svgs:
        ElementTree.fromstring(svg)
    names = re.findall(r'<clipPath id="([^"]+)"', page)
    assert names and len(set(names)) == len(names)  # of one picture do not cut another
    assert page == page_of(tmp_path, "adamw", "one<bit>")


@pytest.mark.parametrize("steps", [1, 3])
def test_short_runs_that_never_validate(tmp_path: Path, steps: int) -> None:
    write_run(tmp_path / "short.csv", steps, has_wire=False, validates=False)
    page = page_of(tmp_path, "short")
    assert page.count("<svg") == 5 and "handed to the network" in page


def test_a_file_without_a_step_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "empty.csv", 0)
    with pytest.raises(ValueError, match="empty: no step is in this file"):
        page_of(tmp_path, "empty")
