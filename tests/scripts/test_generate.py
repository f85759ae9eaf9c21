"""scripts/generate.py: what it writes is what the engine decodes, and what it cannot read ends in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from generate import main
from train.checkpoint import CheckpointFolder
from train.model import build_model

from onebit import zero
from onebit.comm import SimTransport


def test_a_run_is_written_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model("tiny", seed=4)
    CheckpointFolder(tmp_path / "run", SimTransport(), torch.device("cpu")).save(7, {"model": model.state_dict()}, {})
    assert main([str(tmp_path / "run"), "--size", "tiny", "--prompt", "def f", "--new", "9"]) == 0
    (text,) = zero.init_inference(model).generate([list(b"def f")], max_new_tokens=9)
    assert capsys.readouterr().out == bytes(text.tolist()).decode(errors="replace") + "\n"
    drawn = [str(tmp_path / "run"), "--size", "tiny", "--temperature", "2", "--new", "20", "--seed"]
    said = [(main([*drawn, seed]), capsys.readouterr().out)[1] for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]


def test_what_is_no_run_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model("tiny", seed=4)
    CheckpointFolder(tmp_path / "run", SimTransport(), torch.device("cpu")).save(7, {"model": model.state_dict()}, {})
    assert main([str(tmp_path / "run"), "--size", "small"]) == 2
    assert "give the --size" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "holds no weights" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), "--size", "tiny", "--new", "100"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
