"""Models of transformers, built from their configurations: cleaned, in a file, and in a folder of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compression_cases import config, technique, train
from torch import Tensor, nn

from onebit.comm import Transport, run_ranks
from onebit.zero.compression import (
    export_compressed,
    export_pretrained,
    import_compressed,
    init_compression,
    redundancy_clean,
    sizes,
)

transformers = pytest.importorskip("transformers", reason="pip install onebit[transformers]")

from study.model_cases import MODELS  # noqa: E402

FOUR = {"start_bits": 8, "target_bits": 4}
HALF = {"dense_ratio": 0.5}


def bert() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    shape = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=3, **small)
    return transformers.BertForSequenceClassification(shape)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=4)
    )


BERT = {
    "weight_quantization": technique(
        ["attention.self", "intermediate", "output.dense"], FOUR, quantize_groups=4, quantization_period=1
    ),
    "row_pruning": technique(["intermediate.dense"], HALF, [[r"layer.\d+.output.dense"]], method="topk"),
    "head_pruning": technique(
        ["attention.output.dense"], HALF, [["self.query", "self.key", "self.value"]], num_heads=4, method="topk"
    ),
    "sparse_pruning": technique(["pooler"], HALF, method="l1"),
    "activation_quantization": technique(["attention.output.dense"], {"bits": 8}),
}
GPT2 = {
    "weight_quantization": technique([r"h\.\d"], FOUR, quantize_groups=8, quantization_type="asymmetric"),
    "row_pruning": technique(["c_fc"], HALF, [["mlp.c_proj"]]),
    "head_pruning": technique(["attn.c_proj"], HALF, [["c_attn"]], num_heads=4),
    "sparse_pruning": technique(["c_fc"], HALF, method="topk"),
}
CASES = pytest.mark.parametrize(("build", "techniques"), [(bert, BERT), (gpt2, GPT2)], ids=["BERT", "GPT-2"])


def batch(k: int) -> Tensor:
    return torch.randint(40, (3, 8), generator=torch.Generator().manual_seed(k))


def loss(model: nn.Module, k: int) -> Tensor:
    tokens = batch(k)
    return model(input_ids=tokens, labels=tokens[:, 0] % 3 if "Bert" in type(model).__name__ else tokens).loss


@CASES
@pytest.mark.slow
def test_a_model_of_transformers_is_cleaned_and_comes_back(
    build: Callable[[], nn.Module], techniques: dict, tmp_path: Path
) -> None:
    model, plain = build(), build()
    init_compression(model, config(**techniques))
    train(model, loss, 4)
    with torch.no_grad():
        before = model.eval()(batch(9)).logits
        redundancy_clean(model, config(**techniques))
        torch.testing.assert_close(model(batch(9)).logits, before, rtol=0, atol=1e-5)
        export_compressed(model, tmp_path / "small.safetensors")
        back = import_compressed(build(), tmp_path / "small.safetensors").eval()
        assert torch.equal(back(batch(9)).logits, model(batch(9)).logits)
    assert sizes(model).memory_bytes < 0.75 * sizes(plain).memory_bytes
    assert sizes(model).packed_bytes < 0.45 * sizes(plain).packed_bytes


@pytest.mark.slow
def test_the_matrices_of_gpt2_shrink_the_right_way_round() -> None:
    model = init_compression(gpt2(), config(**GPT2))
    heads = model.transformer.h[0].attn.c_proj.parametrizations.weight[1]
    kept_rows = model.transformer.h[0].mlp.c_fc.parametrizations.weight[2]
    model(batch(0))  # computes what is kept
    qkv = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    fc = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    rows, lanes = kept_rows.kept.bool(), heads.kept.bool().repeat_interleave(4)
    redundancy_clean(model)
    attention, mlp = model.transformer.h[0].attn, model.transformer.h[0].mlp
    assert (attention.num_heads, attention.split_size, attention.c_attn.nf, attention.c_proj.nx) == (2, 8, 24, 8)
    assert torch.equal(attention.c_attn.weight, qkv[:, lanes.repeat(3)])
    assert attention.c_attn.bias.shape == (24,) and attention.c_proj.weight.shape == (8, 16)
    assert torch.equal(mlp.c_fc.weight, fc[:, rows]) and mlp.c_proj.weight.shape == (32, 16)


@pytest.mark.slow
def test_the_output_projection_of_gpt2_is_its_embedding() -> None:
    eight = {"start_bits": 8, "target_bits": 8}
    with pytest.raises(ValueError, match=r"transformer.wte, lm_head share one weight"):
        init_compression(gpt2(), config(weight_quantization=technique(["wte"], eight)))
    model = init_compression(gpt2(), config(weight_quantization=technique(["wte", "lm_head"], eight)))
    train(model, loss, 1)
    redundancy_clean(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len(model.lm_head.weight.unique()) <= 255


def test_layers_of_bert_come_from_its_teacher() -> None:
    shape = copy.deepcopy(bert().config)
    shape.num_hidden_layers = 1
    student, teacher = transformers.BertForSequenceClassification(shape), bert()
    reduction = {
        "enabled": True, "keep_number_layer": 1, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1],
        "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
    }  # fmt: skip
    init_compression(student, config(layer_reduction=reduction), teacher)
    assert torch.equal(student.classifier.weight, teacher.classifier.weight)
    own, its = student.bert.encoder.layer[0].state_dict(), teacher.bert.encoder.layer[1].state_dict()
    assert all(torch.equal(x, its[name]) for name, x in own.items())


# ---------------------------------------------------------------- a folder of transformers

MLP = technique(["up_proj"], HALF, [["gate_proj", "down_proj"]])
HEADS = technique(["self_attn.o_proj"], HALF, [["q_proj", "k_proj", "v_proj"]], num_heads=6)
GATED = {"row_pruning": MLP, "head_pruning": HEADS}


def pruned(name: str, techniques: dict) -> nn.Module:
    """One of the study's models, cleaned after a step: other weights than those it began with."""
    torch.manual_seed(0)
    model = init_compression(MODELS[name].build(), config(**techniques))
    train(model, lambda model, k: model(input_ids=batch(k), labels=batch(k)).loss, 1)
    return redundancy_clean(model.eval())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "techniques", "left"),
    [
        ("Llama", GATED, {"intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}),
        ("Qwen3", GATED, {"intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}),
        ("Mixtral", {"head_pruning": HEADS}, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}),
        ("GPT-2", {"row_pruning": technique(["c_fc"], HALF, [["mlp.c_proj"]])}, {"n_inner": 48}),
        ("OPT", {"row_pruning": technique(["fc1"], HALF, [["fc2"]])}, {"ffn_dim": 20}),
        ("DistilBERT", {"row_pruning": technique(["ffn.lin1"], HALF, [["ffn.lin2"]])}, {"hidden_dim": 20}),
        ("Llama", GATED | {"weight_quantization": technique(["up_proj"], FOUR)}, {"intermediate_size": 20}),
        ("Llama", {"sparse_pruning": technique(["up_proj"], HALF)}, {"intermediate_size": 40, "head_dim": 4}),
    ],
)
def test_a_pruned_model_is_read_by_from_pretrained(
    name: str, techniques: dict, left: dict[str, int], tmp_path: Path
) -> None:
    """To the bit, and again from what was read."""
    model = pruned(name, techniques)
    for folder in ("first", "second"):
        export_pretrained(model, tmp_path / folder)
        back, about = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)  # type: ignore[attr-defined]
        assert not any(about.values())
        assert {key: getattr(back.config, key) for key in left} == left
        with torch.no_grad():
            assert torch.equal(back(batch(9)).logits, model(batch(9)).logits)
        model = back


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "techniques", "says"),
    [
        (
            "Llama",
            {"row_pruning": technique([r"layers\.1.*up_proj"], HALF, [[r"1.*gate_proj", r"1.*down_proj"]])},
            r"one intermediate_size for all layers, .* several \(40 in model.layers.0.mlp.gate_proj.weight, .*; 20 in",
        ),
        (
            "GPT-2",
            {"head_pruning": technique(["attn.c_proj"], HALF, [["c_attn"]], num_heads=6)},
            r"cannot express .*c_attn.weight has shape \(24, 36\), and would have \(24, 72\); use export_compressed",
        ),
        (
            "BERT",
            {
                "head_pruning": technique(
                    ["attention.output.dense"], HALF, [["self.query", "self.key", "self.value"]], num_heads=6
                )
            },
            r"cannot express .*query.weight has shape \(12, 24\), and would have \(24, 24\); use export_compressed",
        ),
        ("Llama", {"activation_quantization": technique(["up_proj"], {"bits": 8})}, "has quantized inputs"),
    ],
)
def test_sizes_that_a_configuration_cannot_express_are_refused(
    name: str, techniques: dict, says: str, tmp_path: Path
) -> None:
    model = pruned(name, techniques)
    before = model.config.to_dict()  # type: ignore[operator,union-attr]
    with pytest.raises(ValueError, match=says):
        export_pretrained(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists() and model.config.to_dict() == before  # type: ignore[operator,union-attr]


def test_what_is_no_cleaned_model_of_transformers_is_refused(tmp_path: Path) -> None:
    armed = init_compression(MODELS["Llama"].build(), config(row_pruning=MLP))
    with pytest.raises(ValueError, match="not permanent yet: call redundancy_clean"):
        export_pretrained(armed, tmp_path / "folder")
    with pytest.raises(TypeError, match="expected a model of transformers, got Linear: use export_compressed"):
        export_pretrained(nn.Linear(2, 2), tmp_path / "folder")
    (tmp_path / "file").touch()

    def write(transport: Transport) -> None:
        export_pretrained(MODELS["Llama"].build(), tmp_path / "file" / "folder", transport)

    with pytest.raises(OSError, match="cannot be written"):
        run_ranks(2, write)
