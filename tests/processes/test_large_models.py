"""Models in bfloat16, built without values, and worlds of one: through the engine, on ranks that are processes."""

from __future__ import annotations

from pathlib import Path

import large_ranks
import pytest
from ranks import run_torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple]:
    """By world size; the same folder."""
    folder = tmp_path_factory.mktemp("large")
    large_ranks.write_folder(folder / "hf", large_ranks.net())
    return {n: run_torchrun(n, large_ranks.run_cases, str(folder), timeout_s=120).check().results for n in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", [name for name in large_ranks.CASES if name.startswith("lora")])
def test_a_frozen_base_in_bfloat16_trains_as_one_in_float32_to_the_bit(
    results: dict[int, tuple], ranks: int, case: str
) -> None:
    for found in results[ranks]:
        masters = "torch.bfloat16" if ranks == 1 and case.endswith("2") else "torch.float32"  # inter_node: at owners
        assert found[case] == {"frozen": ["torch.bfloat16"], "trained": [masters], "same": True}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", [name for name in large_ranks.CASES if name.startswith("files")])
def test_a_model_without_values_takes_a_folders(results: dict[int, tuple], ranks: int, case: str) -> None:
    for found in results[ranks]:
        assert all(value is True for key, value in found[case].items() if key != "form"), found[case]


@pytest.mark.parametrize("ranks", [1, 2])
def test_initial_values_depend_on_no_layout(results: dict[int, tuple], ranks: int) -> None:
    for found in results[ranks]:
        assert found["initial values"] == {"same": True, "drawn": True, "norm": True}


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_leave_as_a_folder_of_small_files_and_return(results: dict[int, tuple], ranks: int) -> None:
    for found in results[ranks]:
        assert found["there and back"] == {"same": True, "files": True, "names": True}


def test_stages_and_tensor_slices_take_what_is_theirs(results: dict[int, tuple]) -> None:
    for found in results[2]:
        assert found["stages and slices"] == {"stages": True, "slices": True, "losses": True}


@pytest.mark.parametrize("ranks", [1, 2])
def test_differences_are_named_on_all_ranks(results: dict[int, tuple], ranks: int) -> None:
    for found in results[ranks]:
        said = found["differences"]
        assert "rank 0: " in said["shape"] and "embed.weight has shape (21, 12), the model's (21, 16)" in said["shape"]
        assert "has no weight, which the model has" in said["name"]
        assert "holds no weights: expected a folder" in said["nothing"]
        for stage in (0, 2):
            assert "AdamW keeps no float32 masters, so that small updates would be lost" in said[f"low {stage}"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_low_model_in_an_engine_of_float32_has_masters(results: dict[int, tuple], ranks: int) -> None:
    for found in results[ranks]:
        assert found["low"] == {"set": True, "rounded": True, "finer": True}


@pytest.mark.thorough
def test_a_checkpoint_goes_from_one_rank_to_two_and_back(tmp_path: Path) -> None:
    for k, ranks in enumerate((1, 2, 1)):
        ended = run_torchrun(ranks, large_ranks.continues_elsewhere, str(tmp_path), timeout_s=120).check()
        for found in ended.results:
            assert all(one == [3 * k, True, True] for one in found.values()), found
