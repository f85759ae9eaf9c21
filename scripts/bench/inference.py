"""Tokens per second of init_inference, transformers' generate, torchao and llama.cpp, in turn; and split over hosts.

    python scripts/bench.py inference --record runs/inference.md
    python scripts/bench.py inference --size llama-40m qwen-40m --network none --record FILE

Models with random weights, without end tokens. All sides are measured in one process, in turn, `--repeats` times; the
medians are compared. The first pass (compiling, caches) is thrown away; so is the prompt's, for all sides: the time of
one token is taken from that of all but one. torchao and llama.cpp (`peer_llama.py`) are sides if they are installed.
Then the first model split over two hosts (network namespaces) at --network, by rows and by layers, against the plan.
The latter needs root and iproute2.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from reports import publish
from torch import Tensor

from bench import peer_llama
from bench.ranks import need_hosts, on_hosts
from bench.record import describe_machine, parser_of
from onebit import comm
from onebit.cli.cluster import parse_rate, sent_on_wire
from onebit.comm import torch_versions
from onebit.comm.messages import gather_tensors
from onebit.zero import ContinuousBatch, InferenceEngine, init_inference
from onebit.zero.inference.plan import ServeRun, stage_plan, token_plan


@dataclass(frozen=True)
class Shape:
    """A model with a vocabulary of 8192, so that the table does not hide the layers. inner, kv_heads: not of GPT-2."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int = 0
    inner: int = 0


SHAPES = {
    "25m": Shape("GPT2", 8, 512, 8),
    "gpt2": Shape("GPT2", 12, 768, 12),
    "llama-40m": Shape("Llama", 12, 512, 8, 4, 1408),
    "qwen-40m": Shape("Qwen2", 12, 512, 8, 2, 1472),
    "llama-300m": Shape("Llama", 22, 1024, 16, 8, 2816),
    "qwen-300m": Shape("Qwen2", 22, 1024, 16, 4, 2944),
}
DTYPES = ("fp32", "bf16", "int8", "int4")


def build(size: str, context: int) -> Any:
    """A model of transformers."""
    import transformers

    shape = SHAPES[size]
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": 8192}
    torch.manual_seed(0)
    if shape.family == "GPT2":
        own = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "n_positions": context}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**ids, **own)).eval()
    own = {"num_hidden_layers": shape.layers, "hidden_size": shape.width, "intermediate_size": shape.inner}
    own |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config = getattr(transformers, f"{shape.family}Config")(
        **ids, **own, max_position_embeddings=context, tie_word_embeddings=True
    )
    return getattr(transformers, f"{shape.family}ForCausalLM")(config).eval()


def tokens_s(sides: Mapping[str, Callable[[int], object]], new: int, repeats: int) -> dict[str, float]:
    """Seconds of a token after the first, of each side. The sides take turns, so that other load meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for k in range(repeats + 1):
        for name, generate in sides.items():
            began = time.perf_counter()
            generate(1)
            first = time.perf_counter()
            generate(new)
            if k:  # the first pass compiles
                seconds[name].append((time.perf_counter() - first - (first - began)) / (new - 1))
    return {name: statistics.median(each) for name, each in seconds.items()}


def read_s(size: int, repeats: int) -> float:
    """Seconds to read so many bytes once: the floor of a token, which needs every weight."""
    values, seconds = torch.zeros(size // 4), []
    for _ in range(max(5, repeats)):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def of_torchao(model: Any, dtype: str) -> Any:
    """The model in torchao's int8 by rows, or in int4 in groups of 128 with bfloat16 between."""
    from torchao import quantization

    if dtype == "int8":
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    else:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        config = PrototypeInt4WeightOnlyConfig(group_size=128, set_inductor_config=False)
        quantization.quantize_(model.to(torch.bfloat16), config)
    return model


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


Generate = Callable[[Tensor, int], object]
"""Of prompts [B, T], and how many tokens follow each."""


def peers(size: str, context: int, rows: int, dtypes: Sequence[str]) -> dict[str, Generate]:
    """The other sides: transformers in float32 and bfloat16; torchao's models and llama.cpp's if they are installed."""
    found = {"transformers fp32": build(size, context)}
    if "bf16" in dtypes:
        found["transformers bf16"] = build(size, context).to(torch.bfloat16)
    if has_torchao():
        few = [dtype for dtype in ("int8", "int4") if dtype in dtypes]
        found |= {f"torchao {dtype}": of_torchao(build(size, context), dtype) for dtype in few}
    sides: dict[str, Generate] = {name: partial(their_tokens, model) for name, model in found.items()}
    if not peer_llama.why_not(found["transformers fp32"]):
        for dtype in dtypes:
            model = peer_llama.LlamaCpp(build(size, context), dtype, context, rows, torch.get_num_threads())
            sides[f"llama.cpp {dtype}"] = model.generate
    return sides


def compare(args: argparse.Namespace) -> list[dict]:
    """Seconds of a token of all sides, for every size, batch and prompt."""
    torch_versions.require("this benchmark", at_least=(2, 7))  # with a limit by this name
    # dynamo counts the recompilations of all engines of a process together, and by default stops at 8.
    torch._dynamo.config.recompile_limit = 32 * len(args.size)  # type: ignore[attr-defined]
    lines = []
    context = max(args.prompts) + args.new
    for size in args.size:
        theirs = peers(size, context, max(args.batches), args.dtypes)
        ours = {
            dtype: init_inference(
                build(size, context), dtype=dtype, kernel_inject=not args.eager, max_out_tokens=context
            )
            for dtype in args.dtypes
        }
        whole = sum(p.numel() for p in build(size, context).parameters())
        for batch, length in itertools.product(args.batches, args.prompts):
            prompt = torch.randint(8192, (batch, length), generator=torch.Generator().manual_seed(0))
            sides: dict[str, Callable[[int], object]] = {name: partial(of, prompt) for name, of in theirs.items()}
            for dtype, engine in ours.items():
                sides[dtype] = partial(our_tokens, engine, prompt)
            found = {"size": size, "parameters": whole, "batch": batch, "prompt": length}
            found["seconds"] = tokens_s(sides, args.new, args.repeats)
            found["held"] = {dtype: engine.held_bytes / (4 * whole) for dtype, engine in ours.items()}
            found["floor"] = {dtype: read_s(engine.held_bytes, args.repeats) for dtype, engine in ours.items()}
            lines.append(found)
            print(lines[-1], flush=True)
    return lines


def their_tokens(model: Any, prompt: Tensor, new: int) -> Tensor:
    named = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    tokens: Tensor = model.generate(prompt, max_new_tokens=new, min_new_tokens=new, **named)
    return tokens


def our_tokens(engine: InferenceEngine, prompt: Tensor, new: int) -> Tensor:
    return cast(Tensor, engine.generate(prompt, max_new_tokens=new, eos_token_id=[]))


REQUESTS = 8


def worker(args: argparse.Namespace) -> dict | None:
    """One of two hosts: the model by rows, by layers, and on rank 0 alone, in turn."""
    torch.set_num_threads(1)
    transport = comm.init("gloo")
    size, W = args.size[0], transport.world_size
    model, prompt = build(size, 64), torch.arange(16)[None]
    keys: dict[str, Any] = {"dtype": "fp32", "max_out_tokens": 64}
    engines = {
        "rows": init_inference(model, **keys, tensor_parallel={"tp_size": W}, transport=transport),
        "layers": init_inference(model, **keys, pipeline_parallel={"pp_size": W}, transport=transport),
        "alone": init_inference(model, **keys),
    }
    found: dict[str, Any] = {"one_s": {}, "all_s": {}, "sent": {}, "wire": {}}
    for way, engine in engines.items():
        if way != "alone" or transport.rank == 0:
            sides = {way: partial(our_tokens, engine, prompt)}
            found["one_s"][way] = tokens_s(sides, 24, args.repeats)[way]
            found["all_s"][way] = statistics.median(running_s(engine, 24) for _ in range(args.repeats + 1))
        if way != "alone":
            sent = [(engine.ranks.sent_bytes, sent_on_wire() or 0)]
            for new in (33, 1):
                our_tokens(engine, prompt, new)
                sent.append((engine.ranks.sent_bytes, sent_on_wire() or 0))
            whole, short = torch.tensor(sent, dtype=torch.float64).diff(dim=0)
            most = gather_tensors(transport, (whole - short) / 32).amax(0)  # without the prompt
            found["sent"][way], found["wire"][way] = most.tolist()
        transport.broadcast(torch.zeros(1), 0).wait()
    found["sum_s"] = sum_s(transport, SHAPES[size].width)
    transport.close()
    return None if transport.rank else found


def running_s(engine: InferenceEngine, new: int) -> float:
    """Seconds in which a running batch answers `REQUESTS` of 16 tokens that come together, by the token of each."""
    batch, began = ContinuousBatch(engine, rows=REQUESTS), time.perf_counter()
    if engine.transport.rank > 0:
        batch.follow()
    else:
        for k in range(REQUESTS):
            batch.add(torch.arange(k, k + 16), max_new_tokens=new, eos_token_id=[])
        while batch.running or batch.waiting:
            batch.step()
        batch.close()
    return (time.perf_counter() - began) / new


def sum_s(transport: comm.Transport, width: int, times: int = 200) -> float:
    """Mean seconds that a sum of one token's features waits between two products, as in a decode step. All ranks."""
    matrix, x, seconds = torch.randn(3 * width, width), torch.randn(width), 0.0  # a rank reads as much between two sums
    for k in range(times + 20):
        y = matrix @ x
        began = time.perf_counter()
        gather_tensors(transport, y[:width]).sum(0)
        seconds += (time.perf_counter() - began) * (k >= 20)
    return seconds / times


def rates_table(lines: list[dict], args: argparse.Namespace) -> list[str]:
    text = [
        "| model | rows | prompt | side | tokens/s | of transformers' float32 | ms a token | ms to read the weights | "
        "bytes of float32's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        base = line["seconds"]["transformers fp32"]
        for side, seconds in line["seconds"].items():
            name = f"onebit {side}" if side in line["held"] else side
            cells = f"{line['batch'] / seconds:.1f} | {base / seconds:.2f} × | {1e3 * seconds:.2f}"
            held = f"{1e3 * line['floor'][side]:.2f} | {line['held'][side]:.3f}" if side in line["held"] else " | "
            text.append(f"| {line['size']} | {line['batch']} | {line['prompt']} | {name} | {cells} | {held} |")
    for size in dict.fromkeys(line["size"] for line in lines):
        shape = SHAPES[size]
        parameters = next(line["parameters"] for line in lines if line["size"] == size)
        kv = f" ({shape.kv_heads} of keys), {shape.inner} between" if shape.inner else ""
        text.append(
            f"\n{size}: {shape.family} of {shape.layers} layers, {shape.width} features, {shape.heads} heads{kv} and "
            f"8192 tokens, {parameters / 1e6:.1f} million random weights."
        )
    text.append(
        f"\n{'Eager' if args.eager else 'Compiled'} decode step, {args.new} new tokens, medians of {args.repeats}, all "
        f"sides in turn, threads {torch.get_num_threads()}. Reading: a sum over as many bytes.\n"
    )
    return text


def split_table(split: dict, args: argparse.Namespace, memory: float) -> list[str]:
    """memory: bytes a second of a core. The plan is given what one host takes, and how long a small sum waits."""
    shape = SHAPES[args.size[0]]
    layers, width = shape.layers, shape.width
    parameters = sum(p.numel() for p in build(args.size[0], 64).parameters())
    bits = parse_rate(args.network) or float("inf")
    alone_s = split["one_s"]["alone"]
    overhead = max(0.0, alone_s - 4 * parameters / memory)  # at most all of it
    latency = max(0.0, split["sum_s"] - 4 * width / (bits / 8))
    of_model: Any = {"params": parameters, "layers": layers, "width": width, "overhead_s": overhead}
    run = ServeRun(**of_model, link_bits_per_s=bits, memory_bytes_per_s=memory, latency_s=latency)
    plans = {"rows": token_plan(run, 2), "layers": stage_plan(run, 2)}
    text = [
        f"## Two hosts at {args.network}\n",
        "| | by rows | planned | by layers | planned | one host |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]

    def row(name: str, measured: Mapping[str, float], planned: Mapping[str, float]) -> str:
        cells = [f"{measured[way]:.2f} | " + (f"{planned[way]:.2f}" if way in planned else "") for way in plans]
        cells.append(f"{measured['alone']:.2f}" if "alone" in measured else "")
        return f"| {name} | {' | '.join(cells)} |"

    def scaled(values: Mapping[str, float], factor: float) -> dict[str, float]:
        return {way: factor * value for way, value in values.items()}

    together = {way: REQUESTS / seconds for way, seconds in split["all_s"].items()}
    planned_s = {way: 1e3 * plan.seconds for way, plan in plans.items()}
    text += [
        row("ms a token, one request", scaled(split["one_s"], 1e3), planned_s),
        row(f"tokens a second, {REQUESTS} requests, their prompts included", together, {}),
        row(
            "KB a token that the host sends that sends most",
            scaled(split["sent"], 1e-3),
            {w: p.sent_bytes / 1e3 for w, p in plans.items()},
        ),
        row("the same on the wire, with headers", scaled(split["wire"], 1e-3), {}),
    ]
    text.append(
        f"\n{shape.family} of {layers} layers, {width} features and {shape.heads} heads; float32, eager, one thread a "
        f"host. A sum waits {1e3 * split['sum_s']:.2f} ms between products; of one host's "
        f"token {1e3 * overhead:.2f} ms are beside reading: the plan is given both.\n"
    )
    return text


def report(lines: list[dict], split: dict | None, args: argparse.Namespace) -> str:
    machine = describe_machine()
    text = rates_table(lines, args) if lines else []
    if split is not None:
        text += split_table(split, args, machine["memory_bytes_per_s"] / machine["cores"])
    packages = "".join(map(_version, ("transformers", "torchao", "llama-cpp-python")))
    text.append(
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}{packages}, revision "
        f"{machine['revision']}, load {machine['load']}.\n"
    )
    return "\n".join(text)


def _version(package: str) -> str:
    try:
        return f", {package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("inference", __doc__ or "")
    add = parser.add_argument
    add("--size", nargs="+", choices=SHAPES, default=["gpt2"], help="the first one is split over hosts")
    add("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES), help="none: two hosts only")
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--prompts", nargs="+", type=int, default=[16, 512])
    add("--new", type=int, default=17)
    add("--repeats", type=int, default=3)
    add("--eager", action="store_true", help="do not compile")
    add("--network", default="1gbit", help="of two hosts; none: leave them out")
    args = parser.parse_args(argv)
    has_network = args.network != "none"
    if has_network:
        need_hosts("; --network none leaves them out")
    lines = compare(args) if args.dtypes else []
    text = report(lines, on_hosts(worker, args, hosts=2, rate=args.network) if has_network else None, args)
    publish(args, f"# Inference beside transformers\n\n{text}")
