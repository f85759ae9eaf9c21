"""`study.py sequences`: every format and layout has its row, and the question cannot be answered from nearby."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
pytest.importorskip("rich", reason="needs rich: pip install onebit[train]")

from study.sequences import BLOCK, CODECS, KEYS, PAIRS_AT, RANKS, layouts, main, questions

from onebit.zero.sequence import Pieces


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
    pairs = int(PAIRS_AT * length)
    for row in text.tolist():
        told = {(token - 192) // KEYS: (token - 192) % KEYS for token in row[pairs : pairs + BLOCK]}
        asked = {row[at] - 128: row[at + 1] - 184 for at in range(length - 2 * KEYS, length, 2)}
        assert asked == told and len(asked) == KEYS
        assert max(row[:pairs] + row[pairs + BLOCK : -2 * KEYS]) < 128
    places = [Pieces(length, RANKS).positions(rank).tolist() for rank in range(RANKS)]
    assert length - 1 in places[0] and pairs in places[2] and pairs + BLOCK - 1 in places[2]
