"""Data efficiency through the engine: resume within an epoch, other worlds, stages and slices, the older curriculum."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_ranks import CONTEXT, GLOBAL, SAMPLES, layouts, others, reads, writes
from ranks import run_torchrun


@pytest.mark.parametrize(("ranks", "optimizer", "stage"), [(4, "OneBitAdam", 2), (2, "AdamW", 3)])
def test_a_run_is_resumed_to_the_bit_and_in_half_the_world(
    tmp_path: Path, ranks: int, optimizer: str, stage: int
) -> None:
    """Dropped tokens, difficult samples later, short sequences first; the checkpoint lies within an epoch."""
    given = (str(tmp_path), optimizer, stage)
    found = run_torchrun(ranks, writes, *given, timeout_s=110).check().results
    again = run_torchrun(ranks // 2, reads, *given, timeout_s=110).check().results[0]
    assert all(facts["same"] for facts in found), "a resumed run goes on to the bit"
    rows = found[0]["expected"]
    assert [row["length"] for row in rows] == [5, 6, 6, 6, 6, 8]
    assert all(len(row["samples"]) == GLOBAL for row in rows)
    most = [max(row["samples"]) for row in rows]
    assert max(most[:2]) <= 9 and max(most[2:4]) <= 14 and max(most) <= SAMPLES - 1
    assert found[0]["kept"] == 4
    assert [row["samples"] for row in again] == [row["samples"] for row in rows[3:]]
    assert [row["length"] for row in again] == [row["length"] for row in rows[3:]]


def test_stages_and_slices_drop_what_one_rank_drops() -> None:
    facts = run_torchrun(2, layouts, timeout_s=110).check().results[0]
    assert facts["pipe 0"] == pytest.approx(facts["one stage"], abs=1e-5)
    assert facts["pipe 1"] == pytest.approx(facts["one stage"], abs=1e-5), "activations computed again"
    assert facts["two slices"] == pytest.approx(facts["one slice"], abs=1e-5)


def test_the_older_curriculum_batches_by_tokens_and_rates_by_tokens(tmp_path: Path) -> None:
    facts = run_torchrun(2, others, str(tmp_path), timeout_s=110).check().results[0]
    assert [row["length"] for row in facts["legacy"]] == [4, 4, 6, CONTEXT + 1]
    assert facts["told"] == [4, 4, 6]
    assert "expects sequences of 4 tokens, and the model was given 8; truncate them" in facts["too long"]
    assert "call engine.set_custom_curriculum_learning_schedule" in facts["no function"]
    assert facts["custom"] == [4, 5, 6]
    # lengths 1 2 3 4 5 1 2 ..., at most 6 with padding: {0 1} {2} {3} {4} {5 6} {7} {8} {9}, eight parts to a step
    dynamic = facts["dynamic"]
    assert dynamic["samples"] == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
    assert dynamic["rates"] == pytest.approx([0.01 * 10 / GLOBAL] * 2) and dynamic["after"] == 0.01
    # of each sequence 8 tokens in two layers and 4 in two others, 8 sequences in a step
    tokens, counted, rate = facts["tokens"]
    assert tokens == counted == 2 * GLOBAL * (2 * CONTEXT + 2 * 4) and 0 < rate < 0.01
    assert facts["tokens again"] == facts["tokens"]
