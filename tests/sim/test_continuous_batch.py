"""Requests that join and leave a running batch: each is answered as alone, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from family import same
from test_inference import DECODERS, WINDOWS, gpt, model_of, needs_transformers, of_transformers, prompts
from torch import Tensor, nn

from onebit.comm import PeerError, SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import ContinuousBatch, init_inference
from onebit.zero.inference.batch import Request


def answers(batch: ContinuousBatch, requests: list[Request], most_steps: int = 2000) -> list[Tensor]:
    """Step until all of these have ended."""
    for _ in range(most_steps):
        if all(request.reason for request in requests):
            return [torch.cat([request.prompt, torch.tensor(request.tokens)]) for request in requests]
        batch.step()
    raise AssertionError([request.reason for request in requests])


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize(("rows", "chunk"), [(1, 4), (3, 4), (4, 100)])
def test_each_is_answered_as_alone(kind: str, rows: int, chunk: int) -> None:
    """Prompts of one token, of a chunk, of more, and such as fill a row to its last slot."""
    engine = init_inference(model_of(kind))
    asked = list(zip(prompts(1, 4, 5, 30, 60, 2, 17), (6, 1, 12, 34, 4, 9, 3), strict=True))
    batch = ContinuousBatch(engine, rows, chunk)
    requests = [batch.add(prompt, max_new_tokens=most, eos_token_id=[]) for prompt, most in asked]
    alone = [engine.generate([prompt], max_new_tokens=most, eos_token_id=[])[0] for prompt, most in asked]
    assert same(answers(batch, requests), alone)
    assert {request.reason for request in requests} == {"length"} and not batch.running and not batch.waiting


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_arrivals_and_cancels(seed: int) -> None:
    """Drawn: when requests come, how long they are, which sample, which are cancelled and when. Those that go on are
    as alone; those that are cancelled have a prefix of that. Rows stay dense and memory as it is."""
    draw = random.Random(seed)
    engine = init_inference(gpt())
    batch = ContinuousBatch(engine, rows=draw.randint(1, 4), chunk=draw.randint(1, 20))
    requests: list[tuple[Request, Tensor]] = []
    while len(requests) < 25 or batch.running or batch.waiting:
        if len(requests) < 25 and draw.random() < 0.4:
            prompt = torch.tensor([draw.randrange(256) for _ in range(draw.randint(1, 40))])
            how: dict = {"do_sample": True, "seed": draw.randrange(100), "top_k": 20} if draw.random() < 0.5 else {}
            most, ends = draw.randint(1, 24), draw.sample(range(256), 40)
            request = batch.add(prompt, max_new_tokens=most, eos_token_id=ends, **how)
            alone = engine.generate([prompt], max_new_tokens=most, eos_token_id=ends, **how)[0]
            requests.append((request, alone[len(prompt) :]))
        if requests and draw.random() < 0.1:
            batch.cancel(draw.choice(requests)[0])
        changed = batch.step()
        assert all(request.tokens or request.reason for request in changed)
        assert len(batch.running) <= batch.rows and all(request.reason is None for request in batch.running)
    reasons = [request.reason for request, _ in requests]
    assert {"length", "stop"} <= set(reasons)
    for request, alone in requests:
        assert request.tokens == alone.tolist()[: len(request.tokens)]
        assert request.reason == "cancelled" or len(request.tokens) == len(alone)
    assert batch.cache_bytes == 2 * 2 * batch.rows * engine.slots * 64 * 4  # keys and values of two layers


def test_a_long_prompt_does_not_stop_the_others() -> None:
    batch = ContinuousBatch(init_inference(gpt()), rows=2, chunk=5)
    first = batch.add([1, 2], max_new_tokens=30, eos_token_id=[])
    batch.step()
    long = batch.add(prompts(50)[0], max_new_tokens=1)
    for step in range(10):
        batch.step()
        assert len(first.tokens) == 2 + step and bool(long.tokens) == (step == 9)


@pytest.mark.slow
@needs_transformers
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_follow_rank_0(ranks: int) -> None:
    asked, engine = prompts(3, 20, 1, 9, 30), init_inference(gpt())

    def serve(transport: SimTransport) -> list[Tensor]:
        served = init_inference(gpt(), mp_size=ranks, transport=transport)
        batch = ContinuousBatch(served, rows=2, chunk=8)
        if transport.rank != 0:
            batch.follow()
            return []
        batch.step()  # nothing to do
        requests = [batch.add(prompt, max_new_tokens=9) for prompt in asked]
        batch.step()
        batch.cancel(requests[3])
        found = answers(batch, requests)
        batch.close()
        return found

    found = run_ranks(ranks, serve)[0]
    alone = [engine.generate([prompt], max_new_tokens=9)[0] for prompt in asked]
    assert same(found[:3] + found[4:], alone[:3] + alone[4:]) and torch.equal(found[3], asked[3])


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


def test_what_is_not_finite_ends_its_request_alone() -> None:
    """Its slots are cleared: a later request in its row is as alone."""
    model = gpt()  # whose memory the engine shares
    weight = model.get_parameter("blocks.0.mlp_in.weight")
    batch = ContinuousBatch(init_inference(model), rows=1)
    before = weight.detach().clone()
    weight.data[0] = torch.nan
    request = batch.add(prompts(9)[0], max_new_tokens=4)
    batch.step()
    assert request.reason == "error" and "not finite" in str(request.error)
    weight.data.copy_(before)
    (answer,) = answers(batch, [batch.add(prompts(3)[0], max_new_tokens=20)])
    assert torch.equal(answer, init_inference(gpt()).generate(prompts(3), max_new_tokens=20)[0])


def raising(tokens: Tensor, logits: Tensor) -> Tensor:
    raise ValueError("this rule fails")


def test_a_rule_that_fails_ends_its_request_alone() -> None:
    engine = init_inference(gpt())
    batch = ContinuousBatch(engine, rows=2)
    bad, good = (batch.add([k], max_new_tokens=5, do_sample=True, seed=1) for k in (1, 2))
    assert bad._choice is not None
    bad._choice.groups[0].rules = raising
    (_, answer) = answers(batch, [bad, good])
    assert (bad.reason, bad.error, bad.tokens) == ("error", "this rule fails", [])
    assert torch.equal(answer, engine.generate([[2]], max_new_tokens=5, do_sample=True, seed=1)[0])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda batch: batch.add([], max_new_tokens=1), "at least one token"),
        (lambda batch: batch.add([1], max_new_tokens=0), "at least 1"),
        (lambda batch: batch.add([1] * 60, max_new_tokens=5), "do not fit into the cache of 64"),
        (lambda batch: batch.add([-1], max_new_tokens=5), "expected tokens from 0"),
        (lambda batch: batch.add([1], max_new_tokens=5, temperature=0.5), "no effect without do_sample"),
        (lambda batch: ContinuousBatch(batch.engine, rows=0), "at least 1, got 0"),
        (lambda batch: ContinuousBatch(init_inference(nn.Linear(2, 2))), "does not generate"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_it_joins(ask: Callable[..., object], said: str) -> None:
    batch = ContinuousBatch(init_inference(gpt()), rows=2)
    with pytest.raises(ValueError, match=said):
        ask(batch)
    assert not batch.waiting and not batch.step()
