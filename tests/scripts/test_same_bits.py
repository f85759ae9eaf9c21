"""The gate of changes that must not change a number: it sees every difference, and none where there is none."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import same_bits
import torch
from same_bits import Ended, Start, train_here
from train.corpus import read_corpus

SAME = Ended("losses", "parameters", "state", sent_bytes=10, step_s=0.5, peak_bytes=100)
RUNS = {"dense": "--optimizer adamw", "one bit": "--optimizer onebit-adam"}


@pytest.fixture
def threads() -> Iterator[None]:
    """A start sets its own number, as it is a process of its own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_run_ends_in_the_same_bits_and_another_seed_in_others(
    threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_bits, "STEPS", 3)
    monkeypatch.setattr("train.run.read_corpus", functools.cache(read_corpus))  # 0.4 s of each rank in each run
    ends = []
    for k, flags in enumerate(["", "", " --seed 1"]):
        runs = {name: given + flags for name, given in RUNS.items()}
        monkeypatch.setitem(same_bits.STARTS, "small", Start("sim", 2, runs))
        train_here("small", tmp_path / f"{k}.json")
        ends.append({run: Ended(**end) for run, end in json.loads((tmp_path / f"{k}.json").read_text()).items()})
    first, again, other = ends
    assert first.keys() == again.keys() == RUNS.keys()
    for run in RUNS:
        assert first[run].sent_bytes > 0 and first[run].differs_in(again[run]) == []
        assert first[run].differs_in(other[run]) == ["losses", "parameters", "state"]


@pytest.mark.parametrize("change", [
    {"a": [torch.tensor([1.0, 2.5])]},
    {"a": [torch.tensor([1.0, 2.0], dtype=torch.float64)]},
    {"a": [torch.tensor([[1.0, 2.0]])]},
    {"a": [torch.tensor([1.0, 2.0]), 3]},
    {"b": [torch.tensor([1.0, 2.0])]},
    {"a": torch.tensor([1.0, 2.0])},
], ids=str)  # fmt: skip
def test_a_digest_sees_values_types_shapes_and_places(change: object) -> None:
    plain = {"a": [torch.tensor([1.0, 2.0])]}
    assert same_bits._digest(plain) == same_bits._digest({"a": [torch.tensor([1.0, 2.0])]})
    assert same_bits._digest(plain) != same_bits._digest(change)


@pytest.mark.parametrize("change", [{}, {"losses": "others"}, {"state": "another"}, {"sent_bytes": 11}], ids=str)
def test_the_exit_status_and_the_record_say_what_differs(
    change: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trees that are never checked out: each start ends as it is told to."""

    def run_start(tree: Path, name: str, folder: Path) -> dict[str, Ended]:
        here = replace(SAME, **change, step_s=1.0) if tree == same_bits.ROOT else SAME
        return {"first": here, "second": replace(SAME, step_s=here.step_s)}

    monkeypatch.setattr(same_bits, "checkout", lambda revision: nullcontext(tmp_path))
    monkeypatch.setattr(same_bits, "run_start", run_start)
    record = tmp_path / "record.md"
    status = same_bits.main(["HEAD", "--only", "threads", "one rank", "--record", str(record)])
    text = record.read_text()
    assert status == bool(change)
    assert f"4 runs, {2 if change else 0} of them with a difference" in text
    assert f"| threads | 2 | {int(bool(change))} | 2.00 | 1.00 |" in text
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        f"- {start}: first: {name}" for start in ("threads", "one rank") for name in change
    ]


def test_every_start_is_one_that_the_training_script_takes() -> None:
    from train.run import parse_args

    for start in same_bits.STARTS.values():
        assert start.launcher in ("sim", "torchrun", "mpirun") and start.runs
        for flags in start.runs.values():
            parse_args(flags.split())
