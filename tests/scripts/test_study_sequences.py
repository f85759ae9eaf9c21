"""`study.py sequences`: every format and layout has its row, and the question cannot be answered from nearby."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
pytest.importorskip("rich", reason="needs rich: pip install onebit[train]")

from study.sequences import BLOCK, CODECS, KEYS, PAIRS_AT, RANKS, VALUES, asked_at, layouts, main, questions

from onebit.zero.sequence import Pieces
from onebit.zero.sparse_attention import build_layout, reach, read_sparsity


@pytest.mark.parametrize(("task", "length", "names"), [("codecs", 64, CODECS), ("retrieval", 1024, layouts(1024))])
def test_every_way_has_a_row(
    task: str, length: int, names: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    results = tmp_path / "lines.jsonl"
    asked = [task, "--results", str(results), "--seeds", "1", "--steps", "2", "--length", str(length), "--rows", "1"]
    main(asked)
    rows = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(f"| {name} |" for name in names))
    ]
    assert len(rows) == len(names)
    main(asked)
    assert len(results.read_text().splitlines()) == len(names)
    losses = [json.loads(line)["loss"] for line in results.read_text().splitlines()]
    assert all(4 < loss < 7 for loss in losses)


def test_pairs_and_questions_are_on_different_ranks() -> None:
    length = 2048
    text = questions(3, length, torch.Generator().manual_seed(0))
    pairs, asked = int(PAIRS_AT * length), set(asked_at(length).tolist())
    for row in text.tolist():
        told = {(token - 192) // VALUES: (token - 192) % VALUES for token in row[pairs : pairs + BLOCK]}
        assert len(told) == KEYS and all(told[row[at] - 128] == row[at + 1] - 184 for at in asked)
        others = set(range(length)) - set(range(pairs, pairs + BLOCK)) - asked - {at + 1 for at in asked}
        assert max(row[at] for at in others) < 128
    places = [set(Pieces(length, RANKS).positions(rank).tolist()) for rank in range(RANKS)]
    assert asked <= places[0] | places[1] and set(range(pairs, pairs + BLOCK)) <= places[2]


def test_windows_see_no_former_answer() -> None:
    length = 32768
    places = asked_at(length)
    for name, layout in layouts(length).items():
        seen = build_layout(read_sparsity(layout).of_model(True), 1, length)
        far = reach(seen, 1)[-1].farthest
        assert (far < int((places[1:] - places[:-1]).min()) - 1) == (name == "windows")
