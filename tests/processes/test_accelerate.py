"""accelerate, the real one, on two ranks: the prepared loop is the plain loop, checkpoints, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs accelerate: pip install onebit[accelerate]")

from accelerate_ranks import KINDS, cases, load_in_other_world, without_cpu
from ranks import run_torchrun

pytestmark = pytest.mark.timeout(300)

RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict]:
    """What every rank says of every case."""
    return run_torchrun(RANKS, cases, str(folder), timeout_s=200).check().results


def test_the_example_learns_as_by_adamw_and_is_taken_up_to_the_bit(said: list[dict]) -> None:
    runs = said[0]["example"]
    adamw, onebit, resumed = (runs[name] for name in ("adamw", "onebit", "resumed"))
    assert len(onebit["losses"]) == 40 and len(resumed["losses"]) == 40 - 21
    assert onebit["losses"][-1] < 0.9 * onebit["losses"][0]
    # Of three seeds and 300 steps the gap is in docs/frameworks.md; here both have hardly begun.
    assert abs(sum(onebit["losses"][-8:]) / sum(adamw["losses"][-8:]) - 1) < 0.05
    assert adamw["bits_per_parameter"] is None and 1.0 < onebit["bits_per_parameter"] < 4.0
    assert resumed["sha256"] == onebit["sha256"] and resumed["losses"] == onebit["losses"][21:]


def test_the_prepared_loop_is_the_plain_loop_to_the_bit(said: list[dict]) -> None:
    """With accumulation, clipping and a schedule; BatchNorm's statistics, too."""
    for found in (rank["plain loop"] for rank in said):
        assert found["same"] and found["wrapped"] == "Sequential" and found["resent"] == 0
        assert found["lr"][0] == found["lr"][1]
        assert len(found["norms"]) == 6
        for was_nan, norm, true in found["norms"]:
            assert was_nan and norm == pytest.approx(true, rel=1e-6)


def test_models_begin_with_rank_0s_buffers(said: list[dict]) -> None:
    assert [rank["drawn buffers"] for rank in said] == [[3.0, 3.0]] * RANKS


def test_without_clipping_buckets_leave_in_the_last_pass_of_a_step(said: list[dict]) -> None:
    for found in (rank["overlap"] for rank in said):
        assert found["launched"] == [0] + [found["buckets"]] * 5 and found["resent"] == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_has_every_ranks_state_and_goes_on_to_the_bit(said: list[dict], name: str) -> None:
    for found in (rank[f"resumed {name}"] for rank in said):
        assert found["apart"] == RANKS, "nothing differed, so that synchronising shows nothing"
        assert found["together"] == 1 and found["same"]
        assert {"optimizer.bin", "optimizer_rank_00001.bin"} <= set(found["files"])
        assert not [file for file in found["files"] if file.startswith(".")]


@pytest.mark.parametrize(("case", "known_at"), [("skipped", 3), ("skipped, delayed", 6)])
def test_a_step_that_all_skip_is_skipped_by_the_schedule(said: list[dict], case: str, known_at: int) -> None:
    """And no other: the first step under a delay has not landed when it ends."""
    for found in (rank[case] for rank in said):
        flags, rates = zip(*found["rates"], strict=True)
        assert [k for k, was_skipped in enumerate(flags) if was_skipped] == [known_at]
        assert all((rates[k] < rates[k - 1]) == (k != known_at) for k in range(1, 12))
        assert math.isnan(found["norm"])


def test_another_world_takes_up_what_was_owed(said: list[dict], folder: Path) -> None:
    """One rank owes the mean of what two owed: its sum over the elements."""
    owed = [rank["another world"]["owed"] for rank in said]
    (found,) = run_torchrun(1, load_in_other_world, str(folder), timeout_s=60).check().results
    assert found["owed"] == pytest.approx(sum(owed) / RANKS, rel=1e-5)
    assert found["steps"] == 12 + 12 and math.isfinite(found["norm"])


def test_a_step_is_clipped_if_it_was_asked_for(said: list[dict]) -> None:
    """In the warm-up and after it."""
    assert all(rank["clipped now and then"] == [True, False] * 6 for rank in said)


def test_clipping_by_hand_clips_each_ranks_own_gradient_as_written(said: list[dict]) -> None:
    for found in (rank["clipped by hand"] for rank in said):
        assert found["same"] and found["resent"] == [3, 0]


def test_an_optimizer_that_is_not_prepared_trains_as_without_accelerate(said: list[dict]) -> None:
    assert all(rank["unprepared optimizer"]["same"] for rank in said)


REFUSED = {
    "stock_accelerator": ("RuntimeError: rank 0: DistributedDataParallel averages", "onebit.integrations"),
    "wrapped_model": ("TypeError: rank {rank}: the model is wrapped", "prepare the model itself"),
    "stock_optimizer": ("TypeError: rank {rank}: AdamW averages no gradients", "accelerate's own Accelerator"),
    "moved_model": ("ValueError: rank {rank}: parameter 5 of group 0 is on cpu, its optimizer state on meta", ".to("),
    "other_model": ("ValueError: rank {rank}: the optimizer trains no parameter", "construct it from this model"),
    "sharded": ("ValueError: rank {rank}: accelerate is configured for FSDP", "start with torchrun"),
    "part_of_a_norm": ("ValueError: rank {rank}: clip_grad_norm_ got 2 parameters", "pass all parameters"),
    "two_norms": ("ValueError: rank {rank}: clipping to 1.0, but", "give one of them"),
    "clipped_values": ("ValueError: rank {rank}: clip_grad_value_ would", "use clip_grad_norm_"),
    "other_norm": ("ValueError: rank {rank}: norm_type=1", "2-norm"),
    "uneven_inputs": ("ValueError: rank {rank}: join_uneven_inputs is for", "optimizer.optimizer.join()"),
    "unsynchronised_weights": ("RuntimeError: rank {rank}: the replicas differ", "sync_replicas()"),
    "weights_that_look_ahead": ("RuntimeError: rank {rank}: the parameters look ahead", "sync_replicas()"),
    "missing_file": ("CheckpointError: rank 1: ", "optimizer_rank_00001.bin is missing"),
    "main_process_only": ("CheckpointError: rank 1: ", "save on all ranks"),
    "other_save": ("CheckpointError: rank 1: ", "is of another save than optimizer.bin: step 0 "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_natural_but_wrong_is_refused_with_the_remedy(said: list[dict], name: str) -> None:
    begin, remedy = REFUSED[name]
    for rank, found in enumerate(said):
        assert found[name].startswith(begin.format(rank=rank)) and remedy in found[name], found[name]


def test_a_process_that_accelerate_takes_for_the_only_one_is_refused(folder: Path) -> None:
    """Without GPUs accelerate needs to be told to use the CPU, or every rank trains on all data."""
    for rank, error in enumerate(run_torchrun(RANKS, without_cpu, str(folder), timeout_s=60).check().results):
        assert (
            error.startswith(f"ValueError: rank {rank} of 2: accelerate takes it for 0 of 1")
            and "Accelerator(cpu=True)" in error
        )
