"""Requests that join and leave a running batch: each is answered as alone, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from family import same
from test_inference import OTHERS, SLOW, WINDOWS, gpt, model_of, of_models, of_transformers, prompts
from torch import Tensor, nn

from onebit.comm import PeerError, SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import ContinuousBatch, InferenceEngine, init_inference
from onebit.zero.inference.batch import Request
from onebit.zero.inference.cache import CacheView, StaticCache

KINDS = (*OTHERS, "gpt neo")
KINDS_OF_KEYS = ("gpt2", "llama", "mistral", "gemma3", "gpt neo")
"""With positions in a table, as angles, in windows, in windows of some layers, and under a mask: what rows keep."""


def answers(batch: ContinuousBatch, requests: list[Request], most_steps: int = 2000) -> list[Tensor]:
    """Step until all of these have ended."""
    for _ in range(most_steps):
        if all(request.reason for request in requests):
            return [torch.cat([request.prompt, torch.tensor(request.tokens)]) for request in requests]
        batch.step()
    raise AssertionError([request.reason for request in requests])


def count_tokens(engine: InferenceEngine) -> list[int]:
    """The tokens that each pass of this engine computes, from now on."""
    run, counts = engine.run, []

    def counting(cache: StaticCache, tokens_BT: Tensor, *rest: object, **named: object) -> Tensor:
        counts.append(tokens_BT.numel())
        return run(cache, tokens_BT, *rest, **named)  # type: ignore[arg-type]

    engine.run = counting  # type: ignore[method-assign,assignment]
    return counts


@pytest.mark.parametrize(
    ("kind", "rows", "chunk"),
    [*(("gpt", *of) for of in ((1, 4), (3, 4), (4, 100))), *(pytest.param(k, 3, 4, marks=SLOW) for k in KINDS)],
)
def test_each_is_answered_as_alone(kind: str, rows: int, chunk: int) -> None:
    """Prompts of one token, of a chunk, of more, and such as fill a row to its last slot."""
    engine = init_inference(model_of(kind))
    asked = list(zip(prompts(1, 4, 5, 30, 60, 2, 17), (6, 1, 12, 34, 4, 9, 3), strict=True))
    batch = ContinuousBatch(engine, rows, chunk)
    requests = [batch.add(prompt, max_new_tokens=most, eos_token_id=[]) for prompt, most in asked]
    alone = [engine.generate([prompt], max_new_tokens=most, eos_token_id=[])[0] for prompt, most in asked]
    assert same(answers(batch, requests), alone)
    assert {request.reason for request in requests} == {"length"} and not batch.running and not batch.waiting


def draw_prompt(draw: random.Random, requests: list[tuple[Request, Tensor]]) -> list[int]:
    """It may begin as an earlier one with its answer did."""
    new, earlier = [draw.randrange(256) for _ in range(draw.randint(1, 20))], []
    if requests and draw.random() < 0.5:
        former, answer = draw.choice(requests)
        earlier = [*former.prompt.tolist(), *answer.tolist()][: draw.randint(1, 20)]
    return earlier + new


def answer_drawn(
    batch: ContinuousBatch,
    draw: random.Random,
    reference: InferenceEngine,
    draw_inputs: Callable[[random.Random, list[tuple[Request, Tensor]]], list[int]] = draw_prompt,
    words: int = 256,
    ends: int = 40,
) -> list[Request]:
    """25 requests of a drawn schedule against the reference's answers to each alone. ends: end tokens of a request."""
    requests: list[tuple[Request, Tensor]] = []
    memory = set[int]()
    while len(requests) < 25 or batch.running or batch.waiting:
        if len(requests) < 25 and draw.random() < 0.4:
            inputs = torch.tensor(draw_inputs(draw, requests))
            how: dict = {"do_sample": True, "seed": draw.randrange(100), "top_k": 20} if draw.random() < 0.5 else {}
            how |= {"max_new_tokens": draw.randint(1, 24), "eos_token_id": draw.sample(range(words), ends)}
            request = batch.add(inputs, **how)
            alone = reference.generate([inputs], **how)[0]
            requests.append((request, alone[len(request.prompt) :]))
        if requests and draw.random() < 0.1:
            batch.cancel(draw.choice(requests)[0])
        changed = batch.step()
        assert all(request.tokens or request.reason for request in changed)
        assert len(batch.running) <= batch.rows and all(request.reason is None for request in batch.running)
        memory |= {batch.cache_bytes} - {0}
    assert len(memory) == 1
    for request, alone in requests:
        assert request.tokens == alone.tolist()[: len(request.tokens)]
        assert request.reason == "cancelled" or len(request.tokens) == len(alone)
    return [request for request, _ in requests]


def test_a_decoder_that_masks_by_its_caches_length_is_refused() -> None:
    """It has one length for all rows, so that shorter ones see what earlier requests have left. Alone it is right."""
    model = gpt()

    def by_length(text_BT: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: CacheView) -> Tensor:
        T, before = text_BT.shape[1], past_key_values.get_seq_length()
        hidden = torch.full((T, before + T), float("-inf")).triu(before + 1)
        return type(model).forward(model, text_BT, hidden[None, None], position_ids, past_key_values)

    model.forward = by_length  # type: ignore[method-assign]
    engine = init_inference(model)
    expected = init_inference(gpt()).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
    assert torch.equal(engine.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4), expected)
    with pytest.raises(ValueError, match="GPT gives rows of unlike positions other outputs in one pass than each"):
        ContinuousBatch(engine, rows=2)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(k, marks=pytest.mark.thorough) for k in range(3, 6))])
def test_any_schedule_of_arrivals_and_cancels(seed: int) -> None:
    """Drawn: when requests come, how long they are, which sample, which are cancelled and when, and which begin as an
    earlier prompt with its answer did. Those that go on are as alone; those that are cancelled have a prefix of that.
    Rows stay dense and memory as it is, and what is reused is not computed."""
    draw = random.Random(seed)
    engine = init_inference(gpt())
    batch = ContinuousBatch(engine, rows=draw.randint(1, 4), chunk=draw.randint(1, 20))
    computed, reference = count_tokens(engine), init_inference(gpt())
    requests = answer_drawn(batch, draw, reference)
    assert any(request.reused for request in requests)
    assert {"length", "stop"} <= {request.reason for request in requests}
    assert sum(computed) == sum(request.filled - request.reused for request in requests)
    assert batch.cache_bytes == 2 * 2 * batch.rows * engine.slots * 64 * 4  # keys and values of two layers


def test_a_long_prompt_does_not_stop_the_others() -> None:
    batch = ContinuousBatch(init_inference(gpt()), rows=2, chunk=5)
    first = batch.add([1, 2], max_new_tokens=30, eos_token_id=[])
    batch.step()
    long = batch.add(prompts(50)[0], max_new_tokens=1)
    for step in range(10):
        batch.step()
        assert len(first.tokens) == 2 + step and bool(long.tokens) == (step == 9)


# ---------------------------------------------------------------- what is not computed again


@pytest.mark.parametrize(
    ("kind", "chunk"), [("gpt", 4), ("gpt", 100), *(pytest.param(k, 4, marks=SLOW) for k in KINDS_OF_KEYS)]
)
def test_what_a_row_has_is_not_computed_again(kind: str, chunk: int) -> None:
    """One request after the other: a shared beginning, a prompt once more, one that is a part of it, and a next turn.
    Windows of 6 tokens are shorter than what is reused."""
    engine, reference = init_inference(model_of(kind)), init_inference(model_of(kind))
    system, one, other, turn = prompts(20, 7, 9, 5)
    batch, computed = ContinuousBatch(engine, rows=3, chunk=chunk), count_tokens(engine)
    first = torch.cat([system, one])

    def ask(prompt: Tensor, most: int = 8) -> tuple[int, Tensor]:
        computed.clear()
        request = batch.add(prompt, max_new_tokens=most, eos_token_id=[])
        (answer,) = answers(batch, [request])
        assert torch.equal(answer, reference.generate([prompt], max_new_tokens=most, eos_token_id=[])[0])
        assert sum(computed) == len(prompt) - request.reused + most - 1
        return request.reused, answer

    reused, answer = ask(first)
    assert reused == 0
    assert ask(torch.cat([system, other]))[0] == len(system)
    assert ask(first)[0] == len(first) - 1
    assert ask(system[:10])[0] == 9
    assert ask(torch.cat([answer, turn]))[0] == len(answer) - 1  # the last token of an answer was not computed
    assert ask(torch.cat([system, turn]))[0] == len(system)


def test_rows_that_run_are_reused() -> None:
    """By requests that wait until the first has been read, of which one begins as the first's answer does."""
    engine = init_inference(gpt())
    (prompt,) = prompts(20)
    alone = engine.generate([prompt], max_new_tokens=40, eos_token_id=[])[0]
    batch = ContinuousBatch(engine, rows=3, chunk=8)
    first = batch.add(prompt, max_new_tokens=40, eos_token_id=[])
    while len(first.tokens) < 6:
        batch.step()
    longer = batch.add(alone[:30], max_new_tokens=5, eos_token_id=[])
    same_prompt, waits = (batch.add(prompt, max_new_tokens=30, eos_token_id=[]) for _ in range(2))
    found = answers(batch, [first, longer, same_prompt, waits])
    assert [longer.reused, same_prompt.reused, waits.reused] == [25, 19, 19]
    assert same(found, [alone, alone[:35], alone[:50], alone[:50]])


def test_a_cancelled_request_leaves_what_it_has_read() -> None:
    engine, (prompt,) = init_inference(gpt()), prompts(30)
    batch = ContinuousBatch(engine, rows=2, chunk=8)
    gone = batch.add(prompt, max_new_tokens=4)
    batch.step()
    batch.step()
    batch.cancel(gone)
    again = batch.add(prompt, max_new_tokens=4)
    assert same(answers(batch, [again]), engine.generate([prompt], max_new_tokens=4)) and again.reused == 16


def test_the_row_whose_request_ended_first_is_given_away() -> None:
    """Turns of two conversations take their rows; a third one takes the row of the first."""
    engine = init_inference(gpt())
    batch = ContinuousBatch(engine, rows=2, chunk=50)
    first, second, third, turn = prompts(9, 12, 11, 3)
    texts = {}

    def ask(name: str, prompt: Tensor) -> int:
        request = batch.add(prompt, max_new_tokens=3, eos_token_id=[])
        (texts[name],) = answers(batch, [request])
        assert torch.equal(texts[name], engine.generate([prompt], max_new_tokens=3, eos_token_id=[])[0])
        return request.reused

    assert ask("first", first) == ask("second", second) == 0
    for name in ("first", "second", "first", "second"):
        held = len(texts[name]) - 1
        assert ask(name, torch.cat([texts[name], turn])) == held
    assert ask("third", third) == 0
    held = len(texts["second"]) - 1
    assert ask("second", torch.cat([texts["second"], turn])) == held
    assert ask("first", torch.cat([texts["first"], turn])) == 0


def test_tensors_and_lists_of_the_caller_are_theirs() -> None:
    """A prompt's tensor that is written again, and an answer without its end token, change nothing."""
    engine, (prompt,) = init_inference(gpt()), prompts(12)
    before, batch = prompt.clone(), ContinuousBatch(engine, rows=2)
    request = batch.add(prompt, max_new_tokens=6, eos_token_id=[])
    batch.step()
    prompt.fill_(7)
    (answer,) = answers(batch, [request])
    request.tokens.clear()
    next_ones = [torch.cat([answer, answer[:4]]), torch.cat([prompt, prompt[:2]])]
    found = answers(batch, [batch.add(tokens, max_new_tokens=6, eos_token_id=[]) for tokens in next_ones])
    assert torch.equal(answer, engine.generate([before], max_new_tokens=6, eos_token_id=[])[0])
    assert same(found, engine.generate(next_ones, max_new_tokens=6, eos_token_id=[]))


# ---------------------------------------------------------------- rules, ranks and failures


@of_models
@pytest.mark.parametrize("kind", ["llama", *list(WINDOWS)[:1]])
def test_options_are_of_each_request(kind: str) -> None:
    """Rules of transformers, with different ones side by side."""
    engine = init_inference(of_transformers(kind))
    options: list[dict] = [
        {},
        {"repetition_penalty": 1.3},
        {"do_sample": True, "seed": 4, "top_p": 0.9},
        {"bad_words_ids": [[7]]},
    ]
    batch = ContinuousBatch(engine, rows=3)
    requests = [batch.add(prompts(9)[0], max_new_tokens=12, **how) for how in options]
    alone = [engine.generate([prompts(9)[0]], max_new_tokens=12, **how)[0] for how in options]
    assert same(answers(batch, requests), alone)


def over_ranks(engine: InferenceEngine, asked: list[Tensor]) -> tuple[list[Tensor], list[Request]]:
    """Answers on rank 0, which the others follow. The fourth request is cancelled while it waits for a row."""
    batch = ContinuousBatch(engine, rows=2, chunk=8)
    if engine.transport.rank != 0:
        batch.follow()
        return [], []
    batch.step()  # nothing to do
    requests = [batch.add(x, max_new_tokens=9) for x in asked]
    batch.step()
    batch.cancel(requests[3])
    found = answers(batch, requests)
    batch.close()
    with pytest.raises(RuntimeError, match="create another ContinuousBatch"):
        batch.add(asked[0], max_new_tokens=9)
    return found, requests


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_follow_rank_0(ranks: int) -> None:
    asked, engine = prompts(3, 20, 1, 9, 30), init_inference(gpt())
    asked += [torch.cat([asked[4], asked[0]]), torch.cat([asked[4][:25], asked[1]])]

    found, requests = run_ranks(
        ranks, lambda transport: over_ranks(init_inference(gpt(), mp_size=ranks, transport=transport), asked)
    )[0]
    assert [request.reused for request in requests] == [0, 0, 0, 0, 0, 30, 25]
    alone = [engine.generate([prompt], max_new_tokens=9)[0] for prompt in asked]
    assert same(found[:3] + found[4:], alone[:3] + alone[4:]) and torch.equal(found[3], asked[3])


@of_models
@pytest.mark.parametrize(("form", "ranks", "seeds"), [("tp", 1, 3), ("tp", 2, 1), ("pp", 2, 1), ("pp", 3, 1)])
def test_rows_on_both_sides_of_a_border_are_each_as_alone(form: str, ranks: int, seeds: int) -> None:
    """LongRoPE turns all keys of rows of more than 12 tokens by other angles: drawn schedules of rows that stay below,
    begin beyond or grow beyond it, which take beginnings of each other, and of which some are cancelled."""
    reference = init_inference(of_transformers("phi3 of two lengths"))

    def serve(transport: SimTransport, seed: int) -> list[Request]:
        keys: dict = {"tp": {"mp_size": ranks}, "pp": {"pipeline_parallel": {"pp_size": ranks}}}[form]
        engine = init_inference(of_transformers("phi3 of two lengths"), transport=transport, **keys)
        draw = random.Random(seed)
        batch = ContinuousBatch(engine, rows=draw.randint(1, 4), chunk=draw.randint(1, 20))
        if transport.rank != 0:
            batch.follow()
            return []
        requests = answer_drawn(batch, draw, reference)
        assert any(request.reused for request in requests)
        batch.close()
        return requests

    requests = [request for seed in range(seeds) for request in run_ranks(ranks, partial(serve, seed=seed))[0]]
    assert any(len(request.prompt) <= 12 < request.filled for request in requests)


@of_models
def test_beginnings_are_shared_on_one_side_of_a_border() -> None:
    """Keys that LongRoPE has turned by other angles are none of the prompt's."""
    engine, text = init_inference(of_transformers("phi3 of two lengths")), prompts(30)[0]
    batch = ContinuousBatch(engine, rows=9, chunk=4)
    for length, most, reused in [(6, 3, 0), (9, 1, 6), (20, 2, 0), (22, 9, 20), (14, 1, 13), (12, 1, 9), (11, 4, 6)]:
        request = batch.add(text[:length], max_new_tokens=most, eos_token_id=[])
        (answer,) = answers(batch, [request])
        assert torch.equal(answer, engine.generate([text[:length]], max_new_tokens=most, eos_token_id=[])[0])
        assert request.reused == reused, (length, request.reused)


def test_a_rank_that_is_lost_ends_the_batch() -> None:
    seen: list[PeerError] = []

    def serve(transport: SimTransport) -> None:
        batch = ContinuousBatch(init_inference(gpt(), mp_size=2, transport=transport), rows=2)
        if transport.rank == 1:
            raise KeyError("lost")
        batch.add([1], max_new_tokens=5)
        with pytest.raises(PeerError) as told:
            for _ in range(5):
                batch.step()
        seen.append(told.value)

    with pytest.raises(KeyError, match="lost"):
        run_ranks(2, serve)
    assert seen[0].ranks == (1,)


@pytest.mark.parametrize("chunk", [4, 100])
def test_what_is_not_finite_ends_its_request_alone(chunk: int) -> None:
    """After its first chunk, so that a cancelled request leaves no such keys. Its slots are cleared and not reused: a
    later request in its row is as alone, also with the same prompt."""
    model = gpt()  # whose memory the engine shares
    weight = model.get_parameter("blocks.0.mlp_in.weight")
    batch = ContinuousBatch(init_inference(model), rows=1, chunk=chunk)
    before = weight.detach().clone()
    weight.data[0] = torch.nan
    request = batch.add(prompts(9)[0], max_new_tokens=4)
    batch.step()
    assert request.reason == "error" and "not finite" in str(request.error) and not request.is_refused
    weight.data.copy_(before)
    for length in (3, 9):
        (answer,) = answers(batch, [batch.add(prompts(length)[0], max_new_tokens=20)])
        assert torch.equal(answer, init_inference(gpt()).generate(prompts(length), max_new_tokens=20)[0])


def raising(tokens: Tensor, logits: Tensor) -> Tensor:
    raise ValueError("this rule fails")


def test_a_rule_that_fails_ends_its_request_alone() -> None:
    engine = init_inference(gpt())
    batch = ContinuousBatch(engine, rows=2)
    bad, good = (batch.add([k], max_new_tokens=5, do_sample=True, seed=1) for k in (1, 2))
    assert bad._choice is not None
    bad._choice.groups[0].rules = raising
    (_, answer) = answers(batch, [bad, good])
    assert (bad.reason, bad.error, bad.tokens) == ("error", "this rule fails", []) and bad.is_refused
    assert torch.equal(answer, engine.generate([[2]], max_new_tokens=5, do_sample=True, seed=1)[0])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda batch: batch.add([], max_new_tokens=1), "at least one token"),
        (lambda batch: batch.add("Once", max_new_tokens=1), r"of one text tokenizer\(\[text\]\)"),
        (lambda batch: batch.add([1], max_new_tokens=0), "at least 1"),
        (lambda batch: batch.add([1], max_new_tokens=2.5), "max_new_tokens as an integer, got 2.5"),
        (lambda batch: batch.add([1] * 60, max_new_tokens=5), "do not fit into the cache of 64"),
        (lambda batch: batch.add([-1], max_new_tokens=5), "expected tokens from 0"),
        (lambda batch: batch.add([1], max_new_tokens=5, temperature=0.5), "no effect without do_sample"),
        (lambda batch: ContinuousBatch(batch.engine, rows=0), "at least 1, got 0"),
        (lambda batch: ContinuousBatch(init_inference(nn.Linear(2, 2))), "does not generate"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_it_joins(ask: Callable[..., object], said: str) -> None:
    batch = ContinuousBatch(init_inference(gpt()), rows=2)
    with pytest.raises((ValueError, TypeError), match=said):
        ask(batch)
    assert not batch.waiting and not batch.step()
