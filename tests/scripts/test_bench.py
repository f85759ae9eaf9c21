"""The benchmarks run, in one tiny case each, and what they report is what they measured."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from bench import host_adam as bench_host_adam
from bench import limits, sequence, sequence_memory, zero_deepspeed
from bench import local_rounds as bench_local_rounds
from bench import offload as bench_offload
from bench import offload_gpu as bench_offload_gpu
from bench import unlike as bench_unlike
from hypothesis import given
from hypothesis import strategies as st
from provenance import revision
from ranks import python_of_forks

from onebit.host import native


def rows_in(text: str) -> list[list[str]]:
    """The cells of a report's only table, without its headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


# ---------------------------------------------------------------- the shortest form of each

HERE = {  # on this machine alone: the options, and what a report must have
    "host_time": (["--buckets", "1", "--repeats", "1"], "| ms of a step | 1 buckets |"),
    "kernels": (["--elements", "5000", "--repeats", "2", "--reference-repeats", "1"], "encode_momentum"),
    "memory": ([], "| ZeroOneAdam, local steps | bfloat16 | 8 |"),
    "serving": (
        [
            *("--size", "25m", "--requests", "3", "--prompts", "2", "5", "--answers", "1", "3", "--dtypes", "fp32"),
            *("--prefix", "40"),
        ],
        "| fp32, running batch of 8 |",
        "| ms to the first token of 72 | all computed | 40 reused |",
    ),
    "traffic": (["--elements", "4096"], "| AdamW, fused | **"),
}
ON_HOSTS = {
    "collective": (
        [
            *("--elements", "100000", "--hosts", "4", "--networks", "1gbit", "--transports", "gloo"),
            *("--hops", "1", "2", "--repeats", "2"),
        ],
        "| one-bit, two hops |",
    ),
    "pipeline": (
        ["--size", "tiny", "--networks", "1gbit", "--repeats", "1", "--micro-batches", "2"],
        "| ZeroOneAdam, activations int8",
    ),
    "members": (
        ["--params", "1e5", "--compute", "0", "--rates", "1gbit", "--steps", "2", "--blocks", "1"],
        "| membership |",
    ),
    "newcomers": (
        ["--members", "1", "--params", "1e5", "--compute", "0.02", "--rates", "1gbit", "--steps", "3", "--runs", "1"],
        "| before it |",
    ),
    "unlike": (
        ["--params", "1e5", "--compute", "0.01", "--every", "8", "--micro-batches", "2", "--rounds", "4"],
        "| each step, balanced shares |",
    ),
}


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    threads, level = torch.get_num_threads(), logging.getLogger("onebit").level
    yield
    torch.set_num_threads(threads)
    logging.getLogger("onebit").setLevel(level)


def run_shortest(name: str, words: list[str], record: Path) -> str:
    """Run a benchmark by its name; the record it has written."""
    import_module(f"bench.{name}").main([*words, "--record", str(record)])
    text = record.read_text()
    assert f"revision {revision()}" in text and f"torch {torch.__version__}" in text
    return text


@pytest.mark.processes  # git's, for the revision
@pytest.mark.usefixtures("torch_as_before")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "memory")) for name in HERE]
)
def test_shortest_form_writes_its_record(name: str, tmp_path: Path) -> None:
    if name == "kernels" and not native.is_built():
        pytest.skip(f"needs the C++ library: {native.why_not()}")
    if name == "serving":
        pytest.importorskip("transformers", reason="pip install onebit[transformers]")
    words, *rows = HERE[name]
    text = run_shortest(name, words, tmp_path / "record.md")
    assert all(row in text for row in rows)


@pytest.mark.net
@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("emulated_hosts", "forks")
@pytest.mark.parametrize("name", ON_HOSTS)
def test_shortest_form_on_hosts_writes_its_record(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_unlike, "WAYS", bench_unlike.WAYS[::2])  # one of each kind: each starts hosts anew
    words, row = ON_HOSTS[name]
    assert row in run_shortest(name, words, tmp_path / "record.md")


@pytest.mark.skipif(not native.is_built(), reason=f"needs the C++ library: {native.why_not()}")
@pytest.mark.usefixtures("torch_as_before")
def test_host_adam_has_a_row_for_every_side_and_thread_count(tmp_path: Path) -> None:
    text = run_shortest("host_adam", ["--elements", "1000", "--repeats", "2"], tmp_path / "record.md")
    by_name = {tuple(row[:2]): row for row in rows_in(text)}
    for count in ("1", "2"):
        assert by_name[count, bench_host_adam.FLOOR][-1] == "1.00"
        assert by_name[count, "onebit: m bfloat16, v 8 bits"][2] == "18.03"
        assert by_name[count, "onebit: a direction"][2] == "24.00"
        assert (count, "the same, seven operations of torch") in by_name
        assert by_name[count, "torch.optim.AdamW(fused=True)"][2] == "28.00"


# ---------------------------------------------------------------- local rounds


@pytest.mark.net
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("emulated_hosts", "forks")
def test_local_rounds_count_what_the_network_card_has_sent() -> None:
    """On so slow a network three rounds come after 4 steps each, others after some 64 more, and the last at the end.

    64 is the most. Steps that take long on a busy machine make it less.
    """
    asked = argparse.Namespace(hosts=2, params=1e6, compute=0.001, steps=80)
    run = bench_local_rounds.measure("10mbit", asked)
    assert 4 < run.interval <= 64 and run.rounds == 3 + math.ceil((80 - 3 * 4) / run.interval)
    payload = run.rounds * (2 + 16 / 128) / 2 / 80  # frames of both phases to one peer
    assert payload <= run.payload_bits < 1.05 * payload  # votes, and the padding of small matrices
    assert run.payload_bits < run.counted_bits
    assert bench_local_rounds.cells_of(run)[7:9] == [f"{run.counted_bits:.4f}", f"{run.payload_bits:.4f}"]


# ---------------------------------------------------------------- offload


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["state", "gradients", "full"])
def test_offload_is_measured_and_within_five_percent_of_the_plan(mode: str, tmp_path: Path) -> None:
    case = bench_offload.Case(mode, "files", 8)
    facts = bench_offload.measure(case, tmp_path)
    assert facts["params"] == 8 * 1024 * 1024 and not facts["killed"]
    assert facts["peak"] == pytest.approx(facts["planned"], rel=0.05)
    killed = facts | {"killed": True, "limit_mb": 100}
    text = bench_offload.report([facts, killed])
    assert text.count(f"| {mode} | files | 8 |") == 2 and "| killed |" in text
    assert not list(tmp_path.iterdir())


def test_no_case_of_offload_takes_more_disk_than_there_is() -> None:
    *_, gradients, full = bench_offload.cases([], [160], 10e9)
    assert (gradients.layers, full.layers) == (40, 60)  # all that the limit asks for
    *_, gradients, full = bench_offload.cases([], [160], 500e6)
    assert 14 * gradients.params < 0.85 * 500e6 < 14 * (gradients.params + 1024 * 1024)
    assert 16 * full.params < 0.85 * 500e6 < 16 * (full.params + 1024 * 1024)


@pytest.mark.thorough
def test_offload_on_a_gpu_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--params", "1e6", "--width", "128", "--tokens", "32", "--device", "cpu", "--folder", str(tmp_path)]
    bench_offload_gpu.main([*shape, "--optimizer", "AdamW", "--record", str(tmp_path / "record.md")])
    found = json.loads(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("{")))
    assert found["params"] > 0.9e6 and found["layers"] == 5
    assert found["losses"][-1] < found["losses"][0]  # the same window in every step
    assert "mode full in files" in (tmp_path / "record.md").read_text()


def attention_rows(tmp_path: Path, *flags: str) -> list[list[str]]:
    sequence.main([*flags, "--networks", "1gbit", "--record", str(tmp_path / "record.md")])
    return rows_in((tmp_path / "record.md").read_text())


@pytest.mark.net
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("emulated_hosts", "forks")
def test_attention_over_pieces_sends_what_the_formula_says(tmp_path: Path) -> None:
    """At the network card, within 5 %; and no side sends without a network."""
    rows = attention_rows(tmp_path, "--lengths", "1026", "--hosts", "3", "--repeats", "2")
    assert [row[1] for row in rows] == ["alone", "ring", "ring, int8", "gather"]
    alone, ring, int8, gather = (float(row[5]) for row in rows)
    assert alone == float(rows[0][6]) == 0.0 and 0.98 < ring / float(rows[1][6]) < 1.05
    assert int8 < 0.8 * ring and 0.98 < gather / ring < 1.05
    assert rows[0][4] == "1.00" and all(row[7] for row in rows[1:])


@pytest.mark.net
@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("emulated_hosts", "forks")
def test_windows_send_as_much_at_any_length_and_two_levels_less(tmp_path: Path) -> None:
    """By the cards of two hosts with two ranks each, within 5 % of the formula."""
    sides = ["--sides", "ring", "window", "two levels"]
    flags = ["--lengths", "2048", "4096", "--hosts", "2", "--ranks-per-host", "2", "--window", "256", "--repeats", "1"]
    rows = attention_rows(tmp_path, *sides, *flags)
    sent = {(row[1], row[2]): float(row[5]) for row in rows}
    assert all(0.98 < float(row[5]) / float(row[6]) < 1.05 for row in rows) and len(rows) == 6
    assert sent["window", "4,096"] == pytest.approx(sent["window", "2,048"], rel=0.03)
    assert sent["two levels", "4,096"] < 0.6 * sent["ring", "4,096"]


@given(st.integers(0, 500), st.integers(1, 600))
def test_the_longest_that_works_is_found_to_a_sixteenth(most: int, guess: int) -> None:
    found = sequence_memory.longest(lambda count: count <= most, guess)
    assert found <= most < found + max(1, found // 16)


@pytest.mark.thorough
def test_a_rank_with_too_little_memory_does_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="pip install onebit[transformers]")
    way, args = sequence_memory.WAYS[-1], argparse.Namespace(limit_mb=0, folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python_of_forks()))
        assert sequence_memory.trains(1024, way, 2, args)
    if limits.can_limit():
        args.limit_mb = 64
        assert not sequence_memory.trains(1024, way, 2, args)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_zero_is_timed_with_the_same_json_on_both_sides() -> None:
    """Ours alone, as DeepSpeed has an environment of its own. Of 256 bytes none is known after some steps."""
    found = zero_deepspeed.measure("onebit", 3, "float32", argparse.Namespace(size="tiny", steps=2))
    assert 4 < found["loss"] < 6 and found["seconds"] > 0 and found["peak_mb"] > 1
