"""train.py --sparse-attention: a mode or JSON, in all ways to train, kept by a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train.checkpoint import CheckpointError
from train.methods import build_method
from train.report import read_csv
from train.run import parse_args, train
from train.zero_method import config_of

from onebit.comm import run_ranks
from onebit.zero.sparse_attention import SparseSelfAttention, read_sparsity

SMALL = ["--size", "tiny", "--batch-size", "2", "--progress", "none", "--optimizer", "adamw", "--eval-every", "4"]


def run(*more: str) -> int:
    args = parse_args([*SMALL, *more])
    return run_ranks(1, lambda transport: train(args, transport, lambda: False))[0]


def losses(path: Path) -> list[float]:
    return [float(row["loss"]) for row in read_csv(path)]


def test_a_run_attends_by_its_layout_and_goes_on_with_it(tmp_path: Path) -> None:
    """Of 4 steps: a window's losses are not dense attention's, and a resumed run has the uninterrupted one's."""
    sparse = ["--context", "96", "--sparse-attention", '{"mode": "local_sliding_window", "block": 16}', "--steps", "4"]
    assert run("--csv", str(tmp_path / "a.csv"), *sparse) == 0
    assert run("--csv", str(tmp_path / "dense.csv"), "--context", "96", "--steps", "4") == 0
    folder = ["--checkpoint", str(tmp_path / "runs"), "--csv", str(tmp_path / "b.csv")]
    assert run(*folder, *sparse, "--stop-after", "2") == 0
    assert run(*folder, *sparse, "--resume") == 0
    assert losses(tmp_path / "a.csv") == losses(tmp_path / "b.csv") != losses(tmp_path / "dense.csv")
    with pytest.raises(CheckpointError, match="--sparse-attention"):
        run(*folder, "--context", "96", "--steps", "4", "--resume")


def test_the_engine_is_given_the_whole_block() -> None:
    args = parse_args([*SMALL, "--zero", "1", "--sparse-attention", "bigbird"])
    assert read_sparsity(config_of(args)["sparse_attention"]) == read_sparsity({"mode": "bigbird"})
    assert "sparse_attention" not in config_of(parse_args([*SMALL, "--zero", "1"]))


def test_a_longer_context_has_as_many_positions() -> None:
    args = parse_args([*SMALL, "--context", "200", "--sparse-attention", "fixed", "--optimizer", "onebit-adam"])
    method = run_ranks(1, lambda transport: build_method(args, transport, torch.device("cpu")))[0]
    model = method._model
    assert model.positions.weight.shape[0] == model.context == 200
    assert sum(isinstance(module, SparseSelfAttention) for module in model.modules()) == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("bigbrd", 'expected one of "dense", "fixed"'),
        ('{"mode": "fixed", "blok": 3}', 'did you mean "block"'),
        ("{", ""),
    ],
)
def test_a_bad_layout_is_refused_by_name(text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([*SMALL, "--sparse-attention", text])
    said = capsys.readouterr().err
    assert "--sparse-attention" in said and error in said
