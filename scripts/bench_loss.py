"""Loss of OnebitAdam against AdamW on the byte LM: equal steps, equal learning-rate sweep, paired seeds.

    python scripts/bench_loss.py --record scripts/records/loss_2026-11.md

Ranks are simulated: threads of one process over `SimTransport`, each with its own batches, the same bits as over a
network. AdamW sees the concatenation of the ranks' batches, which is the averaged gradient.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import read_corpus
from model import GPT, build_model, decay_groups
from rich.progress import Progress
from torch import Tensor
from train import Windows

import onebit
from onebit.comm import SimTransport, run_ranks

METHODS = ("adamw", "onebit-adam")
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@dataclass(frozen=True)
class Job:
    """One training run."""

    method: str
    lr: float
    seed: int
    steps: int
    ranks: int
    size: str
    batch_size: int


def lr_at(job: Job, step: int) -> float:
    """Linear over the first tenth, then a cosine to a tenth of the peak."""
    warmup = max(1, job.steps // 10)
    if step < warmup:
        return job.lr * (step + 1) / warmup
    return job.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (job.steps - warmup))))


def run_job(job: Job) -> float:
    """Validation loss at the end, nats per byte."""
    torch.set_num_threads(1)
    if job.method == "adamw":
        return _adamw(job)
    return run_ranks(job.ranks, lambda link: _onebit(job, link), timeout_s=600)[0]


def _adamw(job: Job) -> float:
    model, windows = _start(job)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01))
    for step in range(job.steps):
        batches = [windows.training(job.batch_size, job.seed, step, rank, 0) for rank in range(job.ranks)]
        _step(job, step, optimizer, lambda b=batches: model.loss(torch.cat(b)))
    return _validate(model, windows)


def _onebit(job: Job, link: SimTransport) -> float:
    model, windows = _start(job)
    optimizer = onebit.OnebitAdam(decay_groups(model, 0.01), total_steps=job.steps, link=link)
    for step in range(job.steps):
        batch = windows.training(job.batch_size, job.seed, step, link.rank, 0)
        _step(job, step, optimizer, lambda b=batch: model.loss(b))
    return _validate(model, windows) if link.rank == 0 else math.nan


def _start(job: Job) -> tuple[GPT, Windows]:
    model = build_model(job.size, job.seed)
    return model, Windows(read_corpus(), model.context)


def _step(job: Job, step: int, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr_at(job, step)
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def _validate(model: GPT, windows: Windows) -> float:
    with torch.no_grad():
        return float(model.loss(windows.validation(0, 1, windows=1024)))


def gap_with_interval(losses: list[float], reference: list[float]) -> tuple[float, float]:
    """Mean of the paired relative gaps, and half the width of its 95 % interval."""
    gaps = [a / b - 1 for a, b in zip(losses, reference, strict=True)]
    half = _T95[len(gaps) - 1] * statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    return statistics.mean(gaps), half


def report(jobs: list[Job], losses: list[float], seconds: float) -> str:
    """Markdown: every learning rate of both methods, then the paired gap at each method's best."""
    by_lr: dict[tuple[str, float], list[float]] = {}
    for job, loss in zip(jobs, losses, strict=True):
        by_lr.setdefault((job.method, job.lr), []).append(loss)
    lrs = sorted({job.lr for job in jobs})
    first = jobs[0]
    lines = [
        f"""\
# Loss: OnebitAdam against AdamW, byte LM

`python {" ".join(sys.argv)}`

{first.size} model, {first.ranks} simulated ranks, {first.steps} steps, batch {first.batch_size} per rank,
{len({job.seed for job in jobs})} seeds, freeze_step "auto" (at most 15 % of the steps). Validation loss in
nats per byte, mean over seeds. torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()},
text {read_corpus().sha256[:12]}, {seconds:.0f} s.

| learning rate | {" | ".join(METHODS)} |
| --- | {" | ".join("---" for _ in METHODS)} |"""
    ]
    for lr in lrs:
        cells = [f"{statistics.mean(by_lr[m, lr]):.4f}" for m in METHODS]
        lines.append(f"| {lr:g} | " + " | ".join(cells) + " |")
    best = {m: min(lrs, key=lambda lr, m=m: statistics.mean(by_lr[m, lr])) for m in METHODS}
    chosen = {m: by_lr[m, best[m]] for m in METHODS}
    gap, half = gap_with_interval(chosen["onebit-adam"], chosen["adamw"])
    lines += ["", "At each method's best learning rate, by seed:", ""]
    lines += [f"- {m}, lr {best[m]:g}: " + ", ".join(f"{loss:.4f}" for loss in chosen[m]) for m in METHODS]
    lines += ["", f"Paired gap of onebit-adam to adamw: **{gap:+.2%}** ± {half:.2%} (95 %, t over seeds)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--processes", type=int, default=2, help="runs side by side")
    parser.add_argument("--record", type=Path, metavar="FILE")
    args = parser.parse_args()
    jobs = [
        Job(method, lr, seed, args.steps, args.ranks, args.size, args.batch_size)
        for lr in args.lrs
        for method in METHODS
        for seed in range(args.seeds)
    ]
    began = time.perf_counter()
    with ProcessPoolExecutor(args.processes) as pool, Progress() as progress:
        losses = list(progress.track(pool.map(run_job, jobs), total=len(jobs), description="runs"))
    text = report(jobs, losses, time.perf_counter() - began)
    print(text)
    if args.record is not None:
        args.record.write_text(text)


if __name__ == "__main__":
    main()
