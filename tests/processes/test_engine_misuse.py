"""Scripts that use an engine as it is not meant to be, on several ranks: no silence, and no file of half a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from misuse_ranks import (
    alone,
    config_of,
    empty_batches,
    frozen_after_backward,
    half_saved,
    loaded_past_the_engine,
    unlike_models,
)
from ranks import run_torchrun

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
LOCAL = {"onebit": {"local_steps": {"every": 2, "start_steps": 1}}}
ON_HOST = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

FOUND_EMPTY = [  # configuration, shards, whether the root has parameters, how
    *((config_of("AdamW", 3), 2, True, how) for how in ("leaf", "constant", "unused", "none")),
    (config_of("AdamW", 2, gas=2, gradient_clipping=0.5), 2, True, "unused"),
    (config_of("OneBitAdam", 3, gas=2, **BF16), 2, False, "none"),
    (config_of("AdamW", 0, gas=2), 1, True, "constant"),
    (config_of("AdamW", 3, **FP16), 2, True, "constant"),
    (config_of("OneBitAdam", 0, **BF16), 1, True, "unused"),
    (config_of("AdamW", 3, gas=2, **LOCAL), 2, True, "constant"),
    (config_of("AdamW", 2, **ON_HOST), 2, True, "none"),
    (config_of("OneBitAdam", 1), 1, True, "constant"),
    (config_of("OneBitAdam", 2, **BF16), 1, True, "none"),
]


@pytest.mark.timeout(120)
def test_a_loss_without_a_graph_counts_as_a_zero_gradient() -> None:
    ended = run_torchrun(2, empty_batches, FOUND_EMPTY, timeout_s=90)
    found = ended.check().results[0]
    assert found == [""] * len(FOUND_EMPTY), list(zip(FOUND_EMPTY, found, strict=True))


@pytest.mark.parametrize("name", ["OneBitAdam", "AdamW"])
def test_a_layer_that_is_frozen_after_backward_leaves_replicas_equal_and_is_no_edit(name: str) -> None:
    ended = run_torchrun(2, frozen_after_backward, config_of(name, 0), timeout_s=50)
    first, second = ended.check().results
    assert first == second and "clip_grad_norm_" not in ended.output


@pytest.mark.parametrize(("ranks", "name", "stage", "shards"), [(2, "OneBitAdam", 0, 1), (4, "AdamW", 3, 2)])
def test_ranks_with_unlike_models_are_told_the_parameter(ranks: int, name: str, stage: int, shards: int) -> None:
    """All of them, those of other shard groups too, before any value is sent."""
    ended = run_torchrun(ranks, unlike_models, config_of(name, stage), shards, timeout_s=50)
    for refused, accepted in ended.check().results:
        assert "the model's parameters differ between ranks: entry 6 is layers.2.weight" in refused, ended.output
        assert accepted == "1 step"


CALLS = [
    ("engine.save_checkpoint()", "AdamW", 1),
    ("engine.module_state_dict()", "AdamW", 2),
    ("engine.eval()", "OneBitAdam", 0),
]
RARER = [
    ("engine.load_checkpoint()", "AdamW", 0),
    ("engine.save_16bit_model()", "AdamW", 3),
    ("engine.synchronise()", "OneBitAdam", 1),
    ("check_replicas()", "OneBitAdam", 0),
    ("sync_buffers()", "AdamW", 0),
    ("export_weights()", "AdamW", 2),
]


@pytest.mark.parametrize(
    ("call", "name", "stage"), CALLS + [pytest.param(*case, marks=pytest.mark.thorough) for case in RARER]
)
def test_a_call_that_one_rank_makes_alone_is_named(call: str, name: str, stage: int, tmp_path: Path) -> None:
    shards = 2 if stage else 1
    ended = run_torchrun(2, alone, call, str(tmp_path), config_of(name, stage), shards, timeout_s=50)
    (text, seconds), (other, _) = ended.results
    assert f"Every rank must call {call}: rank 0 did" in text and "rank 1" in text, ended.output
    assert "rank 0" in other.removeprefix("rank 1"), ended.output
    assert "network interface" not in text and float(seconds) < 20


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_are_loaded_or_refused_before_anything_is_written(stage: int) -> None:
    error, is_as_before, is_loaded = (
        run_torchrun(2, loaded_past_the_engine, config_of("AdamW", stage), 2, timeout_s=50).check().results[1]
    )
    if stage == 3:
        assert "rank 1: load_state_dict() got all of" in error and "engine.load_module_state_dict" in error
    assert (error != "") == is_as_before == (stage == 3) and is_loaded


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_one_ranks_state_dict_is_whole_or_refused(stage: int, tmp_path: Path) -> None:
    ended = run_torchrun(2, half_saved, str(tmp_path), config_of("AdamW", stage), 2, timeout_s=50)
    *ways, torchs, pefts = ended.check().results[0]
    if stage == 3:
        assert len(ways) == 6 and all("engine.module_state_dict()" in text for text in ways[:-1]) and ways[-1], ways
    else:
        assert ways[:-1] == [""] * 5  # every rank has whole weights
    assert torchs == pefts == ""
