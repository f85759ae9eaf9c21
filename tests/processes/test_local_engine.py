"""The engine's form "local": local steps in one bit around a dense optimizer, whole or sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_ranks import config_of
from local_engine_ranks import EVERY, SAVED, STEPS, all_of_four, config, goes_on
from ranks import run_torchrun

from onebit import zero
from onebit.zero.forms import choose
from onebit.zero.grid import GridShape

BF16 = {"bf16": {"enabled": True}}
CASES = [
    (config(rounds={"codec": "int8"}, gradient_clipping=1.0), 1),
    (config(stage=1, rounds={"outer_lr": 0.7, "outer_momentum": 0.5}, **BF16), 2),
    (config("Lamb", stage=3, rounds={"every": 4, "delay": 2, "correction_steps": 80}, **BF16), 2),
    (config(rounds={"start_steps": 4, "start_every": 2}, **BF16), 1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict]:
    return run_torchrun(4, all_of_four, str(folder), CASES, timeout_s=110).check().results


def test_the_engine_takes_the_steps_that_are_taken_by_hand(ranks: list[dict]) -> None:
    for facts in ranks:
        assert facts["by hand"] == {"1 shards": True, "norm": True, "2 shards": True}


def test_rounds_of_one_step_in_full_are_averaged_gradients(ranks: list[dict]) -> None:
    for facts in ranks:
        assert max(facts["as dense"].values()) < 2e-6, facts["as dense"]


@pytest.mark.parametrize("k", range(len(CASES)))
def test_a_run_is_resumed_within_a_round_to_the_bit(ranks: list[dict], k: int) -> None:
    """As one that wrote no checkpoint: nothing is exchanged for it."""
    for facts in ranks:
        found = facts["resumes"][k]
        assert found["form"] == "local" and found["losses"][-1] < found["losses"][0]
        wrong = [what for what in ("untouched", "restored", "same bits", "client", "rates") if not found[what]]
        assert not wrong, wrong
        assert found["differ"] and found["alike behind eval"] and found["rounds"] >= (STEPS - 1) // (EVERY + 1)


def test_a_replica_skips_alone_and_its_ranks_together(ranks: list[dict]) -> None:
    rows = [facts["overflows"]["seen"] for facts in ranks]
    assert rows[0] == rows[1] and rows[2] == rows[3]
    assert [row[:2] for row in rows[0]] == [[256.0, 0]] * 6
    assert [row[:2] for row in rows[3]] == [[256.0, 0]] * 2 + [[128.0, 1]] * 4
    assert [row[2] for row in rows[0]] == [row[2] for row in rows[3]]  # one schedule
    assert rows[3][2][3] is None and all(row[3] > 0 for row in (*rows[0], rows[3][1], rows[3][3]))
    assert all(facts["overflows"]["missed"] == [0] and facts["overflows"]["differ"] == [False] for facts in ranks)


def test_other_forms_take_the_weights(ranks: list[dict]) -> None:
    for facts in ranks:
        found = facts["others"]
        assert found["weights"] and found["trains"] and found["a round"] and found["moments"]
        assert "form is local, this run's is dense" in found["form"] and "onebit.local_steps" in found["form"]
        assert "the form local takes over a state only if just the number of replicas changes" in found["grid"]
        assert "optimizer is LocalSteps around AdamW, not LocalSteps around Lamb" in found["inner"]


def test_pipelines_take_rounds_between_their_stages_replicas(ranks: list[dict]) -> None:
    norms = [facts["pipeline"]["norm"] for facts in ranks]
    assert norms[0] == norms[2] != norms[1] == norms[3]  # one of each replica
    for facts in ranks:
        found = facts["pipeline"]
        assert all(0 < loss < 10 for loss in found["losses"]) and len(set(found["losses"])) == STEPS
        assert found["same bits"] and found["tied"] and found["evaluates"] and found["differ"]


def test_tensor_slices_take_the_rounds_of_shards(ranks: list[dict]) -> None:
    for facts in ranks:
        found = facts["tensor"]
        assert found["2"] == pytest.approx(found["1"], rel=1e-3)
        assert found["divergence"] == "" and found["differ"]


def test_another_number_of_replicas_goes_on_from_four(folder: Path, ranks: list[dict]) -> None:
    anchors, owed = ranks[0]["resumes"][0]["agreed"]
    for facts in run_torchrun(2, goes_on, str(folder), CASES[0][0], timeout_s=110).check().results:
        assert facts["agreed"][0] == anchors and facts["steps"] == SAVED
        assert abs(owed) > 1e-6 and facts["agreed"][1] == pytest.approx(owed, rel=1e-5)
        assert facts["losses"][-1] < 1.2 * facts["losses"][0]


# ---------------------------------------------------------------- without processes


@pytest.mark.parametrize(
    ("name", "sizes", "stage", "more", "words"),
    [
        ("AdamW", (1, 4, 1, 1), 0, {}, "local"),
        ("Lamb", (1, 2, 2, 1), 3, {}, "local"),
        ("AdamW", (1, 1, 1, 1), 2, {}, "local"),
        ("AdamW", (2, 2, 1, 1), 0, {}, "local"),
        ("OneBitAdam", (1, 4, 1, 1), 0, {}, "got OneBitAdam; take AdamW"),
        ("AdamW", (1, 4, 1, 1), 2, {}, "a node has one rank; use stage 0"),
        ("AdamW", (1, 2, 2, 1), 2, {"sharding": "inter_node"}, "leave one of them out"),
    ],
)
def test_where_local_steps_have_a_place(name: str, sizes: tuple, stage: int, more: dict, words: str) -> None:
    shape, made = GridShape(sizes), config(name, stage)
    made["onebit"] |= more
    read = zero.read_config(made, world_size=shape.world_size, stages=sizes[0])
    if words == "local":
        assert choose(read, shape).name == "local"
    else:
        with pytest.raises(ValueError, match=words):
            choose(read, shape)


def test_what_local_steps_do_not_do_is_said() -> None:
    made = config(communication_data_type="bf16")
    made["onebit"] |= {"codec": "log4", "differences": "sign"}
    read, shape = zero.read_config(made, world_size=2), GridShape((1, 2, 1, 1))
    lines = choose(read, shape).without_effect(read, shape)
    assert [word in line for word, line in zip(("differences", "codec", "differences in"), lines, strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ({"evry": 3}, 'unknown key "evry"; did you mean "every"'),
        ({}, "every is missing"),
        ({"every": -1}, "every must be at least 1, got -1"),
        ({"every": "often"}, "expected a number of steps"),
        ({"every": {"shar": 1}}, 'unknown key "shar"; did you mean "share"'),
        ({"every": {"scale": 1, "share": 1}}, 'unknown key "share"; known here: scale, least, most'),
        ({"every": {"4": 1}}, "must have an interval from step 0 on"),
        ({"every": {}}, "says no interval"),
        ({"every": 4, "delay": 4}, "cannot land delay=4"),
        ({"every": 0, "outer_lr": 0.5}, "outer_lr is set, but every is 0"),
        ({"every": 4, "codec": "int3"}, "codec: expected one of"),
    ],
)
def test_the_block_is_read_strictly(rounds: dict, words: str) -> None:
    made = config_of("AdamW", onebit={"local_steps": rounds})
    with pytest.raises((TypeError, ValueError), match=words):
        zero.read_config(made, world_size=2)


@pytest.mark.parametrize("every", [5, "auto", {"0": 4, "9": 8}, {"scale": 0.1, "least": 2}, {"share": 0.1}, 0])
def test_the_block_is_what_it_writes(every: object) -> None:
    read = zero.read_config(config_of("AdamW", onebit={"local_steps": {"every": every}}), world_size=2)
    assert zero.read_config(read.to_dict(), world_size=2) == read
    assert read.onebit.local_steps.is_on == (every != 0)
