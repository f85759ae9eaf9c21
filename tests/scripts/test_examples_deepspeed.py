"""scripts/examples/deepspeed/*.py: written as DeepSpeed's scripts are, two ranks each, beside AdamW, and resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from data_ranks import examples
from ranks import run_torchrun

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"


def output(name: str, *args: object, agent: bool = False) -> str:
    return run_torchrun(2, EXAMPLES / f"deepspeed/{name}.py", *args, timeout_s=100, agent=agent).check().output


def numbers(word: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(rf"^.*\b{word} ([\d.]+\d)", text, re.MULTILINE)]


@pytest.mark.thorough
def test_pictures_are_classified_as_well_as_with_adamw() -> None:
    """Chance is 0.1; both are far above, on pictures that they have not seen."""
    onebit, dense = (numbers("accuracy", output("cifar", "--optimizer", name))[0] for name in ("OneBitAdam", "AdamW"))
    assert onebit > 0.9 and dense > 0.9 and onebit > dense - 0.05


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 2), ("fp16", 3)])
def test_pictures_in_other_precisions_and_stages(dtype: str, stage: int) -> None:
    text = output("cifar", "--dtype", dtype, "--stage", stage)
    assert numbers("accuracy", text)[0] > 0.9 and f"onebitadam, stage {stage}" in text


def bert(folder: Path, config: Path, *args: object) -> list[float]:
    text = output("bert", "--deepspeed", "--deepspeed_config", config, "--folder", folder, *args)
    return numbers("loss", text)


@pytest.mark.thorough
def test_a_bert_goes_on_where_it_was_killed_and_learns_as_with_adamw(tmp_path: Path) -> None:
    (tmp_path / "onebit.json").write_bytes((EXAMPLES / "deepspeed" / "bert.json").read_bytes())
    config = json.loads((EXAMPLES / "deepspeed" / "bert.json").read_text())
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.004}}
    (tmp_path / "adam.json").write_text(json.dumps(config))
    whole = bert(tmp_path / "whole", tmp_path / "onebit.json", "--epochs", 6)
    first = bert(tmp_path / "parts", tmp_path / "onebit.json", "--epochs", 6, "--stop-after", 3)
    rest = bert(tmp_path / "parts", tmp_path / "onebit.json", "--epochs", 6)
    assert len(whole) == 6 and first + rest == whole
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [f"epoch{k}" for k in range(6)] + ["latest"]
    dense = bert(tmp_path / "dense", tmp_path / "adam.json", "--epochs", 6)
    assert whole[-1] < 0.9 * whole[0] and whole[-1] < dense[-1] + 0.1


@pytest.mark.thorough
def test_a_gpt_in_two_stages_goes_on_and_learns_as_with_adamw(tmp_path: Path) -> None:
    text = output("gpt_pipeline", "--steps", 10, "--folder", tmp_path)
    text += output("gpt_pipeline", "--steps", 30, "--folder", tmp_path, agent=True)
    dense = output("gpt_pipeline", "--steps", 30, "--optimizer", "AdamW")
    losses, theirs = numbers("loss", text), numbers("loss", dense)
    assert len(losses) == len(theirs) == 3 and losses[-1] < 0.8 * losses[0]
    assert abs(losses[-1] - theirs[-1]) < 0.1 * theirs[-1]
    whole = output("gpt_pipeline", "--steps", 30)
    assert numbers("loss", whole) == losses and numbers("validation", whole) == numbers("validation", text)[1:]


@pytest.mark.thorough
def test_models_of_hugging_face_learn_from_less_data_and_go_on(tmp_path: Path) -> None:
    """With dropout, and a checkpoint within an epoch."""
    pytest.importorskip("transformers")
    for rank, facts in enumerate(run_torchrun(2, examples, str(tmp_path), timeout_s=110).check().results):
        for name, (whole, first, rest) in facts.items():
            assert first + rest == whole and len(whole) == 60, f"{name}, rank {rank}"
            assert sum(whole[-12:]) < 0.98 * sum(whole[:12]), f"{name}, rank {rank}: {whole}"
