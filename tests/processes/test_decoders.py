"""Models of transformers, divided by their own plans among ranks: the losses and weights of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import decoder_ranks
import pytest
import torch
from decoders import alone, decoder, transformers
from ranks import Ended, run_torchrun
from torch import Tensor

from onebit.zero.config.sections import Pipelining
from onebit.zero.parallel.model_plan import KNOWN, training_plan
from onebit.zero.parallel.styles import Experts
from onebit.zero.pipeline.huggingface import DecoderPipeline, pair_of

from study.model_cases import MODELS, SERVED  # isort: skip  (scripts/ is on the path)

pytestmark = pytest.mark.processes

OPTIMIZERS = ("AdamW", "OneBitAdam")
Case = tuple[str, str, int]  # decoder, optimizer, stage
Blocks = dict[str, dict[str, object]]
TENSOR: Blocks = {"onebit": {"tensor": 2}}
STAGES: Blocks = {"pipeline": {"stages": 2}}
SHARDS: Blocks = {"onebit": {"tensor": 2, "ranks_per_node": 4}}
MODELS_OF_SLICES = ("llama", "llama_tied", "qwen3", "phi3", "olmo2", "gpt_neox", "gpt2")
"""By their tensor plans. Qwen2 has biases as `llama` here, and tied weights as `llama_tied`."""
MODELS_OF_STAGES = ("llama", "llama_tied", "mistral", "gemma", "gpt_neox", "gpt2")
"""By what is at their ends and between layers: tied weights, windows, a scale, other names, and positions."""
MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v2")
"""OLMoE has Mixtral's experts and Qwen3's attention."""
GRIDS: Mapping[str, tuple[int, Blocks, list[Case]]] = {
    "slices": (2, TENSOR, [(name, OPTIMIZERS[k % 2], 0) for k, name in enumerate(MODELS_OF_SLICES)]),
    "slices of experts": (2, TENSOR, [(name, OPTIMIZERS[k % 2], 0) for k, name in enumerate(MIXTURES)]),
    "stages": (2, STAGES, [(name, OPTIMIZERS[k % 2], k // 2 % 2) for k, name in enumerate(MODELS_OF_STAGES)]),
    "slices of stages": (4, STAGES | TENSOR, [("qwen3", "AdamW", 1), ("gpt2", "OneBitAdam", 1)]),
    "slices of shards": (4, SHARDS, [("mixtral", "OneBitAdam", 1), ("gpt2", "AdamW", 2), ("phi3", "OneBitAdam", 3)]),
    "more slices": (2, TENSOR, [("qwen2", "AdamW", 0), ("olmoe", "OneBitAdam", 0)]),
    "replicas": (8, STAGES | TENSOR, [("llama_tied", "OneBitAdam", 0)]),
}
THOROUGH = ("more slices", "replicas")
ALL = [
    pytest.param(
        grid,
        case,
        id=f"{grid}-{case[0]}-{case[1]}-{case[2]}",
        marks=pytest.mark.thorough if grid in THOROUGH else (),
    )
    for grid in GRIDS
    for case in GRIDS[grid][2]
]


@cache
def start(grid: str) -> tuple[Ended, Path]:
    """Started by whichever test asks first; all later ones read it, also if it failed."""
    ranks, blocks, cases = GRIDS[grid]
    folder = tempfile.mkdtemp(prefix="decoders-")
    return run_torchrun(ranks, decoder_ranks.run, folder, blocks, cases, timeout_s=110), Path(folder)


def results(grid: str, case: Case) -> tuple[Path, list[dict]]:
    """The folder of a case, and what each rank found."""
    ended, folder = start(grid)
    place = folder / ".".join(map(str, case))
    files = [Path(f"{place}.{rank}") for rank in range(GRIDS[grid][0])]
    assert all(file.exists() for file in files), ended.output
    return place, [torch.load(file) for file in files]


@cache
def twin(name: str, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    return alone(name, kind, decoder_ranks.MICRO_BATCHES)


@pytest.mark.parametrize(("grid", "case"), ALL)
def test_ranks_train_as_one_process(grid: str, case: Case) -> None:
    """Float32 sums in other orders: losses to 1e-6, weights to 2e-5 of a tensor's largest (embeddings of OLMo-2)."""
    losses, weights = twin(*case[:2])
    _, found = results(grid, case)
    mean = torch.tensor([rank["losses"] for rank in found], dtype=torch.float64).mean(0).tolist()
    assert mean == pytest.approx(losses, rel=1e-6)
    assert set().union(*(rank["weights"] for rank in found)) >= weights.keys()
    for rank in found:
        for name, x in rank["weights"].items():
            torch.testing.assert_close(x, weights[name], rtol=0, atol=2e-5 * float(weights[name].abs().max()))


@pytest.mark.parametrize(("grid", "case"), ALL)
def test_a_run_resumes_and_its_weights_are_a_models(grid: str, case: Case) -> None:
    """The resumed step gives the same bits; the written file has every weight, whole, by the model's own names."""
    place, found = results(grid, case)
    plain = decoder(case[0])
    plain.config.save_pretrained(place)
    read, report = type(plain).from_pretrained(place, output_loading_info=True)
    assert not any(report.values())
    for rank in found:
        loss, resumed = rank["resumed"]
        assert len(set(rank["evaluated"])) == 1  # a model built on "meta" has the file's values
        assert loss == rank["losses"][-1] and resumed.keys() == rank["weights"].keys()
        for name, x in rank["weights"].items():
            assert torch.equal(x, resumed[name]) and torch.equal(x, read.state_dict()[name]), name


@pytest.mark.parametrize("grid", ["slices", "slices of shards"])
def test_slices_of_stacks_are_loaded_by_one_process(grid: str) -> None:
    """Weights and optimizer state, with the matrices as the model stacks them: its next step is that of the ranks."""
    cases = [case for case in GRIDS[grid][2] if case[0] in ("gpt2", "phi3", "mixtral") and case[2] < 3]
    places = [results(grid, case)[0] for case in cases]
    run_torchrun(1, decoder_ranks.elsewhere, [str(place) for place in places], timeout_s=60).check()
    for case, place in zip(cases, places, strict=True):
        losses, weights = twin(*case[:2])
        found = torch.load(f"{place}.elsewhere")
        assert found["loss"] == pytest.approx(losses[-1], rel=1e-6)
        for name, x in found["weights"].items():
            torch.testing.assert_close(x, weights[name], rtol=0, atol=2e-5 * float(weights[name].abs().max()))


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
