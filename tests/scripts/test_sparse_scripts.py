"""The benchmark and the command of sparse attention, in tiny cases: they say what they measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from bench import sparse_attention as bench

from onebit.cli import main as command


@pytest.mark.thorough
def test_the_benchmark_measures_all_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process measures the memory of one side; the others' parts run in this one."""
    record = tmp_path / "record.md"

    def ask_here(args: argparse.Namespace, what: str, length: int = 0, side: str = "") -> object:
        if side == "bigbird":
            return in_a_process(args, what, length, side)
        return bench.work(argparse.Namespace(**vars(args), what=what, length=length, side=side))

    in_a_process = bench.ask
    monkeypatch.setattr(bench, "ask", ask_here)
    bench.main(
        [
            *("--lengths", "128", "--dense-up-to", "128", "--windows", "64", "128", "--heads", "1", "--features", "4"),
            *("--repeats", "1", "--threads", "1", "--record", str(record)),
        ]
    )
    lines = [line.split(" | ") for line in record.read_text().splitlines() if line.startswith("| 128 |")]
    assert [line[1] for line in lines] == ["dense", "window", "bigbird", "fixed"]
    dense = lines[0]
    for line in lines[1:]:
        for faster, ms in ((5, 3), (6, 4)):  # a single call is as slow as the machine lets it be, and its ratio follows
            expected = float(dense[ms].split()[0]) / float(line[ms].split()[0])
            assert float(line[faster]) == pytest.approx(expected, rel=0.02, abs=0.06), line
    assert record.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_longest_window_is_the_longest_that_is_no_slower() -> None:
    found = {name: {"wall": [s, s, s]} for name, s in {"dense": 1.0, "512": 0.5, "1024": 1.0, "2048": 1.1}.items()}
    assert bench.longest(found, "wall") == 1024
    assert bench.longest({"dense": {"wall": [1.0]}, "512": {"wall": [2.0]}}, "wall") == 0


def test_the_layouts_of_the_benchmark_are_as_thin_as_they_are_said_to_be() -> None:
    for length in (4096, 8192):
        for config in bench.LAYOUTS.values():
            assert bench.build_layout(config, 1, length).density < 0.15


def test_the_command_draws_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    words = ["local_sliding_window", "--block", "16", "--length", "64", "--layers", "2"]
    assert command(["layout", *words, "--json", str(file), "--png", str(picture)]) == 0
    assert "█···\n██··\n·██·\n··██" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["density"] == 7 / 16 and [row["farthest"] for row in found["reach"]] == [16, 32]
    assert picture.read_bytes().startswith(b"\x89PNG")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 8, "sparse_attention": {"mode": "dense", "block": 32}}))
    assert command(["layout", str(config), "--length", "64"]) == 0
    assert "█·\n██" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (["bigbrd"], 1, "expected dense, fixed"),
        (["{"], 1, "Expecting property name"),
        (["nowhere.json"], 1, "No such file"),
    ],
)
def test_a_bad_layout_ends_the_command(
    words: list[str], status: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["layout", *words]) == status
    assert error in capsys.readouterr().err
