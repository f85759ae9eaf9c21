"""An engine with files, killed again and again, ends in the bits of one that was left alone."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from offload_ranks import trains
from ranks import run_torchrun

STALE = {"onebit-offload-0-1-0badf00d": b"\xff" * 9000, "onebit-offload-1-1-0badf00d": b"", "notes.txt": b"mine"}
KILLS = ["save 2", "load", "step 3", "save 4"]
"""Each in a run that goes on from the last checkpoint."""


@pytest.mark.slow
@pytest.mark.parametrize(("files", "ranks"), [("offload_param", 1), ("offload_optimizer", 2), ("one bit", 2)])
def test_killed_at_any_call_and_resumed(files: str, ranks: int, tmp_path: Path) -> None:
    """Files that lie in the folder from elsewhere are neither read, nor in the way, nor removed."""
    alone = run_torchrun(ranks, trains, files, str(tmp_path / "alone"), str(tmp_path / "saved alone")).check().results
    folder, saves = tmp_path / "nvme", str(tmp_path / "saves")
    folder.mkdir()
    for name, data in STALE.items():
        (folder / name).write_bytes(data)
    points = random.Random(f"{files} {ranks}")
    # Killed in its start, one rank of two would wait long for the other.
    for k, phase in enumerate([*(["start"] if ranks == 1 else []), *KILLS]):
        victim = k % ranks
        call = points.randrange(alone[victim]["calls"][phase])
        ended = run_torchrun(ranks, trains, files, str(folder), saves, victim, phase, call)
        assert ended.returncodes[victim] == -signal.SIGKILL, f"{phase}, call {call}\n{ended.output}"
    resumed = run_torchrun(ranks, trains, files, str(folder), saves).check().results
    assert [found["bits"] for found in resumed] == [found["bits"] for found in alone]
    assert all(found["began"] >= 2 for found in resumed)
    there = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: data for name, data in there.items() if data or name in STALE} == STALE
