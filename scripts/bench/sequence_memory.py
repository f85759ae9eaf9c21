"""The longest sequence that trains in a fixed memory, on more and more ranks: all tokens, windows, inputs in files.

    python scripts/bench.py sequence_memory --folder /nvme --record runs/sequence_memory.md

Each rank is a process under a limit of its own on its memory, libraries and page cache included, as a machine would be.
A Llama of four layers takes two steps of OneBitAdam in the engine on one sequence; what is longer than the length shown
by a sixteenth ends with a rank that is killed. Needs root and cgroup v1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from reports import panels_of, publish, table

from bench.command import calling, free_port
from bench.limits import KILLED, can_limit, limited
from bench.record import here, parser_of

WAYS = ("all tokens", "window", "window, inputs in a file")
GRAIN = 1024  # tokens of a rank
BLOCK, WINDOW = 64, 9  # tokens; blocks


def config_of(way: str, ranks: int, folder: str) -> dict[str, Any]:
    """The engine's JSON. folder: for the inputs of layers that are computed again."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": ranks,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}},
    }
    if way != WAYS[0]:
        mode = {"mode": "local_sliding_window", "block": BLOCK, "num_sliding_window_blocks": WINDOW}
        config["sparse_attention"] = mode | {"attention": "unidirectional"}
    if way == WAYS[2]:
        config["onebit"] = {"activation_folder": folder}
    return config


def worker(args: argparse.Namespace) -> None:
    """One rank: two steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from onebit import zero

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": args.tokens}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False))
    if args.way == WAYS[2]:
        model.gradient_checkpointing_enable()
    engine, *_ = zero.initialize(model=model, config=config_of(args.way, args.ranks, args.folder))
    text = torch.randint(256, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        engine.backward(engine(input_ids=text, labels=text).loss)
        engine.step()
    engine.close()


def trains(tokens: int, way: str, ranks: int, args: argparse.Namespace) -> bool:
    """Whether ranks train on a sequence of so many tokens; False if one of them was killed."""
    port = free_port()
    with ExitStack() as stack, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        asked = argparse.Namespace(tokens=tokens, way=way, ranks=ranks, folder=folder)
        command = [sys.executable, *calling(worker, asked, Path(folder) / "none")]
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        # What is freed goes back to the system, and threads share one heap.
        env |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"}
        started = []
        for rank in range(ranks):
            errors = stack.enter_context(open(Path(folder) / f"errors{rank}", "w+"))
            its_env = env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            enter = stack.enter_context(limited(args.limit_mb, f"-{rank}"))
            process = subprocess.Popen(command, env=its_env, preexec_fn=enter, stdout=errors, stderr=errors)
            stack.callback(_end, process)  # before its limit goes
            started.append((process, errors))
        ended = [process.wait() for process, _ in started]
        if KILLED not in ended and any(ended):
            _, errors = started[next(rank for rank, status in enumerate(ended) if status)]
            errors.seek(0)
            raise RuntimeError(f"{way}, {tokens} tokens on {ranks} ranks: {errors.read()[-2000:]}")
    return not any(ended)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def longest(works: Callable[[int], bool], guess: int) -> int:
    """The largest count that works, to a sixteenth; 0: none. Counts below one that works do, too."""
    least, most, count = 0, 0, guess  # most: the smallest that has failed; 0: none has
    while not most or most - least > max(1, least // 16):
        if works(count):
            least = count
        else:
            most = count
        middle, further = (least + most) // 2, least + max(1, least // 4)
        count = further if not most else middle if least else most * 3 // 4
    return least


def draw(found: dict[str, dict[int, int]], file: Path) -> None:
    """Tokens against ranks."""
    with panels_of(file, ("tokens of the longest sequence",), xlabel="ranks", yscale="log") as (panel,):
        for way, its in found.items():
            panel.plot(list(its), list(its.values()), "o-", label=way)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("sequence_memory", __doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4])
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--limit-mb", type=int, default=768, help="memory of a rank (default: %(default)s)")
    add("--folder", type=Path, required=True, help="for activations; on a disk")
    args = parser.parse_args(argv)
    if not can_limit():
        raise SystemExit("no limits on memory can be set here: that needs root and cgroup v1")
    found: dict[str, dict[int, int]] = {}
    rows = []
    for way in args.ways:
        guess, found[way] = 8, {}
        for ranks in args.ranks:
            grains = longest(lambda count, its=(way, ranks): trains(count * its[1] * GRAIN, *its, args), guess)
            found[way][ranks], guess = grains * ranks * GRAIN, max(1, grains)
            alone = found[way][args.ranks[0]] / args.ranks[0]
            share = f"{grains * GRAIN / alone:.2f}" if alone else ""
            rows.append([way, str(ranks), f"{grains * ranks * GRAIN:,}", f"{grains * GRAIN:,}", share])
            print("; ".join(rows[-1]), file=sys.stderr)
    text = f"""# The longest sequence that trains in a fixed memory

{here()}

{args.limit_mb} MiB for each rank, Python and its libraries included. A Llama of four layers of width 128, two query
heads and one key-value head of width 64, float32; two steps of OneBitAdam in the engine on one sequence. What is a
sixteenth longer, {GRAIN:,} tokens of a rank at least, ends with a rank that is killed. A window has {WINDOW} blocks of
{BLOCK} tokens. In a file: layers keep their inputs there, and compute the rest again in backward. Linear: 1 if ranks
have as many tokens each as the first.

{table(("sees", "ranks", "tokens", "of a rank", "linear"), rows)}
"""
    publish(args, text, shows="tokens of the longest sequence against ranks", draw=partial(draw, found))
