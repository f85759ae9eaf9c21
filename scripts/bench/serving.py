"""Requests of unlike lengths: one at a time, in batches that end together, and in a running batch; first tokens.

    python scripts/bench.py serving --record runs/serving.md

Every side answers the same requests: prompts and answers of random lengths, greedy, without end tokens. Batches take
the requests as they come, and last until their longest answer; only the tokens that were asked count. All sides take
turns; medians are compared. Reading a prompt is part of the time. A running batch is a new one each time, because it
would not read the same prompts again. The time to the first token is measured if a running batch has computed the
beginning of the prompt before, and if not.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from reports import publish
from torch import Tensor

from bench.inference import DTYPES, SHAPES, build
from bench.record import here, parser_of
from bench.timing import in_turn
from onebit.comm import torch_versions
from onebit.zero import ContinuousBatch, InferenceEngine, init_inference

Asked = list[tuple[Tensor, int]]
"""Prompts, and how many tokens each answer has."""
TAIL = 32
"""Tokens of a prompt after those that are reused."""


def requests(count: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Asked:
    draw = random.Random(0)
    tokens = torch.Generator().manual_seed(0)
    return [
        (torch.randint(8192, (draw.randint(*prompts),), generator=tokens), draw.randint(*answers)) for _ in range(count)
    ]


def by_transformers(model: Any, asked: Asked, rows: int) -> None:
    for batch in _batches(asked, rows):
        T = max(len(prompt) for prompt, _ in batch)
        tokens = torch.stack([torch.cat([prompt.new_zeros(T - len(prompt)), prompt]) for prompt, _ in batch])
        mask = torch.stack([(torch.arange(T) >= T - len(prompt)).long() for prompt, _ in batch])
        new = max(most for _, most in batch)
        model.generate(
            tokens, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )


def by_generate(engine: InferenceEngine, asked: Asked, rows: int) -> None:
    for batch in _batches(asked, rows):
        most = max(most for _, most in batch)
        engine.generate([prompt for prompt, _ in batch], max_new_tokens=most, eos_token_id=[])


def by_running_batch(engine: InferenceEngine, asked: Asked, rows: int) -> None:
    batch = ContinuousBatch(engine, rows)
    under_way = [batch.add(prompt, max_new_tokens=most, eos_token_id=[]) for prompt, most in asked]
    while batch.running or batch.waiting:
        batch.step()
    assert all(request.reason == "length" for request in under_way)


def _batches(asked: Asked, rows: int) -> list[Asked]:
    return [asked[k : k + rows] for k in range(0, len(asked), rows)]


def compare(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each side for all requests."""
    torch_versions.require("this benchmark", at_least=(2, 7))
    torch._dynamo.config.recompile_limit = 32 * len(args.dtypes)  # type: ignore[attr-defined]
    asked, context = (
        requests(args.requests, tuple(args.prompts), tuple(args.answers)),
        args.prompts[1] + args.answers[1],
    )
    theirs = build(args.size, context)
    sides: dict[str, Callable[[], None]] = {
        "transformers, one at a time": partial(by_transformers, theirs, asked, 1),
        f"transformers, batches of {args.rows}": partial(by_transformers, theirs, asked, args.rows),
    }
    for dtype in args.dtypes:
        keys = {"dtype": dtype, "kernel_inject": args.compile, "max_out_tokens": context}
        engine = init_inference(build(args.size, context), keys)
        sides |= {
            f"{dtype}, one at a time": partial(by_generate, engine, asked, 1),
            f"{dtype}, batches of {args.rows}": partial(by_generate, engine, asked, args.rows),
            f"{dtype}, running batch of {args.rows}": partial(by_running_batch, engine, asked, args.rows),
        }
    return {name: statistics.median(seconds) for name, seconds in in_turn(sides, args.repeats).items()}


def compare_first_tokens(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """By dtype, median seconds to the first token, of a new prompt and of one whose beginning is reused."""
    tokens = torch.Generator().manual_seed(0)
    length = args.prefix + TAIL
    prefix, nothing = torch.randint(8192, (args.prefix,), generator=tokens), torch.zeros(0, dtype=torch.int64)

    def answer(batch: ContinuousBatch, start: Tensor) -> None:
        rest = torch.randint(8192, (length - len(start),), generator=tokens)
        request = batch.add(torch.cat([start, rest]), max_new_tokens=1, eos_token_id=[])
        while request.reason is None:
            batch.step()

    sides: dict[tuple[str, bool], Callable[[], None]] = {}
    for dtype in args.dtypes:
        keys = {"dtype": dtype, "kernel_inject": args.compile, "max_out_tokens": length + 1}
        batch = ContinuousBatch(init_inference(build(args.size, length + 1), keys))
        sides |= {(dtype, False): partial(answer, batch, nothing), (dtype, True): partial(answer, batch, prefix)}
    found = {side: statistics.median(seconds) for side, seconds in in_turn(sides, args.repeats).items()}
    return {dtype: (found[dtype, False], found[dtype, True]) for dtype in args.dtypes}


def report(seconds: dict[str, float], first_tokens: dict[str, tuple[float, float]], args: argparse.Namespace) -> str:
    tokens = sum(most for _, most in requests(args.requests, tuple(args.prompts), tuple(args.answers)))
    text = [
        "| side | seconds | tokens/s | of one at a time | of transformers, one at a time |",
        "| --- | --- | --- | --- | --- |",
    ]
    base = next(iter(seconds.values()))
    alone = base
    for name, taken in seconds.items():
        alone = taken if name.endswith("one at a time") else alone
        text.append(f"| {name} | {taken:.1f} | {tokens / taken:.1f} | {alone / taken:.2f} × | {base / taken:.2f} × |")
    shape = SHAPES[args.size]
    text.append(
        f"\n{args.size}: {shape.family} of {shape.layers} layers and {shape.width} features, random weights; "
        f"{args.requests} requests with prompts of {args.prompts[0]} to {args.prompts[1]} and answers of "
        f"{args.answers[0]} to {args.answers[1]} tokens, all there from the start; transformers in float32; "
        f"{'compiled' if args.compile else 'eager'} decode steps, threads {torch.get_num_threads()}, medians of "
        f"{args.repeats}.\n"
    )
    text += [
        f"| ms to the first token of {args.prefix + TAIL} | all computed | {args.prefix} reused | |",
        "| --- | --- | --- | --- |",
    ]
    for name, (new, reused) in first_tokens.items():
        text.append(f"| {name}, running batch | {1e3 * new:.0f} | {1e3 * reused:.0f} | {new / reused:.1f} × |")
    text.append("")
    return "\n".join([*text, here(), ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("serving", __doc__ or "")
    add = parser.add_argument
    add("--size", choices=SHAPES, default="llama-40m")
    add("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "int8"])
    add("--rows", type=int, default=8, help="of a batch")
    add("--requests", type=int, default=24)
    add("--prompts", nargs=2, type=int, default=[16, 128], metavar=("LEAST", "MOST"))
    add("--answers", nargs=2, type=int, default=[8, 96], metavar=("LEAST", "MOST"))
    add("--prefix", type=int, default=512, help="tokens of a prompt that are reused")
    add("--repeats", type=int, default=3)
    add("--compile", action="store_true", help="the decode step")
    args = parser.parse_args(argv)
    publish(args, f"# Requests of unlike lengths\n\n{report(compare(args), compare_first_tokens(args), args)}")
