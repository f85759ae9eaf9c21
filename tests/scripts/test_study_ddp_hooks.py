"""`study.py ddp-hooks`: every way trains, and the table has a row for each."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_torchrun

SCRIPT = Path(__file__).parents[2] / "scripts" / "study.py"


@pytest.mark.thorough
def test_every_way_has_a_row_with_its_bits() -> None:
    options = ["ddp-hooks", "--steps", "6", "--warmup", "2", "--seeds", "1"]
    output = run_torchrun(2, SCRIPT, *options, timeout_s=110).check().output
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| ") and "---" not in line][1:]
    bits = {row[0].removeprefix("| "): float(row[3]) for row in rows}
    assert bits["DDP, no hook"] == 32.0
    assert 1.0 < bits["onebit.ddp_hook"] < 1.1 and 4.0 < bits["onebit.ddp_hook, log4"] < 4.2
    assert bits["PowerSGD, rank 1"] < bits["PowerSGD, rank 4"] < 5
    assert len(bits) == 6
