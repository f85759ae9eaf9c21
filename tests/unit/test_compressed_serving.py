"""From a compressed model to a served one: its file serves what the cleaned model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compression_cases import config, technique, train
from torch import Tensor, nn

from onebit.checkpoint.files import CheckpointError
from onebit.comm import SimTransport, run_ranks
from onebit.zero import init_inference
from onebit.zero.compression import export_compressed, init_compression, redundancy_clean

transformers = pytest.importorskip("transformers", reason="pip install onebit[transformers]")

GATED = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
GATED |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GATED),
    "Qwen2": ("Qwen2ForCausalLM", GATED),
    "Mistral": ("MistralForCausalLM", GATED | {"sliding_window": None}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}),
}
EIGHT = {"start_bits": 8, "target_bits": 8}
INPUTS = {"activation_quantization": technique(["proj", "mlp"], {"bits": 8}, range_calibration="dynamic")}
PRUNED = {
    "row_pruning": technique(["c_fc"], {"dense_ratio": 0.5}, [["mlp.c_proj"]]),
    "head_pruning": technique(["attn.c_proj"], {"dense_ratio": 0.5}, [["c_attn"]], num_heads=4),
}


MLP = {"row_pruning": technique(["up_proj"], {"dense_ratio": 0.5}, [["gate_proj", "down_proj"]])}


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    name, keys = FAMILIES[family]
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**keys))


def tokens(k: int) -> Tensor:
    return torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(k))


def compressed(family: str, techniques: dict[str, Any], file: Path) -> nn.Module:
    """Trained for some steps under compression, cleaned and exported."""
    model = build(family)
    init_compression(model, config(**techniques))
    train(model, lambda module, k: module(input_ids=tokens(k), labels=tokens(k)).loss, 3)
    redundancy_clean(model.eval(), config(**techniques))
    export_compressed(model, file)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compressed_file_is_served(family: str, tmp_path: Path) -> None:
    """8 bits of weights; in GPT-2 half of the heads and of the MLP are gone. The given model does not change."""
    layers = ["proj", "mlp"] if family != "GPT2" else [r"h\.\d"]
    techniques = {"weight_quantization": technique(layers, EIGHT)} | (PRUNED if family == "GPT2" else MLP)
    file, given = tmp_path / "small.safetensors", build(family)
    cleaned, before = compressed(family, techniques, file), [p.clone() for p in given.parameters()]
    for checkpoint in (str(file), {"path": str(file)}):
        engine = init_inference(given, checkpoint=checkpoint, dtype="fp32")
        with torch.no_grad():
            torch.testing.assert_close(engine(tokens(9)).logits, cleaned(tokens(9)).logits, rtol=0, atol=1e-5)
        expected = cleaned.generate(tokens(9), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(engine.generate(tokens(9), max_new_tokens=6), expected)
    assert all(map(torch.equal, given.parameters(), before))
    if family != "GPT2":
        mlp = engine.module.get_submodule("model.layers.0.mlp")
        assert [tuple(mlp.get_submodule(n).weight.shape) for n in ("gate_proj", "up_proj", "down_proj")] == [
            (16, 16), (16, 16), (16, 16),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([(["up_proj"], ["down_proj"])], "multiplied with those of .*gate_proj, .*name gate_proj in related_modules"),
        ([(["gate_proj"], ["down_proj"])], "multiplied with those of .*up_proj, .*name up_proj in related_modules"),
        ([(["up_proj"], ["gate_proj", "down_proj"]), (["gate_proj"], ["up_proj", "down_proj"])], "are pruned twice"),
    ],
)
def test_a_gate_and_what_it_multiplies_shrink_together(groups: list[tuple[list[str], list[str]]], words: str) -> None:
    """Named before anything changes: cleaned by itself, the MLP could not run."""
    model = build("Llama")
    half = [technique(names, {"dense_ratio": 0.5}, [related]) for names, related in groups]
    pruning = half[0]
    for k, more in enumerate(half[1:]):
        pruning["different_groups"] |= {f"more {k}": each for each in more["different_groups"].values()}
    with pytest.raises(ValueError, match=words):
        init_compression(model, config(row_pruning=pruning))
    assert not any(torch.nn.utils.parametrize.is_parametrized(module) for module in model.modules())


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_quantized_inputs_are_served_as_such(dtype: str, tmp_path: Path) -> None:
    """By layers that stay as they are, whatever replaces the others."""
    techniques = {"weight_quantization": technique(["proj", "mlp"], EIGHT)} | INPUTS
    file = tmp_path / "small.safetensors"
    cleaned = compressed("Llama", techniques, file)
    for engine in (
        init_inference(build("Llama"), checkpoint=str(file), dtype=dtype),
        init_inference(cleaned, dtype=dtype),
    ):
        with torch.no_grad():
            expected = cleaned(tokens(9)).logits
            near = 1e-5 if dtype == "fp32" else 0.05 * float(expected.std())
            torch.testing.assert_close(engine(tokens(9)).logits, expected, rtol=0, atol=near)
            for p in engine.module.get_submodule("model.layers.0.mlp.up_proj").parameters():
                assert p.is_floating_point()


def test_parts_of_layers_with_quantized_inputs_are_refused(tmp_path: Path) -> None:
    compressed("Llama", INPUTS, tmp_path / "small.safetensors")
    models = [build("Llama") for _ in range(2)]

    def rank(transport: SimTransport) -> None:
        with pytest.raises(ValueError, match=r"has hooks, such as quantized inputs.*use tp_size 1"):
            init_inference(
                models[transport.rank],
                checkpoint=str(tmp_path / "small.safetensors"),
                tensor_parallel={"tp_size": 2},
                transport=transport,
            )

    run_ranks(2, rank)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    compressed("Llama", {"weight_quantization": technique(["proj"], EIGHT)}, tmp_path / "small.safetensors")
    given = build("GPT2")
    with pytest.raises(CheckpointError, match=r"rank 0: .*small\.safetensors is of another model"):
        init_inference(given, checkpoint=str(tmp_path / "small.safetensors"))
