"""Bytes per parameter that the optimizers keep on each rank, counted on the tensors themselves.

python scripts/bench.py memory --record scripts/records/memory_2026-11.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from reports import publish, table
from train.model import build_model

import onebit
from bench.record import here, parser_of
from onebit.comm import SimTransport, run_ranks
from onebit.optimizer import CompressedOptimizer

OPTIMIZERS: dict[str, Callable[..., CompressedOptimizer]] = {
    "OnebitAdam, OnebitLamb": partial(onebit.OnebitAdam, freeze_step=2),
    "ZeroOneAdam": partial(onebit.ZeroOneAdam, var_update_scaler=1),
    "ZeroOneAdam, local steps": partial(onebit.ZeroOneAdam, var_update_scaler=1, local_step_clipper=4),
}


def measure(transport: SimTransport, kind: Callable[..., CompressedOptimizer], error_dtype: torch.dtype) -> list[float]:
    """State and buffers after a step with gradients, then after one with momentum: bytes per parameter, 1 M model."""
    model = build_model("small", seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = kind(model.parameters(), transport=transport, error_dtype=error_dtype)
    sizes = []
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        if step != 1:
            sizes += [optimizer.state_bytes() / parameters, optimizer.buffer_bytes() / parameters]
    return sizes


def adamw() -> float:
    """State of torch.optim.AdamW, bytes per parameter."""
    model = build_model("small", seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.nbytes for t in tensors) / sum(p.numel() for p in model.parameters())


HEADS = ("optimizer", "errors", "ranks", "state, warm-up", "state after", "buffers, warm-up", "buffers after")


def main(argv: Sequence[str] | None = None) -> None:
    args = parser_of("memory", __doc__).parse_args(argv)
    rows: list[list[object]] = [["torch.optim.AdamW, onebit.Lamb", "", "", f"{adamw():.2f}", f"{adamw():.2f}", "", ""]]
    for name, kind in OPTIMIZERS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for ranks in (1, 2, 4, 8):
                sizes = run_ranks(ranks, lambda transport, k=kind, d=dtype: measure(transport, k, d))[0]
                cells = [f"{sizes[k]:.2f}" for k in (0, 2, 1, 3)]
                rows.append([name, str(dtype).removeprefix("torch."), ranks, *cells])
    text = f"""# Memory of the optimizer

{here()}

Bytes per parameter and rank, 1.03 M-parameter GPT (padding included), float32 parameters. Buffers: the gradient buckets
and what is sent and received; DistributedDataParallel has 4 bytes of buckets.

{table(HEADS, rows, names=2)}
"""
    publish(args, text)
