"""gpu_check goes on where it was cut off, loses no section to another's failure, and says what it has left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import torch
from gpu_check import engine, members, modes, section, sequence, transports
from gpu_check import main as check
from gpu_check.checks import assert_same
from gpu_check.forms import FORMS
from gpu_check.section import Outcome, Section, Setting

from onebit.comm import Int8Codec, SignCodec
from onebit.zero.sequence import Pieces, local, ring

SETTING = Setting(torch.device("cpu"), (), 64, (64,), (70,), 4, 500, 300, (128,), 1)


class Sections:
    """Three sections that count their runs. fails: what happens in the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.runs: list[str] = []
        self.fails: Callable[[], None] = lambda: None
        self.record = folder / "record.md"
        made = [
            Section("one", "One", "First.", checks=lambda s: self._checks("one")),
            Section("two", "Two", "Second.", checks=lambda s: self._checks("two"), table=lambda s: ["| a |"]),
            Section("three", "Three", "Third.", table=lambda s: self._table()),
        ]
        monkeypatch.setattr(check, "SECTIONS", {each.name: each for each in made})
        monkeypatch.setattr(check, "why_not_there", lambda name, device: "")

    def _checks(self, name: str) -> list[Outcome]:
        self.runs.append(name)
        if name == "two":
            self.fails()
        return [section.outcome(f"{name} holds", lambda: None)]

    def _table(self) -> list[str]:
        self.runs.append("three")
        return ["| three |"]

    def __call__(self, *words: str) -> int:
        self.runs.clear()
        return check.main(["--rehearse", "--record", str(self.record), *words])


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sections:
    return Sections(monkeypatch, tmp_path)


def test_finished_sections_are_not_run_again(sections: Sections) -> None:
    assert sections("--sections", "one") == 0 and sections.runs == ["one"]
    assert "not run: two, three" in sections.record.read_text()
    assert sections() == 0 and sections.runs == ["two", "three"]
    text = sections.record.read_text()
    assert text.index("## One") < text.index("## Two") < text.index("| a |") < text.index("| three |")
    assert "checks: 2 of 2 held" in text and "not run: none" in text
    assert sections() == 0 and sections.runs == []
    assert sections("--again", "--sections", "three") == 0 and sections.runs == ["three"]


def test_another_commit_or_device_begins_anew(sections: Sections, monkeypatch: pytest.MonkeyPatch) -> None:
    sections()
    monkeypatch.setattr(check, "device_name", lambda device: "another")
    assert sections() == 0 and sections.runs == ["one", "two", "three"]
    monkeypatch.setattr(check, "revision", lambda: "abc")
    assert sections() == 0 and sections.runs == ["one", "two", "three"]


def test_what_a_section_raises_is_a_failed_check_and_others_are_run(sections: Sections) -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    sections.fails = fail
    assert sections() == 1 and sections.runs == ["one", "two", "three"]
    text = sections.record.read_text()
    assert "- FAILED two: its checks come to an end: ValueError: no such luck" in text and "| a |" in text
    assert "checks: 1 of 2 held" in text


def test_a_command_that_dies_loses_nothing_that_is_finished(sections: Sections) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    sections.fails = die
    with pytest.raises(KeyboardInterrupt):
        sections()
    assert "## One" in sections.record.read_text()
    results = sections.record.with_suffix(".jsonl")
    results.write_text(results.read_text() + '{"section": "two", "dev')  # cut short
    sections.fails = lambda: None
    assert sections() == 0 and sections.runs == ["two", "three"]
    assert json.loads(results.read_text().splitlines()[-1])["section"] == "three"


def test_no_section_begins_behind_the_budget(sections: Sections, capsys: pytest.CaptureFixture[str]) -> None:
    assert sections("--budget", "-1") == 3 and sections.runs == []
    assert "one and what follows are left" in capsys.readouterr().out


def test_a_kernel_that_is_not_there_is_a_failure(sections: Sections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "why_not_there", lambda name, device: "pip install it")
    assert sections() == 1
    assert "- FAILED triton is there: pip install it" in sections.record.read_text()


def test_the_page_on_gpus_names_every_section() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    named = page.partition("Its sections are")[2].partition(". Most take")[0]
    assert set(check.SECTIONS) == set(re.sub(r"\([^)]*\)", "", named).replace(",", " ").replace(" and ", " ").split())


@pytest.mark.parametrize("form", FORMS)
def test_forms_hold_on_the_host(form: str) -> None:
    from gpu_check import forms

    forms.check(FORMS[form], torch.device("cpu"), torch.float32, SignCodec(64), 12)


def test_a_form_whose_ranks_differ_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_check import forms

    monkeypatch.setattr(forms, "run_ranks", lambda n, work: [(torch.tensor([float(r)]), [1.0]) for r in range(n)])
    with pytest.raises(AssertionError, match="rank 1 against rank 0"):
        forms.check(FORMS["OnebitMuon"], torch.device("cpu"), torch.float32, SignCodec(64), 12)


@pytest.mark.parametrize("form", members.TRIED)
def test_members_hold_on_the_host(form: str) -> None:
    members.check(members.TRIED[form], torch.device("cpu"), SignCodec(64))


def test_members_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "parameters_to_vector", lambda params: torch.rand(3))
    with pytest.raises(AssertionError, match="against member a's: 3 of 3 differ"):
        members.check(FORMS["OnebitAdam, clipped"], torch.device("cpu"), SignCodec(64))


def test_ranks_over_gloo_end_as_simulated_ones() -> None:
    transports.check("gloo", "OnebitAdam, clipped", SETTING)


def test_modes_hold_on_the_host() -> None:
    modes.check_offload("full", True, torch.float32, SETTING)
    modes.check_inference("fp32", False, SETTING)


@pytest.mark.parametrize(
    "name", [*modes.BATCHED[:1], *(pytest.param(k, marks=pytest.mark.slow) for k in modes.BATCHED[1:])]
)
def test_running_batches_hold_on_the_host(name: str) -> None:
    pytest.importorskip("transformers", reason="pip install onebit[transformers]")
    modes.check_batch(name, "fp32", SETTING)


def test_a_batch_with_other_answers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here their prompts are read backwards."""
    pytest.importorskip("transformers", reason="pip install onebit[transformers]")
    add = modes.ContinuousBatch.add
    monkeypatch.setattr(modes.ContinuousBatch, "add", lambda batch, prompt, **how: add(batch, prompt.flip(0), **how))
    with pytest.raises(AssertionError, match="tokens of 2 and more"):
        modes.check_batch("GPT-2", "fp32", SETTING)


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_engines_hold_on_the_host_in_one_case_of_each_kind() -> None:
    ranks.preload("transformers.models.llama.modeling_llama")
    found = list(engine.engine_checks(SETTING))
    assert not [each for each in found if each.problem]
    assert {*engine.OPTIMIZERS, "local steps"} == {each.name.partition(", ")[0] for each in found}
    assert {name for name in engine.cases() if "sequences" in name} < {each.name for each in found}


def test_split_sequences_hold_on_the_host_in_operations_of_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_has_kernel", lambda q, v: False)
    found = list(sequence.sequence_checks(SETTING))
    assert not [each for each in found if each.problem]
    assert {each.name.split(", ")[0] for each in found} == {f"sequence: {name}" for name in sequence.CASES}


@pytest.mark.parametrize(("lost", "what"), [("_add_", "keys"), ("_merge_", "output"), ("decode_", "output")])
def test_what_a_split_sequence_loses_is_found(lost: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients from other ranks; outputs of blocks; the bytes in which a block arrives.

    Memory that nobody writes may hold the right block, of a call before: its place is filled with something else.
    """
    monkeypatch.setattr(ring, lost, lambda *args: args[2].fill_(9.0) if lost == "decode_" else None)
    with pytest.raises(AssertionError, match=f"{what}: expected an error of at most 1e-05"):
        sequence.check({"codec": Int8Codec}, Pieces(30, 2), True, torch.float32, torch.device("cpu"))


def test_a_nan_equals_a_nan_and_zeros_have_signs() -> None:
    nan = float("nan")
    assert_same("these", torch.tensor([nan, 1.0]), torch.tensor([-nan, 1.0]))
    with pytest.raises(AssertionError, match="1 of 1 differ"):
        assert_same("these", torch.tensor([0.0]), torch.tensor([-0.0]))
