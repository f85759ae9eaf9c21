"""Inference by layers: stages give the tokens of one rank, hold their own layers, and send what the formula counts."""

from __future__ import annotations

import copy
import functools
import random
import threading
from typing import Any

import pytest
import torch
from family import same
from test_continuous_batch import answer_drawn, answers
from test_inference import SLOW, WINDOWS, gpt, logits_of, of_transformers, prompts
from torch import Tensor, nn

from onebit.comm import PeerError, SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import ContinuousBatch, InferenceEngine, init_inference
from onebit.zero.inference.plan import ServeRun, stage_plan, token_plan

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


CUTS = ((2, 2), (4, 3), (5, 2))


@pytest.mark.parametrize(
    ("kind", "layers", "stages"),
    [(kind, *CUTS[(k + n) % 3]) for k, kind in enumerate(KINDS) for n in range(3 if kind == "llama" else 1)],
)
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
def test_sent_bytes_are_those_of_the_formula_and_the_plan(dtype: str, itemsize: int) -> None:
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
    assert stage_plan(ServeRun(1e5, 6, D, dtype, rows=B), W).sent_bytes == itemsize * B * D
    assert run_ranks(W, sent) == [agreed + told, agreed + activations + told, agreed + activations]


def test_the_plan_prefers_layers_on_slow_networks() -> None:
    """Rows save reading for one request; their sums cost more than they save at 100 Mbit/s, and for products."""
    slow, fast = (ServeRun(7e9, 32, 4096, "bf16", rows=8, link_bits_per_s=rate) for rate in (1e8, 1e10))
    assert stage_plan(slow, 2).seconds < token_plan(slow, 2).seconds
    assert stage_plan(fast, 2).seconds > token_plan(fast, 2).seconds
    assert stage_plan(slow, 2).seconds > token_plan(slow, 1).seconds  # while weights are read, and not waited for
    many = ServeRun(7e9, 32, 4096, "bf16", rows=64, link_bits_per_s=1e8, flops_per_s=2e11)
    assert stage_plan(many, 4).seconds == pytest.approx(token_plan(many, 1).seconds / 4, rel=0.1)
    assert token_plan(many, 4).seconds > token_plan(many, 1).seconds
    assert stage_plan(many, 1).seconds == token_plan(many, 1).seconds
    with pytest.raises(ValueError, match="from 1 to the 32 layers, got 33"):
        stage_plan(many, 33)


# ---------------------------------------------------------------- requests


def batch_of(model: nn.Module, transport: SimTransport, **how: Any) -> ContinuousBatch | None:
    """The batch on rank 0; None on other ranks, whose part is done by then."""
    batch = ContinuousBatch(staged(model, transport), **how)
    if transport.rank == 0:
        return batch
    batch.follow()
    return None


@pytest.mark.parametrize(
    ("kind", "stages", "rows", "chunk"),
    [
        *(("llama", 2, 1, 4), ("gpt2", 2, 3, 4), ("gemma3", 2, 8, 100)),
        *(("llama", 3, 3, 4), ("gpt2", 3, 8, 100), ("gemma3", 3, 1, 4)),
    ],
)
def test_requests_are_answered_as_alone(kind: str, stages: int, rows: int, chunk: int) -> None:
    model = deep(kind, 4)
    alone = init_inference(model)
    asked = list(zip(prompts(1, 4, 5, 30, 60, 2, 17), (6, 1, 12, 30, 4, 9, 3), strict=True))
    expected = [alone.generate([prompt], max_new_tokens=most, eos_token_id=[])[0] for prompt, most in asked]

    def serve(transport: SimTransport) -> None:
        if batch := batch_of(model, transport, rows=rows, chunk=chunk):
            requests = [batch.add(prompt, max_new_tokens=most, eos_token_id=[]) for prompt, most in asked]
            assert same(answers(batch, requests), expected)
            (again,) = answers(batch, [batch.add(asked[4][0], max_new_tokens=4, eos_token_id=[])])
            assert torch.equal(again, expected[4])
            batch.close()

    run_ranks(stages, serve)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(k, marks=pytest.mark.thorough) for k in range(3, 6))])
def test_any_schedule_of_arrivals_and_cancels(seed: int) -> None:
    """As over one rank: drawn are arrivals, lengths, samples, shared beginnings, cancels and pauses."""
    draw, model = random.Random(seed), deep("llama", 4)
    reference = init_inference(model)

    def serve(transport: SimTransport) -> None:
        if batch := batch_of(model, transport, rows=rows, chunk=chunk):
            assert any(request.reused for request in answer_drawn(batch, draw, reference))
            batch.close()

    rows, chunk = draw.randint(1, 7), draw.randint(1, 20)
    run_ranks(draw.choice([2, 3, 4]), serve)


def test_stages_compute_at_the_same_time() -> None:
    """Two groups of rows, and the chunks of one long prompt: while rank 0 computes a pass, rank 1 computes the next.

    Each pass waits in a layer until the other rank is in the pass beside it: one after the other would never meet.
    """
    model, most = deep("llama", 2), 8
    (prompt,) = prompts(32)
    for asked, passes in (([prompt[:3], prompt[3:6]], 2 * most), ([prompt], 8)):
        meeting = threading.Barrier(2)

        def serve(transport: SimTransport, asked: list[Tensor], passes: int, meeting: threading.Barrier) -> None:
            engine = staged(model, transport)
            batch, own = ContinuousBatch(engine, rows=2, chunk=4), {0: range(passes - 1), 1: range(1, passes)}
            count = iter(range(1000))

            def meet(*_: object) -> None:
                if next(count) in own[transport.rank]:
                    meeting.wait(timeout=20)

            engine.module.get_submodule("model.layers")[1 - transport.rank].mlp.register_forward_hook(meet)  # type: ignore[operator]
            if transport.rank == 1:
                return batch.follow()
            answers(batch, [batch.add(tokens, max_new_tokens=passes // 2, eos_token_id=[]) for tokens in asked])
            return batch.close()

        run_ranks(2, functools.partial(serve, asked=asked, passes=passes, meeting=meeting))


# ---------------------------------------------------------------- failures and what is refused


def raising(tokens: Tensor, logits: Tensor) -> Tensor:
    raise ValueError("this rule fails")


def test_a_rule_that_fails_ends_its_request_alone() -> None:
    model = deep("llama", 3)
    expected = init_inference(model).generate([[2]], max_new_tokens=5, eos_token_id=[])

    def serve(transport: SimTransport) -> None:
        if batch := batch_of(model, transport, rows=3):
            bad = batch.add([1], max_new_tokens=5, repetition_penalty=1.3)
            good = batch.add([2], max_new_tokens=5, eos_token_id=[])
            assert bad._choice is not None
            bad._choice.groups[0].rules = raising
            assert same(answers(batch, [bad, good])[1:], expected)
            assert (bad.reason, bad.error, bad.tokens) == ("error", "this rule fails", [])
            batch.close()

    run_ranks(3, serve)


def test_a_rule_that_fails_in_generate_is_an_error_on_all_ranks() -> None:
    """Draws from logits that are not finite fail on rank 0, which alone has them."""
    model = copy.deepcopy(deep("llama", 2))
    told: list[str] = []

    def serve(transport: SimTransport) -> None:
        engine = staged(model, transport)
        if transport.rank == 0:
            engine.module.get_parameter("model.norm.weight").data.fill_(torch.nan)
        with pytest.raises(ValueError, match="rank 0 cannot choose a token: ") as error:
            engine.generate(prompts(4), max_new_tokens=3, **SAMPLED)
        told.append(str(error.value))

    run_ranks(2, serve)
    assert len(told) == 2 and told[0] == told[1]


def test_what_is_not_finite_ends_its_request_alone() -> None:
    """Later requests with the same prompt are as alone, also beside it in another group."""
    model = copy.deepcopy(deep("llama", 2))
    alone = init_inference(deep("llama", 2)).generate(prompts(19), max_new_tokens=8, eos_token_id=[])
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")  # whose memory the engine shares
    before = weight.detach().clone()

    def serve(transport: SimTransport) -> None:
        if batch := batch_of(model, transport, rows=2, chunk=4):
            weight.data[0] = torch.nan
            request = batch.add(prompts(19)[0], max_new_tokens=4)
            while request.reason is None:
                batch.step()
            assert request.reason == "error" and "not finite" in str(request.error)
            batch.step()
            weight.data.copy_(before)
            for _ in range(2):
                pair = [batch.add(prompts(19)[0], max_new_tokens=8, eos_token_id=[]) for _ in range(2)]
                assert same(answers(batch, pair), alone * 2)
            batch.close()

    run_ranks(2, serve)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_is_lost_ends_the_others(lost: int) -> None:
    model, seen = deep("llama", 3), {}

    def serve(transport: SimTransport) -> None:
        batch = ContinuousBatch(staged(model, transport), rows=2)
        if transport.rank == lost:
            raise KeyError("lost")
        with pytest.raises(PeerError) as told:
            if transport.rank != 0:
                batch.follow()
            request = batch.add([1], max_new_tokens=5)
            while request.reason is None:
                batch.step()
        seen[transport.rank] = told.value.ranks

    with pytest.raises(KeyError, match="lost"):
        run_ranks(3, serve)
    assert len(seen) == 2


def test_a_silent_rank_is_an_error_after_the_timeout() -> None:
    model = deep("llama", 3)

    def serve(transport: SimTransport) -> None:
        batch = ContinuousBatch(staged(model, transport), rows=2)
        if transport.rank == 0:
            batch.add([1], max_new_tokens=5)
            with pytest.raises(PeerError, match="rank"):
                for _ in range(3):
                    batch.step()
            done.set()
        done.wait(30)

    done = threading.Event()
    run_ranks(3, serve, timeout_s=3.0)


@pytest.mark.parametrize(
    ("model", "keys", "message"),
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
def test_what_cannot_be_cut_is_refused_by_name(model: Any, keys: dict[str, Any], message: str) -> None:
    keys = dict(keys)
    stages, ranks = keys.pop("pp_size", 2), keys.pop("tp_size", 1)
    block = {"pipeline_parallel": {"pp_size": stages}, "tensor_parallel": {"tp_size": ranks}, **keys}
    whole = model()
    with pytest.raises(ValueError, match=message):
        run_ranks(stages, lambda transport: init_inference(whole, transport=transport, **block))


def test_layers_that_take_more_than_each_others_outputs_are_refused_by_name() -> None:
    """What the first stage alone has: of the embeddings, or of a layer before the last one."""
    model = copy.deepcopy(deep("llama", 3))
    base, layer = model.get_submodule("model"), model.get_submodule("model.layers.2")

    def with_tokens(_: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        return args, named | {"position_ids": named["position_ids"] + kept.tokens}

    kept = threading.local()  # ranks are threads
    base.register_forward_pre_hook(lambda _, __, named: setattr(kept, "tokens", named["input_ids"]), with_kwargs=True)
    layer.register_forward_pre_hook(with_tokens, with_kwargs=True)
    with pytest.raises(ValueError, match=r"layers\.2 of LlamaForCausalLM takes more of the tokens"):
        run_ranks(2, lambda transport: staged(model, transport))
    skipping = copy.deepcopy(deep("llama", 3))
    skipping.get_submodule("model.layers.1").register_forward_hook(lambda _, __, x: x + 0)
    skipping.get_submodule("model.layers.2").register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    with pytest.raises(ValueError, match=r"layers\.2 of LlamaForCausalLM does not take the one tensor"):
        run_ranks(2, lambda transport: staged(skipping, transport))
