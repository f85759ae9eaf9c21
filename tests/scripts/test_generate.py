"""scripts/generate.py: what it writes is what the engine decodes, and what it cannot read ends in one line."""

from __future__ import annotations

import threading
from pathlib import Path

import byte_llama
import pytest
import torch
from generate import main
from train.checkpoint import CheckpointFolder
from train.model import build_model

from onebit import comm, zero
from onebit.comm import SimTransport, run_ranks


def test_a_run_is_written_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model("tiny", seed=4)
    CheckpointFolder(tmp_path / "run", SimTransport(), torch.device("cpu")).save(7, {"model": model.state_dict()}, {})
    assert main([str(tmp_path / "run"), "--size", "tiny", "--prompt", "def f", "--new", "9"]) == 0
    (text,) = zero.init_inference(model).generate([list(b"def f")], max_new_tokens=9)
    assert capsys.readouterr().out == bytes(text.tolist()).decode(errors="replace") + "\n"
    drawn = [str(tmp_path / "run"), "--size", "tiny", "--temperature", "2", "--new", "20", "--seed"]
    said = [(main([*drawn, seed]), capsys.readouterr().out)[1] for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("way", ["--tp", "--pp"])
def test_two_ranks_write_what_one_does(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
    words = [str(byte_llama.save(tmp_path / "llama")), "--prompt", "def f", "--new", "12"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    assert main([*words, way, "2"]) == 2
    assert f"{way[2:]}_size is 2 and there are 1 ranks" in capsys.readouterr().err
    own = threading.local()
    monkeypatch.setattr(comm, "init", lambda: own.transport)

    def write(transport: SimTransport) -> int:
        own.transport = transport
        return main([*words, way, "2"])

    assert run_ranks(2, write) == [0, 0] and capsys.readouterr().out == expected


def test_what_is_no_run_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model("tiny", seed=4)
    CheckpointFolder(tmp_path / "run", SimTransport(), torch.device("cpu")).save(7, {"model": model.state_dict()}, {})
    assert main([str(tmp_path / "run"), "--size", "small"]) == 2
    assert "give the --size" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "holds no weights" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), "--size", "tiny", "--new", "100"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
