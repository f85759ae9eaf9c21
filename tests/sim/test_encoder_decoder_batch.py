"""Encoder-decoders in a running batch: each request is answered as alone, and as transformers' own generate does."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from family import same
from test_continuous_batch import answer_drawn, answers, over_ranks
from test_encoder_decoders import OF_TEXT, model_of
from torch import Tensor

pytest.importorskip("transformers", reason="pip install onebit[transformers]")

from study.model_cases import SERVED

from onebit.comm import SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import ContinuousBatch, InferenceEngine, init_inference

pytestmark = pytest.mark.slow

SLOTS = 40
ASKED = ((1, 6), (9, 12), (SLOTS, 1), (4, SLOTS - 1), (1, 1), (20, 9), (7, 12))
"""Tokens of inputs, and of their answers: a single one, all that a row has room for, and between."""


def served(kind: str, **options: object) -> InferenceEngine:
    return init_inference(model_of(kind), max_out_tokens=SLOTS, **options)  # type: ignore[arg-type]


def inputs_like(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 64, (length,), generator=generator) for length in lengths]


def theirs(model: Any, inputs: Tensor, most: int) -> Tensor:
    """transformers' greedy tokens, which nothing ends."""
    found = model.generate(inputs[None], max_new_tokens=most, do_sample=False, eos_token_id=-1)
    assert isinstance(found, Tensor)
    return found[0]


@pytest.mark.parametrize(
    ("kind", "rows", "chunk"), [*((kind, 3, 4) for kind in OF_TEXT), ("gated t5", 1, 4), ("bart", 8, 100)]
)
def test_each_is_answered_as_by_transformers(kind: str, rows: int, chunk: int) -> None:
    engine, inputs = served(kind), inputs_like(*(length for length, _ in ASKED))
    batch = ContinuousBatch(engine, rows, chunk)
    asked = list(zip(inputs, (most for _, most in ASKED), strict=True))
    requests = [batch.add(x, max_new_tokens=most, eos_token_id=[]) for x, most in asked]
    found = answers(batch, requests)
    assert same(found, [theirs(model_of(kind), x, most) for x, most in asked])
    assert {request.reason for request in requests} == {"length"} and not batch.running and not batch.waiting


@pytest.mark.parametrize(
    "name",
    [
        *("mBART", "M2M-100", "Pegasus", "Blenderbot", "PLBART", "Marian"),
        *("T5, odd heads", "mT5", "UMT5", "LongT5", "Switch"),
    ],
)
def test_positions_are_those_of_each_row(name: str) -> None:
    """Of every family that has its own tables of positions, or biases of distances. Drawn tokens differ from each
    other, so that one position too many is another answer."""
    engine = init_inference(SERVED[name].build(0.2).eval())
    batch = ContinuousBatch(engine, rows=3)
    asked: list[tuple[Tensor, dict]] = [
        (x % 20 + 3, {"max_new_tokens": most, "do_sample": True, "temperature": 2.0, "seed": most, "eos_token_id": []})
        for x, most in zip(inputs_like(1, 9, 4, 10, 3, 7), (6, 12, 3, 9, 11, 5), strict=True)
    ]
    requests = [batch.add(x, **how) for x, how in asked]
    alone = [engine.generate([x], **how)[0] for x, how in asked]
    assert same(answers(batch, requests), alone) and len({tuple(row.tolist()[-3:]) for row in alone}) > 3


@pytest.mark.parametrize("kind", OF_TEXT)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_any_schedule_of_arrivals_and_cancels(kind: str, seed: int) -> None:
    """Drawn: when requests come, how long inputs and answers are, which sample, which are cancelled and when. Memory
    stays as it is."""
    draw, engine = random.Random(seed), served(kind)
    batch = ContinuousBatch(engine, rows=draw.randint(2, 4), chunk=draw.randint(1, 20))

    def draw_inputs(draw: random.Random, _: object) -> list[int]:
        return [draw.randrange(3, 64) for _ in range(draw.randint(1, SLOTS))]

    requests = answer_drawn(batch, draw, engine, draw_inputs, words=64, ends=6)
    assert {"length", "stop", "cancelled"} <= {request.reason for request in requests}
    layers, heads = 2, 32  # keys and values of an answer's slots and of its inputs
    assert batch.cache_bytes == 2 * 2 * layers * batch.rows * SLOTS * heads * 4


@pytest.mark.parametrize("kind", OF_TEXT)
def test_inputs_are_encoded_once_and_nothing_is_kept_for_others(kind: str) -> None:
    """The encoder, and the keys and values of what it made, run once a request, when it has a row. The same inputs
    again are another request's."""
    engine, (x, y) = served(kind), inputs_like(9, 5)
    batch, calls = ContinuousBatch(engine, rows=2), dict[str, int]()
    for name, module in engine.module.named_modules():
        if name.endswith(("encoder_attn.k_proj", "EncDecAttention.v", "encoder")):
            module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    requests = [batch.add(each, max_new_tokens=8, eos_token_id=[]) for each in (x, y, x, x)]
    assert not calls
    found = answers(batch, requests)
    assert set(calls.values()) == {4} and len(calls) == 3  # the encoder, and one product in each of two layers
    assert [request.reused for request in requests] == [0] * 4
    assert same(found[2:], [found[0]] * 2)


def test_the_callers_tensor_may_be_written_again() -> None:
    engine, (x,) = served("bart"), inputs_like(9)
    batch, before = ContinuousBatch(engine, rows=2), x.clone()
    request = batch.add(x, max_new_tokens=6, eos_token_id=[])
    x.fill_(7)
    assert same(answers(batch, [request]), [theirs(model_of("bart"), before, 6)])
    assert request.inputs is not None and torch.equal(request.inputs, before)


@pytest.mark.parametrize("kind", OF_TEXT)
def test_options_are_of_each_request(kind: str) -> None:
    """Processors of transformers, also those that look at the encoder's inputs, and BART's forced first token."""
    engine, (x,) = served(kind), inputs_like(9)
    options: list[dict] = [
        {},
        {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
        {"do_sample": True, "seed": 4, "top_p": 0.9},
        {"encoder_repetition_penalty": 3.0},
        {"encoder_no_repeat_ngram_size": 1, "forced_bos_token_id": 9},
    ]
    batch = ContinuousBatch(engine, rows=3)
    requests = [batch.add(x, max_new_tokens=12, **how) for how in options]
    alone = [engine.generate([x], max_new_tokens=12, **how)[0] for how in options]
    assert same(answers(batch, requests), alone) and int(alone[-1][1]) == 9


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "fp32") for kind in OF_TEXT), ("gated t5", "int8"), ("bart", "int4")]
)
def test_ranks_follow_rank_0(kind: str, dtype: str) -> None:
    """In float32 with the tokens of one rank; inputs are longer than a message of a pass."""
    inputs = inputs_like(3, 20, 1, 9, SLOTS)

    def serve(transport: SimTransport) -> tuple[list[Tensor], list[Tensor]]:
        engine = served(kind, mp_size=2, transport=transport, dtype=dtype)
        alone = [engine.generate([x], max_new_tokens=9)[0] for x in inputs]
        return over_ranks(engine, inputs)[0], alone

    found, alone = run_ranks(2, serve)[0]
    assert same(found[:3] + found[4:], alone[:3] + alone[4:]) and found[3].tolist() == [1]
    if dtype == "fp32":
        one = served(kind)
        assert same(alone, [one.generate([x], max_new_tokens=9)[0] for x in inputs])


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_few_bits_decode_as_alone(dtype: str) -> None:
    engine = init_inference(copy.deepcopy(model_of("gated t5")), dtype=dtype, max_out_tokens=SLOTS)
    inputs = inputs_like(3, 20, 1, 9, SLOTS)
    batch = ContinuousBatch(engine, rows=3)
    found = answers(batch, [batch.add(x, max_new_tokens=9) for x in inputs])
    assert same(found, [engine.generate([x], max_new_tokens=9)[0] for x in inputs])


def test_what_is_not_finite_ends_its_request_alone() -> None:
    """Keys of inputs that are not finite stay in no row: the next ones there are shorter than a neighbour's, whose pass
    reads the rest of the row, too."""
    model = copy.deepcopy(model_of("gated t5"))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    batch = ContinuousBatch(init_inference(model, max_out_tokens=SLOTS), rows=2)
    bad, short, long = inputs_like(30, 3, 35)
    model.shared.weight.data[63] = torch.nan  # whose memory the engine shares
    bad, short, long = (x.clamp(max=62) for x in (bad, short, long))
    bad[7] = 63
    how: dict = {"max_new_tokens": 12, "eos_token_id": [], "suppress_tokens": [63]}
    neighbour, failed = batch.add(long, **how), batch.add(bad, **how)
    while failed.reason is None:
        batch.step()
    assert failed.reason == "error" and "not finite" in str(failed.error) and not failed.is_refused
    found = answers(batch, [neighbour, batch.add(short, **how)])
    assert same(found, [batch.engine.generate([x], **how)[0] for x in (long, short)])


def test_a_compiled_step_has_few_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths of inputs and the number of rows; a form for each would end at torch's limit. Nothing but
    torch's tracing is looked at here, which does not depend on the backend."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = copy.deepcopy(model_of("gated t5"))
    model.decoder.block = model.decoder.block[:1]
    engine = init_inference(model, max_out_tokens=SLOTS, kernel_inject=True)
    batch, plain = ContinuousBatch(engine, rows=3), init_inference(model, max_out_tokens=SLOTS)
    inputs = inputs_like(*range(1, 14))
    requests = [batch.add(x, max_new_tokens=2 + k % 5, eos_token_id=[]) for k, x in enumerate(inputs)]
    alone = [plain.generate([x], max_new_tokens=2 + k % 5, eos_token_id=[])[0] for k, x in enumerate(inputs)]
    assert same(answers(batch, requests), alone)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


# ---------------------------------------------------------------- what is refused


def test_what_cannot_be_answered_is_refused_before_it_joins() -> None:
    batch = ContinuousBatch(served("t5"), rows=2)
    for asked, how, said in (
        ([], {}, "inputs of at least one token"),
        ([3] * (SLOTS + 1), {}, f"inputs of {SLOTS + 1} tokens do not fit into the {SLOTS} that a row has"),
        ([3], {"max_new_tokens": SLOTS}, f"do not fit into the cache of {SLOTS}"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens"),
        ([3], {"max_new_tokens": 2.5}, "max_new_tokens as an integer, got 2.5"),
        ([-1], {}, "expected tokens from 0 to 63"),
        ([64], {}, "expected tokens from 0 to 63"),
        ([0.5], {}, "sequence of tokens"),
        ([3], {"temperature": 0.5}, "no effect without do_sample"),
        ([3], {"num_beams": 2}, "beam_search"),
        ([3], {"language": "en"}, "takes no language"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            batch.add(asked, **{"max_new_tokens": 3, **how})  # type: ignore[arg-type]
    assert not batch.waiting and not batch.step()


def test_models_that_a_batch_does_not_carry_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration encodes input_features"):
        ContinuousBatch(init_inference(model_of("whisper")))
    with pytest.raises(ValueError, match="LEDForConditionalGeneration does not decode rows of unlike positions"):
        ContinuousBatch(init_inference(SERVED["LED"].build(0.2)))


def test_a_model_with_one_position_for_all_rows_is_found_out() -> None:
    """BART's table of positions, read at the first row's alone."""
    model: Any = copy.deepcopy(model_of("bart"))
    engine = init_inference(model)
    table: Any = engine.module.get_decoder().embed_positions  # type: ignore[operator]
    table.register_forward_hook(lambda _, __, out: out[:, :1].expand_as(out) if out.dim() == 4 else out)
    with pytest.raises(ValueError, match="BartForConditionalGeneration gives rows of unlike positions other outputs"):
        ContinuousBatch(engine)
