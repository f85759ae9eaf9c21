"""DeepSpeed's names of a running engine: whole parameters, tags, boundaries, what scripts hand over. Two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_ranks import FORMS, surface
from ranks import run_torchrun


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank found."""
    folder: Path = tmp_path_factory.mktemp("surface")
    return list(run_torchrun(2, surface, str(folder), timeout_s=110).check().results)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_gradients_and_moments_are_asked_for_whole(ranks: list[dict], form: str) -> None:
    """The gradient is that of a plain model on all samples, the moment a tenth of it: 8 bits and bfloat16 are near."""
    for rank in ranks:
        facts = rank["whole"][form]
        near = 0.03 if "intra" in form else 1e-6
        assert facts["gradient"] < near and facts["other"] and facts["none behind step"]
        assert facts["gathered"] and facts["set"] and facts["alike"], facts
        assert "layers.0.weight has shape (16, 8), got a value of (3,)" in facts["shape"]
        if form == "inter_node":
            assert all("are divided over their owners" in text for text in facts["refused"])
        else:
            assert facts["moment"] < (1e-6 if "dense" in form else 0.03) and facts["whole"] and facts["moved"]
            assert "has no 'xyzzy' of layers.0.weight now; it has exp_avg, exp_avg_sq" in facts["unknown"]


def test_scripts_gather_shards_by_their_ids_through_variables_of_their_own(ranks: list[dict]) -> None:
    for rank in ranks:
        assert all(rank["by ids"].values()), [name for name, holds in rank["by ids"].items() if not holds]


def test_parts_are_set_as_wholes_are(ranks: list[dict]) -> None:
    for k, rank in enumerate(ranks):
        facts = rank["by parts"]
        assert facts["same"] and facts["moved"]
        assert facts["without gradient"].startswith(f"ValueError: rank {k}: layers.0.weight has no gradient; call")
        name = "layers.0.weight"
        part = "this rank's part of layers.0.weight has shape (8, 8), got a value of (16, 8)"
        assert facts["refused"] == [f"ValueError: rank {r}: {part}" for r in (0, k)]
        of_1 = f"ValueError: rank 1: this rank's part of {name} has shape (8, 8), got a value of (7, 8)"
        whole = f"ValueError: rank 1: {name} has shape (16, 8), got a value of (15, 8)"
        assert facts["refused on all"] == [of_1, whole, whole, whole]
        assert all("below stage 3 ranks hold parameters whole" in text for text in facts["whole"])


def test_a_gradient_is_set_that_only_one_rank_has(ranks: list[dict]) -> None:
    for rank in ranks:
        assert set(rank["of one rank"].values()) == {0.5}, rank["of one rank"]


def test_checkpoints_have_tags_of_which_one_is_the_latest(ranks: list[dict]) -> None:
    for k, rank in enumerate(ranks):
        facts = rank["checkpoints"]
        assert [facts[f"save {k}"] for k in range(4)] == ["a", "b", "b", "c"]
        assert facts["load None"] == ["b", {"k": 2}, [3, 3, 24, 3], True]
        assert facts["load a"] == ["a", {"k": 0}, [1, 1, 8, 1], True]
        assert facts["load c"] == ["c", {"k": 3}, [4, 4, 32, 4], True]
        assert facts["folders"] == ["a", "b", "c", "latest", "latest", "step_00000003"]  # of a tag one stays
        assert facts["absent"].endswith("holds no checkpoint 'd'; it holds a, b, c: name one of them by tag=")
        assert all("is no name for a checkpoint" in text for text in facts["bad"]) and len(facts["bad"]) == 4
        assert f"rank {k}: the ranks give a checkpoint different tags: ['rank 0', 'rank 1']" in facts["apart"]
        assert facts["empty"] == [None, None] and facts["no latest"] == [[None, None], None]


def test_a_checkpoint_is_read_in_float32(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["checkpoints"]["in float32"] == [True] * 5


def test_a_grid_has_a_group_for_each_axis(ranks: list[dict]) -> None:
    """Ranks add 1 and 2: the sum of both is 3. Groups of stages, replicas, slices and a replica; places; last stage."""
    for k, rank in enumerate(ranks):
        mine = 1 + k
        assert rank["topologies"] == [3, mine, mine, 3, k, 0, 0, 2, 1, *[mine, 3, mine, mine, 0, k, 0, 1, k],
                                      *[mine, mine, 3, 3, 0, 0, k, 2, k]]  # fmt: skip


def test_torchs_optimizers_and_autocast_train_as_in_one_process(ranks: list[dict]) -> None:
    """To the bit: the sum over two ranks has one order."""
    for rank in ranks:
        assert rank["steps"]["of torch"] == [0.0] * 4


def test_the_optimizer_says_whether_the_step_was_skipped(ranks: list[dict]) -> None:
    for rank in ranks:
        (taken, scale, rates), (skipped, halved, _), after = rank["steps"]["shown"]
        assert (taken, scale, skipped, halved) == (False, 16.0, True, 8.0) and after == [0.25] * len(rates)


def test_a_part_of_a_checkpoint_is_taken(ranks: list[dict]) -> None:
    for rank in ranks:
        facts = rank["checkpoints"]
        for form, (state, counts, is_loaded, goes_on, is_alike) in facts["weights alone"].items():
            assert (state, counts) == ({"k": 3}, [1, 1]) and is_loaded and goes_on and is_alike, form
        steps, rate, is_loaded, states = facts["anew"]
        assert (steps, rate, is_loaded) == (4, 0, True) and states > 0
        assert (
            facts["frozen"] == [["embed.weight"]] * 2
            and "the checkpoint has no model.embed.weight" in facts["not frozen"]
        )
        *refused, taken = facts["strict"]
        assert all("the checkpoint has no model.more.bias" in each for each in refused)
        assert taken == "" and facts["not strict"] and facts["module"]
        assert "name it model.safetensors" in facts["named otherwise"]


def test_steps_of_other_sizes_and_boundaries(ranks: list[dict]) -> None:
    for k, rank in enumerate(ranks):
        facts = rank["steps"]
        assert facts["said"] == [[2, 6], [2, 6], True]
        assert "within a step" in facts["within"] and "give a multiple of 8" in facts["bad size"]
        applied = [False, True, False, True, False, False, False, True]
        assert facts["sizes"] == [[32, 4, 4], 3, 2 * 16 + 32, applied]
        assert "step() within no_sync()" in facts["paused"] and facts["passes"] == [1, 2]
        assert facts["ranks"][:-3] == [k, k, 2, 2, 1, k, 2, "cpu", "gloo", True]
        assert "computes on cpu and stays there, asked for cuda" in facts["ranks"][-3]
        assert facts["ranks"][-2:] == [0.0, [[0.9, 0.99]]]


def test_an_optimizer_and_a_schedule_are_handed_over(ranks: list[dict]) -> None:
    """A plateau's metric goes through step(); its rate falls with the second and the third step."""
    for k, rank in enumerate(ranks):
        is_same, is_same_schedule, rates, name, moves, kind, is_alike = rank["steps"]["given"]
        assert is_same and is_same_schedule and moves and is_alike and (name, kind) == ("SGD", "DTensor")
        assert rates == pytest.approx([0.025, 0.075])
        said = ["optimizer= (SGD) takes the place of AdamW in the configuration"]
        assert rank["steps"]["takes the place"] == (said if k == 0 else [])
        said = ["dist_backend='nccl' has no effect: torch.distributed runs already, with cpu:gloo,cuda:gloo"]
        assert rank["again"] == (said if k == 0 else [])


def test_natural_but_wrong_steps_say_what_to_do(ranks: list[dict]) -> None:
    for k, rank in enumerate(ranks):
        facts = rank["steps"]
        assert f"rank {k}: step() finds gradients that did not come by engine.backward" in facts["by loss.backward()"]
        vector, number, kept = facts["no loss"]
        assert "a tensor of shape (3,); reduce it" in vector and "got float" in number
        assert "accumulate in engine.no_sync()" in kept
        (line,) = facts["never stepped"]
        assert "call engine.step() after every micro-batch" in line
