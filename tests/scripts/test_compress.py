"""The command that compresses a model, and the study of recipes: both on digits, for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from study import compression
from study.compress import main
from study.compression import RECIPES, dense_model, draw, report, run, task_named

STEPS = compression.Setting(steps=20, more_steps=6, batch=16, lr=8e-3, more_lr=4e-3)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
def test_the_command_ends_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"compression_training": RECIPES["digits"]["all, 4 bits"]}))
    out = tmp_path / "runs" / "small.safetensors"
    words = ["--task", "digits", "--config", str(config), "--out", str(out)]
    main([*words, "--steps", "20", "--more-steps", "5", "--distill"])
    said = capsys.readouterr().out
    assert "read from" in said and f"{out.stat().st_size:,}" in said and "8,970" in said
    assert [path.name for path in out.parent.iterdir()] == ["small.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dense", "all, 4 bits"])
def test_a_run_of_the_study_is_cleaned_and_read_back(recipe: str, tmp_path: Path) -> None:
    dense = dense_model(task_named("digits"), 0, STEPS)
    modes = ("rounded", "trained", "distilled")[: 2 if recipe == "dense" else 3]
    results = [run("digits", recipe, mode, 0, dense, STEPS) for mode in modes]
    for result in results:
        assert result.moved <= 1e-10 and result.loss == pytest.approx(result.loss_trained, rel=1e-4)
    assert (results[0].bytes < 10_000) == (recipe != "dense")
    again = run("digits", recipe, "trained", 0, dense, STEPS)
    assert again == results[1]
    if recipe == "dense":
        draw(results, tmp_path / "figure.png")
        assert "| dense | 26,122 |" in report(results) and (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES["byte-lm"] if name in ("all, 8 bits", "half the layers")])
def test_recipes_of_the_byte_lm_fit_its_modules(recipe: str) -> None:
    task = task_named("byte-lm")
    student = compression.student_of(task, task.build(0), RECIPES["byte-lm"][recipe])
    assert compression.is_armed(student) and len(student.blocks) == (1 if recipe == "half the layers" else 2)
