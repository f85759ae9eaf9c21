"""Inference by layers: stages give the tokens of one rank, hold their own layers, and send what the formula counts."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from family import same
from test_inference import SLOW, WINDOWS, gpt, logits_of, of_transformers, prompts
from torch import Tensor, nn

from onebit.comm import SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import InferenceEngine, init_inference

pytestmark = SLOW
KINDS = ["gpt2", "llama", "opt", "phi3", "mixtral", *WINDOWS]


@functools.cache
def deep(kind: str, layers: int, *, is_tied: bool = False) -> nn.Module:
    """A model of this kind with more layers, which change what comes: new ones hardly do."""
    config = copy.deepcopy(of_transformers(kind).config)
    setattr(config, "n_layer" if kind == "gpt2" else "num_hidden_layers", layers)
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]  # type: ignore[union-attr,index]
    config.initializer_range, config.tie_word_embeddings = 0.2, is_tied  # type: ignore[union-attr]
    torch.manual_seed(5)
    return type(of_transformers(kind))(config).eval()  # type: ignore[call-arg]


def staged(model: nn.Module, transport: SimTransport, **keys: Any) -> InferenceEngine:
    return init_inference(model, pipeline_parallel={"pp_size": transport.world_size}, transport=transport, **keys)


SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 4, "temperature": 0.8, "top_k": 30}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "stages"), [(2, 2), (4, 3), (5, 2)])
def test_stages_give_the_logits_and_tokens_of_one_rank(kind: str, layers: int, stages: int) -> None:
    """Windows, grouped queries, experts, tied tables; layers that the stages divide and others. Greedy and drawn."""
    model, (short, text) = deep(kind, layers, is_tied=layers == 5), prompts(5, 21)

    def serve(engine: InferenceEngine) -> list[Any]:
        tokens = engine.generate([short, text], max_new_tokens=12, eos_token_id=[])
        drawn = engine.generate([short], max_new_tokens=12, eos_token_id=[], **SAMPLED)
        streamed = list(engine.stream([text], max_new_tokens=4, eos_token_id=[]))
        return [*tokens, *drawn, torch.tensor(streamed), logits_of(engine, text[None]), engine.step(text[None], 0)]

    alone = serve(init_inference(model))
    assert torch.equal(alone[1][None], model.generate(text[None], max_new_tokens=12))  # type: ignore[operator]
    for found in run_ranks(stages, lambda transport: serve(staged(model, transport))):
        assert same(found[:4], alone[:4])
        for logits, expected in zip(found[4:], alone[4:], strict=True):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_in_few_bits_give_the_tokens_of_one_rank(dtype: str, is_tied: bool) -> None:
    """A tied head is packed as the table, which the last stage has, too."""
    model, asked = deep("llama", 4, is_tied=is_tied), prompts(3, 21)
    alone = init_inference(model, dtype=dtype)
    answers = alone.generate(asked, max_new_tokens=12, eos_token_id=[])
    for stages in (2, 3):
        found = run_ranks(
            stages, lambda t: staged(model, t, dtype=dtype).generate(asked, max_new_tokens=12, eos_token_id=[])
        )
        assert all(same(tokens, answers) for tokens in found)


@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_rank_holds_its_own_layers(dtype: str, is_tied: bool) -> None:
    """All ranks together hold what one does, and a second copy of what is tied and of the tables of rotations."""
    model = deep("llama", 6, is_tied=is_tied)
    whole = init_inference(model, dtype=dtype)
    found = run_ranks(3, lambda t: staged(model, t, dtype=dtype).held_bytes)
    table = whole.module.get_submodule("model.embed_tokens")
    twice = sum(x.nbytes for x in (*table.parameters(), *table.buffers())) if is_tied else 0
    rotations = sum(x.nbytes for x in whole.module.get_submodule("model.rotary_emb").buffers())
    assert sum(found) == whole.held_bytes + twice + 2 * rotations
    assert max(found) < 0.5 * whole.held_bytes


def test_the_head_weighs_in_where_layers_are_cut() -> None:
    """A head of four layers' weights leaves the last stage fewer layers; rank 0 has it, and rank 1 the table."""
    config = copy.deepcopy(of_transformers("llama").config)
    config.num_hidden_layers, config.vocab_size = 8, 2400  # type: ignore[union-attr]
    model = type(of_transformers("llama"))(config).eval()  # type: ignore[call-arg]

    def names(transport: SimTransport) -> set[str]:
        return {name for name, _ in staged(model, transport).module.named_parameters()}

    last, first = run_ranks(2, names)
    assert {name.split(".")[2] for name in last if name.startswith("model.layers")} == {"6", "7"}
    assert {"lm_head.matrix", "model.norm.weight"} <= last and "model.embed_tokens.weight" in first
    assert not last & first


# ---------------------------------------------------------------- what travels


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2), ("int8", 4)])
def test_sent_bytes_are_those_of_the_formula(dtype: str, itemsize: int) -> None:
    """A pass sends B·T·D elements from each stage to the next; each token is told to every rank but rank 0."""
    model, asked, most = deep("llama", 6), prompts(9, 21), 7

    def sent(transport: SimTransport) -> int:
        engine = staged(model, transport, dtype=dtype)
        before = engine.ranks.sent_bytes
        engine.generate(asked, max_new_tokens=most, eos_token_id=[])
        return engine.ranks.sent_bytes - before

    W, B, T, D = 3, len(asked), 21, 64
    agreed = (W - 1) * (16 + 64)  # a hash of the prompts and options
    activations, told = itemsize * B * D * (T + most - 1), 8 * B * most
    assert run_ranks(W, sent) == [agreed + told, agreed + activations + told, agreed + activations]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("model", "keys", "said"),
    [
        (gpt, {}, "pp_size divides the layers of decoders of transformers, and GPT is none"),
        (lambda: nn.Linear(2, 2), {}, "pp_size divides the layers of decoders, and Linear is none"),
        (lambda: of_transformers("bert"), {}, "pp_size divides the layers of decoders, and BertModel is none"),
        (lambda: of_transformers("llama"), {"pp_size": 3}, "pp_size is 3, and LlamaForCausalLM has 2 layers"),
        (lambda: of_transformers("llama"), {"tp_size": 2}, "tp_size 2 with pp_size 2"),
        (lambda: of_transformers("llama"), {"calibration": [], "dtype": "int4"}, "calibration"),
        (lambda: of_transformers("llama"), {"enable_cuda_graph": True}, "enable_cuda_graph with pp_size > 1"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(model: Any, keys: dict[str, Any], said: str) -> None:
    keys = dict(keys)
    stages, ranks = keys.pop("pp_size", 2), keys.pop("tp_size", 1)
    block = {"pipeline_parallel": {"pp_size": stages}, "tensor_parallel": {"tp_size": ranks}, **keys}
    whole = model()
    with pytest.raises(ValueError, match=said):
        run_ranks(stages, lambda transport: init_inference(whole, transport=transport, **block))


def test_layers_that_take_more_than_each_others_outputs_are_refused_by_name() -> None:
    """What the first stage alone has: of the embeddings, or of a layer before the last one."""
    model = copy.deepcopy(deep("llama", 3))
    base, layer = model.get_submodule("model"), model.get_submodule("model.layers.2")

    def with_tokens(_: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        return args, named | {"position_ids": named["position_ids"] + kept["tokens"]}

    kept: dict[str, Tensor] = {}
    base.register_forward_pre_hook(lambda _, __, named: kept.update(tokens=named["input_ids"]), with_kwargs=True)
    layer.register_forward_pre_hook(with_tokens, with_kwargs=True)
    with pytest.raises(ValueError, match=r"layers\.2 of LlamaForCausalLM takes more of the tokens"):
        run_ranks(2, lambda transport: staged(model, transport))
    skipping = copy.deepcopy(deep("llama", 3))
    skipping.get_submodule("model.layers.1").register_forward_hook(lambda _, __, x: x + 0)
    skipping.get_submodule("model.layers.2").register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    with pytest.raises(ValueError, match=r"layers\.2 of LlamaForCausalLM does not take the one tensor"):
        run_ranks(2, lambda transport: staged(skipping, transport))
