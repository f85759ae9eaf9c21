"""The block "elasticity": the batches that DeepSpeed chose, and what a run on them does when its ranks change."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from config_files import small

from onebit.zero.config.elasticity import Elasticity
from onebit.zero.config.whole import read_config
from onebit.zero.elasticity import compute_elastic_config, elasticity_enabled

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "elasticity_deepspeed_0.19.6.json").read_text())
BLOCK = {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}


@pytest.mark.parametrize("version", [0.1, 0.2])
def test_the_batches_of_deepspeed(version: float) -> None:
    for block, ranks, theirs in (case for case in GOLDEN if case[0]["version"] == version):
        if theirs is None:
            with pytest.raises(ValueError, match=r"micro-batch|divide"):
                compute_elastic_config({"elasticity": block}, "0.19.6", world_size=ranks)
        else:
            assert [*compute_elastic_config({"elasticity": block}, "0.19.6", world_size=ranks)] == theirs, (
                block,
                ranks,
            )


@pytest.mark.pairwise
@pytest.mark.parametrize("prefer_larger", [True, False])
@pytest.mark.parametrize("micros", [(1,), (3,), (2, 4, 6), (5, 7), (16, 16)])
@pytest.mark.parametrize("most", [16, 100, 2000])
def test_every_number_of_ranks_divides_the_batch(most: int, micros: tuple[int, ...], prefer_larger: bool) -> None:
    """Also a number that is not one of the batch's: it gets a batch of its own, below the limit."""
    made = Elasticity(
        enabled=True, max_train_batch_size=most, micro_batch_sizes=micros, prefer_larger_batch=prefer_larger
    )
    train, valid = made.choose()
    assert 0 < train <= most and 1 in valid
    for ranks in range(1, most // min(micros) + 1):
        size, micro = made.batch_sizes(ranks)
        assert size <= most and micro in micros and size % (micro * ranks) == 0
        assert (ranks in valid) == any(train % (each * ranks) == 0 for each in micros)
        assert size == train or ranks not in valid
    with pytest.raises(ValueError, match="more than max_train_batch_size"):
        made.batch_sizes(most // min(micros) + 1)


def test_a_configuration_has_the_chosen_sizes(caplog: pytest.LogCaptureFixture) -> None:
    for ranks in (1, 2, 3, 7, 8, 840):
        config = read_config({"elasticity": BLOCK}, world_size=ranks)
        assert config.train_batch_size == 1680
        assert config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * ranks == 1680
        assert read_config(config.to_dict(), world_size=ranks) == config
    assert not caplog.records


def test_other_sizes_of_the_file_are_an_error_or_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ValueError, match=r"elasticity chooses train_batch_size = 1680, .* train_batch_size = 8 is given, in"
    ):
        read_config({"train_batch_size": 8, "elasticity": BLOCK}, world_size=2)
    with caplog.at_level(logging.WARNING, "onebit"):
        ignoring = {"train_batch_size": 8, "elasticity": {**BLOCK, "ignore_non_elastic_batch_info": True}}
        assert read_config(ignoring, world_size=2).train_batch_size == 1680
    assert "train_batch_size has no effect: elasticity chooses train_batch_size = 1680" in caplog.text


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"enabled": True}, "write max_train_batch_size and micro_batch_sizes"),
        ({**BLOCK, "micro_batch_sizes": [2, 4000]}, "micro-batch 4000 .* is above max_train_batch_size = 2000"),
        ({**BLOCK, "micro_batch_sizes": [0]}, "expected a list of integers at least 1"),
        ({**BLOCK, "min_gpus": 9, "max_gpus": 8}, "min_gpus = 9 is above max_gpus = 8"),
        ({**BLOCK, "num_gpus_per_node": 4, "model_parallel_size": 3}, "no multiple of model_parallel_size = 3"),
        ({**BLOCK, "version": 0.1, "num_gpus_per_node": 2, "model_parallel_size": 2}, 'needs "version": 0.2'),
        ({**BLOCK, "version": 0.3}, "expected one of 0.1, 0.2"),
        ({**BLOCK, "version": 0.1, "max_gpus": 2}, "start one of 1, 2, or"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen_is_refused(block: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_config({"elasticity": block}, world_size=4)


def test_a_block_that_is_off_changes_nothing() -> None:
    assert small(elasticity={**BLOCK, "enabled": False}).train_batch_size == small().train_batch_size


def test_deepspeeds_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"elasticity": BLOCK}
    assert elasticity_enabled(config) and not elasticity_enabled({})
    train, valid = compute_elastic_config(config, "0.19.6")
    assert train == 1680 and len(valid) == 32 and all(any(1680 % (n * m) == 0 for m in (2, 4, 6)) for n in valid)
    with pytest.raises(ValueError, match="expected a configuration with"):
        compute_elastic_config({"train_batch_size": 8}, "0.19.6")
    with pytest.raises(ValueError, match="pass world_size"):
        compute_elastic_config(config, "0.19.6", return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert compute_elastic_config(config, "0.19.6", return_microbatch=True)[2] == 4
