"""Loss and traffic of the optimizers against their dense twins: equal steps, equal learning-rate sweep, paired seeds.

Every method is swept over the same learning rates with the first seeds; the best one is then run with all seeds. Runs
that --results already holds are not run again: a study can be interrupted and extended, and the report is of all that
the file holds. The tasks are in tasks.py, a run in run.py, the report in report.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from provenance import add_record, check_record, record_path
from reports import add_missing, publish, read_lines

from study.catalog import ALIKE, TASKS
from study.figure import draw
from study.report import best_lr, report, runs_by_lr
from study.run import DEFAULTS, METHODS, Job, Point, Result, Setting, run_job

# ---------------------------------------------------------------- many runs


def read_results(path: Path) -> dict[Job, Result]:
    """The runs that a file of JSON lines holds."""
    results = {}
    for line in read_lines(path):
        job = Job(**line["job"])
        results[job] = Result(job, tuple(Point(*point) for point in line["curve"]), line["seconds"], line["revision"])
    return results


def to_line(result: Result) -> dict:
    """`loss` and `bits_per_step` are there for other readers."""
    about = {"job": asdict(result.job), "loss": result.loss, "bits_per_step": result.bits_per_step}
    curve = [[point.step, point.loss, point.bits] for point in result.curve]
    return about | {"curve": curve, "seconds": round(result.seconds, 2), "revision": result.revision}


def line_of(job: Job) -> dict:
    return to_line(run_job(job))


def run_missing(jobs: Iterable[Job], path: Path, pool: Executor, title: str) -> None:
    """Run the jobs that the file does not hold."""
    add_missing(jobs, read_results(path), line_of, path, pool, title)


def run_study(args: argparse.Namespace, pool: Executor) -> None:
    """The sweep of every setting and method, then all seeds at each one's best learning rate."""
    settings = [setting for task in args.task for setting in _settings(args, task)]
    sweep = [
        _job(setting, method, lr, seed)
        for setting in settings
        for lr in args.lrs or DEFAULTS[setting.task].lrs
        for method in args.methods
        for seed in range(min(args.sweep_seeds, args.seeds or DEFAULTS[setting.task].seeds))
    ]
    run_missing(sweep, args.results, pool, "learning rates")
    results = list(read_results(args.results).values())
    chosen = [
        _job(setting, method, best_lr(runs_by_lr(results, setting)[method]), seed)
        for setting in settings
        for method in args.methods
        for seed in range(args.seeds or DEFAULTS[setting.task].seeds)
    ]
    run_missing(chosen, args.results, pool, "seeds")


def _settings(args: argparse.Namespace, task: str) -> Iterator[Setting]:
    defaults = DEFAULTS[task]
    for ranks in args.ranks:
        yield Setting(task, ranks, args.steps or defaults.steps, args.batch_size or defaults.batch_size)


def _job(setting: Setting, method: str, lr: float, seed: int) -> Job:
    return Job(setting.task, method, lr, seed, setting.steps, setting.ranks, setting.batch_size)


# ---------------------------------------------------------------- command line


def _names(methods: Iterable[str]) -> str:
    """For --help, which reads % as the start of a format."""
    return ", ".join(methods).replace("%", "%%")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, default=[task.name for task in ALIKE])
    add("--ranks", type=int, nargs="+", default=[4])
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help=_names(METHODS))
    add("--steps", type=int, help="default: the task's, as for the next three")
    add("--seeds", type=int)
    add("--lrs", type=float, nargs="+", metavar="LR")
    add("--batch-size", type=int, help="per rank")
    add("--sweep-seeds", type=int, default=1, help="seeds at every learning rate; all of them at the best one")
    add("--processes", type=int, default=2, help="runs side by side")
    add("--results", type=Path, default=Path("runs/study.jsonl"), metavar="FILE", help="the runs, one JSON line each")
    add_record(parser, "the report, with its figure beside it as .png")
    add("--figure", type=record_path, metavar="FILE", help="the figure alone")
    add("--report-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    if not args.report_only:
        check_record(parser, args.results)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not args.report_only:
        with ProcessPoolExecutor(args.processes) as pool:
            run_study(args, pool)
    results = list(read_results(args.results).values())
    shows = "Gap to the dense twins, and loss against traffic"
    publish(args, report(results), args.results, shows=shows, draw=partial(draw, results))
    if args.figure is not None:
        draw(results, args.figure)
