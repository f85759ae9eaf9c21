"""What it costs that clipped steps leave before their norm is known: how often they are sent twice, and the loss.

    python scripts/study.py clip --record scripts/records/clip_2026-11.md

`OnebitAdam` on four simulated ranks, one rate. A step leaves with an expected factor, and once more if that
exceeds the right one by more than a given factor. "exact": every step leaves with the factor that its norm asks for.
Batches, seeds and the schedule of dense steps are the same.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from bench.record import here
from provenance import add_record
from reports import gap_text, publish, table
from torch import Tensor
from train.model import decay_groups
from train.schedule import train_steps

import onebit.optimizer
from onebit.comm import Transport, run_ranks
from study.catalog import load_task
from study.run import WEIGHT_DECAY
from study.tasks import Task

RANKS, ROWS, LR, EXACT = 4, 4, 4e-3, 0.0
CASES = (("byte-lm", 1.0), ("byte-lm", 0.3), ("masked-lm", 1.0), ("digits", 1.0))  # task, max_grad_norm


@dataclass(frozen=True)
class Found:
    """Of one run. clipped, twice: shares of its compressed steps, those with a factor below 1 and those sent twice."""

    task: str
    max_norm: float
    most: float
    seed: int
    loss: float
    clipped: float
    twice: float


def run(case: tuple[str, float], most: float, seed: int, steps: int) -> Found:
    task = load_task(case[0])
    with mock.patch.object(onebit.optimizer, "MOST_TOO_LARGE", most):
        loss, factors, sent = run_ranks(RANKS, partial(_train, task, case[1], seed, steps), timeout_s=600.0)[0]
    compressed, once = len(sent), min(sent)
    twice = sum(count > 1.5 * once for count in sent) / compressed if most > EXACT else 0.0
    return Found(*case, most, seed, loss, sum(factor < 1.0 for factor in factors) / compressed, twice)


def _train(
    task: Task, max_norm: float, seed: int, steps: int, transport: Transport
) -> tuple[float, list[float], list[int]]:
    """The held-out loss; of each compressed step the factor and the bytes that this rank sent."""
    model = task.build(seed)
    groups = decay_groups(model, WEIGHT_DECAY)
    optimizer = onebit.OnebitAdam(groups, transport=transport, max_grad_norm=max_norm, compression="always")
    factors, sent = [], []

    def loss_of(step: int) -> Tensor:
        return task.loss(model, task.batch(seed, step, transport.rank, ROWS))

    for _ in train_steps(optimizer, steps, loss_of, LR):
        if optimizer.stats.phase == "compressed":
            factors.append(optimizer.stats.clip_factor)
            sent.append(optimizer.stats.sent_bytes)
    return (task.evaluate(model) if transport.rank == 0 else 0.0), factors, sent


def _prepare_process() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


HEADS = ("task, max_grad_norm", "at most × too large", "clipped", "sent twice", "loss", "to exact")


def rows_of(found: Sequence[Found], mosts: Sequence[float]) -> Iterator[list[str]]:
    """A row for each case and factor."""
    for case in dict.fromkeys((each.task, each.max_norm) for each in found):
        of = {
            most: [each for each in found if (each.task, each.max_norm, each.most) == (*case, most)] for most in mosts
        }
        for most, runs in of.items():
            shares = [statistics.mean(share) for share in zip(*((r.clipped, r.twice) for r in runs), strict=True)]
            gap = "" if most == EXACT else gap_text((r.loss for r in runs), (r.loss for r in of[EXACT]))
            loss = statistics.mean(each.loss for each in runs)
            clipped, twice = (f"{100 * share:.0f} %" for share in shares)
            yield [f"{case[0]}, {case[1]:g}", f"{most or 'exact'}", clipped, twice, f"{loss:.3f}", gap]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=400)
    add("--seeds", type=int, default=3)
    add("--most", type=float, nargs="+", default=[1.25, 2.0], help="times too large, before a step is sent once more")
    add("--processes", type=int, default=2)
    add_record(parser)
    args = parser.parse_args(argv)
    mosts = [EXACT, *args.most]
    asked = [(case, most, seed, args.steps) for case in CASES for most in mosts for seed in range(args.seeds)]
    with ProcessPoolExecutor(args.processes, initializer=_prepare_process) as pool:
        found = list(pool.map(run, *zip(*asked, strict=True)))
    text = f"""# Clipped steps that leave before their norm is known

{here()}

{RANKS} simulated ranks of {ROWS} rows, {args.steps} steps, {args.seeds} seeds, learning rate {LR:g}; means over seeds,
in brackets the least and the largest.

{table(HEADS, rows_of(found, mosts))}
"""
    publish(args, text)
