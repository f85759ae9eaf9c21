"""zero.Init: a model is built in parts, with the values and the training of one that is built whole."""

from __future__ import annotations

import pytest
from ranks import run_torchrun
from zero_init_ranks import memory, surface

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_in_parts_is_the_one_that_rank_0_builds(ranks: int) -> None:
    for facts in run_torchrun(ranks, surface, "", timeout_s=180).check().results:
        for part in ("built", "written", "trained"):
            assert [name for name, is_true in facts[part].items() if not is_true] == [], part


def test_no_rank_holds_the_model() -> None:
    """Of four ranks each holds 72 of 288 MiB, beside the matrix of 36 that is being divided, or sharded."""
    for built_mib, sharded_mib in run_torchrun(4, memory, timeout_s=120).check().results:
        assert built_mib < 72 + 36 + 36 and sharded_mib < 72 + 36 + 36
