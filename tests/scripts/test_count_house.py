"""The counts of the tree: of a small one by hand, of this one what must hold for any."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import count_house
import pytest
from count_house import ROOT, Walk, circles, count_shape, walk_step, with_row

import onebit


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two rooms, a circle by type between them; the second is also seen through a link, as comm and zero are."""
    one, two = 'def one():\n    """Owed."""\n    return 1\n', "def two():\n    a = 1\n    return a  # noqa\n"
    for name, text in {
        "onebit/first.py": f"from .comm.second import Two\n# a reason\n\n{one}",
        "comm/second.py": f"if TYPE_CHECKING:\n    from ..first import one\n\n{two}",
        "onebit/third.py": "from .first import one\n",
        "tests/test_one.py": "\n" * 7,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "onebit/comm").symlink_to("../comm")
    return tmp_path


def test_the_text_of_a_small_tree(tree: Path) -> None:
    found = count_shape(tree)
    assert found["lines"] == 13 and found["functions per 1,000 lines"] == round(2000 / 13, 1)
    assert found["median lines of a function"] == 3 and found["% of one statement"] == 50
    assert found["comments, % of lines"] == round(100 / 13, 2)
    assert found["dialect in docstrings"] == 1 and found["in docs"] == 0
    assert found["lines of scripts"] == 0 and found["of tests"] == 7


def test_circles_by_type_alone_are_found(tree: Path) -> None:
    assert circles(tree) == [["onebit.comm.second", "onebit.first"]]


def test_a_step_is_walked_and_counts_the_same_again() -> None:
    """The hops of a step are no matter of chance."""
    taken = [walk_step(ROOT, onebit.OnebitAdam, compression="always", freeze_step=4) for _ in range(2)]
    first, second = (walk.counts() for walk in taken)
    assert first == second and len(taken[0].listing().splitlines()) == first["files"]
    assert 5 < first["files"] < first["functions"] and first["files"] < first["hops"]


def test_a_record_gains_a_row(tmp_path: Path) -> None:
    record = with_row("# The house\n", {"A step": {"files": 1, "hops": 2}}, "a")
    record = with_row(record, {"A step": {"files": 3, "hops": 4}, "The text": {"lines": 5}}, "b")
    assert "| revision | files | hops |\n| --- | ---: | ---: |\n| a | 1 | 2 |\n| b | 3 | 4 |\n" in record
    assert record.endswith("## The text\n\n| revision | lines |\n| --- | ---: |\n| b | 5 |\n")
    record = with_row(record, {"A step": {"files": 5, "hops": 6}}, "c")
    assert "| b | 3 | 4 |\n| c | 5 | 6 |\n\n## The text\n" in record  # not at the end of the file


def test_the_command_prints_and_records(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    walk = Walk(tree)
    for file in ("onebit/first.py", "onebit/third.py", "onebit/first.py"):
        walk.functions.setdefault(file, Counter())[count_house.main.__code__] += 1
    monkeypatch.setattr(count_house, "walks", lambda tree: {"a step of OnebitAdam": walk})
    monkeypatch.setattr(count_house, "ROOT", tree)
    assert count_house.main(["--record", str(tmp_path / "house.md")]) == 0
    assert '"files": 2' in capsys.readouterr().out
    assert (tmp_path / "house.md").read_text().startswith("# The house")
    assert count_house.main(["--list", "a step of OnebitAdam"]) == 0
    assert capsys.readouterr().out == "onebit/first.py: main 2\nonebit/third.py: main 1\n"
    with pytest.raises(SystemExit):
        count_house.main(["--list", "a step of nobody"])
    assert "there are: a step of OnebitAdam" in capsys.readouterr().err
