"""What a split sequence will cost, against counts element by element and the bytes that were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from onebit.cli.plan import main
from onebit.zero.sequence.pieces import Pieces
from onebit.zero.sequence.plan import SequenceRun, chosen, plans

RUN = SequenceRun(params=1e6, tokens=96, layers=3, width=32, heads=8, groups=4, hosts=3, ranks_per_host=2)


def counted(run: SequenceRun, degree: int) -> int:
    """Bytes of a step between hosts, token by token: each key that a query of another node sees or that is between."""
    pieces = Pieces(run.tokens, run.ranks, degree)
    total = 0
    for node in range(pieces.nodes):
        queries = [t for chunk in pieces.chunks(node) for t in chunk]
        for source in range(pieces.nodes):
            if node * degree // run.ranks_per_host == source * degree // run.ranks_per_host:
                continue
            for chunk in pieces.chunks(source):
                seen = [t for t in chunk if any(t <= q and (run.window is None or q - t < run.window) for q in queries)]
                total += seen[-1] - seen[0] + 1 if seen else 0
    return total * 2 * run.groups * (run.width // run.heads) * run.layers * (2 * 2 + 4)


@pytest.mark.parametrize("window", [None, 1, 5, 96])
def test_bytes_are_those_of_a_count(window: int | None) -> None:
    made = plans(replace(RUN, window=window))
    assert [(plan.ranks, plan.ulysses_degree) for plan in made] == [(1, 1), (6, 1), (6, 2)]
    assert made[0].sent_bytes == 0
    for plan in made[1:]:
        assert plan.sent_bytes * RUN.hosts == counted(replace(RUN, window=window), plan.ulysses_degree)


def test_the_bytes_are_those_of_the_record() -> None:
    """14.16 MB for each of four hosts (scripts/records/sequence_2026-11.md)."""
    run = SequenceRun(1.0, 8192, 1, 512, 8, 2, hosts=4, ranks_per_host=1, dtype="fp32")
    assert round(plans(run)[1].sent_bytes / 1e6, 2) == 14.16


@pytest.mark.parametrize(("codec", "bits"), [("bf16", 16), ("int8", 8 + 16 / 64), ("int4", 4 + 16 / 64)])
def test_keys_and_values_travel_in_few_bits_and_gradients_in_float32(codec: str, bits: float) -> None:
    plain, fewer = (plans(replace(RUN, codec=each))[1].sent_bytes for each in (None, codec))
    assert fewer / plain == pytest.approx((2 * bits / 8 + 4) / (2 * 2 + 4))


def test_operations_grow_with_the_square_or_with_the_window() -> None:
    long = replace(RUN, tokens=96000, params=1e-9)
    longer = replace(long, tokens=192000)
    assert plans(longer)[0].compute_s / plans(long)[0].compute_s == pytest.approx(4, rel=1e-3)
    short, wide = (plans(replace(run, window=64))[0].compute_s for run in (long, longer))
    assert wide / short == pytest.approx(2, rel=1e-2)
    assert plans(long)[0].compute_s == pytest.approx(6 * plans(long)[1].compute_s)
    assert plans(long)[0].activation_bytes == 6 * plans(long)[1].activation_bytes


def test_it_chooses_fewer_bytes_and_one_rank_if_splitting_does_not_pay() -> None:
    slow, fast = replace(RUN, link_bits_per_s=1e3), replace(RUN, flops_per_s=1e6)
    assert chosen(plans(slow)).ranks == 1
    assert (chosen(plans(fast)).ranks, chosen(plans(fast)).ulysses_degree) == (6, 2)
    one_each = replace(RUN, hosts=6, ranks_per_host=1, flops_per_s=1e6)
    assert chosen(plans(one_each)).ulysses_degree == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 11}, "two tokens for each of 6 ranks, got 11"),
        ({"groups": 3}, "key-value heads that divide them, got a width of 32, 8 heads and 3"),
        ({"heads": 5}, "heads that divide the width"),
        ({"dtype": "int8"}, "dtype of fp32, bf16, fp16"),
        ({"codec": "sign"}, "codec of bf16, int8, int4, or None, got 'sign'"),
        ({"layers": 0}, "numbers above 0"),
        ({"window": 0}, "numbers above 0"),
    ],
)
def test_runs_that_make_no_sense_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(RUN, **change)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--params", "8e9", "--hosts", "4", "--ranks-per-host", "2", "--tokens", "131072", "--sequence"]
    assert main([*common, "32x4096x32x8", "--window", "4096", "--json", str(tmp_path / "x.json")]) == 0
    assert "windows of 4096" in capsys.readouterr().out
    assert main([*common, "32x4096x32x8", "--kv", "int8"]) == 0
    assert "causal, keys and values in int8" in capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())
    assert [plan["ranks"] for plan in found["plans"]] == [1, 8, 8] and found["run"]["groups"] == 8
    for alone in (["--window", "4096"], ["--kv", "int8"]):
        with pytest.raises(SystemExit):
            main([*common[:-1], *alone])
        assert "belong to a split sequence: add --sequence" in capsys.readouterr().err
    for text in ("32x4096", "32x4096x0", "32x4096x32x8x1", "a"):
        with pytest.raises(SystemExit):
            main([*common, text])
        assert "as 32x4096x32x8" in capsys.readouterr().err
