"""Models in bfloat16, built without values, and worlds of one: through the engine, on ranks that are processes."""

from __future__ import annotations

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
