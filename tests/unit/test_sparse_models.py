"""Sparse attention in models: equal to their own attention with the layout as a mask; longer positions; refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train.model import ModelSize, build_model

from onebit.zero.sparse_attention import (
    SparseSelfAttention,
    SparsityConfig,
    build_layout,
    extend_positions,
    replace_attention,
)

SIZE = ModelSize(layers=2, width=32, heads=4, context=48)
VOCABULARY, LENGTH = 64, 41
SPARSE = {"mode": "bigbird", "block": 8, "num_sliding_window_blocks": 1, "different_layout_per_head": True}


def library() -> Any:
    return pytest.importorskip("transformers", reason="install onebit[transformers] to test Hugging Face's models")


def gpt2(**options: object) -> nn.Module:
    transformers = library()
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, **options
    )
    return build(transformers.GPT2LMHeadModel, config)


SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 48, "num_hidden_layers": 2}
SHAPE |= {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def bert(**options: object) -> nn.Module:
    transformers = library()
    config = transformers.BertConfig(**SHAPE, **options)
    return build(transformers.BertForMaskedLM, config)


def llama(**options: object) -> nn.Module:
    """Grouped-query heads: 4 of queries, 2 of keys."""
    transformers = library()
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, **options)
    return build(transformers.LlamaForCausalLM, config)


def build(kind: Callable[[Any], nn.Module], config: object) -> nn.Module:
    torch.manual_seed(1)
    model = kind(config).eval()
    for p in model.parameters():  # so that attention matters: the libraries' start is nearly uniform
        nn.init.normal_(p, std=0.3)
    return model


MODELS = {"gpt2": (gpt2, "transformer.h.1.attn"), "bert": (bert, "bert.encoder.layer.1.attention.self")}
MODELS["llama"] = (llama, "model.layers.1.self_attn")


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.slow
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_hugging_face_is_itself_under_the_layouts_mask(name: str, has_padding: bool) -> None:
    """The same model with its own eager attention and a table of all pairs; logits and gradients."""
    make, module = MODELS[name]
    model, text = make(attn_implementation="eager"), tokens()
    sparse = copy.deepcopy(model)
    assert module in replace_attention(sparse, SPARSE)
    config = sparse.get_submodule(module).sparse_attention.config
    assert config.is_causal == (name != "bert")
    is_token = torch.ones_like(text)
    if has_padding:
        is_token[1, LENGTH - 9 :] = 0
    seen = build_layout(config, 4, LENGTH).visible(LENGTH)[None] & is_token.bool()[:, None, None]
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    padding = {"attention_mask": is_token} if has_padding else {}
    expected, found = model(text, attention_mask=added).logits, sparse(text, **padding).logits
    real = is_token.bool()
    assert (found - expected)[real].abs().max() < 1e-5 * expected.abs().max()
    expected[real].square().mean().backward()
    found[real].square().mean().backward()
    for (p_name, wanted), p in zip(model.named_parameters(), sparse.parameters(), strict=True):
        scale = wanted.grad.abs().max()
        assert (p.grad - wanted.grad).abs().max() <= 1e-4 * scale + 1e-7, p_name


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama])
def test_generation_with_a_cache_is_generation_without(make: Callable[[], nn.Module]) -> None:
    """Greedy, with padding on the left of one prompt."""
    model, text = make(), tokens(19)
    replace_attention(model, SPARSE)
    is_token = torch.ones_like(text)
    is_token[0, :5] = 0
    options = {"attention_mask": is_token, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(text, use_cache=True, **options), model.generate(text, use_cache=False, **options)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_longer_texts_with_more_positions(name: str) -> None:
    """The first positions give what they gave; the table's rows repeat."""
    make, _ = MODELS[name]
    model = make()
    replace_attention(model, {"mode": "dense", "block": 16})
    before = model(tokens()).logits
    extend_positions(model, 120)
    assert (model(tokens()).logits - before).abs().max() < 1e-5
    assert model(tokens(120)).logits.shape == (2, 120, VOCABULARY)
    assert model.config.max_position_embeddings == 120
    table = {"gpt2": "transformer.wpe", "bert": "bert.embeddings.position_embeddings"}.get(name)
    if table is not None:
        weight = model.get_submodule(table).weight
        assert torch.equal(weight[48:96], weight[:48]) and weight.requires_grad
        with pytest.raises(ValueError, match="at least 120, which the model already has, got 64"):
            extend_positions(model, 64)


@pytest.mark.slow
def test_dropout_is_the_models() -> None:
    """GPT-2's own: at work in training, and not in evaluation."""
    model = gpt2(attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0)
    replace_attention(model, SPARSE)
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)
    model.train()
    assert not torch.equal(model(tokens()).logits, model(tokens()).logits)


@pytest.mark.slow
def test_attention_to_another_sequence_stays_whole() -> None:
    model = gpt2(add_cross_attention=True, attn_implementation="sdpa")
    other, is_token = torch.randn(2, 7, 32), torch.ones(2, 7)
    is_token[1, 4:] = 0
    given = {"encoder_hidden_states": other, "encoder_attention_mask": is_token}
    expected = model(tokens(), **given).logits
    assert len(replace_attention(model, {"mode": "dense"})) == 2
    assert (model(tokens(), **given).logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda model: model(tokens(), attention_mask=torch.ones(2, 1, LENGTH, LENGTH)), "defeats a sparse layout"),
        (
            lambda model: model(tokens(), use_cache=False, position_ids=torch.arange(LENGTH)[None] % 20),
            "one sequence in each row",
        ),
        (lambda model: model(tokens(), output_attentions=True), "has no output_attentions"),
    ],
)
def test_what_a_layout_does_not_know_is_refused(call: Callable[[nn.Module], object], error: str) -> None:
    model = llama()
    replace_attention(model, SPARSE)
    with pytest.raises(ValueError, match=error):
        call(model)


@pytest.mark.slow
def test_attention_that_contradicts_the_model_is_refused() -> None:
    """A bidirectional layout in GPT-2 would show it the bytes that it predicts."""
    model = gpt2()
    with pytest.raises(ValueError, match="the model's attention is unidirectional"):
        replace_attention(model, SPARSE | {"attention": "bidirectional"})
    assert not any(isinstance(module, SparseSelfAttention) for module in model.modules())


def test_our_model_is_itself_under_a_dense_layout() -> None:
    model, text = build_model(SIZE, seed=0), torch.randint(256, (2, LENGTH + 1))
    loss = model.loss(text)
    assert replace_attention(model, {"mode": "dense", "block": 16}) == ["blocks.0", "blocks.1"]
    assert abs((model.loss(text) - loss).item()) < 1e-6


def test_a_byte_sees_no_farther_than_its_layout() -> None:
    """A window of one block back, 2 layers: a byte 3 blocks back has no say, one 2 blocks back has."""
    model = build_model(SIZE, seed=0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(1))
    replace_attention(model, SparsityConfig(mode="local_sliding_window", block=8))
    text = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(3))
    last = model(text)[0, -1]
    for block, is_seen in ((0, False), (1, True), (2, True)):
        other = text.clone()
        other[0, 8 * block] += 1
        assert torch.equal(model(other % 256)[0, -1], last) != is_seen


def test_our_model_takes_longer_texts_with_more_positions() -> None:
    model, text = build_model(SIZE, seed=0), torch.randint(256, (2, 200))
    names = list(model.state_dict())
    replace_attention(model, {"mode": "fixed", "block": 8}, max_positions=200)
    assert model(text).shape == (2, 200, 256) and model.context == 200
    assert list(model.state_dict()) == names


def test_a_model_without_known_attention_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Sequential has no attention module that onebit knows: expected .*GPT2Attention"
    ):
        replace_attention(nn.Sequential(nn.Linear(4, 4)), SPARSE)
