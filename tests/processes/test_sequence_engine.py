"""The engine with sequences split over ranks, two of them at a time: it trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_torchrun
from sequence_engine_ranks import CASES, RESUMING, alone, two_by_two

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sequence")
    run_torchrun(4, two_by_two, str(folder), timeout_s=150).check()
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.timeout(200)
def test_it_equals_one_process_with_the_same_global_batch(ranks: list[dict[str, Any]]) -> None:
    """Dense and one-bit optimizers (in their warm-up, in float32), at all stages, with a tensor axis.

    Local steps are no AdamW of averaged gradients: of them, ranks agree.
    """
    own = {"sparse": alone(is_sparse=True), "by hand": alone(in_windows=True)}
    plain = alone()
    trained = [case for case in ranks[0] if "weights" in (ranks[0][case] if isinstance(ranks[0][case], dict) else ())]
    assert len(trained) == len(CASES) + 5
    for case in trained:
        expected = own.get(case, plain)
        for rank in ranks:
            for name, x in rank[case]["weights"].items():
                assert torch.equal(x, ranks[0][case]["weights"][name]), f"{case}: {name}"
                if case != "local steps":
                    torch.testing.assert_close(x, expected[name], rtol=0, atol=2e-5, msg=lambda m, c=case: f"{c}: {m}")


def test_a_decoder_in_one_module_computes_its_own_loss_of_a_whole_step(ranks: list[dict[str, Any]]) -> None:
    """The mean over micro-batches and ranks, on all of them; the first step's, as nothing has been trained before."""
    first = sum(sum(rank["stage 2"]["loss"][:2]) for rank in ranks) / 8
    for rank in ranks:
        assert rank["by train_batch"]["loss"] == ranks[0]["by train_batch"]["loss"]
        assert rank["evaluated"] == pytest.approx(first, rel=1e-6)
        assert rank["by train_batch"]["loss"][0] == pytest.approx(first, rel=1e-6)


def test_ranks_of_a_sequence_read_the_same_data(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stage 2"]["data"] for rank in ranks] == [((k // 2, 2), 2, 4) for k in range(4)]
    assert [rank["tensor"]["data"] for rank in ranks] == [((0, 1), 1, 4)] * 4
    assert all(rank["stage 2"]["sequence"] == (2, 2) and rank["mesh"] == 2 for rank in ranks)


def test_a_resumed_run_is_the_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    assert [rank[case]["resumed"] for rank in ranks for case in RESUMING] == [True] * 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lengths", "all ranks of a sequence are called with the same whole batch"),
        ("group", "no process group has ranks of different sequences"),
        ("own attention", "Linear is no model of transformers, and has no method split_sequences"),
        ("heads", "which reads the number of heads from a model of transformers, and this is a Linear"),
        ("ranks", "4 ranks cannot be divided by the 3"),
        ("local", "need equal weights"),
        ("0/1", "need equal weights"),
        ("twice", "are split already"),
        ("sparse", "different_layout_per_head gives each head a layout of its own"),
        ("slices", "different_layout_per_head gives each head a layout of its own"),
        ("dropped", "random_ltd needs whole sequences on each rank"),
        ("blind", "see none of other ranks"),
    ],
)
def test_what_does_not_work_is_named_on_all_ranks(ranks: list[dict[str, Any]], name: str, words: str) -> None:
    for rank in ranks:
        assert words in rank["refused"][name]
