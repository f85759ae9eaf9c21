"""Models of transformers, divided by their own plans among ranks: the losses and weights of one process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ended, run_torchrun

from onebit.zero.config.sections import Pipelining
from onebit.zero.parallel.model_plan import KNOWN, training_plan
from onebit.zero.parallel.styles import Experts
from onebit.zero.pipeline.huggingface import DecoderPipeline, pair_of

pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")
pytest.importorskip("rich", reason="needs rich: pip install onebit[train]")

import decoder_ranks
import transformers
from decoder_ranks import Case, decoder
from study.model_cases import MODELS, SERVED
from study.models import OPTIMIZERS, Found, verdict

pytestmark = pytest.mark.processes

MODELS_OF_SLICES = ("llama", "llama_tied", "qwen3", "phi3", "olmo2", "gpt_neox", "gpt2")
"""By their tensor plans. Qwen2 has biases as `llama` here, and tied weights as `llama_tied`."""
MODELS_OF_STAGES = ("llama", "llama_tied", "mistral", "gemma", "gpt_neox", "gpt2")
"""By what is at their ends and between layers: tied weights, windows, a scale, other names, and positions."""
MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v2")
"""OLMoE has Mixtral's experts and Qwen3's attention."""


def in_turn(names: tuple[str, ...], *layouts: str) -> list[Case]:
    """With one optimizer and the other, which then change layouts."""
    pairs = cycle([(layout, optimizer) for layout in layouts for optimizer in OPTIMIZERS])
    return [Case(name, *pair) for name, pair in zip(names, pairs, strict=False)]


STARTS: Mapping[str, list[Case]] = {
    "slices": in_turn(MODELS_OF_SLICES, "slices"),
    "slices of experts": in_turn(MIXTURES, "slices"),
    "stages": in_turn(MODELS_OF_STAGES, "stages", "stages, ZeRO 1"),
    "slices of stages": [Case("qwen3", "slices of stages", "AdamW"), Case("gpt2", "slices of stages", "OneBitAdam")],
    "slices of shards": [
        Case("mixtral", "slices of shards, ZeRO 1", "OneBitAdam"),
        Case("gpt2", "slices of shards, ZeRO 2", "AdamW"),
        Case("phi3", "slices of shards, ZeRO 3", "OneBitAdam"),
    ],
    "more slices": in_turn(("qwen2", "olmoe"), "slices"),
    "replicas": [Case("llama_tied", "replicas", "OneBitAdam")],
}
THOROUGH = ("more slices", "replicas")
ALL = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=pytest.mark.thorough if name in THOROUGH else ())
    for name, cases in STARTS.items()
    for case in cases
]


def words(cases: list[Case]) -> list[tuple[str, str, str]]:
    return [(case.model, case.layout, case.optimizer) for case in cases]


@cache
def start(name: str) -> tuple[Ended, str]:
    """Started by whichever test asks first; all later ones read it, also if it failed."""
    folder, cases = tempfile.mkdtemp(prefix="decoders-"), STARTS[name]
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return run_torchrun(cases[0].on.ranks, decoder_ranks.run, folder, words(cases), timeout_s=110), folder


@pytest.mark.parametrize(("name", "case"), ALL)
def test_ranks_train_as_one_process_and_resume(name: str, case: Case) -> None:
    """By the study's verdict; losses to 1e-6; and a model built on "meta" has the values of the file that was written.

    Float32 sums in other orders. All weights are compared, by one rank or another.
    """
    ended, _ = start(name)
    results: Any = [of_rank[STARTS[name].index(case)] for of_rank in ended.check().results]
    evaluated = [result.pop("evaluated") for result in results]
    found = [Found(**result) for result in results]
    assert verdict(case, found) == "ok"
    mean = torch.tensor([rank.losses for rank in found], dtype=torch.float64).mean(0).tolist()
    assert mean == pytest.approx(found[0].alone, rel=1e-6) and len(mean) == 2
    weights = {key for key, x in decoder(case.model).state_dict().items() if x.is_floating_point()}
    assert set().union(*(rank.deviations for rank in found)) == weights <= found[0].exported.keys()
    assert all(len(set(of_rank)) == 1 for of_rank in evaluated), evaluated


@pytest.mark.parametrize("name", ["slices", "slices of shards"])
def test_slices_of_stacks_are_loaded_by_one_process(name: str) -> None:
    """Weights and optimizer state, with the matrices as the model stacks them: its next step is that of the ranks."""
    cases = [case for case in STARTS[name] if case.model in ("gpt2", "phi3", "mixtral") and "3" not in case.layout]
    (results,) = run_torchrun(1, decoder_ranks.elsewhere, start(name)[1], words(cases), timeout_s=60).check().results
    for found in results:  # type: ignore[attr-defined]
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["deviations"] and max(found["deviations"].values()) < 2e-5


OF_OURS = (
    *("ALBERT", "BART", "BERT", "CLIP", "DINOv2", "DistilBERT", "ELECTRA", "GPT-2", "ModernBERT", "OPT", "Phi-3"),
    *("RoBERTa", "T5", "ViT", "Wav2Vec2", "Whisper", "mT5", "UMT5", "XGLM"),
)
RELATIVES = ("BioGPT", "Blenderbot", "M2M-100", "Marian", "mBART", "Pegasus", "PLBART")
"""Of BART: its plan, and no widths of their own to be divided."""


@pytest.mark.parametrize("names", [OF_OURS, pytest.param(RELATIVES, marks=pytest.mark.thorough)])
def test_gradients_under_plans_of_ours_are_those_of_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    """Of every model that `KNOWN` has a plan for, in float64: to 1e-12 of gradients of up to 10."""
    run_torchrun(2, decoder_ranks.gradients, str(tmp_path), names, timeout_s=60).check()
    for rank in range(2):
        furthest = torch.load(tmp_path / f"gradients.{rank}")
        assert furthest.keys() == set(names)
        assert max(furthest.values()) < 1e-12, furthest


def test_every_plan_of_ours_has_a_model() -> None:
    models = [(MODELS | SERVED)[name].build() for name in OF_OURS + RELATIVES]
    assert {model.config.model_type for model in models} == set(KNOWN)  # type: ignore[union-attr]


def test_models_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    run_torchrun(2, decoder_ranks.refusals, str(tmp_path)).check()
    said = torch.load(tmp_path / "refusals")
    assert "num_attention_heads is 3, which 2 ranks do not divide; use a tensor" in said["heads"]
    assert "num_key_value_heads is 3, which 2 ranks do not divide" in said["keys"]
    assert "layers.0.mlp.gate_proj.weight: dimension 0 has 41 elements, which 2 tensor ranks" in said["width"]
    assert "num_attention_heads is 3, which 2 ranks do not divide" in said["stacked heads"]
    assert "h.0.mlp.c_fc.weight: dimension 1 has 41 elements, which 2 tensor ranks" in said["Conv1D"]
    assert "experts.gate_up_proj: dimension 1 has 41 elements for one of 2 matrices, which 2" in said["experts"]
    assert "2 ranks compute each layer together: pass initialize(tensor_plan=...)" in said["plan"]


def test_a_style_that_training_does_not_have_is_refused_by_name() -> None:
    config = transformers.LongcatFlashConfig(num_hidden_layers=4)
    with torch.device("meta"):
        model = transformers.LongcatFlashForCausalLM(config)
    with pytest.raises(ValueError, match=r"mlp.experts.identity_expert the style 'moe_identity_expert'"):
        training_plan(model, 2)


def test_experts_with_a_norm_at_their_end_are_refused() -> None:
    """Parts of an output, which ranks add up, have another norm. A model of transformers has such experts."""
    model = decoder("mixtral")
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module.has_post_expert_norm = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"MixtralExperts normalises .* leave the experts out of the tensor plan"):
        training_plan(model, 2)
    plan = training_plan(decoder("mixtral"), 2)
    assert sum(isinstance(style, Experts) for style in plan.values()) == 3


def test_padding_at_the_end_needs_no_mask() -> None:
    ids, labels = torch.arange(6).view(2, 3), torch.tensor([[1, 2, -100], [1, 2, 3]])
    mask = (labels != -100).long()
    inputs, target = pair_of({"input_ids": ids, "labels": labels, "attention_mask": mask})
    assert inputs is ids and target is labels
    for wrong, says in (
        ({"attention_mask": mask.flip(1)}, "pad rows at the end"),
        ({"attention_mask": mask, "labels": ids}, "with labels of -100"),
        ({"token_type_ids": ids}, "input_ids and labels, got input_ids, labels, token_type_ids"),
        ({"attention_mask": mask, "position_ids": ids}, "drop the mask if positions begin anew"),
    ):
        with pytest.raises(ValueError, match=says):
            pair_of({"input_ids": ids, "labels": labels} | wrong)


def test_a_second_input_without_a_name_is_refused() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    (stage,) = DecoderPipeline(decoder("llama"), Pipelining(stages=2)).stages([range(2)])
    with pytest.raises(ValueError, match="take input_ids, got 2 inputs; give a dict that names them"):
        stage.cut([((ids, ids), ids)])


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"schedule": "interleaved"}, "one stage for each rank, and pipeline.schedule 'interleaved' has 2"),
        ({"activation_checkpoint_interval": 1}, r"call model.gradient_checkpointing_enable\(\)"),
        ({"partition": "time"}, "is for a PipelineModule"),
    ],
)
def test_settings_for_lists_of_layers_are_refused(block: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DecoderPipeline(decoder("llama"), Pipelining(**({"stages": 2} | block)))
