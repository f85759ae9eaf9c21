"""Inference: ranks, cache, batches, int8, requests and what is refused. transformers' models are small and untrained
but where perplexity is measured."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from family import same
from torch import Tensor, nn
from train.model import GPT, ModelSize, build_model

from onebit import zero
from onebit.checkpoint.files import CheckpointError
from onebit.comm import PeerError, SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import InferenceEngine, init_inference
from onebit.zero.inference import engine as engines
from onebit.zero.inference.config import read_inference_config
from onebit.zero.inference.engine import outputs_of
from onebit.zero.inference.packed import linear, quantize_rows
from onebit.zero.inference.plan import ServeRun, is_gathered, token_plan

SIZE = ModelSize(layers=2, width=64, heads=4, context=64)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="pip install onebit[transformers]"
)


def of_models(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test of transformers' models, which takes seconds."""
    return pytest.mark.slow(needs_transformers(test))


def gpt() -> GPT:
    return build_model(SIZE, seed=3)


MIXED: dict[str, object] = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWS: dict[str, tuple[str, dict[str, object]]] = {
    "mistral": ("Mistral", {}),
    "phi3 in windows": ("Phi3", {}),
    "qwen2 in windows": ("Qwen2", {"use_sliding_window": True, **MIXED}),
    "gemma2": ("Gemma2", {"head_dim": 16, **MIXED}),
    "gemma3": ("Gemma3", {"head_dim": 16, **MIXED}),
    "gpt-oss in windows": ("GptOss", {"num_local_experts": 4, "head_dim": 16, **MIXED}),
    "olmo3": ("Olmo3", {"layer_types": ["sliding_attention"] * 2}),
}
"""Models of transformers with layers that look back over 6 tokens: the family, and more of its configuration."""
LONG_ROPE: dict[str, object] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 12,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
}  # fmt: skip
GROUPED: dict[str, tuple[str, dict[str, object]]] = {
    **{kind: (family, {"sliding_window": 6, **more}) for kind, (family, more) in WINDOWS.items()},
    **{kind: (kind.capitalize(), {}) for kind in ("llama", "phi3", "olmo2")},
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 6}
        | {"num_experts_per_tok": 3, "num_key_value_heads": 4},
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"] * 2}),
    "phi3 of two lengths": (
        "Phi3",
        {"original_max_position_embeddings": 12, "rope_parameters": LONG_ROPE, "initializer_range": 0.2}
        | {"num_hidden_layers": 3},
    ),
}
"""With four heads over two of keys."""


@functools.cache
def of_transformers(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(3)
    ids = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind in GROUPED:
        family, more = GROUPED[kind]
        heads = {"num_key_value_heads": 2, "max_position_embeddings": 64}
        config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
        return getattr(transformers, f"{family}ForCausalLM")(config_class(**ids | shape | heads | more)).eval()
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **ids)
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "gpt neo":
        neo = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6}
        config = transformers.GPTNeoConfig(hidden_size=64, max_position_embeddings=64, **neo, **ids)
        return transformers.GPTNeoForCausalLM(config).eval()
    if kind == "opt":
        opt = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64}
        return transformers.OPTForCausalLM(transformers.OPTConfig(**shape, **opt, **ids)).eval()
    config = transformers.BertConfig(**shape, vocab_size=256)
    cls = transformers.BertForSequenceClassification if kind == "bert classes" else transformers.BertModel
    return cls(config).eval()


def model_of(kind: str) -> nn.Module:
    return gpt() if kind == "gpt" else of_transformers(kind)


SLOW = [pytest.mark.slow, needs_transformers]
OTHERS = ("gpt2", "llama", "opt", *WINDOWS)
DECODERS = ["gpt", *(pytest.param(kind, marks=SLOW) for kind in OTHERS)]


def prompts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def logits_of(model: Callable[..., object], tokens: Tensor) -> Tensor:
    return outputs_of(model(tokens))


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("shape", [(0, 7), (1, 7), (3, 7), (2, 0, 7), (2, 3, 7), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of a matrix as it lies and transposed, of no rows, of inputs with gaps, with and without a bias, compiled."""
    x, matrix = torch.randn(shape).to(dtype), torch.randn(5, 7).to(dtype)
    apart = torch.randn(*shape[:-1], 14).to(dtype)[..., ::2]
    turned, tolerance = matrix.t().contiguous().t(), {"rtol": 1e-5, "atol": 1e-5} if dtype != torch.bfloat16 else {}
    for inputs, bias in itertools.product((x, apart), (None, torch.randn(5).to(dtype))):
        expected = torch.nn.functional.linear(inputs, matrix, bias)
        for weight in (matrix, turned):
            torch.testing.assert_close(linear(inputs, weight, bias), expected, **tolerance)


INT8 = """
import torch
from onebit.zero import init_inference

for width in (1, 8, 17, 24, 100):
    for activation in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(width, 7))
        engine = init_inference(model, dtype="int8", quant={"activation": {"enabled": activation}})
        for rows in (4, 1, 70, 0):
            for x in (torch.randn(rows, width), torch.randn(width, rows).t(), torch.randn(rows, 2 * width)[:, ::2]):
                assert ((engine(x) - model(x)).abs() < 0.1).all(), (width, activation, rows, x.stride())
table = torch.nn.Sequential(torch.nn.Embedding(10, 20))
assert ((init_inference(table, dtype="int8")(torch.arange(10)) - table(torch.arange(10))).abs() < 0.05).all()
"""


@pytest.mark.processes
def test_int8_of_any_width_and_batch() -> None:
    """In a process, which ends where torch's product reads behind a row. Inputs with gaps and transposed, too."""
    done = subprocess.run([sys.executable, "-c", INT8], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-300:])


@pytest.mark.slow
def test_a_compiled_product_is_the_same() -> None:
    """In one graph; and what the compiler is told of its shapes, strides and effects is so."""
    x, matrix, bias = torch.randn(2, 3, 8), torch.randn(8, 6).t(), torch.randn(6)
    compiled = torch.compile(lambda x: linear(x, matrix, bias) * 2, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (1, 2):
            assert torch.equal(compiled(x[:rows]), linear(x[:rows], matrix, bias) * 2)
            torch.library.opcheck(torch.ops.onebit.onednn_linear, (x[:rows], matrix, bias))


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    "kind", [*DECODERS, *(pytest.param(kind, marks=SLOW) for kind in ("phi3", "olmo2", "bert", "bert classes"))]
)
def test_ranks_give_the_logits_and_tokens_of_one(kind: str) -> None:
    """Two ranks, and four of the models of our own and BERT; many others have two heads of keys."""
    model, ranks, (short, text) = model_of(kind), 4 if kind in ("gpt", "bert") else 2, prompts(5, 21)

    def serve(transport: SimTransport) -> tuple[Tensor, list[Tensor]]:
        engine = init_inference(model, tensor_parallel={"tp_size": ranks}, transport=transport)
        tokens = [] if kind.startswith("bert") else engine.generate([short, text], max_new_tokens=12)
        return logits_of(engine, text[None]), tokens

    whole = logits_of(model, text[None])
    alone = [] if kind.startswith("bert") else init_inference(model).generate([short, text], max_new_tokens=12)
    for logits, tokens in run_ranks(ranks, serve):
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)  # sums in another order
        assert same(tokens, alone)


@of_models
@pytest.mark.parametrize(("kind", "ranks"), [("llama", 4), ("phi3", 2), ("mixtral", 4)])
def test_widths_that_ranks_do_not_divide(kind: str, ranks: int) -> None:
    """Of the head's outputs, between the two halves of an MLP, and in experts, of which some ranks have one more."""
    config = copy.deepcopy(of_transformers(kind).config)
    torch.manual_seed(5)
    config.vocab_size, config.intermediate_size, config.num_key_value_heads = 257, 41, 4  # type: ignore[union-attr]
    config._experts_implementation = "eager"  # type: ignore[union-attr]  # torch's grouped product takes no odd widths
    model, (text,) = type(of_transformers(kind))(config).eval(), prompts(9)  # type: ignore[call-arg]
    whole, answer = logits_of(model, text[None]), model.generate(text[None], max_new_tokens=8)

    def serve(transport: SimTransport, dtype: str) -> tuple[Tensor, Tensor, int]:
        engine = init_inference(model, mp_size=ranks, transport=transport, dtype=dtype)
        return logits_of(engine, text[None]), engine.generate(text[None], max_new_tokens=8), engine.held_bytes  # type: ignore[return-value]

    held = init_inference(model).held_bytes
    for logits, tokens, bytes_of_rank in run_ranks(ranks, functools.partial(serve, dtype="fp32")):
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)
        assert torch.equal(tokens, answer) and bytes_of_rank < 0.75 * held
    for logits, *_ in run_ranks(ranks, functools.partial(serve, dtype="int8")):
        assert float((logits - whole).abs().max() / whole.abs().max()) < 0.05


def test_layers_narrower_than_the_ranks() -> None:
    """A rank may have no output, or no input, at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    policy = {"0": "colwise", "2": "rowwise", "3": "colwise_gather_output", "4": "rowwise_split_input"}
    x = torch.randn(4, 5)
    for out in run_ranks(4, lambda t: init_inference(model, mp_size=4, injection_policy=policy, transport=t)(x)):
        torch.testing.assert_close(out, model(x).detach(), rtol=0, atol=1e-6)


def test_groups_of_ranks_serve_side_by_side() -> None:
    def serve(transport: SimTransport) -> tuple[int, list[Tensor]]:
        engine = init_inference(gpt(), tensor_parallel={"tp_size": 2}, transport=transport)
        first = transport.rank // 2
        return engine.transport.world_size, engine.generate(prompts(7, 4)[first : first + 1], max_new_tokens=4)

    alone = [init_inference(gpt()).generate([prompt], max_new_tokens=4) for prompt in prompts(7, 4)]
    for rank, (size, tokens) in enumerate(run_ranks(4, serve)):
        assert size == 2 and same(tokens, alone[rank // 2])


def test_sampled_tokens_are_those_of_rank_0_on_all() -> None:
    def serve(transport: SimTransport) -> list[Tensor]:
        engine = init_inference(gpt(), mp_size=2, transport=transport)
        return engine.generate(prompts(6), max_new_tokens=16, do_sample=True)  # no seed: ranks would differ

    first, second = run_ranks(2, serve)
    assert same(first, second)


def test_a_plan_by_name_and_deepspeeds_form_of_it() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.blocks = nn.Embedding(10, 8), nn.Sequential(Block(), Block())

        def forward(self, ids: Tensor) -> Tensor:
            return self.blocks(self.table(ids))

    torch.manual_seed(0)
    model, ids = Plain(), torch.arange(10)[None]
    policies: list[object] = [{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, {Block: ("down",)}]
    for policy in policies:
        engines = run_ranks(
            2, lambda t, p=policy: init_inference(model, mp_size=2, injection_policy=p, transport=t)(ids)
        )
        for out in engines:
            torch.testing.assert_close(out, model(ids).detach(), rtol=0, atol=1e-5)
    wrong: list[tuple[object, str]] = [
        (None, r"blocks\.\*\.up, blocks\.\*\.down"),
        ({"blocks.*.side": "colwise"}, "matches no linear"),
        ({"blocks.*.up": "colwise"}, "gives nothing: .* cuts what belongs together"),
        ({"blocks.*.up": "colwise_gather_output", "blocks.*.down": "packed_colwise:4"}, "gives nothing"),
        ({"blocks.*.up": "sideways"}, "the style 'sideways', unknown here"),
        ({Block: ("side",)}, "not all of"),
        ("up", "expected injection_policy as"),
    ]
    for policy, said in wrong:
        with pytest.raises((ValueError, TypeError), match=said):
            run_ranks(2, lambda t, p=policy: init_inference(model, mp_size=2, injection_policy=p, transport=t))


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_torchs_encoder_over_ranks_is_the_whole_one(dtype: str) -> None:
    """Its fast path in evaluation reads the weights of layers and calls none; with a mask it takes nested tensors."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    policy = {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}
    x, is_pad = torch.randn(3, 5, 32), torch.arange(5) >= torch.tensor([[3], [5], [5]])
    whole, masked = encoder(x).detach(), encoder(x, src_key_padding_mask=is_pad).detach()

    def serve(transport: SimTransport) -> tuple[Tensor, Tensor]:
        engine = init_inference(encoder, mp_size=2, injection_policy=policy, transport=transport, dtype=dtype)
        return engine(x), engine(x, src_key_padding_mask=is_pad)  # type: ignore[return-value]

    for plain, with_mask in run_ranks(2, serve):
        torch.testing.assert_close(plain, whole, rtol=0, atol=1e-5 if dtype == "fp32" else 0.05)
        torch.testing.assert_close(with_mask[~is_pad], masked[~is_pad], rtol=0, atol=1e-5 if dtype == "fp32" else 0.05)


@pytest.mark.parametrize("policy", [{"2": "colwise"}, {"0": "colwise"}, {"0": "packed_colwise:2"}])
def test_a_plan_of_a_model_without_tokens_is_looked_at_in_its_first_call(policy: dict[str, str]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="cuts what belongs together"):
        run_ranks(2, lambda t: init_inference(model, mp_size=2, injection_policy=policy, transport=t)(x))
    right = {"0": "colwise", "2": "rowwise"}
    for out in run_ranks(2, lambda t: init_inference(model, mp_size=2, injection_policy=right, transport=t)(x)):
        torch.testing.assert_close(out, model(x).detach(), rtol=0, atol=1e-6)


@of_models
def test_experts_are_in_int8_and_divided_over_ranks() -> None:
    model, (text,) = model_of("mixtral"), prompts(12)
    whole, expected = init_inference(model).held_bytes, logits_of(model, text[None])

    def serve(transport: SimTransport, dtype: str) -> tuple[Tensor, Tensor, int]:
        engine = init_inference(model, mp_size=transport.world_size, transport=transport, dtype=dtype)
        return logits_of(engine, text[None]), engine.generate(text[None], max_new_tokens=6), engine.held_bytes

    answer = model.generate(text[None], max_new_tokens=6)  # type: ignore[operator]
    for ranks, dtype, share in [(1, "int8", 0.28), (2, "fp32", 0.6), (2, "int8", 0.18)]:
        for logits, tokens, held in run_ranks(ranks, functools.partial(serve, dtype=dtype)):
            assert held < share * whole
            off = float((logits - expected).abs().max() / expected.abs().max())
            assert off < (1e-5 if dtype == "fp32" else 0.05)
            assert torch.equal(tokens, answer) or dtype == "int8"


@of_models
def test_experts_with_biases_and_interleaved_gates_are_divided() -> None:
    model, (text,) = model_of("gpt-oss"), prompts(12)
    expected = logits_of(model, text[None])
    policy = {"mlp.experts": "moe_tp_experts"}
    for dtype, tolerance in (("fp32", 1e-5), ("int8", 0.05)):
        serve = functools.partial(init_inference, model, mp_size=2, injection_policy=policy, dtype=dtype)
        for logits in run_ranks(2, lambda t, serve=serve: logits_of(serve(transport=t), text[None])):
            assert float((logits - expected).abs().max() / expected.abs().max()) < tolerance
    with pytest.raises(ValueError, match="cannot be 'colwise': 'moe_tp_experts' and 'experts_by_rank' are"):
        run_ranks(2, lambda t: init_inference(model, mp_size=2, injection_policy={"experts": "colwise"}, transport=t))


@of_models
@pytest.mark.parametrize(("kind", "ranks"), [("mixtral", 2), ("qwen2_moe", 4), ("gpt-oss", 2)])
def test_experts_are_divided_whole(kind: str, ranks: int) -> None:
    """With attention whole, by our name and by transformers' plan; and with attention divided as well.

    Six experts over four ranks: the first two have two.
    """
    model, (text,) = model_of(kind), prompts(12)
    whole, answer = logits_of(model, text[None]), model.generate(text[None], max_new_tokens=8)  # type: ignore[operator]
    halves = {f"self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in "qkvo"}
    policies = [{"mlp.experts": "experts_by_rank"}]
    if kind != "gpt-oss":
        policies.append(model.ep_plan)  # type: ignore[arg-type]
    if kind == "qwen2_moe":
        policies.append(policies[0] | halves | {"lm_head": "colwise_gather_output"})
    held = init_inference(model).held_bytes

    def serve(transport: SimTransport, policy: dict[str, str], dtype: str) -> tuple[Tensor, Tensor, int]:
        engine = init_inference(model, mp_size=ranks, injection_policy=policy, transport=transport, dtype=dtype)
        return logits_of(engine, text[None]), engine.generate(text[None], max_new_tokens=8), engine.held_bytes  # type: ignore[return-value]

    for policy, dtype in itertools.product(policies, ("fp32", "int8")):
        run = functools.partial(serve, policy=policy, dtype=dtype)
        if (kind, dtype) == ("gpt-oss", "int8"):
            with pytest.raises(ValueError, match="GptOssExperts in few bits cannot skip"):
                run_ranks(ranks, run)
            continue
        for logits, tokens, bytes_of_rank in run_ranks(ranks, run):
            off = float((logits - whole).abs().max() / whole.abs().max())
            assert off < (1e-5 if dtype == "fp32" else 0.05)
            assert bytes_of_rank < 0.9 * held and (torch.equal(tokens, answer) or dtype == "int8")


@needs_transformers
def test_fewer_experts_than_ranks_are_refused() -> None:
    model, policy = model_of("mixtral"), {"mlp.experts": "experts_by_rank"}
    with pytest.raises(ValueError, match=r"experts has 4 experts for 8 ranks: use 'moe_tp_experts'"):
        run_ranks(8, lambda t: init_inference(model, mp_size=8, injection_policy=policy, transport=t))


@of_models
def test_a_plan_that_cuts_fused_matrices_apart_is_found_out() -> None:
    model, policy = model_of("gpt2"), {"h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise"}
    with pytest.raises(ValueError, match=r"off by .*packed_colwise"):
        run_ranks(2, lambda t: init_inference(model, mp_size=2, injection_policy=policy, transport=t))


# ---------------------------------------------------------------- the cache and batches


@pytest.mark.parametrize("kind", DECODERS)
def test_decoding_over_the_cache_is_one_pass_over_all(kind: str) -> None:
    model, (text,) = model_of(kind), prompts(24)
    engine = init_inference(model)
    steps = [engine.step(text[None, :10], 0)] + [engine.step(text[None, k : k + 1], k) for k in range(10, 24)]
    whole = logits_of(model, text[None])[:, 9:]
    torch.testing.assert_close(torch.stack(steps, 1), whole, rtol=0, atol=1e-5)
    text = text[None, :7]
    for _ in range(12):
        text = torch.cat([text, logits_of(model, text)[:, -1].argmax(1)[:, None]], 1)
    assert torch.equal(engine.generate(text[:, :7], max_new_tokens=12, eos_token_id=[]), text)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_batch_of_unequal_prompts_is_each_alone(kind: str) -> None:
    engine, rows = init_inference(model_of(kind)), prompts(1, 9, 30)
    batch = engine.generate(rows, max_new_tokens=10)
    assert same(batch, [engine.generate([row], max_new_tokens=10)[0] for row in rows])
    padded = torch.stack([torch.cat([row.new_zeros(30 - len(row)), row]) for row in rows])
    mask = torch.stack([(torch.arange(30) >= 30 - len(row)).long() for row in rows])
    as_tensor = engine.generate(padded, attention_mask=mask, max_new_tokens=10)
    assert isinstance(as_tensor, Tensor) and torch.equal(as_tensor[:, 30:], torch.stack([row[-10:] for row in batch]))
    assert torch.equal(engine.generate(input_ids=padded, attention_mask=mask, max_new_tokens=10), as_tensor)
    tokenized = {"input_ids": padded.flip(1).tolist(), "attention_mask": mask.flip(1).tolist()}  # on the right
    backwards = engine.generate([row.flip(0) for row in rows], max_new_tokens=10)
    assert same(engine.generate(**tokenized, max_new_tokens=10), backwards)
    steps = torch.tensor(list(engine.stream(**tokenized, max_new_tokens=10)))
    assert torch.equal(steps, torch.stack([row[-10:] for row in backwards], 1))


@of_models
@pytest.mark.parametrize(
    ("keys", "backend"),
    [
        ({}, ""),
        ({"mp_size": 2}, ""),
        ({"pipeline_parallel": {"pp_size": 2}}, ""),
        ({"kernel_inject": True}, "eager"),
        pytest.param({"kernel_inject": True}, "inductor", marks=pytest.mark.thorough),
    ],
)
def test_rows_have_the_angles_of_their_own_length(keys: dict, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LongRoPE has other angles beyond 12 tokens. Rows below, beyond and across that have transformers' own tokens.

    Which angles a compiled step takes is decided as it is traced, whatever the backend.
    """
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, backend=backend, fullgraph=True))
    model, asked = of_transformers("phi3 of two lengths"), prompts(3, 9, 11, 12, 13, 30)
    alone = [model.generate(prompt[None], max_new_tokens=12)[0] for prompt in asked]  # type: ignore[operator]
    padded = torch.stack([torch.cat([torch.zeros(13 - len(row), dtype=torch.int64), row]) for row in asked[1:5]])

    def serve(transport: SimTransport) -> tuple[list[Tensor], list[Tensor], Tensor]:
        engine = init_inference(model, transport=transport, **keys)
        mask = torch.tensor([[0] * (13 - len(row)) + [1] * len(row) for row in asked[1:5]])
        together = engine.generate(padded, max_new_tokens=12, attention_mask=mask)
        return (
            [engine.generate([prompt], max_new_tokens=12)[0] for prompt in asked],
            list(engine.generate(asked, max_new_tokens=12)),
            together[:, 13:],
        )

    for one_by_one, together, of_padded in run_ranks(1 if "kernel_inject" in keys or not keys else 2, serve):
        assert same(one_by_one, alone) and same(together, alone)
        assert same(list(of_padded), [row[-12:] for row in alone[1:5]])


@of_models
def test_logits_beyond_the_border_of_longrope_need_the_whole_row() -> None:
    model, (text,) = of_transformers("phi3 of two lengths"), prompts(20)
    engine, whole = init_inference(model), logits_of(model, text[None])
    engine.step(text[None, :12], 0)
    with pytest.raises(
        ValueError, match=r"1 tokens from slot 12 on make rows of more than 12.* whole rows with slot 0"
    ):
        engine.step(text[None, 12:13], 12)
    torch.testing.assert_close(engine.step(text[None, :19], 0), whole[:, 18], rtol=0, atol=1e-4)
    torch.testing.assert_close(engine.step(text[None, 19:], 19), whole[:, 19], rtol=0, atol=1e-4)


def test_end_tokens_end_their_rows_alone() -> None:
    engine, rows = init_inference(gpt()), prompts(3, 8)
    free = engine.generate(rows, max_new_tokens=12)
    new = [row[-12:].tolist() for row in free]
    end = next(token for token in new[0] if token not in new[1])
    stop = new[0].index(end) + 1
    first, second = engine.generate(rows, max_new_tokens=12, eos_token_id=end)
    assert first.tolist() == free[0].tolist()[: 3 + stop] and torch.equal(second, free[1])
    steps = list(engine.stream(rows, max_new_tokens=12, eos_token_id=end))
    assert [step[0] for step in steps] == new[0][:stop] + [None] * (12 - stop) and [step[1] for step in steps] == new[1]
    both = torch.stack([rows[0], rows[0]])
    assert engine.generate(both, max_new_tokens=12, eos_token_id=[end]).shape == (2, 3 + stop)


def test_a_row_is_served_while_it_is_made() -> None:
    engine = init_inference(gpt())
    stream = engine.stream(prompts(5), max_new_tokens=59)
    assert [next(stream)[0]] == engine.generate(prompts(5), max_new_tokens=1)[0][5:].tolist()


def test_streams_that_take_turns_are_each_alone() -> None:
    model, (first, second) = gpt(), prompts(9, 8)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # so that a wrong cache shows in the tokens
    engine = init_inference(model)
    alone = [list(engine.stream([row], max_new_tokens=8)) for row in (first, second)]
    streams = [engine.stream([row], max_new_tokens=8) for row in (first, second)]
    taken = list(zip(*streams, strict=True))
    logits = engine.step(first[None], 0)
    engine.generate([second], max_new_tokens=2)
    again = torch.stack([logits, engine.step(second[None, :1], 9)])
    assert [list(steps) for steps in zip(*taken, strict=True)] == alone
    whole = logits_of(engine, torch.cat([first, second[:1]])[None])[0, 8:, None]
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-3)


# ---------------------------------------------------------------- what transformers' own generate does


OPTIONS: list[dict[str, object]] = [
    {"repetition_penalty": 1.8, "use_cache": True},
    {"use_cache": False},
    {"bad_words_ids": [[5], [7, 9]], "no_repeat_ngram_size": 2},
    {"eos_token_id": 77, "min_new_tokens": 8, "exponential_decay_length_penalty": (3, 1.9)},
    {"eos_token_id": [3, 4], "forced_eos_token_id": 7, "suppress_tokens": [1, 2], "begin_suppress_tokens": [8]},
    {"do_sample": True},
    {"do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.6, "min_p": 0.01},
    {"do_sample": True, "typical_p": 0.5, "renormalize_logits": True, "repetition_penalty": 1.3},
]


@pytest.fixture
def llama() -> nn.Module:
    """Of sure opinions, and with a generation_config that a test may change."""
    model = copy.deepcopy(of_transformers("llama"))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


@of_models
def test_generation_is_transformers_own(llama: nn.Module) -> None:
    """Greedy and drawn from the same seed, by options and by the model's generation_config, over ranks as well."""
    text = torch.stack(prompts(9, 9, 9))

    def theirs(**options: object) -> Tensor:
        torch.manual_seed(7)
        return llama.generate(text, max_new_tokens=14, **options)  # type: ignore[operator]

    for options in OPTIONS:
        engine = init_inference(llama)
        assert torch.equal(engine.generate(text, max_new_tokens=14, seed=7, **options), theirs(**options)), options
    llama.generation_config.update(**OPTIONS[-1])  # type: ignore[union-attr,operator]
    serve = functools.partial(init_inference, llama, mp_size=2)
    answers = run_ranks(2, lambda t: serve(transport=t).generate(text, max_new_tokens=14, seed=7))
    assert torch.equal(answers[0], theirs()) and torch.equal(answers[1], theirs())


@of_models
def test_the_generation_config_is_followed(llama: nn.Module) -> None:
    llama.generation_config.update(repetition_penalty=1.8, bad_words_ids=[[5]])  # type: ignore[union-attr,operator]
    rows = prompts(9, 4)
    expected = [llama.generate(row[None], max_new_tokens=14)[0] for row in rows]  # type: ignore[operator]
    assert same(init_inference(llama).generate(rows, max_new_tokens=14), expected)


@of_models
def test_pads_without_a_mask_are_no_tokens(llama: nn.Module) -> None:
    text = torch.stack(prompts(9, 9, 9)).clamp(min=10)
    text[0, :4] = text[1, :1] = text[2, 3] = 0
    llama.generation_config.update(pad_token_id=0, eos_token_id=9)  # type: ignore[union-attr,operator]
    engine = init_inference(llama)
    for options in ({}, {"repetition_penalty": 1.6}, {"pad_token_id": 9}):  # the last: one that ends rows is a token
        expected = llama.generate(text, max_new_tokens=9, **options)  # type: ignore[operator]
        assert torch.equal(engine.generate(text, max_new_tokens=9, **options), expected)
    own = init_inference(gpt())
    assert torch.equal(own.generate(text[:1], max_new_tokens=4, pad_token_id=0)[:, 9:],
                       own.generate(text[:1, 4:], max_new_tokens=4)[:, 5:])  # fmt: skip
    text[0, -1] = 0
    refused(engine, "padded on the right", text, max_new_tokens=3)


@of_models
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 3}, "this asks for beam_search"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"stop_strings": ["a"]}, "stop_strings=.* it takes a tokenizer"),
        ({"return_dict_in_generate": True}, "the answer is tokens"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"temperature": 0.5}, "temperature has no effect without do_sample"),
        ({"max_length": 20}, "takes no max_length"),
        ({"repetition_penalti": 2.0}, "takes no repetition_penalti"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(llama: nn.Module, options: dict, said: str) -> None:
    refused(init_inference(llama), said, prompts(5), max_new_tokens=3, **options)
    if {"num_beams", "guidance_scale"} & options.keys():
        llama.generation_config.update(**options)  # type: ignore[union-attr,operator]
        refused(init_inference(llama), said, prompts(5), max_new_tokens=3)
        init_inference(llama).generate(prompts(5), max_new_tokens=3, **dict.fromkeys(options, 1))  # type: ignore[arg-type]


# ---------------------------------------------------------------- sampling


def test_top_p_is_of_what_top_k_has_left() -> None:
    """Of three tokens the third is needed for so much of what the three hold, of which all 256 hold far more."""
    engine, (text,) = init_inference(gpt()), prompts(6)
    logits, three = logits_of(engine, text[None])[0, -1].topk(3)
    share = float(logits.softmax(0)[:2].sum() + 1) / 2
    rows = text[None].expand(400, 6)
    drawn = engine.generate(rows, max_new_tokens=1, do_sample=True, top_k=3, top_p=share, seed=1)[:, -1]
    assert set(drawn.tolist()) == set(three.tolist())


@of_models
@pytest.mark.parametrize("how", [{"top_k": 3}, {"top_p": 0.6}, {"temperature": 0.3, "top_k": 50, "top_p": 0.9}])
def test_the_rules_are_transformers_processors(how: dict[str, float]) -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from onebit.zero.inference.requests import Sampling

    logits = torch.randn(20, 60).round(decimals=1) * 2  # with ties
    made = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    expected = LogitsProcessorList([made[name](value) for name, value in how.items()])(None, logits)
    assert torch.equal(Sampling(do_sample=True, **how)(torch.empty(0), logits), expected)  # type: ignore[arg-type]


@of_models
@pytest.mark.parametrize("how", [{"temperature": 0.7, "top_k": 0}, {"temperature": 1.6, "top_k": 30, "top_p": 0.9}])
def test_drawn_tokens_have_the_distribution_of_transformers_processors(how: dict[str, float]) -> None:
    """Pearson's chi-square of 6000 draws: within 4 standard deviations, √(2·df), of its mean, the degrees of freedom.

    Tokens that are expected fewer than 5 times are counted together. Temperatures of .7 and 1 are told apart.
    """
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    model, draws, text = gpt(), 6000, prompts(6)[0][None]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # so that some tokens are likely, whatever the model begins with
            p.mul_(3) if p.dim() < 2 else p.normal_(std=0.06, generator=generator)
    made = {"temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    rules = LogitsProcessorList([made[name](value) for name, value in how.items() if value])
    logits_1V = logits_of(model, text)[:, -1]
    drawn = init_inference(model).generate(text.expand(draws, 6), max_new_tokens=1, do_sample=True, seed=1, **how)  # type: ignore[arg-type]
    found_V = drawn[:, -1].bincount(minlength=256).double()  # type: ignore[call-overload]

    def deviations(share_V: Tensor) -> float:
        is_common_V = share_V * draws >= 5
        bins = torch.stack([found_V, share_V.double() * draws])
        rare = bins[:, ~is_common_V].sum(1, keepdim=True)
        bins = torch.cat([bins[:, is_common_V], rare[:, : int(rare[1] >= 5)]], 1)
        freedom = bins.shape[1] - 1
        assert freedom > 3
        return (float(((bins[0] - bins[1]) ** 2 / bins[1]).sum()) - freedom) / (2 * freedom) ** 0.5

    share_V = rules(None, logits_1V)[0].softmax(0)
    assert not found_V[share_V == 0].any() and abs(deviations(share_V)) < 4
    cooler_V = share_V ** (1 / 0.7)
    assert deviations(cooler_V / cooler_V.sum()) > 6


def test_a_seed_repeats_and_one_candidate_is_greedy() -> None:
    engine, rows = init_inference(gpt()), prompts(4, 6)
    draw = functools.partial(engine.generate, rows, max_new_tokens=20, do_sample=True)
    assert same(draw(seed=5), draw(seed=5)) and not same(draw(seed=5), draw(seed=6))
    assert not same(draw(), draw())
    assert same(draw(top_k=1), engine.generate(rows, max_new_tokens=20))


# ---------------------------------------------------------------- int8 and dtypes


def text_of_python() -> Tensor:
    return torch.tensor(list((inspect.getsource(inspect) + inspect.getsource(functools)).encode()))


@functools.cache
def trained(kind: str) -> nn.Module:
    """A few steps: enough that a wrong matrix shows in the perplexity."""
    torch.manual_seed(0)
    model, text = model_of(kind).train(), text_of_python()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        at = torch.randint(len(text) - 49, (8,))
        windows = torch.stack([text[k : k + 49] for k in at])
        logits = outputs_of(model(windows[:, :-1]))
        nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def perplexity(model: Callable[..., object]) -> float:
    windows = text_of_python()[: 49 * 40].view(40, 49)
    logits = logits_of(model, windows[:, :-1])
    return float(nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).exp())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=needs_transformers)])
def test_few_bits_keep_the_perplexity(kind: str) -> None:
    model = trained(kind)
    whole = init_inference(model)
    before = perplexity(whole)
    assert before < 40 < perplexity(model_of("gpt"))  # it has learned something that could be lost
    eight = init_inference(model, dtype="int8")
    assert perplexity(eight) == pytest.approx(before, rel=0.01)
    assert eight.held_bytes <= 0.27 * whole.held_bytes
    both = init_inference(model, dtype="int8", quant={"activation": {"enabled": True}})
    assert perplexity(both) == pytest.approx(before, rel=0.01) and perplexity(both) != perplexity(eight)
    assert perplexity(init_inference(model, dtype="bf16")) == pytest.approx(before, rel=0.01)
    four = init_inference(model, dtype="int4")
    assert perplexity(four) == pytest.approx(before, rel=0.02) and perplexity(four) != perplexity(eight)
    table = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)) / 4
    assert four.held_bytes <= 0.2 * (whole.held_bytes - 4 * table) + table
    few = text_of_python()[None, :20]  # the product of few rows is another one
    torch.testing.assert_close(logits_of(eight, few), logits_of(whole, few), rtol=0, atol=0.25)
    assert logits_of(eight, few).dtype == torch.float32


@pytest.mark.parametrize(("dtype", "near"), [("int8", 0.02), ("int4", 0.2)])
def test_few_bits_over_ranks_are_those_alone(dtype: str, near: float) -> None:
    (text,) = prompts(20)
    whole, alone = logits_of(gpt(), text[None]), logits_of(init_inference(gpt(), dtype=dtype), text[None])
    ranks = run_ranks(2, lambda t: logits_of(init_inference(gpt(), dtype=dtype, mp_size=2, transport=t), text[None]))
    assert torch.equal(ranks[0], ranks[1])
    # Scales of parts of rows are finer: not the same numbers, but as near to float32.
    for served in (alone, ranks[0]):
        torch.testing.assert_close(served, whole, rtol=0, atol=near * float(whole.abs().max()))


def test_rows_are_within_half_a_step() -> None:
    w = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 7)[:, None]
    w[3] = 0
    rows, scale = quantize_rows(w)
    assert rows.dtype == torch.int8 and ((rows * scale[:, None] - w).abs() <= 0.5001 * scale[:, None]).all()
    assert (rows.abs().amax(1)[[0, 1, 2, 4, 5, 6]] == 127).all() and not rows[3].any()


def test_the_given_model_stays_as_it_is() -> None:
    model = gpt().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    shared = init_inference(model)
    init_inference(model, dtype="bf16")
    init_inference(model, dtype="int8")
    assert model.training and all(p.requires_grad and torch.equal(p, before[n]) for n, p in model.named_parameters())
    with torch.no_grad():
        model.blocks[0].mlp_in.weight.mul_(2)
    torch.testing.assert_close(logits_of(shared, prompts(9)[0][None]), logits_of(model, prompts(9)[0][None]))


def test_an_engine_that_trains_is_served() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    training = zero.initialize(model=gpt(), config=config)[0]
    found = logits_of(init_inference(training), prompts(9)[0][None])
    expected = logits_of(init_inference(training.module), prompts(9)[0][None])
    trained = logits_of(training.module, prompts(9)[0][None])
    training.close()
    assert torch.equal(found, expected) and not torch.distributed.is_initialized()
    torch.testing.assert_close(found, trained, rtol=1e-5, atol=1e-5)


def test_an_engine_with_a_step_under_way_is_served_with_that_step() -> None:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}},
        "onebit": {"delay": 1},
    }
    training, (text,) = zero.initialize(model=gpt(), config=config)[0], prompts(12)
    for _ in range(4):
        training.backward(training(text[None]).logsumexp(2).mean())
        training.step()
    assert training.optimizer.step_under_way is not None
    served = logits_of(init_inference(training), text[None])
    training.eval()
    expected = logits_of(init_inference(training.module), text[None])
    training.close()
    assert torch.equal(served, expected)


# ---------------------------------------------------------------- from files


def test_weights_come_from_checkpoints(tmp_path: Path) -> None:
    model, (text,) = gpt(), prompts(12)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    training = zero.initialize(model=model, config=config)[0]
    training.backward(training(text[None]).logsumexp(2).mean())
    training.step()
    training.save_checkpoint(tmp_path / "steps")
    training.save_checkpoint(tmp_path / "tags", tag="best")
    training.close()
    zero.export_weights(model, tmp_path / "model.safetensors", SimTransport())
    expected = logits_of(init_inference(model), text[None])
    torch.testing.assert_close(expected, logits_of(model, text[None]), rtol=1e-5, atol=1e-5)
    assert not torch.equal(expected, logits_of(init_inference(gpt()), text[None]))
    with torch.device("meta"):
        empty = GPT(SIZE)
    for place in ["steps", "tags", {"path": tmp_path / "tags", "tag": "best"}, "model.safetensors", "."]:
        where = place if isinstance(place, dict) else str(tmp_path / str(place))
        assert torch.equal(logits_of(init_inference(empty, checkpoint=where), text[None]), expected), place
    for where, said in [
        (tmp_path / "nowhere", "holds no weights"), ({"path": tmp_path / "tags", "tag": "worst"}, "it holds best"),
        ({"file": tmp_path}, 'expected "path"'),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            init_inference(empty, checkpoint=where)
    other = build_model(ModelSize(layers=1, width=64, heads=4, context=64), 0)
    with pytest.raises(CheckpointError, match=r"which has no blocks\.1\."):
        init_inference(other, checkpoint=tmp_path / "steps")
    with pytest.raises(ValueError, match="has no values"):
        init_inference(empty)
    next((tmp_path / "steps").glob("step_*/*.distcp")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        init_inference(empty, checkpoint=tmp_path / "steps")


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_frozen_weights_of_a_run_in_bfloat16_are_served_with_the_others(tmp_path: Path, dtype: str | None) -> None:
    """A checkpoint has float32 masters of those that are trained, and the frozen ones as they are."""
    model, (text,) = gpt(), prompts(12)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    options = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "bf16": {"enabled": True}}
    training = zero.initialize(model=model, config={"train_batch_size": 1, **options})[0]
    training.backward(training(text[None]).float().logsumexp(2).mean())
    training.step()
    training.save_checkpoint(tmp_path)
    training.close()
    plain = gpt()
    plain.load_state_dict(zero.read_checkpoint_weights(tmp_path))
    expected = logits_of(init_inference(plain, dtype=dtype), text[None])
    assert torch.equal(logits_of(init_inference(gpt(), checkpoint=tmp_path, dtype=dtype), text[None]), expected)


@needs_transformers
def test_a_folder_without_all_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw the others, and what is served would be noise."""
    from safetensors.torch import load_file, save_file

    of_transformers("llama").save_pretrained(tmp_path)
    assert init_inference(str(tmp_path)).module.lm_head.weight.numel()
    file, lost = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    save_file({name: x for name, x in weights.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"lacks weights \({lost}\)"):
        init_inference(str(tmp_path))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        init_inference(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OwnForCausalLM"]}))
    with pytest.raises(ValueError, match="transformers has no OwnForCausalLM"):
        init_inference(str(tmp_path))


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_model_with_running_statistics_in_another_dtype(dtype: torch.dtype, name: str) -> None:
    """As `model.to(dtype)` makes it, buffers of the checkpoint included."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 2))
    model(torch.randn(8, 3, 5, 5))  # statistics of a batch
    x = torch.randn(2, 3, 5, 5)
    engine = init_inference(model, dtype=name)
    expected = copy.deepcopy(model).eval().to(dtype)(x.to(dtype))
    assert torch.equal(engine(x.to(dtype)), expected) and model[1].running_mean.dtype == torch.float32


@of_models
def test_gpt2_in_bfloat16_is_gpt2() -> None:
    model, (text,) = of_transformers("gpt2"), prompts(20)
    engine = init_inference(model, dtype="bf16")
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    expected = logits_of(model, text[None])
    torch.testing.assert_close(logits_of(engine, text[None]).float(), expected, rtol=0, atol=0.05)
    assert engine.held_bytes == pytest.approx(init_inference(model).held_bytes / 2, rel=0.01)


@of_models
def test_a_folder_of_transformers_is_a_model(tmp_path: Path) -> None:
    model = of_transformers("gpt2")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert same(init_inference(str(tmp_path)).generate(prompts(9), max_new_tokens=4),
                init_inference(model).generate(prompts(9), max_new_tokens=4))  # fmt: skip
    tied = init_inference(model, checkpoint=tmp_path, dtype="int8")
    assert tied.module.lm_head.matrix is tied.module.transformer.wte.matrix  # one matrix still


@of_models
def test_ranks_of_one_process_load_a_folder_at_once(tmp_path: Path) -> None:
    """from_pretrained changes the classes of the process while it loads: models made afterwards tie their weights."""
    model = of_transformers("gpt2")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    expected = init_inference(model).generate(prompts(9), max_new_tokens=4)
    for found in run_ranks(
        4, lambda t: init_inference(str(tmp_path), mp_size=2, transport=t).generate(prompts(9), max_new_tokens=4)
    ):
        assert same(found, expected)
    made = of_transformers("gpt2")
    assert made.lm_head.weight is made.transformer.wte.weight


# ---------------------------------------------------------------- compiled


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_compiled_step_decodes_the_same_and_is_compiled_once(dtype: str) -> None:
    from torch._dynamo.utils import counters

    plain, compiled = init_inference(gpt(), dtype=dtype), init_inference(gpt(), dtype=dtype, kernel_inject=True)
    rows = prompts(3, 20)
    counters.clear()
    assert same(compiled.generate(rows, max_new_tokens=30), plain.generate(rows, max_new_tokens=30))
    assert same(compiled.generate(prompts(5, 2), max_new_tokens=9), plain.generate(prompts(5, 2), max_new_tokens=9))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_each_kind_of_model_is_compiled_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes 8 variants of the same code, and with fullgraph refuses the next."""
    compiled, graphs = torch.compile, []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, backend=backend, fullgraph=True))
    monkeypatch.setattr(engines, "_compiled_forward", cache(engines._compiled_forward.__wrapped__))
    # not by monkeypatch, which deletes torch's options when it is done
    with torch._dynamo.config.patch(recompile_limit=1):
        for layers, seed in ((1, 3), (2, 3), (1, 4), (2, 4)):
            model = build_model(replace(SIZE, layers=layers), seed=seed)
            plain, fast = init_inference(model), init_inference(model, kernel_inject=True)
            assert same(fast.generate(prompts(3), max_new_tokens=3), plain.generate(prompts(3), max_new_tokens=3))
    assert len(graphs) == 2


# ---------------------------------------------------------------- what is refused


def refused(engine: InferenceEngine, said: str, *args: object, **options: object) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        engine.generate(*args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_an_answer_holds_all_tokens_whatever_the_type_of_the_prompt(dtype: torch.dtype) -> None:
    """As transformers' own, whose prompts are joined to tokens in int64."""
    engine, tokens = init_inference(gpt()), torch.arange(5, 105, 20)[None]
    how = {"max_new_tokens": 16, "do_sample": True, "seed": 1}
    expected = engine.generate(tokens, **how)
    found = engine.generate(tokens.to(dtype), **how)
    assert int(expected.max()) > 127 and found.dtype == torch.int64 and torch.equal(found, expected)


def test_what_only_the_model_has_is_named() -> None:
    """Scripts for DeepSpeed put its engine in the place of the model, as in a pipeline of transformers."""
    engine = init_inference(gpt())
    with pytest.raises(AttributeError, match=r"has no parameters; its module has: engine\.module\.parameters"):
        engine.parameters()
    with pytest.raises(AttributeError, match=r"InferenceEngine has no frobnicate$"):
        engine.frobnicate()
    assert copy.copy(engine).module is engine.module


def test_requests_that_cannot_be_answered() -> None:
    engine = init_inference(gpt(), max_out_tokens=32)
    refused(engine, r"a prompt of 30 tokens and 3 new ones do not fit into the cache of 32: .* up to the 64",
            prompts(4, 30), max_new_tokens=3)  # fmt: skip
    assert len(engine.generate(prompts(4, 30), max_new_tokens=2)[1]) == 32
    refused(engine, "at least one token", [[]], max_new_tokens=3)
    refused(engine, "at least 1", prompts(3), max_new_tokens=0)
    refused(engine, "no effect without do_sample", prompts(3), max_new_tokens=3, temperature=0.5)
    refused(engine, "temperature > 0", prompts(3), max_new_tokens=3, do_sample=True, temperature=0.0)
    refused(engine, "temperature that is too small", prompts(3), max_new_tokens=3, do_sample=True, temperature=1e-310)
    refused(engine, "num_beams", prompts(3), max_new_tokens=3, num_beams=2)
    refused(engine, "a tensor .B, T. of tokens", [0.5], max_new_tokens=3)
    refused(engine, "a tensor .B, T. of tokens", torch.ones(1, 3, dtype=torch.bool), max_new_tokens=3)
    refused(engine, "padded on the right", torch.ones(1, 3, dtype=torch.int64), max_new_tokens=3,
            attention_mask=torch.tensor([[1, 1, 0]]))  # fmt: skip
    refused(engine, "expected prompts, or input_ids=, and not both", [[1]], input_ids=[[1]], max_new_tokens=3)
    refused(engine, "expected prompts, or input_ids=, and not both", max_new_tokens=3)
    refused(engine, r"of one text tokenizer\(\[text\]\)", input_ids=[1, 2], attention_mask=[1, 1], max_new_tokens=3)
    (listed,), (drawn,) = (engine.generate(given([[1, 2]]), max_new_tokens=3) for given in (list, iter))
    assert torch.equal(listed, drawn)
    for texts in ("", "Once", ["Once"]):
        refused(engine, r"of one text tokenizer\(\[text\]\)", texts, max_new_tokens=3)
    with pytest.raises(TypeError, match="transport must be a transport, got 'gloo'"):
        init_inference(gpt(), transport="gloo")  # type: ignore[arg-type]
    refused(engine, "of the shape of the prompts", input_ids=[[1, 2]], attention_mask=[[1]], max_new_tokens=3)
    with pytest.raises(ValueError, match="raise max_out_tokens"):
        engine.step(torch.zeros(1, 4, dtype=torch.int64), 30)


@of_models
def test_models_that_do_not_decode() -> None:

    refused(
        init_inference(of_transformers("bert")),
        "BertModel does not generate: it is an encoder",
        prompts(3),
        max_new_tokens=1,
    )

    class OfPeft(nn.Sequential):
        merge_and_unload = None

    refused(
        init_inference(OfPeft(of_transformers("llama"))), r"pass its merge_and_unload\(\)", prompts(3), max_new_tokens=1
    )
    chunks = copy.deepcopy(of_transformers("llama"))
    chunks.config.layer_types = ["chunked_attention", "full_attention"]  # type: ignore[union-attr]
    refused(init_inference(chunks), "neither to all tokens nor over a window", prompts(3), max_new_tokens=1)


def test_heads_that_ranks_do_not_divide() -> None:
    with pytest.raises(ValueError, match="heads is 4, which 8 ranks do not divide"):
        run_ranks(8, lambda t: init_inference(gpt(), mp_size=8, transport=t))
    five = build_model(ModelSize(layers=1, width=20, heads=5, context=8), seed=3)
    with pytest.raises(ValueError, match="heads is 5, which 2 ranks do not divide"):
        run_ranks(2, lambda t: init_inference(five, mp_size=2, transport=t))
    with pytest.raises(ValueError, match="tp_size is 2 and there are 3 ranks"):
        run_ranks(3, lambda t: init_inference(gpt(), mp_size=2, transport=t))


def test_ranks_that_hold_or_ask_different_things() -> None:
    with pytest.raises(ValueError, match=r"rank 1 has another bytes.weight than rank 0"):
        run_ranks(2, lambda t: init_inference(build_model(SIZE, t.rank), mp_size=2, transport=t))
    with pytest.raises(ValueError, match="rank 1 generates from other prompts or options"):
        run_ranks(2, lambda t: init_inference(gpt(), mp_size=2, transport=t).generate([[t.rank]], max_new_tokens=2))


def test_a_rank_that_dies_ends_the_others() -> None:
    seen: dict[int, BaseException] = {}

    def serve(transport: SimTransport) -> None:
        stream = init_inference(gpt(), mp_size=2, transport=transport).stream(prompts(4), max_new_tokens=9)
        try:
            for k, _ in enumerate(stream):
                if transport.rank == 1 and k == 2:
                    raise KeyboardInterrupt
        except BaseException as error:
            seen[transport.rank] = error
            raise

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, serve, timeout_s=20)
    assert isinstance(seen[0], PeerError) and seen[0].ranks == (1,)


def test_a_cache_by_the_name_of_newer_transformers() -> None:
    """5.24 calls the argument `cache`."""

    class Renamed(GPT):
        def forward(self, text_BT, attention_mask=None, position_ids=None, cache=None):  # type: ignore[no-untyped-def]
            return super().forward(text_BT, attention_mask, position_ids, cache)

    renamed = Renamed(SIZE)
    renamed.load_state_dict(gpt().state_dict())
    expected, got = (init_inference(model).generate(prompts(4, 7), max_new_tokens=6) for model in (gpt(), renamed))
    assert same(expected, got)


def test_a_cache_that_a_model_does_not_use() -> None:
    class Forgetful(GPT):
        def forward(self, text_BT, attention_mask=None, position_ids=None, past_key_values=None):  # type: ignore[no-untyped-def]
            return super().forward(text_BT)

    with pytest.raises(ValueError, match=r"Forgetful over a cache gives other outputs than in one pass \(off by"):
        init_inference(Forgetful(SIZE))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"dtype": "int2"}, 'dtype: expected "fp32", "bf16", "fp16", "int8" or "int4" or null, got "int2"'),
        ({"max_out_token": 9}, "max_out_tokens"),
        ({"max_out_tokens": 0}, "expected an integer at least 1"),
        ({"tensor_parallel": {"tp_size": 0}}, "tensor_parallel.tp_size: expected an integer at least 1"),
        ({"tensor_parallel": {"tp_group": 1}}, "pass transport="),
        ({"mp_size": 2, "tensor_parallel": {"tp_size": 4}}, "given twice"),
        ({"quant": {"weight": {"num_bits": 2}}}, "expected one of 8, 4"),
        (
            {"dtype": "int8", "quant": {"weight": {"num_bits": 4}}},
            "'int8' and quant.weight.num_bits 4 exclude each other",
        ),
        ({"dtype": "int4", "quant": {"activation": {"enabled": True}}}, "needs weights in int8"),
        ({"quant": {"enabled": False, "activation": {"enabled": True}}}, "needs weights in int8"),
        ({"enable_cuda_graph": True}, "enable_cuda_graph needs CUDA"),
    ],
)
def test_keys_that_cannot_be(keys: dict[str, object], said: str) -> None:
    if torch.cuda.is_available() and "enable_cuda_graph" in keys:
        pytest.skip("there is CUDA here")
    with pytest.raises((ValueError, TypeError), match=said):
        read_inference_config(keys)


def test_keys_by_deepspeeds_names() -> None:
    read = read_inference_config(
        {"dtype": torch.half, "replace_with_kernel_inject": True, "max_tokens": 99}, tp={"tp_size": 2}
    )
    assert (read.dtype, read.kernel_inject, read.max_out_tokens, read.tensor_parallel.tp_size) == ("fp16", True, 99, 2)
    assert read.weight_bits is None
    assert read_inference_config({"dtype": "bf16", "quant": {"weight": {"num_bits": 8}}}).weight_bits == 8
    for four in (
        {"dtype": "int4"},
        {"quant": {"weight": {"num_bits": 4}}},
        {"dtype": "int4", "quant": {"enabled": True}},
    ):
        assert read_inference_config(four).weight_bits == 4 and read_inference_config(four).compute_dtype is None
    assert read_inference_config(read) is read


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize(("ranks", "rows"), [(1, 3), (2, 3), (2, 1000), (4, 3), (4, 1000)])
def test_the_plan_counts_the_bytes_that_a_token_sends(ranks: int, rows: int) -> None:
    """Of many rows on four ranks the sums are all-reduced; of others each rank's parts go to all."""
    assert is_gathered(4 * rows * SIZE.width, ranks) == ((ranks, rows) != (4, 1000))

    def serve(transport: SimTransport) -> int:
        engine = init_inference(gpt(), mp_size=ranks, transport=transport)
        token = torch.zeros(rows, 1, dtype=torch.int64)
        engine.step(token, 0)
        before = engine.transport.sent_bytes
        engine.step(token, 1)
        return engine.transport.sent_bytes - before

    run = ServeRun(params=1e5, layers=SIZE.layers, width=SIZE.width, rows=rows)
    assert run_ranks(ranks, serve) == [token_plan(run, ranks).sent_bytes] * ranks


def test_the_plan_splits_what_is_large_over_what_is_fast() -> None:
    small, large = ServeRun(25e6, 8, 512), ServeRun(7e9, 32, 4096)
    assert token_plan(small, 2).seconds > token_plan(small, 1).seconds
    assert token_plan(large, 2).seconds < token_plan(large, 1).seconds
    slow = ServeRun(7e9, 32, 4096, overhead_s=1.0)
    for ranks in (1, 2):  # what no split makes less
        assert token_plan(slow, ranks).seconds == pytest.approx(token_plan(large, ranks).seconds + 1)
    with pytest.raises(ValueError, match="above 0"):
        ServeRun(1e6, 0, 64)
