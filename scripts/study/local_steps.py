"""What local steps cost in loss: the price of locality and the price of compression, apart.

    python scripts/study.py local-steps --steps 600 --lrs 4e-3 8e-3 --seeds 0 1 --results runs/local.jsonl

All methods see the same batches. AdamW averages gradients in every step, and "AdamW with an outer step" takes
Nesterov's step over its own last H steps, as DiLoCo does: what such a step gives one worker alone. "DiLoCo" is the
published outer step (.7, .9) over differences in full or in eight bits; "local" takes the mean of the weights, "one
bit" the same from frames in one bit, "corrected" with `LocalSteps`' correction over 80 steps. Methods with "Muon" have
it in AdamW's place. "one worker alone" has one rank's batches and no network: what the others add is the distance from
it. Each method has the rate that suits it best of those given, by the mean over seeds. "speeds 1 : 3" has ranks of
unlike speed in balanced rounds, and as many samples as the others in all. Locality: local differences in full against
AdamW; compression: one bit against differences in full, by equal schedules.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench.record import here
from provenance import add_record, check_record
from reports import add_missing, gap_text, publish, read_lines, table
from torch.optim.lr_scheduler import LambdaLR
from train.model import decay_groups
from train.schedule import lr_fraction

import onebit
from onebit.comm import Codec, IdentityCodec, Int8Codec, SignCodec, SimTransport, run_ranks
from study.catalog import TASKS, load_task
from study.run import WEIGHT_DECAY, muon_groups
from study.tasks import Task


@dataclass(frozen=True)
class Job:
    """One run, and what it found. loss: of validation. bits: sent per parameter and step, without (n-1)/n."""

    task: str
    method: str
    every: int
    ranks: int
    steps: int
    rows: int
    lr: float
    seed: int

    def lr_at(self, step: int) -> float:
        """A share of the peak: linear over the first twentieth, then a cosine to a tenth."""
        return lr_fraction(step, self.steps, max(1, self.steps // 20))


@dataclass(frozen=True)
class Way:
    """every_of: what LocalSteps takes, of a job; None: AdamW alone. is_one_worker: all batches in one. is_muon: Muon
    in place of AdamW.

    speeds: of the ranks, in balanced rounds; one of speed 1 sleeps until a step has taken SLOWEST_S.
    """

    every_of: Callable[[Job], object] | None = None
    codec: Codec | None = None
    outer: tuple[float, float] = (1.0, 0.0)
    is_one_worker: bool = False
    is_alone: bool = False
    is_muon: bool = False
    correction_steps: int = 0
    speeds: tuple[float, ...] = ()


def _fixed(job: Job) -> object:
    return job.every


def _started(job: Job) -> object:
    """A twentieth of the steps in rounds of two, another in rounds of a quarter of H."""
    twentieth = max(1, job.steps // 20)
    return {0: 2, twentieth: max(2, job.every // 4), 2 * twentieth: job.every}


SLOWEST_S = 0.12
NESTEROV, SHORTER = (0.7, 0.9), (0.7, 0.6)
WAYS = {
    "AdamW": Way(is_one_worker=True),
    "one worker alone": Way(is_one_worker=True, is_alone=True),
    "AdamW with an outer step": Way(_fixed, IdentityCodec(), NESTEROV, is_one_worker=True),
    "Muon": Way(is_one_worker=True, is_muon=True),
    "local": Way(_fixed, IdentityCodec()),
    "local, Muon": Way(_fixed, IdentityCodec(), is_muon=True),
    "one bit, started, Muon": Way(_started, SignCodec(), is_muon=True),
    "one bit": Way(_fixed, SignCodec()),
    "one bit, started": Way(_started, SignCodec()),
    "local, started": Way(_started, IdentityCodec()),
    "one bit, corrected": Way(_fixed, SignCodec(), correction_steps=80),
    "one bit, started, corrected": Way(_started, SignCodec(), correction_steps=80),
    "local, speeds 1 : 3": Way(_fixed, IdentityCodec(), speeds=(1, 3)),
    "one bit, speeds 1 : 3": Way(_fixed, SignCodec(), speeds=(1, 3)),
    "DiLoCo, fp32": Way(_fixed, IdentityCodec(), NESTEROV),
    "DiLoCo, int8": Way(_fixed, Int8Codec(), NESTEROV),
    "DiLoCo, one bit": Way(_fixed, SignCodec(), NESTEROV),
    "DiLoCo, .7 and .6, fp32": Way(_fixed, IdentityCodec(), SHORTER),
    "DiLoCo, .7 and .6, one bit": Way(_fixed, SignCodec(), SHORTER),
}


def run_job(job: Job) -> dict:
    """The loss and the traffic of a run."""
    task, way, began = load_task(job.task), WAYS[job.method], time.perf_counter()
    found = run_ranks(1 if way.is_one_worker else job.ranks, lambda t: _train(job, way, task, t), timeout_s=600.0)
    loss, bits = found[0]
    return {**asdict(job), "loss": loss, "bits": bits, "seconds": time.perf_counter() - began}


def _train(job: Job, way: Way, task: Task, transport: SimTransport) -> tuple[float, float]:
    model = task.build(job.seed)
    inner: torch.optim.Optimizer
    if way.is_muon:
        inner = onebit.Muon(muon_groups(model), lr=job.lr)
    else:
        inner = torch.optim.AdamW(decay_groups(model, WEIGHT_DECAY), lr=job.lr)
    optimizer = inner
    if way.every_of is not None:
        optimizer = onebit.LocalSteps(
            inner,
            way.every_of(job),  # type: ignore[arg-type]
            outer_lr=way.outer[0],
            outer_momentum=way.outer[1],
            codec=way.codec,
            correction_steps=way.correction_steps,
            balanced=bool(way.speeds),
            transport=transport,
        )
    schedule = LambdaLR(optimizer, job.lr_at)
    workers = range(1 if way.is_alone else job.ranks) if way.is_one_worker else [transport.rank]
    step = 0  # of this rank

    def steps_taken() -> int:
        return optimizer.steps_taken() if isinstance(optimizer, onebit.LocalSteps) else step

    while steps_taken() < job.steps:
        began = time.perf_counter()
        parts = [task.batch(job.seed, step, worker, job.rows) for worker in workers]
        task.loss(model, tuple(torch.cat(column) for column in zip(*parts, strict=True))).backward()
        if way.speeds:
            step_s = SLOWEST_S / way.speeds[transport.rank % len(way.speeds)]
            time.sleep(max(0.0, began + step_s - time.perf_counter()))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        while schedule.last_epoch < steps_taken():
            schedule.step()
    if not isinstance(optimizer, onebit.LocalSteps):
        return task.evaluate(model), 0.0 if way.is_alone else 64.0
    optimizer.sync()
    bits = optimizer.stats.mean_bits_per_parameter * job.ranks / max(1, job.ranks - 1)
    return (task.evaluate(model) if transport.rank == 0 else 0.0), 64.0 if way.is_one_worker else bits


# ---------------------------------------------------------------- the table


def report(results: Sequence[dict]) -> Iterator[str]:
    """Methods are compared at the rates that all of them had, where there are any; below, all rates of all."""
    first = results[0]
    results = [r if WAYS[r["method"]].every_of else r | {"every": 0} for r in results]
    rates_of: dict[tuple[str, int], set[float]] = {}
    for r in results:
        rates_of.setdefault((r["method"], r["every"]), set()).add(r["lr"])
    shared = set.intersection(*rates_of.values())
    compared = [r for r in results if not shared or r["lr"] in shared]
    yield (
        f"{first['task']}, {first['ranks']} workers of {first['rows']} rows, {first['steps']} steps, seeds "
        f"{', '.join(map(str, sorted({r['seed'] for r in results})))}; each method at its best rate of "
        f"{', '.join(f'{lr:g}' for lr in sorted({r['lr'] for r in compared}))}{'' if shared else ', where it had it'}. "
        f"Bits per parameter and step, without (n-1)/n.\n"
    )
    best = {key: _best(compared, *key) for key in rates_of}
    plain = next((value for (method, _), value in best.items() if method == "AdamW"), None)
    in_full = {"one bit": "local", "one bit, started": "local, started", "DiLoCo, one bit": "DiLoCo, fp32"}
    in_full |= {"one bit, speeds 1 : 3": "one bit", "local, speeds 1 : 3": "local"}
    in_full |= {"DiLoCo, int8": "DiLoCo, fp32", "DiLoCo, .7 and .6, one bit": "DiLoCo, .7 and .6, fp32"}
    rows = []
    for (method, every), (lr, losses, bits) in best.items():
        twin = best.get((in_full.get(method, ""), every))
        cells = [method, str(every or ""), f"{bits:.3f}", f"{lr:g}"]
        rows.append([*cells, f"{statistics.mean(losses):.4f}", *(_gap(losses, other) for other in (plain, twin))])
    yield table(("method", "H", "bits", "best rate", "loss", "to AdamW", "to the same in full"), rows)
    rates = sorted({r["lr"] for r in results})
    yield "\nAll rates, mean over seeds:\n"
    yield table(("method", "H", *(f"{lr:g}" for lr in rates)), _sweep(results, list(rates_of), rates))


def _sweep(results: Sequence[dict], keys: Sequence[tuple[str, int]], rates: Sequence[float]) -> Iterator[list[str]]:
    """Every method at every rate, mean over seeds; in brackets how many, where the most have more."""
    seeds = len({r["seed"] for r in results})
    for method, every in keys:
        cells = [method, str(every or "")]
        for lr in rates:
            losses = [r["loss"] for r in results if (r["method"], r["every"], r["lr"]) == (method, every, lr)]
            text = f"{statistics.mean(losses):.4f}" if losses else ""
            cells.append(text + (f" ({len(losses)})" if 0 < len(losses) < seeds else ""))
        yield cells


def _best(results: Sequence[dict], method: str, every: int) -> tuple[float, list[float], float]:
    """(rate, losses by seed, bits), of those with the most seeds the rate of the least mean loss."""
    by_rate: dict[float, list[dict]] = {}
    for r in results:
        if (r["method"], r["every"]) == (method, every):
            by_rate.setdefault(r["lr"], []).append(r)
    most = max(len(runs) for runs in by_rate.values())
    whole = {lr: sorted(runs, key=lambda r: r["seed"]) for lr, runs in by_rate.items() if len(runs) == most}
    lr, runs = min(whole.items(), key=lambda item: statistics.mean(r["loss"] for r in item[1]))
    return lr, [r["loss"] for r in runs], statistics.mean(r["bits"] for r in runs)


def _gap(losses: Sequence[float], other: tuple[float, list[float], float] | None) -> str:
    if other is None or len(other[1]) != len(losses) or other[1] == losses:
        return ""
    return gap_text(losses, other[1], 1)


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    """What the command line asks for, one method after the other at each rate: a table has its rows early."""
    for task, rows, seed, lr in itertools.product(args.task, args.rows, args.seeds, args.lrs):
        for method in args.methods:
            for every in args.every if WAYS[method].every_of else args.every[:1]:
                yield Job(task, method, every, args.ranks, args.steps, rows, lr, seed)


def _tables(args: argparse.Namespace, results: Sequence[dict]) -> Iterator[list[dict]]:
    """The results of each task and number of rows, by the seeds, methods and H that are asked for."""
    asked = [r for r in results if r["seed"] in args.seeds and r["method"] in args.methods]
    asked = [r for r in asked if r["every"] in args.every or not WAYS[r["method"]].every_of]
    for task, rows in itertools.product(args.task, args.rows):
        wanted = (task, args.ranks, args.steps, rows)
        yield [r for r in asked if (r["task"], r["ranks"], r["steps"], r["rows"]) == wanted]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="study.py local-steps", description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["byte-lm"], help="a table for each")
    parser.add_argument("--methods", nargs="+", choices=WAYS, default=list(WAYS), metavar="METHOD")
    parser.add_argument("--every", nargs="+", type=int, default=[8, 32], metavar="H")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", nargs="+", type=int, default=[4], help="of a worker's batch; a table for each")
    parser.add_argument("--lrs", nargs="+", type=float, default=[4e-3, 8e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--results", type=Path, help="JSON lines; what is in there is not run again")
    add_record(parser)
    parser.add_argument("--report-only", action="store_true", help="what --results holds of this; runs nothing")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.report_only and args.results is None:
        parser.error("--report-only reads what --results holds: give it a file")
    if args.results is not None and not args.report_only:
        check_record(parser, args.results)
    results = read_lines(args.results)
    if not args.report_only:
        done = {Job(**{name: r[name] for name in Job.__annotations__}) for r in results}
        results += add_missing(_jobs(args), done, run_job, args.results)
    tables = list(_tables(args, results))
    if not all(tables):
        parser.error(
            f"{args.results} holds no run of some task and rows that are asked for, with these steps, seeds, methods "
            "and H; leave out --report-only"
        )
    text = "\n\n".join("\n".join(report(runs)) for runs in tables)
    publish(args, f"# Local steps\n\n{here()}\n\n{text}\n", *filter(None, [args.results]))
