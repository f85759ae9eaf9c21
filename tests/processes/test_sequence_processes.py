"""Sequences split over processes: stages 1 to 3 train as one process does, and one-bit replicas keep the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_torchrun
from sequence_ranks import KINDS, alone, trains_long_sequences

pytest.importorskip("transformers")


def test_a_rank_of_the_sequence_is_a_rank_of_the_data(tmp_path: Path) -> None:
    run_torchrun(3, trains_long_sequences, str(tmp_path), timeout_s=110).check()
    ranks, expected = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)], {kind: alone(kind) for kind in KINDS}
    for rank in ranks:
        for kind, weights in rank.items():
            for name, x in weights.items():
                assert torch.equal(x, ranks[0][kind][name])
                if kind != "one bit":
                    torch.testing.assert_close(x, expected[kind][name], rtol=0, atol=1e-5, msg=f"{kind}: {name}")
