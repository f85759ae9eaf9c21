"""Tokens per second of init_inference and of transformers' generate, in turn; and over a slow network, split or not.

    python scripts/bench.py inference --record scripts/records/inference_2026-11.md

A GPT-2 with random weights, without end tokens. Each line is measured in one process, both sides in turn, `--repeats`
times; the medians are compared. The first pass (compiling, caches) is thrown away; so is the prompt's, for both sides:
the time of one token is taken from that of all but one. Then the same split over two hosts (network namespaces) at
--network, against the plan. The latter needs root and iproute2. With --worker it is one rank's part of that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import record_path, write_record

from bench.command import words
from bench.record import describe_machine
from onebit import comm
from onebit.cli.cluster import Cluster, available, parse_rate, sent_on_wire
from onebit.comm.messages import gather_tensors
from onebit.zero import InferenceEngine, init_inference
from onebit.zero.inference.plan import ServeRun, token_plan

SHAPES = {"25m": (8, 512, 8), "gpt2": (12, 768, 12)}  # layers, width, heads
DTYPES = ("fp32", "bf16", "int8")


def build(size: str, context: int) -> Any:
    """A GPT-2 of transformers with a vocabulary of 8192, so that the table does not hide the layers."""
    import transformers

    layers, width, heads = SHAPES[size]
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8192, n_layer=layers, n_embd=width, n_head=heads, n_positions=context, **ids
    )
    return transformers.GPT2LMHeadModel(config).eval()


def token_s(generate: Callable[[int], object], new: int, repeats: int) -> float:
    """Seconds of a token behind the first."""
    generate(new)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        generate(1)
        first = time.perf_counter()
        generate(new)
        seconds.append((time.perf_counter() - first - (first - began)) / (new - 1))
    return statistics.median(seconds)


def read_s(size: int, repeats: int) -> float:
    """Seconds to read so many bytes once: the floor of a token, which needs every weight."""
    values, seconds = torch.zeros(size // 4), []
    for _ in range(max(5, repeats)):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def compare(args: argparse.Namespace) -> list[dict]:
    """Both sides of every dtype, batch and prompt. transformers has no int8 of its own: its float32 stands there."""
    lines = []
    context = max(args.prompts) + args.new
    for dtype in args.dtypes:
        theirs = build(args.size, context)
        if dtype == "bf16":
            theirs = theirs.to(torch.bfloat16)
        ours = init_inference(
            build(args.size, context), dtype=dtype, kernel_inject=not args.eager, max_out_tokens=context
        )
        whole = sum(p.numel() for p in theirs.parameters())
        for batch in args.batches:
            for length in args.prompts:
                prompt = torch.randint(8192, (batch, length), generator=torch.Generator().manual_seed(0))
                named = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}

                def their_tokens(new: int, model: Any = theirs, x: Any = prompt, named: Any = named) -> object:
                    return model.generate(x, max_new_tokens=new, min_new_tokens=new, **named)

                def our_tokens(new: int, engine: InferenceEngine = ours, x: Any = prompt) -> object:
                    return engine.generate(x, max_new_tokens=new, eos_token_id=[])

                lines.append(
                    {
                        "dtype": dtype,
                        "batch": batch,
                        "prompt": length,
                        "transformers_s": token_s(their_tokens, args.new, args.repeats),
                        "onebit_s": token_s(our_tokens, args.new, args.repeats),
                        "floor_s": read_s(ours.held_bytes, args.repeats),
                        "held": ours.held_bytes / (4 * whole),
                    }
                )
                print(lines[-1], flush=True)
    return lines


def worker(args: argparse.Namespace) -> None:
    """One of two hosts: the model split, and on rank 0 alone, in turn."""
    torch.set_num_threads(1)
    transport = comm.init("gloo")
    model, prompt = build(args.size, 64), torch.arange(16)[None]
    split = init_inference(model, dtype="fp32", mp_size=transport.world_size, transport=transport)
    alone = init_inference(model, dtype="fp32")
    before, wire = split.transport.sent_bytes, sent_on_wire() or 0
    split.generate(prompt, max_new_tokens=33, eos_token_id=[])
    after = split.transport.sent_bytes
    split.generate(prompt, max_new_tokens=1, eos_token_id=[])
    payload = (after - before - (split.transport.sent_bytes - after)) / 32
    found = {"sent": payload, "wire": ((sent_on_wire() or 0) - wire) / 33}
    found["split_s"] = token_s(lambda n: split.generate(prompt, max_new_tokens=n, eos_token_id=[]), 24, args.repeats)
    if transport.rank == 0:
        found["alone_s"] = token_s(
            lambda n: alone.generate(prompt, max_new_tokens=n, eos_token_id=[]), 24, args.repeats
        )
    transport.broadcast(torch.zeros(1), 0).wait()
    found["sum_s"] = sum_s(transport, SHAPES[args.size][1])
    if transport.rank == 0:
        args.out.write_text(json.dumps(found))
    transport.close()


def sum_s(transport: comm.Transport, width: int, times: int = 200) -> float:
    """Mean seconds that a sum of one token's features waits between two products, as in a decode step. All ranks."""
    matrix, x, seconds = torch.randn(3 * width, width), torch.randn(width), 0.0  # a rank reads as much between two sums
    for k in range(times + 20):
        y = matrix @ x
        began = time.perf_counter()
        gather_tensors(transport, y[:width]).sum(0)
        seconds += (time.perf_counter() - began) * (k >= 20)
    return seconds / times


def over_network(args: argparse.Namespace) -> dict:
    """RuntimeError where the workers fail."""
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=2, rate=args.network) as cluster:
        out = Path(folder) / "result.json"
        flags = ["--size", args.size, "--repeats", str(args.repeats)]
        ended = cluster.run(words("inference", "--worker", "--out", str(out), *flags), launcher="none", timeout_s=600)
        if ended.status:
            raise RuntimeError(f"inference at {args.network} ended with status {ended.status}")
        return json.loads(out.read_text())


def rates_table(lines: list[dict], args: argparse.Namespace) -> list[str]:
    layers, width, heads = SHAPES[args.size]
    text = [
        "| weights | rows | prompt | transformers, tokens/s | onebit, tokens/s | faster | ms a token | ms to read the "
        "weights | bytes of float32's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        rates = [line["batch"] / line[key] for key in ("transformers_s", "onebit_s")]
        ms = [1e3 * line[key] for key in ("onebit_s", "floor_s")]
        cells = f"{rates[0]:.1f} | {rates[1]:.1f} | {rates[1] / rates[0]:.2f} × | {ms[0]:.2f} | {ms[1]:.2f}"
        cells += f" | {line['held']:.3f}"
        text.append(f"| {line['dtype']} | {line['batch']} | {line['prompt']} | {cells} |")
    text.append(
        f"\nGPT-2 of {layers} layers, {width} features, {heads} heads and 8192 tokens with random weights; "
        f"{'eager' if args.eager else 'compiled'} decode step, {args.new} new tokens, medians of {args.repeats}, "
        f"threads {torch.get_num_threads()}. Beside int8 stands transformers in float32. "
        "Reading: a sum over as many bytes.\n"
    )
    return text


def split_table(split: dict, args: argparse.Namespace, memory: float) -> list[str]:
    """memory: bytes a second of a core. The plan is given what one host takes, and how long a small sum waits."""
    layers, width, heads = SHAPES[args.size]
    parameters = sum(p.numel() for p in build(args.size, 64).parameters())
    bits = parse_rate(args.network) or float("inf")
    overhead = max(0.0, split["alone_s"] - 4 * parameters / memory)  # at most all of it
    latency = max(0.0, split["sum_s"] - 4 * width / (bits / 8))
    shape: Any = {"params": parameters, "layers": layers, "width": width, "overhead_s": overhead}
    run = ServeRun(**shape, link_bits_per_s=bits, memory_bytes_per_s=memory, latency_s=latency)
    plan = token_plan(run, 2)
    return [
        f"## Two hosts at {args.network}\n",
        "| | measured | plan |",
        "| --- | --- | --- |",
        f"| ms a token, one host | {1e3 * split['alone_s']:.2f} | taken; {1e3 * overhead:.2f} beside reading |",
        f"| ms that a sum waits between products | {1e3 * split['sum_s']:.2f} | taken |",
        f"| ms a token, split over two | {1e3 * split['split_s']:.2f} | {1e3 * plan.seconds:.2f} |",
        f"| KB a token that a host sends | {split['sent'] / 1e3:.1f} | {plan.sent_bytes / 1e3:.1f} |",
        f"| the same on the wire, with headers | {split['wire'] / 1e3:.1f} | |",
        f"| splitting pays | {'yes' if split['split_s'] < split['alone_s'] else 'no'} | "
        f"{'yes' if plan.seconds < token_plan(run, 1).seconds else 'no'} |\n",
        f"GPT-2 of {layers} layers, {width} features and {heads} heads; float32, eager, one row, one thread a host.\n",
    ]


def report(lines: list[dict], split: dict | None, args: argparse.Namespace) -> str:
    machine = describe_machine()
    text = rates_table(lines, args) if lines else []
    if split is not None:
        text += split_table(split, args, machine["memory_bytes_per_s"] / machine["cores"])
    text.append(
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, revision "
        f"{machine['revision']}, load {machine['load']}.\n"
    )
    return "\n".join(text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py inference", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--size", choices=SHAPES, default="gpt2")
    add("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES), help="none: two hosts only")
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--prompts", nargs="+", type=int, default=[16, 512])
    add("--new", type=int, default=33)
    add("--repeats", type=int, default=5)
    add("--eager", action="store_true", help="do not compile")
    add("--network", default="1gbit", help="of two hosts; none: leave them out")
    add("--record", type=record_path, metavar="FILE")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        worker(args)
        return
    if args.network != "none" and (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}; --network none leaves them out")
    lines = compare(args)
    text = report(lines, None if args.network == "none" else over_network(args), args)
    print(text)
    if args.record is not None:
        write_record(args.record, f"# Inference beside transformers\n\n{text}")
