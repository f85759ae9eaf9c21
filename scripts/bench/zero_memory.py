"""What a rank holds at every stage of ZeRO, counted while it trains: 4 ranks, as 4 nodes of one and as 2 nodes of two.

    python scripts/bench.py zero_memory --record runs/zero_memory.md

Each configuration takes a few steps of a GPT, one after another. Then, after a backward pass and again after the
step, all storages of all live tensors are counted, once each, in bytes per parameter of the model: what is there beside
parameters, gradients and optimizer state are buckets, wire buffers and gathered copies. Activations are gone by then.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from provenance import record_path, revision, write_record
from torch import Tensor, nn
from train.model import SIZES, VOCABULARY, build_model

from bench.command import COMMAND
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


class WithLoss(nn.Module):
    """The GPT with its loss as forward()."""

    def __init__(self, size: str):
        super().__init__()
        self.model = build_model(size, seed=0)

    def forward(self, windows: Tensor) -> Tensor:
        return self.model.loss(windows)


def worker(size: str, out: Path) -> None:
    """One rank: count every case, and let rank 0 write."""
    torch.set_num_threads(1)
    grids = {per_node: zero.grid.start(shard=per_node) for per_node in {case[3] for case in CASES}}
    found = [count(case, size, grids[case[3]]) for case in CASES]
    if grids[1].world.rank == 0:
        out.write_text(json.dumps(found))
    for grid in grids.values():
        grid.close()


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
    engine, *_ = zero.initialize(model=WithLoss(size), config=config, grid=grid)
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.py zero_memory", description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--record", type=record_path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        worker(args.size, args.out)
        return
    heads = (
        "optimizer", "stage", "ranks per node", "parameters", "gradients", "state", "state, by the estimator",
        "all tensors after backward", "after the step", "seconds of a step",
    )  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    rows += [row(case, found) for case, found in zip(CASES, measured(args.size), strict=True)]
    text = f"""# Memory of the engine, per rank

`python scripts/bench.py zero_memory`, {time.strftime("%Y-%m-%d")}, revision {revision()}, torch {torch.__version__}.
GPT `{args.size}`, {RANKS} ranks over Gloo, bfloat16, errors in bfloat16, after {STEPS} steps (the one-bit optimizers
compress by then). Bytes per parameter of the model; the columns "all tensors" count every storage once, wire buffers,
buckets and gathered copies included. Seconds are medians over {STEPS - 1} steps.

{chr(10).join(rows)}
"""
    sys.stdout.write(text)
    if args.record is not None:
        write_record(args.record, text)


def measured(size: str) -> list[dict]:
    """Start the ranks; what rank 0 counted, by case."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counted.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        call = [COMMAND, "zero_memory", "--worker", "--size", size, "--out", str(out)]
        subprocess.run([*command, *call], check=True, timeout=600)
        return json.loads(out.read_text())


def row(case: Sequence, found: dict) -> str:
    optimizer, name, stage, per_node = case
    run = replace(Run(1e6, RANKS // per_node, per_node), error_bytes=2)
    expected = plan(run, name, stage)
    assert expected is not None
    columns = ("parameters", "gradients", "state", "after backward", "after the step")
    cells = [f"{found[column]:.2f}" for column in columns]
    cells.insert(3, f"{expected.state:.2f}")
    cells.append(f"{found['seconds']:.3f}")
    return f"| {name if name.startswith('sharded') else optimizer} | {stage} | {per_node} | {' | '.join(cells)} |"
