"""Lightning's Trainer with `OnebitStrategy`: the plain loop, to the bit; wrong uses end in an error with the remedy."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_torchrun

pytest.importorskip("lightning", reason="pip install onebit[lightning]")

import lightning_ranks
from lightning_ranks import everything, example, resumed_here

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]  # Lightning's import alone takes 4 s on each rank

ELASTIC = {"TORCHELASTIC_RUN_ID": "tests"}
"""What tells Lightning that torchrun has started a rank."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lightning")
    results: Any = run_torchrun(2, everything, str(folder), timeout_s=280, env=ELASTIC).check().results
    assert results[0]["interrupted"]["load_from_checkpoint"] == 6
    other: Any = run_torchrun(1, resumed_here, f"{folder}/1-bit Adam/step=12.ckpt", 14, env=ELASTIC).check().results
    return [*results, {"in a world of one": other[0]}]


def test_the_trainer_does_what_the_plain_loop_does(found: list[dict[str, Any]]) -> None:
    for name, ours in found[0]["trained"].items():
        theirs = found[1]["trained"][name]
        assert ours["here"] == theirs["here"] == ours["by hand"], name
        assert ours["same data"] and theirs["same data"] and ours["seen"] != theirs["seen"], name
    bits = [case["here"] for case in found[0]["trained"].values()]
    assert len(set(bits)) == len(bits) - 1  # two of the cases are the same


def test_what_is_validated_is_the_same_on_all_ranks(found: list[dict[str, Any]]) -> None:
    ours, theirs = (result["validated"] for result in found[:2])
    assert ours["validated"] == theirs["validated"] and len(set(ours["validated"])) == 3  # two, and the end
    # A validation comes between the steps 7 and 8, where local steps have left the replicas apart.
    assert ours["weights"][8] == theirs["weights"][8] and ours["without"][8] != theirs["without"][8]


def test_resumed_trainings_end_in_the_same_bits(found: list[dict[str, Any]]) -> None:
    for name in ("1-bit Adam", "0/1 Adam", "16-mixed"):
        ours, theirs = (result["interrupted"][name] for result in found[:2])
        assert len(set(ours)) == 1 and ours == theirs, name
    assert len(found[2]["in a world of one"]) == 64


def test_no_file_of_a_rank_outlives_its_checkpoint(found: list[dict[str, Any]]) -> None:
    files = [file for file in found[0]["kept"] if not file.startswith("ranks/")]
    of_ranks = [file.split("/")[1] for file in found[0]["kept"] if file.startswith("ranks/")]
    assert files == of_ranks == ["same.ckpt", "step=9.ckpt"]


def test_the_strategy_has_a_name(found: list[dict[str, Any]]) -> None:
    assert found[0]["by name"] == found[0]["trained"]["plain"]["here"]


def test_ranks_that_lightning_starts_do_the_same(found: list[dict[str, Any]]) -> None:
    command = [sys.executable, lightning_ranks.__file__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [found[0]["trained"]["plain"]["here"]] * 2


@pytest.mark.parametrize(
    ("case", "start", "remedy"),
    [
        (
            "auto",
            "RuntimeError: rank {r}: Lightning's SingleDeviceStrategy takes",
            "Trainer(strategy=OnebitStrategy())",
        ),
        ("ddp", "RuntimeError: rank 0: DistributedDataParallel averages", "class from onebit.integrations"),
        ("AdamW", "TypeError: rank {r}: configure_optimizers returned AdamW", "return onebit.OnebitAdam(...)"),
        ("two norms", "ValueError: Trainer(gradient_clip_val=0.5), but OnebitAdam(max_grad_norm=1.0)", "give one"),
        ("by value", "ValueError: rank {r}: gradient_clip_algorithm='value'", 'use "norm"'),
        ("by value, by hand", "ValueError: rank {r}: gradient_clip_algorithm='value'", 'use "norm"'),
        ("DDP's argument", "TypeError: OnebitStrategy() got 'find_unused_parameters'", "leave it out"),
        ("ranks missing", "CheckpointError: rank 1: ", "keep the folder ranks/"),
    ],
)
def test_a_wrong_use_ends_in_an_error_with_the_remedy(
    found: list[dict[str, Any]], case: str, start: str, remedy: str
) -> None:
    for rank in (0, 1):
        error = found[rank]["errors"][case]
        if case == "ranks missing" and rank == 0:
            assert "Error" in error  # its peer is gone
            continue
        assert error.startswith(start.format(r=rank)) and remedy in error, error


def test_the_example_trains_as_adamw_and_resumes_in_the_same_bits(tmp_path: Path) -> None:
    said: Any = run_torchrun(2, example, str(tmp_path), timeout_s=200, env=ELASTIC).check().results[0]
    adamw, ours = (statistics.fmean(said[run]["losses"][-6:]) for run in ("adamw", "onebit"))
    assert said["adamw"]["losses"][0] == said["onebit"]["losses"][0] > 2.0
    assert ours < 1.2 * adamw < 1.2  # after 60 steps
    assert said["resumed"]["sha256"] == said["onebit"]["sha256"]
    assert said["resumed"]["losses"] == said["onebit"]["losses"][31:]
    assert 0 < said["onebit"]["bits_per_parameter"] < 6 and said["adamw"]["bits_per_parameter"] is None


def test_without_lightning_the_import_names_the_extra() -> None:
    code = "import sys; sys.modules['lightning'] = None; import onebit.integrations.lightning"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1 and "ImportError" in ended.stderr and "pip install onebit[lightning]" in ended.stderr
