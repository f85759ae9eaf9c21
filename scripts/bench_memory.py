"""Bytes per parameter that the optimizers keep on each rank, counted on the tensors themselves.

python scripts/bench_memory.py --record scripts/records/memory_2026-11.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from model import build_model

import onebit
from onebit.comm import SimTransport, run_ranks


def measure(link: SimTransport, error_dtype: torch.dtype) -> tuple[float, float, float, float]:
    """State and buffers in warm-up, then after the freeze, bytes per parameter of the 1 M model."""
    model = build_model("small", seed=0)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = onebit.OnebitAdam(model.parameters(), freeze_step=1, link=link, error_dtype=error_dtype)
    warmup = optimizer.state_bytes(), optimizer.buffer_bytes()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    sizes = *warmup, optimizer.state_bytes(), optimizer.buffer_bytes()
    return tuple(size / parameters for size in sizes)


def adamw() -> float:
    """State of torch.optim.AdamW, bytes per parameter."""
    model = build_model("small", seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.nbytes for t in tensors) / sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", type=Path, metavar="FILE")
    args = parser.parse_args()
    lines = [
        "# Memory of the optimizer",
        "",
        f"`python {' '.join(sys.argv)}`",
        "",
        "Bytes per parameter and rank, 1.03 M-parameter GPT (padding included), float32 parameters. Buffers: the",
        "gradient buckets and what is sent and received; DistributedDataParallel has 4 bytes of buckets.",
        "",
        "| optimizer | errors | ranks | state, warm-up | state after | buffers, warm-up | buffers after |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| torch.optim.AdamW | | | {adamw():.2f} | {adamw():.2f} | | |",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (1, 2, 4, 8):
            state, buffers, state_after, buffers_after = run_ranks(ranks, lambda link, d=dtype: measure(link, d))[0]
            cells = [f"{x:.2f}" for x in (state, state_after, buffers, buffers_after)]
            lines.append(f"| OnebitAdam | {str(dtype).removeprefix('torch.')} | {ranks} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.record is not None:
        args.record.write_text(text)


if __name__ == "__main__":
    main()
