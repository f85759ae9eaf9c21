"""`study.py inference-models`: three models in every form, rounding as documented, and what is wrong is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import start
from torch import nn

pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
pytest.importorskip("rich", reason="needs rich: pip install onebit[train]")

from study import inference_models as study

SCRIPT = Path(__file__).parents[2] / "scripts" / "study.py"


@pytest.mark.timeout(120)
def test_models_pass_in_each_form_or_are_refused_by_it(tmp_path: Path) -> None:
    output, errors = tmp_path / "output", tmp_path / "errors"
    status = start(str(SCRIPT), "inference-models", "--quick", output=output, errors=errors).wait(110)
    assert status == 0, output.read_text() + errors.read_text()
    lines = output.read_text().splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines}
    assert len(rows["model"]) == len(study.FORMS) + 1 == 8
    assert rows["Llama"][1:4] == ["ok"] * 3 and rows["T5"][1:3] == ["ok"] * 2
    assert all(cell.startswith("refused [") for cell in (rows["T5"][3], *rows["BLOOM"][1:]))
    assert rows["Llama"][5].endswith(" of 16)") and rows["T5"][7].endswith(" of 24)")


def test_rounded_weights_have_as_many_values_as_bits_allow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 256), nn.Linear(256, 3), nn.Linear(24, 3))
    for bits, values in ((8, 255), (4, 16)):
        twin = study.rounded(model, bits)
        for layer, groups in ((1, 256 if bits == 8 else 128), (2, 24)):
            weight, before = twin[layer].weight, model[layer].weight  # type: ignore[index]
            for row, old in zip(weight.split(groups, 1)[0], before.split(groups, 1)[0], strict=True):
                assert len(row.unique()) <= values
                step = 2 * old.abs().max() / 254 if bits == 8 else (old.max() - old.min()) / 15
                assert (row - old).abs().max() < 0.51 * step + 0.01 * old.abs().max()
        assert twin[0].weight.unique(dim=1).shape == (5, 256)  # type: ignore[index]  # a table has 8 bits


def test_what_is_wrong_with_a_case_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = study.built("Llama")
    tokens = [torch.tensor([1, 2]), torch.tensor([3])]
    good = study.Found(model.logits["fp32"], model.answers)

    def told(found: study.Found, dtype: str = "fp32", layout: str = "one rank") -> str:
        monkeypatch.setattr(study, "serve", lambda *args: found)
        return study.examined(model, dtype, layout, None)[0].verdict

    assert told(good) == "ok"
    assert told(replace(good, answers=tokens)) == "fails: tokens are not those of transformers"
    assert told(replace(good, logits=1.001 * good.logits)).startswith("fails: logits differ from float32's by 1.0e-03")
    assert told(good, "int4").startswith("fails: logits differ from those of rounded weights by ")
    assert told(replace(good, logits=2 * good.logits), "int4", "rows 2").startswith(
        "fails: logits differ from float32's"
    )
    assert (
        told(replace(good, shortfall=0.2), "int8", "rows 2")
        == "fails: the logit of a token is 2.0e-01 below the largest"
    )
    assert told(study.Found(refusal="no")) == "refused: no"
    assert told(replace(good, logits=2 * good.logits, refusal="no")).startswith("fails: logits differ")
    ranks = iter([good, study.Found(refusal="no")])
    monkeypatch.setattr(study, "serve", lambda *args: next(ranks))
    assert study.examined(model, "fp32", "rows 2", None)[0].verdict == "fails: ranks refuse differently: nothing; no"


def test_an_error_of_others_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **named: object) -> None:
        torch.arange(-1.0, "x")  # type: ignore[call-overload]

    monkeypatch.setattr(study, "init_inference", broken)
    row, _ = study.examined(study.built("Llama"), "fp32", "one rank", None)
    assert row.verdict.startswith("fails: TypeError in test_study_inference_models.py")
