"""scripts/deepspeed_configs.py: which files it takes, what it writes into them, and what it tells of each."""

from __future__ import annotations

import json
from pathlib import Path

import deepspeed_configs as script
from config_files import FILES


def test_a_folder_of_repositories(tmp_path: Path) -> None:
    files = {
        "a/b/ds.json": {"train_batch_size": "auto", "zero_optimization": {"stage": 1}},
        "a/b/args.json": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "c/d/deep/model.json": {"hidden_size": 4},
        "c/d/deep/wrong.json": {"train_batch_size": 4, "sparse_gradients": True},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "c/d/template.json").write_text('{"train_batch_size": SIZE}')
    found = list(script.public_files(tmp_path))
    assert [(repository, name) for repository, name, _ in found] == [
        ("a/b", "ds.json"), ("c/d", "deep/wrong.json"), ("c/d", "template.json"),
    ]  # fmt: skip
    told = [script.outcome(*each, timeout_s=60) for each in found[1:]]
    assert "sparse_gradients = true is not supported" in told[0].refused and "not JSON" in told[1].refused
    text = script.report([script.Outcome("a/b", "ds.json", steps=2), *told])
    assert "| a/b | 1 | 1 | 1 |\n| c/d | 2 | 0 | 0 |\n| all | 3 | 1 | 1 |" in text


def test_auto_is_what_the_trainer_writes() -> None:
    filled = script.as_the_trainer({"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "x": ["auto"]})
    assert filled == {"train_batch_size": 8, "fp16": {"enabled": False}, "x": ["auto"]}
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert script.ranks_of(sizes) == 8 and script.ranks_of(sizes | {"tensor_parallel": {"autotp_size": 2}}) == 16
    assert script.with_sizes({}) == {"train_micro_batch_size_per_gpu": 8}
    assert script.with_sizes(sizes, 2) == {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def test_a_file_trains() -> None:
    (path,) = [path for path in FILES if path.name == "hf_zero2_auto.json"]
    told = script.outcome("a/b", path.name, json.loads(path.read_text()), timeout_s=120)
    assert (told.refused, told.failed) == ("", "") and told.steps >= script.STEPS
