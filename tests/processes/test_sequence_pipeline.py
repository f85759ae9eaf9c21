"""Stages of a pipeline with sequences split over ranks: they train as one process does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_torchrun
from sequence_pipeline_ranks import CASES, ELSEWHERE, RESUMING, SLICED, USUAL, alone, two_sliced_stages, two_stages

pytest.importorskip("transformers")


Rank = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    folder = tmp_path_factory.mktemp("sequence")
    run_torchrun(4, two_stages, str(folder), timeout_s=250).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def run_of_eight(folder: Path, names: Sequence[str]) -> list[Rank]:
    run_torchrun(8, two_sliced_stages, str(folder), list(names), timeout_s=250).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(8)]


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return run_of_eight(tmp_path_factory.mktemp("sliced"), USUAL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*CASES, *ELSEWHERE])
def test_it_equals_one_process_with_the_same_global_batch(ranks: list[Rank], case: str) -> None:
    check(ranks, case, CASES[case][0] if case in CASES else ELSEWHERE[case][0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*USUAL, "llama, then whole layers"])
def test_with_two_ranks_for_each_layer_it_equals_one_process(eight: list[Rank], case: str) -> None:
    check(eight, case, SLICED[case][0] if case in SLICED else "llama")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_with_two_ranks_for_each_layer_all_others_equal_one_process(tmp_path: Path) -> None:
    others = [case for case in SLICED if case not in USUAL]
    ranks = run_of_eight(tmp_path, others)
    for case in others:
        check(ranks, case, SLICED[case][0])
        assert [rank[case]["data"] for rank in ranks] == [(0, 1)] * 8


def check(ranks: list[Rank], case: str, kind: str) -> None:
    """Weights and losses; of the compressed one, ranks agree to the bit.

    A parameter is on the ranks of its stage, or on both if it is tied.
    """
    losses, weights = alone(kind)
    for rank in ranks:
        its = rank[case]
        assert its["loss"] == ranks[0][case]["loss"]
        if case != "compressed":
            assert its["loss"] == pytest.approx(losses, abs=2e-5)
            for name, x in its["weights"].items():
                torch.testing.assert_close(x, weights[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        for other in ranks:
            for name in its["weights"].keys() & other[case]["weights"].keys():
                assert torch.equal(its["weights"][name], other[case]["weights"][name]), name
    assert set().union(*(rank[case]["weights"] for rank in ranks)) == set(weights)


def test_all_stages_of_all_ranks_of_a_sequence_read_the_same_data(ranks: list[Rank], eight: list[Rank]) -> None:
    assert [rank["layers"]["data"] for rank in ranks] == [(0, 1)] * 4
    assert [rank["heads divided"]["data"] for rank in eight] == [(0, 1)] * 8


def test_evaluation_has_the_loss_of_whole_sequences(ranks: list[Rank]) -> None:
    from sequence_pipeline_ranks import ROWS, dataset, model_of

    ids, labels = dataset("llama")[0:ROWS]
    expected = model_of("llama").eval()(input_ids=ids, labels=labels).loss.item()
    assert [rank["llama, stage 1"]["eval"] for rank in ranks] == pytest.approx([expected] * 4, abs=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one(ranks: list[Rank]) -> None:
    for case in RESUMING:
        assert [rank[case]["resumed"] for rank in ranks] == [True] * 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no layer", r"no layer of the PipelineModule has a method compute_pieces\(split\)"),
        ("batches", "all ranks of a sequence are called with the same whole batch"),
        ("lengths", "so that each token has one"),
        ("short", "a sequence of 1 tokens is too short for 2 ranks"),
        ("hidden", "targets of -100 hide tokens"),
        ("hidden among inputs", "targets of -100 hide tokens"),
        ("outputs", "pieces, which have no mean"),
    ],
)
def test_what_does_not_work_is_named_on_all_ranks(ranks: list[Rank], name: str, words: str) -> None:
    for k, rank in enumerate(ranks):
        assert re.search(f"rank ({k}|{k % 2}): .*{words}", rank["refused"][name]), rank["refused"][name]


def test_pieces_that_tensor_ranks_cannot_divide_are_named_on_all_ranks(eight: list[Rank]) -> None:
    for k, rank in enumerate(eight):
        words = f"rank {k // 2 % 2}: .* those of 6 tokens have 3, 3; take a multiple of 8 tokens"
        assert re.search(words, rank["odd pieces"]), rank["odd pieces"]
