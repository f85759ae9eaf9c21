"""The engine: every form trains, its ranks agree, and a resumed run is the run that was not interrupted, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import FILES
from engine_ranks import STEPS, config_of, resumes, trains_json, trains_with_a_collective_between
from ranks import run_torchrun

FASTER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.04, "warmup_num_steps": 3}}}
SKIPPING = {"var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 2}
WARM = {"freeze_step": 4}
MUON = {"freeze_step": 4, "head": "head"}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}


def at(stage: int, **ours: object) -> dict:
    return {"zero_optimization": {"stage": stage}, "onebit": {"compression": "always", "block": 64, **ours}}


# Each optimizer, form, stage and precision, not all together: test_contracts.py has every form, test_torch_contract.py
# and test_optimizer_contract.py every optimizer.
USUAL = [
    (config_of("ZeroOneAdam", **at(0), gradient_clipping=1.0), 1, "replicated"),
    (config_of("OneBitAdam", WARM, **at(1), gradient_clipping=1.0), 1, "inter_node"),
    (config_of("OneBitAdam", WARM, **at(1), **FP16), 1, "inter_node"),
    (config_of("ZeroOneAdam", SKIPPING, **at(2), **BF16), 1, "inter_node"),
    (config_of("OneBitAdam", WARM, **at(1), **BF16, gradient_clipping=1.0), 2, "intra_node"),
    (config_of("ZeroOneAdam", **at(2)), 2, "intra_node"),
    (config_of("OneBitLamb", {"freeze_step": 4, "lr": 0.03}, **at(3), **BF16), 2, "intra_node"),
    (config_of("Adam", **at(0)), 1, "dense"),
    (config_of("Lion", {"lr": 0.005}, **at(1), **BF16, gradient_clipping=1.0), 2, "dense"),
]
THOROUGH = [
    (config_of("OneBitMuon", MUON, **at(0), gradient_clipping=1.0), 1, "replicated"),
    (config_of("OneBitAdam", WARM, **at(1, differences="sign"), **BF16), 1, "inter_node"),
    (config_of("OneBitAdam", **at(2), **BF16), 1, "inter_node"),  # warm-up to the end
    (config_of("OneBitLamb", WARM, **at(2), **BF16, **FASTER), 1, "inter_node"),
    (config_of("OneBitMuon", MUON, **at(3), **BF16), 2, "intra_node"),
    (config_of("OneBitAdam", WARM, **at(0), **BF16), 1, "intra_node"),
    (config_of("OneBitAdam", WARM, **at(3), **FP16), 2, "intra_node"),
    (config_of("Lamb", {"lr": 0.03}, **at(3), **FP16), 2, "dense"),
    (config_of("Muon", {"head": "head", "adam_lr": 0.01}, **at(3), **BF16), 2, "dense"),
]


@pytest.mark.parametrize(
    "cases", [pytest.param(USUAL, id="usual"), pytest.param(THOROUGH, id="thorough", marks=pytest.mark.thorough)]
)
def test_every_form_trains_and_resumes_to_the_bit(tmp_path: Path, cases: list) -> None:
    configs = [case[:2] for case in cases]
    results = run_torchrun(4, resumes, str(tmp_path), configs, timeout_s=110).check().results
    for k, (config, _, form) in enumerate(cases):
        facts = results[0][k]
        what = f"{config['optimizer']['type']} {config['zero_optimization']} {facts}"
        assert facts["form"] == form, what
        assert facts["same bits"] and facts["same everywhere"] and facts["found"], what
        assert facts["again"] == facts["losses"][STEPS // 2 :], what
        assert facts["losses"][-1] < 0.8 * facts["losses"][0], what
        assert facts["counts"] == [STEPS, 2 * STEPS, facts["counts"][2]], what
        assert all(results[rank][k]["client"] and results[rank][k]["same bits"] for rank in range(4)), what


def test_every_public_style_configuration_trains(tmp_path: Path) -> None:
    files = [str(path) for path in FILES]
    assert len(files) >= 12
    for problems in (
        run_torchrun(2, trains_json, files, str(tmp_path), timeout_s=110, as_python_ends=True).check().results
    ):
        assert {file: text for file, text in problems.items() if "needs torch" not in text} == {}
        assert not problems, "\n".join(problems.values())


@pytest.mark.timeout(100)
def test_a_collective_of_the_scripts_own_between_backward_and_step() -> None:
    """While a replica's gradients are missing; at every stage, buckets of one layer each."""
    small = {"gradient_accumulation_steps": 1, "scheduler": None}
    ours = {"bucket_cap_mb": 0.002}
    cases = [
        (config_of("OneBitAdam", WARM, **{**at(stage, **ours), **small}), shards)
        for stage, shards in ((0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 2))
    ]
    cases += [(config_of("AdamW", **{**at(0, **ours), **small}), 1)]
    ended = run_torchrun(4, trains_with_a_collective_between, cases, timeout_s=90).check()
    for found in ended.results:
        assert found == [{"same everywhere": True, "steps": 7}] * len(cases)
