"""The arguments that every example takes, and the JSON that it writes: see `README.md`. Not for copying."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn


def parse(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """The arguments, and is_onebit and save_step: after how many steps a checkpoint is saved."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--optimizer", choices=("onebit", "adamw"), default="onebit")
    add("--steps", type=int, default=300)
    add("--warmup", type=int, default=100, help="steps before one bit")
    add("--seed", type=int, default=0, help="of the initial weights")
    add("--folder", type=Path, help="for checkpoints")
    add("--resume", action="store_true", help="go on from the checkpoint in --folder")
    add("--out", type=Path, help="the JSON that rank 0 writes")
    args = parser.parse_args(argv)
    args.is_onebit, args.save_step = args.optimizer == "onebit", args.steps // 2 + 1
    return args


def write(
    args: argparse.Namespace, model: nn.Module, losses: Sequence[float], bits: Sequence[float], seconds: float
) -> None:
    """What came out. Rank 0 alone. bits: per parameter, of each step; empty for AdamW."""
    parameters = b"".join(p.detach().float().cpu().numpy().tobytes() for p in model.parameters())
    said = {
        "losses": list(losses),
        "bits_per_parameter": statistics.fmean(bits) if bits else None,
        "seconds": seconds,
        "sha256": hashlib.sha256(parameters).hexdigest(),
    }
    if args.out:
        args.out.write_text(json.dumps(said))


def world_size() -> int:
    """How many ranks torchrun has started."""
    return int(os.environ["WORLD_SIZE"])


def samples(number: int, seed: int = 8) -> tuple[Tensor, Tensor]:
    """Vectors, and what a linear teacher makes of their tanh: one of eight classes."""
    teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(7))
    x = torch.randn(number, 32, generator=torch.Generator().manual_seed(seed))
    return x, (x.tanh() @ teacher).argmax(1)
