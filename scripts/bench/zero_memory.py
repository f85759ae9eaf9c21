"""What a rank holds at every stage of ZeRO, counted while it trains: 4 ranks, as 4 nodes of one and as 2 nodes of two.

    python scripts/bench.py zero_memory --record runs/zero_memory.md

Each configuration takes a few steps of a GPT, one after another. Then, after a backward pass and again after the
step, all storages of all live tensors are counted, once each, in bytes per parameter of the model: what is there beside
parameters, gradients and optimizer state are buckets, wire buffers and gathered copies. Activations are gone by then.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from reports import publish, table
from torch import Tensor
from train.model import SIZES, VOCABULARY, WithLoss, build_model

from bench.command import on_loopback
from bench.record import here, parser_of
from onebit import zero
from onebit.model_parallel import local
from onebit.zero.plan import Run, plan

RANKS, STEPS = 4, 7
# (optimizer of the configuration, plan's name for it, stage, ranks per node)
CASES = (
    ("AdamW", "AdamW", 1, 4),
    ("AdamW", "AdamW", 2, 4),
    ("AdamW", "AdamW", 3, 4),
    ("OneBitAdam", "sharded int4", 1, 1),
    ("OneBitAdam", "sharded int4", 2, 1),
    ("OneBitAdam", "OneBitAdam", 0, 1),
    ("OneBitAdam", "OneBitAdam", 1, 2),
    ("OneBitAdam", "OneBitAdam", 2, 2),
    ("OneBitAdam", "OneBitAdam", 3, 2),
    ("ZeroOneAdam", "ZeroOneAdam", 3, 2),
    ("OneBitLamb", "OneBitLamb", 3, 2),
)


def worker(args: argparse.Namespace) -> list[dict] | None:
    """One rank: count every case; on rank 0 what it counted."""
    torch.set_num_threads(1)
    grids = {per_node: zero.grid.start(shard=per_node) for per_node in {case[3] for case in CASES}}
    found = [count(case, args.size, grids[case[3]]) for case in CASES]
    rank = grids[1].world.rank
    for grid in grids.values():
        grid.close()
    return None if rank else found


def count(case: Sequence, size: str, grid: zero.grid.Grid) -> dict[str, float]:
    """Train for a few steps; bytes per parameter."""
    optimizer, _, stage, per_node = case
    others = counted()
    params = {"lr": 1e-4, **({"freeze_step": 1} if optimizer in ("OneBitAdam", "OneBitLamb") else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": stage},
        "onebit": {"compression": "always", "ranks_per_node": per_node, "error_dtype": "bf16", "bucket_cap_mb": 0.5},
    }
    engine, *_ = zero.initialize(model=WithLoss(build_model(size, seed=0)), config=config, grid=grid)
    elements = sum(p.numel() for p in engine.module.parameters())
    windows = torch.randint(VOCABULARY, (1, SIZES[size].context + 1))
    seconds = []
    for _ in range(STEPS - 1):
        began = time.perf_counter()
        engine.backward(engine(windows))
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.backward(engine(windows))
    in_backward = counted()
    engine.sharding.reduce(is_last=True)
    grads = bytes_of(p.grad for p in parameters_of(engine))
    engine.step()
    optimizer_bytes = (
        engine.optimizer.state_bytes()
        if hasattr(engine.optimizer, "state_bytes")
        else sum(local(x).nbytes for s in engine.optimizer.state.values() for x in s.values() if isinstance(x, Tensor))
    )
    engine.synchronise()
    return {
        "parameters": bytes_of(parameters_of(engine)) / elements,
        "gradients": grads / elements,
        "state": optimizer_bytes / elements,
        "after backward": (in_backward - others) / elements,
        "after the step": (counted() - others) / elements,
        "seconds": statistics.median(seconds),
    }


def parameters_of(engine: zero.Engine) -> list[Tensor]:
    """The model's parameters, and those that the optimizer has."""
    return [*engine.module.parameters(), *engine.sharding.held.parameters()]


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages that these refer to, each counted once; a view of rows is of its whole."""
    held = [local(x) for x in tensors if x is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())


def counted() -> int:
    """Bytes of all storages that live tensors refer to."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if issubclass(type(x), Tensor):
            for tensor in {
                id(t): t for t in (local(x), local(x.grad) if x.is_leaf and x.grad is not None else x)
            }.values():
                plain = local(tensor)
                storages[plain.untyped_storage().data_ptr()] = plain.untyped_storage().nbytes()
    return sum(storages.values())


HEADS = (
    "optimizer", "stage", "ranks per node", "parameters", "gradients", "state", "state, by the estimator",
    "all tensors after backward", "after the step", "seconds of a step",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("zero_memory", __doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    args = parser.parse_args(argv)
    rows = [row(*each) for each in zip(CASES, on_loopback(worker, args, RANKS), strict=True)]
    text = f"""# Memory of the engine, per rank

{here()}

GPT `{args.size}`, {RANKS} ranks over Gloo, bfloat16, errors in bfloat16, after {STEPS} steps (the one-bit optimizers
compress by then). Bytes per parameter of the model; the columns "all tensors" count every storage once, wire buffers,
buckets and gathered copies included. Seconds are medians over {STEPS - 1} steps.

{table(HEADS, rows)}
"""
    publish(args, text)


def row(case: Sequence, found: dict) -> list[object]:
    optimizer, name, stage, per_node = case
    run = replace(Run(1e6, RANKS // per_node, per_node), error_bytes=2)
    expected = plan(run, name, stage)
    assert expected is not None
    columns = ("parameters", "gradients", "state", "after backward", "after the step")
    cells = [f"{found[column]:.2f}" for column in columns]
    cells.insert(3, f"{expected.state:.2f}")
    return [name if name.startswith("sharded") else optimizer, stage, per_node, *cells, f"{found['seconds']:.3f}"]
