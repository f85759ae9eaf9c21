"""Stages 1 to 3 beside DeepSpeed 0.19.6 on CPU: seconds of a step, peak memory, and the loss, of the same JSON.

    python scripts/bench.py peer_deepspeed
    python scripts/bench.py zero_deepspeed --record runs/zero_deepspeed.md

Both engines train the same GPT from the same values on the same windows, with torch's fused AdamW, 2 ranks over Gloo on
loopback. Each case is a fresh pair of processes, and the two sides take turns. Peak memory is the largest resident set
of a rank, less what it had after a step with a model of two parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from provenance import add_record, revision
from reports import publish, table
from train.model import SIZES, VOCABULARY, WithLoss, build_model

from bench import peer_deepspeed
from bench.command import on_loopback
from bench.limits import resident_bytes

RANKS, WARM, BATCH, CLIP = 2, 4, 2, 1.0  # BATCH: windows per rank
SIDES = ("onebit", "deepspeed")
CASES = [(stage, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")]


def worker(args: argparse.Namespace) -> dict[str, float] | None:
    """One rank; on rank 0 what it measured."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
        if args.side == "deepspeed":
            peer_deepspeed.start()
            import deepspeed as engine_of
        else:
            from onebit import zero as engine_of  # type: ignore[no-redef]
        found = train(engine_of, args)
    rank = torch.distributed.get_rank()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # a Python that ends with Gloo's threads may abort
    return None if rank else found


def train(engine_of: Any, args: argparse.Namespace) -> dict[str, float]:
    """Steps of one engine; medians over those after the first few."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "zero_optimization": {"stage": args.stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    _take_a_step(engine_of, config)
    before, _ = resident_bytes()
    model = WithLoss(build_model(args.size, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = engine_of.initialize(model=model, optimizer=optimizer, config=config)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    windows = torch.randint(VOCABULARY, (BATCH, SIZES[args.size].context + 1), generator=generator)
    seconds = []
    for _ in range(args.steps + WARM):
        began = time.perf_counter()
        loss = engine(windows)
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - began)
    facts = torch.tensor([resident_bytes()[1] - before, float(loss.detach()) / RANKS, 0.0], dtype=torch.float64)
    peak, mean = facts[:1].clone(), facts[1:2].clone()
    torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(mean)
    return {"seconds": statistics.median(seconds[WARM:]), "peak_mb": float(peak) / 1e6, "loss": float(mean)}


def _take_a_step(engine_of: Any, config: dict[str, Any]) -> None:
    """With a model of two parameters, so that all that an engine imports is there."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine, *_ = engine_of.initialize(model=model, optimizer=optimizer, config=config)
    dtype = next(model.parameters()).dtype
    engine.backward(engine(torch.ones(2, 1, dtype=dtype)).sum())
    engine.step()


def measure(side: str, stage: int, dtype: str, args: argparse.Namespace) -> dict[str, float]:
    """Start the ranks of one case."""
    asked = argparse.Namespace(**vars(args) | {"side": side, "stage": stage, "dtype": dtype})
    python = peer_deepspeed.python() if side == "deepspeed" else [*peer_deepspeed.with_allocator(), sys.executable]
    return on_loopback(worker, asked, RANKS, python)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py zero_deepspeed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="25m-short")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (default: %(default)s)")
    add_record(parser)
    args = parser.parse_args(argv)
    if why := peer_deepspeed.why_not_prepared():
        raise SystemExit(why)
    beside = [head for name in ("seconds", "peak MB") for head in (name, "DeepSpeed's", "ratio")]
    heads = ("stage", "dtype", *beside, "loss", "DeepSpeed's")
    rows = []
    for stage, dtype in CASES:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(args.rounds):
            for side in SIDES:
                runs[side].append(measure(side, stage, dtype, args))
        ours, theirs = ({key: statistics.median(run[key] for run in of) for key in of[0]} for of in runs.values())
        cells = [str(stage), dtype]
        for key, form in (("seconds", ".3f"), ("peak_mb", ".0f")):
            cells += [f"{ours[key]:{form}}", f"{theirs[key]:{form}}", f"{ours[key] / theirs[key]:.2f}"]
        cells += [f"{side['loss']:.4f}" for side in (ours, theirs)]
        rows.append(cells)
    text = f"""# Stages 1 to 3 beside DeepSpeed 0.19.6 on CPU

`python scripts/bench.py zero_deepspeed`, {time.strftime("%Y-%m-%d")}, revision {revision()}, torch {torch.__version__}.
GPT `{args.size}`, {BATCH} windows a rank, {RANKS} ranks over Gloo with one thread each, torch's fused AdamW and
`gradient_clipping` {CLIP:g} on both sides, `contiguous_gradients` and `overlap_comm` on (without the latter
DeepSpeed takes as long). DeepSpeed averages gradients in bfloat16 if it computes in it, ours always in float32.
Medians of {args.rounds} runs of {args.steps} steps, in turn. Peak: the largest resident set of a rank, less that after
a step of two parameters.

{table(heads, rows, names=2)}
"""
    publish(args, text)
