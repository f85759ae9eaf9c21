"""Stages 1 and 2 keep whole parameters: what FSDP2 refuses trains as in one process, and scripts see a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from partitioned_ranks import (
    LOSSES,
    MICROS,
    alone,
    alone_with_muon,
    config,
    is_rounded_right,
    leaves_unused_alone,
    several_engines,
    shares_a_trunk,
    trains,
    trains_at_stage_3,
    trains_with_muon,
    unfreezes,
)
from ranks import run_torchrun

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01, "eps": 1e-2}}
CASES = [(config(stage, micros, ADAM), loss) for stage, micros in ((1, MICROS), (2, MICROS), (1, 1)) for loss in LOSSES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("found")
    run_torchrun(2, trains, CASES, str(folder), timeout_s=100).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    "k",
    range(len(CASES)),
    ids=[f"{c['zero_optimization']['stage']} {loss} {c['gradient_accumulation_steps']}" for c, loss in CASES],
)
def test_any_model_trains_as_in_one_process(found: list[list[dict[str, Any]]], k: int) -> None:
    expected = alone(*CASES[k])
    for rank in found:
        assert rank[k]["weights"].keys() == expected["weights"].keys()
        for name, x in rank[k]["weights"].items():
            assert torch.equal(x, found[0][k]["weights"][name])
            torch.testing.assert_close(x, expected["weights"][name].to(x.dtype), rtol=0, atol=2e-6)
        for mean, wanted in zip(rank[k]["average"], expected["average"], strict=True):
            torch.testing.assert_close(mean, wanted.to(mean.dtype), rtol=0, atol=2e-6)
        for name, p in rank[k]["used"].items():
            assert torch.equal(p, rank[k]["weights"][name])
    assert found[0][k]["alone"].keys() == expected["weights"].keys()


def test_two_engines_share_a_trunk(tmp_path: Path) -> None:
    run_torchrun(2, shares_a_trunk, str(tmp_path)).check()
    for rank in (torch.load(tmp_path / f"{rank}.pt") for rank in range(2)):
        for name, engines in rank.items():
            for model, wanted in zip(engines, rank["alone"], strict=True):
                for key, x in model.items():
                    tolerance = 2e-2 if name.endswith("True") else 2e-6
                    torch.testing.assert_close(x, wanted[key], rtol=0, atol=tolerance, msg=f"{name} {key}")


def test_rounded_weights_follow_what_scripts_write() -> None:
    for found in run_torchrun(2, is_rounded_right, (1, 2)).check().results:
        for rank in found:
            assert rank["kept"] and rank["is rounded"] and rank["written"] == [0.5]
            assert rank["gradient"] == pytest.approx([1.0]) and rank["set"] == [7.0]
            # exp_avg of three steps with gradient 1, of which one had half of it, and one with 7
            assert rank["moment"] == pytest.approx([0.1 * 7 + 0.09 * 0.5 + 0.1 * 0.81 + 0.1 * 0.729], rel=1e-2)
            assert rank["bytes of gradients"] == 0


def test_engines_without_an_optimizer_compute_beside_those_that_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in run_torchrun(2, several_engines).check().results:
        assert max(rank["gaps"].values()) < 2e-6 and rank["moved"] > 0.01, rank
        assert rank["optimizers"] == ["actor", "critic"] and rank["loads"]
        assert "this engine trains nothing" in rank["reference"] and "this engine trains nothing" in rank["reward"]


def test_what_no_rank_uses_is_not_stepped() -> None:
    cases = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True)]
    for found in run_torchrun(2, leaves_unused_alone, cases).check().results:
        assert found == [[True, False, False]] * len(cases)


def test_a_frozen_layer_joins_when_it_is_unfrozen() -> None:
    for gaps in run_torchrun(2, unfreezes, (1, 2)).check().results:
        assert len(gaps) == 2 and max(gaps) < 2e-6


def test_stage_3_leaves_whole_what_fsdp2_refuses(tmp_path: Path) -> None:
    methods = {"onebit": {"forward_methods": ["encode"]}}
    cases = [config(3, micros, ADAM, **methods) for micros in (1, MICROS)]
    results = run_torchrun(2, trains_at_stage_3, cases, str(tmp_path)).check().results
    for rank in range(2):
        for k, weights in enumerate(torch.load(tmp_path / f"{rank}.pt")):
            expected = alone(cases[k // 2], "by_encoder")["weights"]
            for name, x in weights.items():
                torch.testing.assert_close(x, expected[name].to(x.dtype), rtol=0, atol=2e-6, msg=f"{k} {name}")
        trunk, method = results[rank]
        assert "is sharded by FSDP2 already" in trunk and "stages 1 and 2" in trunk
        assert "onebit.forward_methods: _Missing has no method 'encode'" in method


def test_muons_matrices_are_orthogonalised_whole_at_every_stage(tmp_path: Path) -> None:
    """Shards of a matrix meet, and its rows are those of one process; a shard by itself would get another update."""
    run_torchrun(2, trains_with_muon, str(tmp_path)).check()
    expected = alone_with_muon()
    for rank in range(2):
        for stage, weights in torch.load(tmp_path / f"{rank}.pt").items():
            for name, x in weights.items():
                torch.testing.assert_close(x, expected[name], rtol=0, atol=2e-5, msg=f"stage {stage}, {name}")
