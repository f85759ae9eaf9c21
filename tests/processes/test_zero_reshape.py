"""The engine's checkpoints in other layouts than they were written in: whole models, shards, replicas."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import run_torchrun
from reshape_ranks import ONE_BIT, runs

BF16 = {"bf16": {"enabled": True}}
FIRST = 6

# On four ranks. Each case: what it loads was saved by one above it.
OF_FOUR: list[dict] = [
    {"name": name, "stage": 2, "shards": 2, "save": f"{name} 2x2", "steps": FIRST} for name in (*ONE_BIT, "Lamb")
]
OF_FOUR += [
    {"name": "OneBitAdam", "stage": 0, "load": "OneBitAdam 2x2", "save": "OneBitAdam whole"},
    {
        "name": "OneBitAdam",
        "stage": 3,
        "shards": 4,
        "load": "OneBitAdam whole",
        "save": "OneBitAdam 1x4",
        "blocks": BF16,
    },
    {"name": "ZeroOneAdam", "stage": 0, "load": "ZeroOneAdam 2x2"},
    {"name": "OneBitLamb", "stage": 1, "shards": 4, "load": "OneBitLamb 2x2", "blocks": BF16},
    {"name": "OneBitMuon", "stage": 1, "shards": 4, "load": "OneBitMuon 2x2"},
    {"name": "OneBitAdam", "stage": 1, "save": "inter_node"},
    {"name": "OneBitAdam", "stage": 2, "shards": 2, "load": "inter_node"},
    {"name": "AdamW", "stage": 2, "shards": 4, "save": "AdamW"},
    {"name": "AdamW", "stage": 1, "shards": 4, "load": "AdamW", "save": "AdamW in files", "nvme": True},
    {"name": "AdamW", "stage": 3, "shards": 2, "load": "AdamW in files", "nvme": True, "blocks": BF16},
    {"name": "Lamb", "stage": 2, "shards": 4, "load": "Lamb 2x2", "save": "Lamb in files", "nvme": True},
    {"name": "Lamb", "stage": 0, "load": "Lamb in files"},
]
OF_TWO = [
    {"name": "OneBitAdam", "stage": 2, "shards": 2, "load": "OneBitAdam 1x4"},
    {"name": "ZeroOneAdam", "stage": 0, "load": "ZeroOneAdam 2x2"},
    {"name": "AdamW", "stage": 3, "shards": 2, "load": "AdamW in files", "nvme": True},
]


def due(of: dict[str, list]) -> torch.Tensor:
    """What the next exchange will deliver of what is there: the momentum that is kept, and what is owed."""
    owed = torch.tensor(of["owed"], dtype=torch.float64)
    return owed + 0.9 * torch.tensor(of["momentum"], dtype=torch.float64) if "momentum" in of else owed


def test_a_checkpoint_loads_into_every_other_layout(tmp_path: Path) -> None:
    saved: dict[str, dict] = {}
    for ranks, cases in ((4, OF_FOUR), (2, OF_TWO)):
        every = run_torchrun(ranks, runs, str(tmp_path), cases, timeout_s=110).check().results
        for case, facts in zip(cases, every[0], strict=True):
            if case.get("load") == "inter_node":
                assert "form is inter_node, this run's is intra_node" in facts["refused"]
                continue
            assert facts.get("refused") is None and facts["same everywhere"], (case, facts)
            if "load" not in case:
                saved[case["save"]] = facts
                continue
            before = saved[case["load"]]
            assert facts["steps"] == before["steps"] + 2
            assert facts["losses"][0] < 1.2 * before["losses"][-1], (case, facts["losses"], before["losses"])
            check_same(before["at end"], facts["at start"], case)
            if "save" in case:
                saved[case["save"]] = facts


def check_same(there: dict, here: dict, case: dict) -> None:
    assert there.keys() == here.keys() and len(there) == 9, case
    for name, theirs in there.items():
        mine = here[name]
        assert theirs.keys() == mine.keys(), (case, name)
        for what in theirs.keys() - {"owed", "momentum"}:
            assert theirs[what] == mine[what], (case, name, what)
        if "owed" in theirs:
            torch.testing.assert_close(due(mine), due(theirs), atol=1e-6, rtol=1e-6)
    if "owed" in next(iter(there.values())):
        assert any(due(of).any() for of in there.values()), "the test would not see what is owed"
