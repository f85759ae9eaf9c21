"""Decoders of transformers, divided by their own plans among ranks: the losses and weights of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import decoder_ranks
import pytest
import torch
from decoders import DECODERS, alone, decoder, transformers
from ranks import run_torchrun
from torch import Tensor

from onebit.zero.parallel.model_plan import training_plan

pytestmark = pytest.mark.processes

OPTIMIZERS = ("AdamW", "OneBitAdam")
Case = tuple[str, str, int]  # decoder, optimizer, stage
GRIDS: Mapping[str, tuple[int, dict[str, int], list[Case]]] = {
    "slices": (2, {"tensor": 2}, [(name, kind, 0) for name in DECODERS if name != "gpt2" for kind in OPTIMIZERS]),
}
ALL = [
    pytest.param(grid, case, id=f"{grid}-{case[0]}-{case[1]}-{case[2]}") for grid in GRIDS for case in GRIDS[grid][2]
]


@cache
def folder_of(grid: str) -> Path:
    ranks, axes, cases = GRIDS[grid]
    folder = tempfile.mkdtemp(prefix="decoders-")
    run_torchrun(ranks, decoder_ranks.run, folder, axes, cases, timeout_s=110).check()
    return Path(folder)


def results(grid: str, case: Case) -> list[dict]:
    name, kind, stage = case
    return [torch.load(folder_of(grid) / f"{name}.{kind}.{stage}.{rank}") for rank in range(GRIDS[grid][0])]


@cache
def twin(name: str, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    return alone(name, kind, decoder_ranks.MICRO_BATCHES)


@pytest.mark.parametrize(("grid", "case"), ALL)
def test_ranks_train_as_one_process(grid: str, case: Case) -> None:
    """Float32 sums in other orders: losses to 1e-6, weights to 2e-5 of a tensor's largest (embeddings of OLMo-2)."""
    losses, weights = twin(*case[:2])
    found = results(grid, case)
    mean = torch.tensor([rank["losses"] for rank in found], dtype=torch.float64).mean(0).tolist()
    assert mean == pytest.approx(losses, rel=1e-6)
    for name, x in found[0]["weights"].items():
        torch.testing.assert_close(x, weights[name], rtol=0, atol=2e-5 * float(weights[name].abs().max()))


@pytest.mark.parametrize(("grid", "case"), ALL)
def test_a_run_resumes_and_its_weights_are_a_models(grid: str, case: Case) -> None:
    """The resumed step gives the same bits; the written file has every weight, whole, by the model's own names."""
    found, place = results(grid, case), folder_of(grid) / ".".join(map(str, case))
    plain = decoder(case[0])
    plain.config.save_pretrained(place)
    read, report = type(plain).from_pretrained(place, output_loading_info=True)
    assert not any(report.values())
    for rank in found:
        loss, resumed = rank["resumed"]
        assert loss == rank["losses"][-1] and resumed.keys() == rank["weights"].keys()
        for name, x in rank["weights"].items():
            assert torch.equal(x, resumed[name]) and torch.equal(x, read.state_dict()[name]), name


def test_models_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    run_torchrun(2, decoder_ranks.refusals, str(tmp_path)).check()
    said = torch.load(tmp_path / "refusals")
    assert "num_attention_heads is 3, which 2 ranks do not divide; use a tensor" in said["heads"]
    assert "num_key_value_heads is 3, which 2 ranks do not divide" in said["keys"]
    assert "layers.0.mlp.gate_proj.weight: dimension 0 has 41 elements, which 2 tensor ranks" in said["width"]
    assert "h.*.attn.c_attn the style 'packed_colwise:3', which training does not have" in said["style"]
    assert "2 ranks compute each layer together: pass initialize(tensor_plan=...)" in said["plan"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Mixtral", r"mlp.experts.gate_up_proj the style 'packed_colwise'"),
        ("LongcatFlash", r"self_attn.*kv_a_proj_with_mqa the style 'mla_kv_a_proj'"),
    ],
)
def test_styles_that_training_does_not_have_are_refused_by_name(kind: str, says: str) -> None:
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=4)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises(ValueError, match=says):
        training_plan(model, 2)
