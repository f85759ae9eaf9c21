"""From a compressed model to a served one: its file serves what the cleaned model computes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from compression_cases import config, technique, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onebit.checkpoint.files import CheckpointError
from onebit.comm import SimTransport, run_ranks
from onebit.zero import init_inference
from onebit.zero.compression import export_compressed, init_compression, redundancy_clean
from onebit.zero.inference.initializing import distance
from onebit.zero.inference.layers import ServedEmbedding, ServedLinear
from onebit.zero.inference.packed import Groups, Rows

transformers = pytest.importorskip("transformers", reason="pip install onebit[transformers]")

GATED = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
GATED |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
Families: TypeAlias = dict[str, tuple[str, dict[str, Any]]]
FAMILIES: Families = {
    "Llama": ("LlamaForCausalLM", GATED),
    "Qwen2": ("Qwen2ForCausalLM", GATED),
    "Mistral": ("MistralForCausalLM", GATED | {"sliding_window": None}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}),
}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
WIDER: Families = {name: (cls, keys | WIDE) for name, (cls, keys) in FAMILIES.items()}
WIDER["GPT2"] = "GPT2LMHeadModel", FAMILIES["GPT2"][1] | {"n_embd": 64}
WIDER["Bert"] = "BertForMaskedLM", {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4} | WIDE
WIDER["Bert"][1].update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
EIGHT, FOUR, THREE = ({"start_bits": bits, "target_bits": bits} for bits in (8, 4, 3))
INPUTS = {"activation_quantization": technique(["proj", "mlp"], {"bits": 8}, range_calibration="dynamic")}
PRUNED = {
    "row_pruning": technique(["c_fc"], {"dense_ratio": 0.5}, [["mlp.c_proj"]]),
    "head_pruning": technique(["attn.c_proj"], {"dense_ratio": 0.5}, [["c_attn"]], num_heads=4),
}
MLP = {"row_pruning": technique(["up_proj"], {"dense_ratio": 0.5}, [["gate_proj", "down_proj"]])}


def build(family: str, families: Families = FAMILIES, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    name, keys = families[family]
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**keys))


def tokens(k: int) -> Tensor:
    return torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(k))


TRAINED: dict[str, tuple[nn.Module, bytes]] = {}


def compressed(
    family: str,
    techniques: dict[str, Any],
    file: Path,
    families: Families = FAMILIES,
    batches: Iterable[int] = range(3),
) -> nn.Module:
    """Trained under compression, cleaned and exported; once for all tests that ask for the same."""
    key = repr((families[family], techniques, given := list(batches)))
    if key not in TRAINED:
        model = build(family, families)
        init_compression(model, config(**techniques))
        rows = [tokens(k) for k in given]
        train(model, lambda module, k: module(input_ids=rows[k], labels=rows[k]).loss, len(rows))
        redundancy_clean(model.eval(), config(**techniques))
        export_compressed(model, file)
        TRAINED[key] = model, file.read_bytes()
    model, exported = TRAINED[key]
    file.write_bytes(exported)
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


def memorized(family: str, techniques: dict[str, Any], file: Path) -> nn.Module:
    """A wide model that knows two rows of tokens by heart, so that its greatest logit stands out."""
    return compressed(family, techniques, file, WIDER, [0] * 30)


def plain(family: str) -> nn.Module:
    return build(family, WIDER, seed=1).eval()


def check_served(engine: Any, cleaned: nn.Module, near: float) -> None:
    """Its logits, in one pass of few rows and of many, and its greedy tokens."""
    with torch.no_grad():
        for x in (tokens(0), tokens(0).repeat(8, 1)):
            expected = cleaned(x).logits
            torch.testing.assert_close(engine(x).logits, expected, rtol=0, atol=near * float(expected.std()))
    if "Bert" not in type(cleaned).__name__:
        x = tokens(0)[:, :3]
        expected = cleaned.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(engine.generate(x, max_new_tokens=5), expected)


ASYMMETRIC = {"quantization_type": "asymmetric"}
IN_PARTS = [r"\.o_proj|\.q_proj|down_proj|c_proj|output\.dense"]
FORMS = {
    "rows": (["."], EIGHT, {}, Rows),
    "asymmetric rows": (["."], EIGHT, ASYMMETRIC, Rows),
    "4 bits": (["."], FOUR, {"quantize_groups": 4}, Groups),
    "groups": (IN_PARTS, FOUR, {"quantize_groups": 128} | ASYMMETRIC, Groups),
}


class Floats(TorchDispatchMode):
    """Records the sizes of the tensors of floats that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = {x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()}
        self.sizes |= made if "detach" not in str(func) else set()
        return out


PACKED = [("Llama", form) for form in FORMS]
PACKED += [("GPT2", "rows"), ("GPT2", "groups"), ("Bert", "asymmetric rows"), ("Qwen2", "4 bits")]


@pytest.mark.parametrize(("family", "form"), PACKED)
def test_what_was_packed_is_executed_packed(family: str, form: str, tmp_path: Path) -> None:
    """No matrix is in floats, neither while the file is read nor afterwards; tied ones stay tied."""
    layers, bits, shared, kind = FORMS[form]
    file, given = tmp_path / "small.safetensors", plain(family)
    cleaned = memorized(family, {"weight_quantization": technique(layers, bits, **shared)}, file)
    engine = init_inference(given, checkpoint=str(file))
    served = [m for m in engine.module.modules() if isinstance(m, ServedLinear | ServedEmbedding)]
    packed = [m.matrix for m in served if isinstance(m.matrix, Rows | Groups)]
    assert packed and all(type(matrix) is kind for matrix in packed)
    if form != "groups":
        assert sum(p.numel() for p in engine.module.parameters() if p.dim() > 1) == 0 or family == "GPT2"
        ties = {id(p) for p in cleaned.parameters()}
        assert len({id(matrix) for matrix in packed}) < len(packed) or len(ties) == len(list(cleaned.parameters()))
    check_served(engine, cleaned, 0.03)
    check_served(init_inference(given, checkpoint=str(file), dtype="int8"), cleaned, 0.05)
    check_served(init_inference(given, checkpoint=str(file), dtype="fp32"), cleaned, 1e-4)


@pytest.mark.parametrize("form", ["rows", "asymmetric rows", "4 bits"])
def test_reading_packed_weights_makes_no_matrix_of_floats(form: str, tmp_path: Path) -> None:
    layers, bits, shared, _ = FORMS[form]
    file, given = tmp_path / "small.safetensors", plain("Llama")
    memorized("Llama", {"weight_quantization": technique(layers, bits, **shared)}, file)
    from onebit.zero.compression.packing import read_compressed
    from onebit.zero.inference.codes import serve_codes

    with Floats() as floats:
        serve_codes(given, read_compressed(file), has_int8_inputs=False)
        for matrix in (m for m in given.modules() if isinstance(m, Rows | Groups)):
            matrix.part(torch.arange(matrix.N // 2), range(matrix.K // 2, matrix.K))
    smallest = 40 * 64  # the table; no scale has so many
    assert floats.sizes and max(floats.sizes) < smallest


@pytest.mark.parametrize("by", ["the file", "the options"])
def test_inputs_in_int8(by: str, tmp_path: Path) -> None:
    """The file's, which training has seen, are multiplied as they are; others are rounded in serving only."""
    techniques = {"weight_quantization": technique(["proj"], EIGHT)}
    techniques |= (
        {"activation_quantization": technique(["proj"], {"bits": 8}, range_calibration="dynamic")}
        if by == "the file"
        else {}
    )
    file, options = tmp_path / "small.safetensors", {"quant": {"activation": {"enabled": True}}, "dtype": "int8"}
    cleaned = memorized("Llama", techniques, file)
    engine = init_inference(plain("Llama"), checkpoint=str(file), **({} if by == "the file" else options))
    layers = [m for m in engine.module.modules() if isinstance(m, ServedLinear) and isinstance(m.matrix, Rows)]
    assert len(layers) >= 14 and all(layer.has_int8_inputs and not layer._forward_pre_hooks for layer in layers)
    # Both sides round the same inputs, except to other levels where sums differ in their last bits.
    check_served(engine, cleaned, 0.02 if by == "the file" else 0.1)
    assert len(engine.generate([tokens(0)[0, :2]], max_new_tokens=3)[0]) == 5


@pytest.mark.parametrize(
    "shared", [{"range_calibration": "static"}, {"range_calibration": "dynamic", "quantization_type": "asymmetric"}]
)
def test_inputs_of_other_ranges_are_rounded_as_in_training(shared: dict[str, str], tmp_path: Path) -> None:
    techniques = {"weight_quantization": technique(["proj"], EIGHT)}
    techniques |= {"activation_quantization": technique(["proj"], {"bits": 8}, **shared)}
    cleaned = memorized("Llama", techniques, tmp_path / "small.safetensors")
    engine = init_inference(plain("Llama"), checkpoint=str(tmp_path / "small.safetensors"))
    layer = engine.module.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, ServedLinear) and isinstance(layer.matrix, Rows) and layer._forward_pre_hooks
    check_served(engine, cleaned, 0.15)  # a rounding moves some inputs to the next level


def test_what_no_kernel_takes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    techniques = {"weight_quantization": technique(["q_proj"], {"start_bits": 12, "target_bits": 12})}
    cleaned = memorized("Llama", techniques, tmp_path / "small.safetensors")
    with caplog.at_level(logging.WARNING):
        engine = init_inference(plain("Llama"), checkpoint=str(tmp_path / "small.safetensors"))
    assert "model.layers.0.self_attn.q_proj.weight of" in caplog.text and "expanded to floats: 12 bits" in caplog.text
    check_served(engine, cleaned, 1e-4)


def test_int8_inputs_of_four_bits_are_refused(tmp_path: Path) -> None:
    techniques = {"weight_quantization": technique(["q_proj"], FOUR)}
    memorized("Llama", techniques, tmp_path / "small.safetensors")
    options: dict[str, Any] = {"dtype": "int8", "quant": {"activation": {"enabled": True}}}
    with pytest.raises(CheckpointError, match=r"q_proj.weight of .* has 4 bits or groups: leave quant.activation out"):
        init_inference(plain("Llama"), checkpoint=str(tmp_path / "small.safetensors"), **options)


# Widths that 4 ranks do not divide; groups of 96 inputs, of which a rank has a half.
ODD = {"vocab_size": 42, "intermediate_size": 130, "num_key_value_heads": 4}
RANKED: Families = {name: (WIDER[name][0], WIDER[name][1] | ODD) for name in ("Llama", "Qwen2")}
RANKED["Phi3"] = "Phi3ForCausalLM", RANKED["Llama"][1] | {"pad_token_id": None}
RANKED["Mixtral"] = "MixtralForCausalLM", RANKED["Llama"][1] | {"num_local_experts": 4, "intermediate_size": 128}
RANKED["GPT2"] = "GPT2LMHeadModel", WIDER["GPT2"][1] | {"vocab_size": 42, "n_inner": 130}
RANKED["T5"] = "T5ForConditionalGeneration", {"vocab_size": 42, "d_model": 64, "d_kv": 16, "d_ff": 130, "num_layers": 2}
RANKED["T5"][1].update(num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
IN_GROUPS: Families = {"Llama": ("LlamaForCausalLM", RANKED["Llama"][1] | {"intermediate_size": 192})}
IN_GROUPS["GPT2"] = "GPT2LMHeadModel", RANKED["GPT2"][1] | {"n_inner": 192}
OVER_RANKS = {
    "8 bits": (["."], EIGHT, ASYMMETRIC, RANKED, ["Llama", "Qwen2", "GPT2", "Phi3", "Mixtral", "T5"]),
    "4 bits": (["."], FOUR, {"quantize_groups": 2}, RANKED, ["Llama", "GPT2", "T5"]),
    "3 bits": (["."], THREE, {"quantize_groups": 2} | ASYMMETRIC, RANKED, ["Qwen2"]),
    "4 bits in groups": (IN_PARTS, FOUR, {"quantize_groups": 128} | ASYMMETRIC, IN_GROUPS, ["Llama", "GPT2"]),
    "8 bits in groups": (IN_PARTS, EIGHT, {"quantize_groups": 128}, IN_GROUPS, ["Llama"]),
}
"""Layers, bits, the rest of the configuration, sizes and families."""


@torch.no_grad()
def answers(engine: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of few rows, and greedy tokens."""
    named = {"decoder_input_ids": x} if engine.has_encoder else {}
    return engine(x, **named).logits, engine.generate(x[:, :3], max_new_tokens=5)


@pytest.mark.pairwise
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("form", "family"), [(form, each) for form, (*_, names) in OVER_RANKS.items() for each in names]
)
def test_a_packed_file_is_cut_packed(form: str, family: str, ranks: int, tmp_path: Path, caplog: Any) -> None:
    """Ranks give the tokens of one, and hold a part of its bytes. Sums of parts are rounded to bfloat16 once each."""
    layers, bits, shared, families, _ = OVER_RANKS[form]
    file = tmp_path / "small.safetensors"
    compressed(family, {"weight_quantization": technique(layers, bits, **shared)}, file, families, [0] * 30)
    given = [build(family, families, seed=1).eval() for _ in range(1 + ranks)]
    one = init_inference(given[ranks], checkpoint=str(file))
    logits, text = answers(one, tokens(0))
    names = [name for name, m in one.module.named_modules() if isinstance(m, Rows | Groups)]

    def rank(transport: SimTransport) -> None:
        engine = init_inference(given[transport.rank], checkpoint=str(file), mp_size=ranks, transport=transport)
        own, own_text = answers(engine, tokens(0))
        assert torch.equal(own_text, text) and distance(logits, own) < 0.02
        assert [name for name, m in engine.module.named_modules() if isinstance(m, Rows | Groups)] == names
        if form == "8 bits" and family != "Mixtral":  # whose experts are in floats
            assert engine.held_bytes < (1 / ranks + 0.12) * one.held_bytes

    with caplog.at_level(logging.WARNING):
        run_ranks(ranks, rank)
    assert names and "expanded" not in caplog.text


def over_ranks(ranks: int, file: Path, form: str = "tensor_parallel", **keys: Any) -> list[tuple[Tensor, ...]]:
    """The answers of a wide Llama on every rank: by rows, or by layers."""
    models, size = (
        [plain("Llama") for _ in range(ranks)],
        {"tensor_parallel": "tp_size", "pipeline_parallel": "pp_size"},
    )

    def rank(transport: SimTransport) -> tuple[Tensor, ...]:
        keys_of_rank = keys | {form: {size[form]: ranks}, "checkpoint": str(file), "transport": transport}
        return answers(init_inference(models[transport.rank], **keys_of_rank), tokens(0))

    return run_ranks(ranks, rank)


@pytest.mark.parametrize("by", ["the file", "the options"])
def test_parts_take_inputs_in_int8(by: str, tmp_path: Path) -> None:
    """A rank rounds its own inputs of a row-wise layer by the greatest of them: steps may be finer than on one rank."""
    techniques = {"weight_quantization": technique(["proj"], EIGHT)} | (INPUTS if by == "the file" else {})
    file, options = tmp_path / "small.safetensors", {"quant": {"activation": {"enabled": True}}, "dtype": "int8"}
    cleaned = memorized("Llama", techniques, file)
    keys: dict[str, Any] = {} if by == "the file" else options
    logits, text = answers(init_inference(plain("Llama"), checkpoint=str(file), **keys), tokens(0))
    floats = answers(init_inference(cleaned, dtype="fp32"), tokens(0))[0] if by == "the file" else logits
    for own, own_text in over_ranks(2, file, **keys):
        assert distance(floats, own) < 0.03 and torch.equal(own_text, text)


def test_what_cannot_be_packed_is_cut_in_floats_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    techniques = {"weight_quantization": technique(["q_proj"], {"start_bits": 12, "target_bits": 12})}
    cleaned = memorized("Llama", techniques, tmp_path / "small.safetensors")
    with caplog.at_level(logging.WARNING):
        found = over_ranks(2, tmp_path / "small.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight of" in caplog.text and "expanded to floats: 12 bits" in caplog.text
    for logits, _ in found:
        torch.testing.assert_close(logits, cleaned(tokens(0)).logits.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["rows", "4 bits", "groups"])
def test_stages_serve_a_packed_file(form: str, tmp_path: Path) -> None:
    """To the bit: each layer is whole on its rank."""
    layers, bits, shared, _ = FORMS[form]
    memorized("Llama", {"weight_quantization": technique(layers, bits, **shared)}, tmp_path / "small.safetensors")
    one = answers(init_inference(plain("Llama"), checkpoint=str(tmp_path / "small.safetensors")), tokens(0))
    for found in over_ranks(2, tmp_path / "small.safetensors", "pipeline_parallel"):
        assert all(map(torch.equal, found, one))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_dtype_of_floats_expands_the_parts_and_int8_keeps_them(dtype: str, tmp_path: Path) -> None:
    cleaned = memorized("Llama", {"weight_quantization": technique(["proj"], FOUR)}, tmp_path / "small.safetensors")
    models = [plain("Llama") for _ in range(2)]

    def rank(transport: SimTransport) -> set[type]:
        keys = {"checkpoint": str(tmp_path / "small.safetensors"), "mp_size": 2, "dtype": dtype}
        engine = init_inference(models[transport.rank], transport=transport, **keys)
        near = {"fp32": 1e-4, "bf16": 0.05, "int8": 0.05}[dtype]
        assert distance(cleaned(tokens(0)).logits.detach(), engine(tokens(0)).logits) < near
        return {type(m.matrix) for m in engine.module.modules() if isinstance(m, ServedLinear)}

    kinds = {"fp32": {torch.nn.Parameter}, "bf16": {torch.nn.Parameter}, "int8": {Groups, Rows}}  # the head in int8
    assert run_ranks(2, rank) == [kinds[dtype]] * 2


def test_what_one_rank_refuses_of_packed_files_ranks_refuse(tmp_path: Path) -> None:
    file = tmp_path / "small.safetensors"
    memorized("Llama", {"weight_quantization": technique(["q_proj"], FOUR)}, file)
    with pytest.raises(CheckpointError, match=r"rank 0: .*has 4 bits or groups: leave quant.activation out"):
        over_ranks(2, file, dtype="int8", quant={"activation": {"enabled": True}})
    with pytest.raises(ValueError, match="these are packed already: leave calibration out"):
        over_ranks(2, file, dtype="int4", calibration=[tokens(0)])


@pytest.mark.parametrize("bits", [EIGHT, FOUR])
def test_packed_layers_narrower_than_the_ranks(bits: dict[str, int], tmp_path: Path) -> None:
    """A rank may have no output, or no input, at all. Without tokens the first call is the check."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    given, x, how = (
        [copy.deepcopy(model) for _ in range(4)],
        torch.randn(4, 5),
        config(weight_quantization=technique(["."], bits)),
    )
    export_compressed(redundancy_clean(init_compression(model, how), how), tmp_path / "small.safetensors")
    policy = {"0": "colwise", "2": "rowwise", "3": "colwise_gather_output", "4": "rowwise_split_input"}
    keys: dict[str, Any] = {"checkpoint": tmp_path / "small.safetensors"}
    expected = init_inference(copy.deepcopy(given[0]), **keys)(x)
    keys |= {"mp_size": 4, "injection_policy": policy}
    for out in run_ranks(4, lambda t: init_inference(given[t.rank], transport=t, **keys)(x)):
        assert distance(expected, out) < 0.02


def test_a_plan_that_cuts_packed_matrices_apart_is_found_out(tmp_path: Path) -> None:
    """Its outputs are far beyond what products in bfloat16 lose."""
    techniques = {"weight_quantization": technique(["proj"], EIGHT)}
    compressed("Phi3", techniques, tmp_path / "small.safetensors", RANKED)
    given = [build("Phi3", RANKED) for _ in range(2)]
    keys = {"checkpoint": str(tmp_path / "small.safetensors"), "mp_size": 2}
    keys["injection_policy"] = {"qkv_proj": "colwise", "o_proj": "rowwise"}
    with pytest.raises(ValueError, match="split over 2 ranks the model gives other outputs than whole"):
        run_ranks(2, lambda t: init_inference(given[t.rank], transport=t, **keys))


def of_groups(related: list[str], **shared: Any) -> dict[str, Any]:
    return {"head_pruning": technique(["o_proj"], {"dense_ratio": 0.5}, [related], num_heads=4, **shared)}


@pytest.mark.pairwise
@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize("related", [["q_proj"], ["k_proj"], ["v_proj", "q_proj", "k_proj"]])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral"])
def test_a_head_of_keys_goes_with_all_its_queries(family: str, related: list[str], method: str, tmp_path: Path) -> None:
    """Of 2 heads of keys with 2 of queries each one group stays, whichever of q, k, v is named; cleaning is exact."""
    model = build(family).double()
    techniques = of_groups(related, method=method)
    init_compression(model, config(**techniques))
    train(model, lambda module, k: module(input_ids=tokens(k), labels=tokens(k)).loss, 3)
    model.eval()
    with torch.no_grad():
        before = model(tokens(9)).logits
        kept = model.model.layers[0].self_attn.o_proj.weight.view(16, 2, 8).abs().sum((0, 2)) > 0  # type: ignore[union-attr]
        assert int(kept.sum()) == 1  # two neighbouring heads of queries, which share their keys
        redundancy_clean(model, config(**techniques))
        torch.testing.assert_close(model(tokens(9)).logits, before, rtol=0, atol=1e-12)
    layer = model.get_submodule("model.layers.0.self_attn")
    shapes = [tuple(layer.get_submodule(f"{n}_proj").weight.shape) for n in "qkvo"]
    assert shapes == [(8, 16), (4, 16), (4, 16), (16, 8)]
    export_compressed(model, tmp_path / "small.safetensors")
    engine = init_inference(build(family).double(), checkpoint=str(tmp_path / "small.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens(9)).logits, before, rtol=0, atol=1e-12)
    expected = model.generate(tokens(9), max_new_tokens=6, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    assert torch.equal(engine.generate(tokens(9), max_new_tokens=6), expected)


@pytest.mark.parametrize(
    ("heads", "related", "words"),
    [
        (4, ["gate_proj"], "its related module model.layers.0.mlp.gate_proj has 32 outputs: expected 16, or 48"),
        (1, ["q_proj"], r"1 heads of 16, and its related module .*k_proj has 8 outputs: .* whole number of heads"),
        (3, ["q_proj"], "3 heads do not divide its 16 inputs"),
    ],
)
def test_heads_that_are_no_groups_are_refused(heads: int, related: list[str], words: str) -> None:
    model, techniques = build("Llama"), of_groups(related)
    techniques["head_pruning"]["shared_parameters"]["num_heads"] = heads
    with pytest.raises(ValueError, match=words):
        init_compression(model, config(**techniques))
    assert not any(torch.nn.utils.parametrize.is_parametrized(module) for module in model.modules())


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_quantized_inputs_are_served_as_such(dtype: str, tmp_path: Path) -> None:
    """From a file, and from the cleaned model, whose layers stay as they are."""
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
    assert all(p.is_floating_point() for p in engine.module.get_submodule("model.layers.0.mlp.up_proj").parameters())


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
