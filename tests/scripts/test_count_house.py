"""The counts of the tree: of a small one all by hand, of this one what must hold for any."""

from __future__ import annotations

import json
from pathlib import Path

import count_house
import pytest
import torch
from count_house import LONG_FUNCTION, ROOT, count_class, count_files, count_step, count_touches

import onebit

LONG = "def long():\n" + "    pass\n" * LONG_FUNCTION
SHORT = "def short():\n" + "    pass\n" * (LONG_FUNCTION - 1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two rooms; the second is also seen through a link, as comm and zero are."""
    for name, text in {
        "onebit/first.py": LONG,
        "onebit/second.py": SHORT + "# int4\n",
        "comm/codecs/int4.py": "class Int4Codec:\n    pass\n",
        "tests/test_int4.py": "import Int4Codec\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "onebit/comm").symlink_to("../comm")
    return tmp_path


def test_files_lines_and_long_functions_of_a_small_tree(tree: Path) -> None:
    found = count_files(tree)
    assert found["files"] == {"onebit": 2, "comm": 1, "zero": 0, "scripts": 0, "tests": 1}
    assert found["lines"] == {"onebit": 2 * LONG_FUNCTION + 2, "comm": 2, "zero": 0, "scripts": 0, "tests": 1}
    assert found["longest files"]["onebit/first.py"] == LONG_FUNCTION + 1
    assert found[f"functions over {LONG_FUNCTION} lines"] == {"onebit/first.py: long": LONG_FUNCTION + 1}


def test_what_an_addition_touches_is_counted_outside_the_tests(tree: Path) -> None:
    assert count_touches(tree)["codec int4"] == 2
    assert count_touches(tree)["backend cupy"] == 0


def test_a_ladder_of_classes_is_counted_as_far_as_the_tree_goes() -> None:
    found = count_class(ROOT, onebit.Lamb)
    assert found["levels"] == 1 and found["methods"] >= 5 and found["overrides"] == 0


def test_a_step_is_traced_and_counts_the_same_again() -> None:
    """One compressed step on one rank. The hops of a step are no matter of chance."""
    first, second = (count_step(ROOT, onebit.OnebitAdam, compression="always", freeze_step=4) for _ in range(2))
    assert first == second
    assert 5 < first["files"] <= first["hops"] and first["switches in its class ladder"] < first["hops"]
    assert first["levels"] >= 1 and first["methods"] > 10 and first["attributes"] > 10


def test_a_round_of_local_steps_passes_through_more_files_than_a_step_between_two() -> None:
    between, at_round = (
        count_step(
            ROOT, lambda params, lr, **options: onebit.LocalSteps(torch.optim.AdamW(params, lr), **options), every=h
        )
        for h in (8, 4)
    )
    assert 5 < between["files"] < at_round["files"] and between["hops"] < at_round["hops"]
    assert between["levels"] == at_round["levels"] == 2


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(count_house, "count_steps", lambda tree: {"OnebitAdam": {"files": 24}})
    assert count_house.main(["--json", str(tmp_path / "counts.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "counts.json").read_text())
    assert printed["one step"] == {"OnebitAdam": {"files": 24}} and printed["files"]["onebit"] > 10
