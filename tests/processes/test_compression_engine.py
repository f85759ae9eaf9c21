"""Compression through the engine: every stage, dense and one-bit, against one rank; checkpoints in mid-schedule."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from compression_cases import GPT_TECHNIQUES, config, gpt
from compression_ranks import COMPRESSION, STEPS, ds_config, trains
from ranks import run_torchrun

from onebit import zero
from onebit.comm import SimTransport
from onebit.zero.compression import init_compression
from onebit.zero.feature import Asked
from onebit.zero.features.compression import Compression
from onebit.zero.grid import GridShape

WARM = {"freeze_step": 3}
LOCAL = {"var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 2}
BF16 = {"bf16": {"enabled": True}}
CASES = [
    (ds_config("AdamW", {}, 2), 2, "dense"),
    (ds_config("OneBitAdam", WARM, 3), 2, "intra_node"),
    (ds_config("ZeroOneAdam", LOCAL, 0), 1, "replicated"),
]
"""Compared with one rank alone."""
OTHERS = [
    (ds_config("OneBitLamb", WARM, 3), 2, "intra_node"),
    (ds_config("OneBitAdam", WARM, 1, **BF16), 1, "inter_node"),
    (ds_config("ZeroOneAdam", LOCAL, 3, **BF16), 2, "intra_node"),
]
"""Other forms, also those that one rank does not have, and that compute in bfloat16."""


def check(facts: dict, form: str, what: str) -> None:
    assert facts["form"] == form, what
    assert facts["same bits"] and facts["same everywhere"] and facts["step"] == STEPS, what
    assert set(facts["on"]) == {
        "weights in 6 bits", "element pruning (topk) keeps 50.0%", "row pruning (l1) keeps 50.0%",
        "head pruning (topk) keeps 50.0%", "activations in 8 bits",
    }, what  # fmt: skip
    assert facts["cleaning moves"] <= 1e-5 and facts["file moves"] == 0, what


def test_stages_train_as_one_rank_and_resume_to_the_bit(tmp_path: Path) -> None:
    """Dense: losses within 1e-5 of one rank, for sums in another order; one-bit: 1 %, for scales of other elements."""
    cases = [case[:2] for case in CASES]
    two, one = (run_torchrun(n, trains, str(tmp_path / str(n)), cases, timeout_s=110).check().results for n in (2, 1))
    for k, (given, _, form) in enumerate(CASES):
        what = f"{given['optimizer']['type']} {given['zero_optimization']} {two[0][k]} {one[0][k]}"
        check(two[0][k], form, what)
        if given["zero_optimization"]["stage"] == 3:
            assert "is sharded over ranks, and cleaning needs whole weights" in two[0][k]["refusal"], what
        tolerance = 1e-5 if form == "dense" else 0.01
        assert two[0][k]["loss"] == pytest.approx(one[0][k]["loss"], rel=tolerance), what


@pytest.mark.thorough
def test_other_forms_resume_to_the_bit(tmp_path: Path) -> None:
    results = run_torchrun(2, trains, str(tmp_path), [c[:2] for c in OTHERS], timeout_s=110).check().results
    for k, (given, _, form) in enumerate(OTHERS):
        check(results[0][k], form, f"{given['optimizer']['type']} {given['zero_optimization']} {results[0][k]}")


def test_the_configuration_and_the_model_agree_or_say_so() -> None:
    given = ds_config("AdamW", {}, 0)
    with pytest.raises(ValueError, match=r"has compression_training, and the model is as it was: call .*init_compr"):
        zero.initialize(model=gpt(), config=given)
    other = config(row_pruning=GPT_TECHNIQUES["row_pruning"])
    with pytest.raises(ValueError, match="is not the one that init_compression was given"):
        zero.initialize(model=init_compression(gpt(), other), config=given)
    model, grid = (
        init_compression(gpt(), COMPRESSION),
        SimpleNamespace(shape=GridShape((1, 1, 1, 2)), world=SimTransport()),
    )
    feature = Compression.of(Asked(zero.read_config(given, world_size=1), model, 0))
    with pytest.raises(ValueError, match="2 tensor ranks divide layers, and compression needs whole weights"):
        feature.prepare(model, grid, is_part=False)
