"""The inference benchmark: what it takes for a token's time, and what its two tables say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench import inference as bench

ARGS = argparse.Namespace(
    size=["25m"], dtypes=["fp32"], batches=[8], prompts=[16], new=9, repeats=3, eager=True, network="1gbit"
)


def cells(text: str, first: str) -> list[str]:
    """The cells of the row that begins with this one."""
    rows = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in text.splitlines() if row.startswith("|")]
    return next(row[1:] for row in rows if row[0] == first)


class Clock:
    """Generates without taking time: the prompt takes 5 seconds, a token each of these, over and over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of_a_token: list[float]) -> None:
        self.now, self.calls, self.of_a_token = 0.0, -1, of_a_token
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.now)

    def generate(self, new: int) -> None:
        if new > 1:
            self.calls += 1
        self.now += 5.0 + (new - 1) * self.of_a_token[self.calls % len(self.of_a_token)]


def test_a_tokens_time_leaves_the_prompt_and_the_first_pass_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, [90.0, 2.0, 1.0, 4.0])  # the first compiles
    assert bench.tokens_s({"a": clock.generate}, 9, repeats=3) == {"a": pytest.approx(2.0)}


def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a machine that slows down slows all of them."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(len(calls)))
    found = bench.tokens_s({name: lambda n, name=name: calls.append((name, n)) for name in "ab"}, 5, repeats=2)
    assert calls == [("a", 1), ("a", 5), ("b", 1), ("b", 5)] * 3 and found == {"a": 0.0, "b": 0.0}


@pytest.mark.parametrize("size", ["25m", "llama-40m", "qwen-40m"])
def test_a_line_for_every_side_batch_and_prompt(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "has_torchao", lambda: False)
    monkeypatch.setattr(bench.peer_llama, "why_not", lambda model: "not now")
    small = bench.Shape(bench.SHAPES[size].family, 1, 64, 4, 2, 128)
    monkeypatch.setitem(bench.SHAPES, size, small)
    tokens: list[tuple[int, ...]] = []

    def tokens_s(sides: dict[str, Callable[[int], object]], new: int, repeats: int) -> dict[str, float]:
        for generate in sides.values():
            out = generate(2)
            assert isinstance(out, torch.Tensor)
            tokens.append(tuple(out.shape))
        return {name: 0.5 if name == "transformers fp32" else 0.25 for name in sides}

    monkeypatch.setattr(bench, "tokens_s", tokens_s)
    dtypes = ["fp32", "bf16", "int8", "int4"]
    args = argparse.Namespace(**vars(ARGS) | {"size": [size], "dtypes": dtypes, "batches": [1, 3], "prompts": [4]})
    lines = bench.compare(args)
    assert [(line["size"], line["batch"]) for line in lines] == [(size, 1), (size, 3)]
    assert list(lines[0]["seconds"]) == ["transformers fp32", "transformers bf16", *dtypes]
    assert tokens == [(1, 6)] * 6 + [(3, 6)] * 6
    held = lines[0]["held"]
    assert held["fp32"] == pytest.approx(1, abs=0.05) and held["bf16"] == pytest.approx(0.5, abs=0.05)
    assert held["int8"] < 0.3 and held["int4"] < held["int8"]
    text = "\n".join(bench.rates_table(lines[1:], args))
    row = next(line for line in text.splitlines() if "onebit int4" in line)
    assert [cell.strip() for cell in row.strip("| ").split(" | ")][:6] == [
        size,
        "3",
        "4",
        "onebit int4",
        "12.0",
        "2.00 ×",
    ]


@pytest.mark.parametrize("size", ["llama-40m", "qwen-40m"])
def test_llama_cpp_has_the_models_own_weights(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of two rows are transformers', in float32; in few bits the logits are near."""
    for name in ("transformers", "llama_cpp", "gguf"):
        pytest.importorskip(name)
    monkeypatch.setitem(bench.SHAPES, size, bench.Shape(bench.SHAPES[size].family, 2, 64, 4, 2, 128))
    model, prompt = bench.build(size, 24), torch.arange(14).view(2, 7)
    with torch.no_grad():
        expected = model(prompt).logits[:, -1]
    for dtype, bound in {"fp32": 0.01, "bf16": 0.05, "int8": 0.1, "int4": 1.0}.items():
        theirs = bench.peer_llama.LlamaCpp(model, dtype, 24, 2, 1)
        torch.testing.assert_close(
            theirs._logits(prompt, 0), expected, rtol=0, atol=bound * float(expected.abs().max())
        )
        if dtype == "fp32":
            assert torch.equal(theirs.generate(prompt, 9), bench.their_tokens(model, prompt, 9))


def test_what_llama_cpp_lacks_is_said() -> None:
    pytest.importorskip("transformers")
    assert bench.peer_llama.why_not(bench.build("25m", 8))


def test_the_plan_is_given_what_was_measured_but_the_split() -> None:
    ways = {"rows": 0.040, "layers": 0.045, "alone": 0.050}
    sent = {"rows": 30e3, "layers": 2e3}
    found = {"one_s": ways, "all_s": {way: 2 * seconds for way, seconds in ways.items()}, "sum_s": 0.0}
    found |= {"sent": sent, "wire": sent}
    text = "\n".join(bench.split_table(found, ARGS, memory=1e10))
    rows, planned_rows, layers, planned_layers, alone = cells(text, "ms a token, one request")
    assert (rows, layers, alone) == ("40.00", "45.00", "50.00") and float(planned_rows) < float(planned_layers) <= 50.5
    assert cells(text, "tokens a second, 8 requests, their prompts included")[::2] == ["100.00", "88.89", "80.00"]
    assert cells(text, "KB a token that the host sends that sends most")[::2] == ["30.00", "2.00"]
    slow = "\n".join(bench.split_table(found | {"sum_s": 1.0}, ARGS, memory=1e10))
    assert float(cells(slow, "ms a token, one request")[1]) > 1e3


def test_without_a_network_there_is_one_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "record.md"
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--dtypes", "fp64", "--record", str(record)])
    assert "invalid choice: 'fp64'" in capsys.readouterr().err and not record.exists()
    assert bench.report([], None, ARGS).count("|") == 0
