"""`study.py models`: two models pass in every form, and what is wrong with a case is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ranks import start

pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
pytest.importorskip("rich", reason="needs rich: pip install onebit[train]")

from study.models import CASES, Found, verdict

from onebit.comm import torch_versions

LAYOUTS = ["ZeRO 0", "ZeRO 3", "tensor 2", "pipe 2"]  # on two ranks; processes/test_decoders.py has grids of eight
SHORT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "scripts")!r})
from study import models
models.CASES = [case for case in models.CASES if case.layout in {LAYOUTS}]
models.main(["--quick"])
"""
CASE = CASES[0]  # float32
GOOD = Found([2.0, 1.0], {"weight": 0.0}, {"weight": 1}, True, {"weight": 1}, [])


@pytest.mark.timeout(240)
def test_two_models_pass_in_each_form_or_are_refused_by_it(tmp_path: Path) -> None:
    torch_versions.require_fsdp2()
    program, output, errors = (tmp_path / name for name in ("short.py", "output", "errors"))
    program.write_text(SHORT)
    assert start(str(program), output=output, errors=errors).wait(230) == 0, output.read_text() + errors.read_text()
    lines = output.read_text().splitlines()
    rows = {cells[0]: cells[1:] for line in lines if len(cells := line.strip("| ").split(" | ")) > 1}
    assert rows["model"][:-1] == LAYOUTS and rows["Llama"][:-1] == ["ok"] * len(LAYOUTS)
    assert rows["BERT"][:2] == ["ok"] * 2 and rows["BERT"][3].startswith("refused [")


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({}, {}, "ok"),
        (
            {"deviations": {"weight": 2e-5}},
            {},
            "fails: weights differ from one process by 2.0e-05 of the largest (weight, 1 in all)",
        ),
        ({}, {"deviations": {"weight": float("nan")}}, "fails: weights differ from one process by nan"),
        ({}, {"deviations": {}}, "fails: weights were not compared"),
        ({"losses": [2.0, 4.0]}, {}, "fails: the loss goes from 2.0000 to 2.5000"),
        ({}, {"weights": {"weight": 2}}, "fails: ranks differ in weight"),
        ({}, {"resumes": False}, "fails: a resumed run has other bits"),
        ({"exported": {"weight": 2}}, {}, "fails: from_pretrained has other values in weight"),
        ({"lost": ["weight (missing_keys)"]}, {}, "fails: from_pretrained: weight (missing_keys)"),
        ({"error": "KeyError: x"}, {"error": "PeerError: y"}, "fails: KeyError: x"),
        (
            {"error": "ValueError: x", "is_refused": True},
            {"error": "ValueError: x", "is_refused": True},
            "refused: ValueError: x",
        ),
        ({"error": "ValueError: x", "is_refused": True}, {}, "fails: ValueError: x"),
    ],
)
def test_what_is_wrong_with_a_case_is_told(first: dict, second: dict, says: str) -> None:
    assert verdict(CASE, [replace(GOOD, **first), replace(GOOD, **second)]).startswith(says)


def test_a_lost_rank_fails() -> None:
    assert verdict(CASE, [GOOD, None]) == "fails: a rank was lost"
