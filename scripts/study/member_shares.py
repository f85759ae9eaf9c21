"""What shares by speed cost in loss: members that take unlike numbers of micro-batches, against equal ones.

    python scripts/study.py member-shares --seeds 0 1 2 --results runs/shares.jsonl

All methods see the same samples in the same steps, 2 micro-batches of the mean member in each. A member of speed v
sleeps until a micro-batch has taken SLOWEST_S / v, and `MemberSampler(balanced=True)` gives it what it can do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench.record import here
from faults.member_runs import Hub, founded
from provenance import add_record, check_record
from reports import add_missing, gap_text, publish, read_lines, table
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from train.model import decay_groups
from train.schedule import lr_fraction

import onebit
from onebit.membership import Members, MemberSampler, begin, end
from study.catalog import TASKS, load_task
from study.run import WEIGHT_DECAY

MEAN, SLOWEST_S = 2, 0.12


def _adamw(groups: list[dict], lr: float, members: Members) -> Any:
    return onebit.AveragedSteps(torch.optim.AdamW(groups, lr=lr), transport=members)


def _onebit_adam(groups: list[dict], lr: float, members: Members) -> Any:
    return onebit.OnebitAdam(groups, lr=lr, transport=members, compression="always")


@dataclass(frozen=True)
class Way:
    """speeds: of the members; none: equal shares. twin: the method with equal shares."""

    make: Callable[[list[dict], float, Members], Any]
    speeds: tuple[float, ...] = ()
    twin: str = ""


WAYS = {
    "AdamW": Way(_adamw),
    "AdamW, speeds 1 : 3": Way(_adamw, (1.0, 3.0), "AdamW"),
    "OnebitAdam": Way(_onebit_adam),
    "OnebitAdam, speeds 1 : 3": Way(_onebit_adam, (1.0, 3.0), "OnebitAdam"),
}


@dataclass(frozen=True)
class Job:
    """One run. rows: of a micro-batch."""

    task: str
    method: str
    steps: int
    rows: int
    lr: float
    seed: int


def run_job(job: Job) -> dict:
    """The loss of a run, and the share of the micro-batches that the first of its two members took."""
    task, way = load_task(job.task), WAYS[job.method]

    def work(members: Members) -> tuple[float, int]:
        model, taken = task.build(job.seed), 0
        optimizer = way.make(decay_groups(model, WEIGHT_DECAY), job.lr, members)
        schedule = LambdaLR(optimizer, lambda step: lr_fraction(step, job.steps, max(1, job.steps // 20)))
        count = job.steps * MEAN * 2
        sampler = MemberSampler(members, count, 1, micro_batches=MEAN, balanced=bool(way.speeds), shuffle=False)
        begin(optimizer, sampler=sampler, schedule=schedule)
        batches = sampler.batches(DataLoader(range(count), batch_sampler=sampler))  # type: ignore[arg-type]
        while optimizer.steps_taken() < job.steps:
            for numbers in sampler.step_batches(batches):
                began = time.perf_counter()
                (task.loss(model, task.batch(job.seed, int(numbers), 0, job.rows)) / MEAN).backward()
                taken += 1
                if way.speeds:
                    time.sleep(max(0.0, began + SLOWEST_S / way.speeds[members.rank] - time.perf_counter()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        loss = task.evaluate(model) if members.rank == 0 else 0.0
        end(optimizer)
        return loss, taken

    run = founded(Hub(2, timeout_s=600.0, wait_s=600.0), work, [float("inf")] * 2)
    run.wait(36_000.0)
    results = run.join().results
    counts = [taken for _, taken in results.values()]
    loss = max(loss for loss, _ in results.values())
    return {**asdict(job), "loss": loss, "share": min(counts) / sum(counts)}


def rows_of(results: Sequence[dict]) -> Iterator[list[str]]:
    """A row for each method."""
    seeds = sorted({r["seed"] for r in results})
    losses = {name: [r["loss"] for seed in seeds for r in results if (r["method"], r["seed"]) == (name, seed)]
              for name in dict.fromkeys(r["method"] for r in results)}  # fmt: skip
    for name, own in losses.items():
        share = statistics.mean(r["share"] for r in results if r["method"] == name)
        other = losses.get(WAYS[name].twin, [])
        gap = gap_text(own, other) if len(own) == len(other) else ""
        yield [name, f"{share:.0%}", f"{statistics.mean(own):.4f}", gap]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py member-shares", description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", choices=TASKS, default="byte-lm")
    parser.add_argument("--methods", nargs="+", choices=WAYS, default=list(WAYS), metavar="METHOD")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--results", type=Path, help="JSON lines; what is in there is not run again")
    add_record(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.results is not None:
        check_record(parser, args.results)
    jobs = [
        Job(args.task, method, args.steps, args.rows, args.lr, seed) for seed in args.seeds for method in args.methods
    ]
    results = read_lines(args.results)
    done = {Job(**{name: r[name] for name in Job.__annotations__}): r for r in results}
    results += add_missing(jobs, set(done), run_job, args.results)
    asked = [r for r in results if Job(**{name: r[name] for name in Job.__annotations__}) in jobs]
    text = f"""# Shares of members by speed

{here()}

{args.task}, 2 members, {2 * MEAN} micro-batches of {args.rows} rows in a step, {args.steps} steps, rate {args.lr:g},
seeds {", ".join(map(str, args.seeds))}. Share: of the slower member.

{table(("method", "share", "loss", "to equal shares"), rows_of(asked))}
"""
    publish(args, text, *filter(None, [args.results]))
