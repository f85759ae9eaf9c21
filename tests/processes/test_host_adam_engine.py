"""HostAdam in an engine whose shards lie in host memory: as torch's AdamW, also from its checkpoints and back."""

from __future__ import annotations

from pathlib import Path

from host_adam_ranks import compares
from ranks import run_torchrun


def test_an_engine_steps_by_host_adam_as_by_torchs_and_their_checkpoints_are_one(tmp_path: Path) -> None:
    for facts in run_torchrun(2, compares, str(tmp_path), timeout_s=60).check().results:
        assert facts["names"] == ["AdamW", "HostAdam"]
        assert max(facts["start"], facts["of torch's"], facts["of ours"]) < 1e-6, facts
        assert min(facts["of torch's moved"], facts["of ours moved"]) > 1e-3, facts
