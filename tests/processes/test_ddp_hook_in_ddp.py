"""onebit.ddp_hook in DistributedDataParallel itself, with all that DDP does around it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from hook_ranks import everything, example
from ranks import run_torchrun


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results: Any = run_torchrun(2, everything, timeout_s=100).check().results
    return list(results)


def test_replicas_end_in_the_same_bits(found: list[dict[str, Any]]) -> None:
    assert {name: said for name, said in found[0].items() if name != "with OnebitAdam"} == {
        name: said for name, said in found[1].items() if name != "with OnebitAdam"
    }


def test_ddps_options_change_no_bit(found: list[dict[str, Any]]) -> None:
    ours = found[0]
    assert ours["plain"] == ours["views"] == ours["static graph"]
    assert len({ours[name] for name in ("plain", "from the first step", "accumulated", "unused")}) == 4


def test_a_loss_scale_changes_no_bit_until_a_step_overflows(found: list[dict[str, Any]]) -> None:
    """A power of two. All ranks skip the step that overflows on one: else the replicas would not have the same bits."""
    assert found[0]["scaled"] == found[0]["plain"] != found[0]["overflow"]


def test_a_saved_state_goes_on_in_the_same_bits(found: list[dict[str, Any]]) -> None:
    straight, resumed = found[0]["resumed"]
    assert straight == resumed


@pytest.mark.parametrize("name", ["lossless", "lossless, accumulated", "warm-up"])
def test_without_compression_it_is_ddp(found: list[dict[str, Any]], name: str) -> None:
    assert found[0][name] <= (0.0 if name == "warm-up" else 2e-6)  # Adam divides by its own small gradients


def test_our_optimizers_behind_the_hook_are_refused(found: list[dict[str, Any]]) -> None:
    for said in found:
        assert said["with OnebitAdam"].startswith("rank 0: DistributedDataParallel averages the gradients")


@pytest.mark.thorough
def test_the_example_trains_as_adamw_and_resumes_in_the_same_bits(tmp_path: Path) -> None:
    said: Any = run_torchrun(2, example, str(tmp_path), timeout_s=100).check().results[0]
    adamw, ours = (statistics.fmean(said[run]["losses"][-12:]) for run in ("adamw", "onebit"))
    assert said["adamw"]["losses"][0] == said["onebit"]["losses"][0] > 2.0
    assert ours < 1.2 * adamw < 1.2  # after 120 steps
    assert said["resumed"]["sha256"] == said["onebit"]["sha256"]
    assert said["resumed"]["losses"] == said["onebit"]["losses"][61:]
    assert said["onebit"]["bits_per_parameter"] > 1 and said["adamw"]["bits_per_parameter"] is None
