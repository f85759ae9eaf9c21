"""The benchmark suite: every contender on every network, one after another on the same hosts, in one run.

    make bench                       or, a part of it:
    python scripts/bench.py suite --networks 100mbit --hosts 4 --methods onebit-adam ddp-fp32

Contenders: our optimizers, DistributedDataParallel in four forms, DeepSpeed's three optimizers; each as a collective
alone and as whole training steps of a GPT, on emulated Ethernet (`onebit emulate`). What --results (by default a file
of today in runs/) already holds is not measured again, so that a run may be interrupted and extended; the report is of
all that the file holds. A rank's part is in `bench`: collective.py, step.py and peer_deepspeed.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import step as bench_step
from bench.collective import BF16, FP32, ONE_BIT, run_workers
from bench.command import words
from bench.record import describe_machine
from provenance import add_results, write_record
from reports import append, read_lines
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onebit.cli.cluster import TIMED_OUT, Cluster, available
from suite.report import Setting, draw, report

DEEPSPEED = ("deepspeed-onebit-adam", "deepspeed-zero-one-adam", "deepspeed-onebit-lamb")
STUCK_S = 600.0  # what no start needs on an idle machine; one that is stuck must not stop the suite

# ---------------------------------------------------------------- what there is to run


@dataclass(frozen=True)
class Job:
    """One start of workers on a laid cluster, for one contender or several: a start takes as long as some measurements.

    run(cluster, args, contenders): what was measured of each of them, and what went wrong if that is not all.
    """

    what: str
    contenders: tuple[str, ...]
    run: Callable[[Cluster, argparse.Namespace, Sequence[str]], tuple[dict[str, dict], str | None]]


SIDES = {"onebit over gloo": ONE_BIT, "onebit over mpi": ONE_BIT, "all-reduce fp32": FP32, "all-reduce bf16": BF16}


def all_jobs(is_deepspeed_here: bool) -> list[Job]:
    """In the order in which they run."""
    ddp = tuple(method for method in bench_step.METHODS if method.startswith("ddp"))
    zero = ("fsdp2-bf16", "sharded int4", "sharded sign")
    ours = tuple(method for method in bench_step.METHODS if method not in (*ddp, *zero))
    over_gloo = ("onebit over gloo", "all-reduce fp32", "all-reduce bf16")
    jobs = [
        Job("collective", over_gloo, partial(_run_collective, transport="gloo")),
        Job("collective", ("onebit over mpi",), partial(_run_collective, transport="mpi")),
        Job("step", ddp, _run_step),
        Job("step", ours, _run_step),
        *(Job("step", (method,), _run_step) for method in zero),
    ]
    if is_deepspeed_here:
        # The three share one collective.
        run = partial(_run_deepspeed, what="collective", method=DEEPSPEED[0])
        jobs.append(Job("collective", ("deepspeed compressed_allreduce",), run))
        jobs += [Job("step", (m,), partial(_run_deepspeed, what="step", method=m)) for m in DEEPSPEED]
    return jobs


def _run_collective(
    cluster: Cluster, args: argparse.Namespace, contenders: Sequence[str], *, transport: str
) -> tuple[dict[str, dict], str | None]:
    options = {"elements": args.elements, "repeats": args.repeats, "budget_s": args.budget_s, "timeout_s": STUCK_S}
    try:
        measured = run_workers(cluster, transport, [SIDES[name] for name in contenders], **options)
    except RuntimeError as error:
        return {}, str(error)
    return {name: measured[SIDES[name]] for name in contenders}, None


def _run_step(
    cluster: Cluster, args: argparse.Namespace, contenders: Sequence[str]
) -> tuple[dict[str, dict], str | None]:
    flags = ["--worker", "--method", *contenders, "--size", args.size, "--batch", str(args.batch)]
    flags += ["--steps", str(args.steps), "--budget-s", str(args.budget_s)]
    return _run(cluster, words("step", *flags))


def _run_deepspeed(
    cluster: Cluster, args: argparse.Namespace, contenders: Sequence[str], *, what: str, method: str
) -> tuple[dict[str, dict], str | None]:
    repeats = args.peer_steps if what == "step" else args.repeats
    flags = ["--what", what, "--method", method, "--elements", str(args.elements), "--size", args.size]
    flags += ["--batch", str(args.batch), "--steps", str(repeats), "--warmup-steps", "1"]
    peer = importlib.import_module("bench.peer_deepspeed")
    measured, problem = _run(cluster, peer.worker_command(peer.FOLDER, flags))
    return ({contenders[0]: measured} if measured else {}), problem


def _run(cluster: Cluster, command: Sequence[str]) -> tuple[dict, str | None]:
    """What rank 0 wrote to --out, and why the workers ended, if they did so early."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        status = cluster.run([*command, "--out", str(out)], launcher="none", timeout_s=STUCK_S).status
        problem = f"not done in {STUCK_S:g} s" if status == TIMED_OUT else f"ended with status {status}"
        return json.loads(out.read_text()) if out.exists() else {}, problem if status else None


def why_no_deepspeed() -> str | None:
    """None where DeepSpeed's environment is there, else the reason, for the record."""
    try:
        return importlib.import_module("bench.peer_deepspeed").why_not_prepared()
    except ModuleNotFoundError:
        return "scripts/bench/peer_deepspeed.py is not here"


# ---------------------------------------------------------------- running it


def measure_missing(args: argparse.Namespace, setting: Setting) -> None:
    """Run what --results does not hold yet, network by network; a contender that fails is noted and passed over."""
    deepspeed = why_no_deepspeed()
    done = {_key(line) for line in read_lines(args.results) if setting.holds(line) and "seconds" in line}
    todo: dict[tuple[int, str], list[tuple[Job, list[str]]]] = {}
    for network in args.networks:
        for hosts in args.hosts:
            for job in all_jobs(deepspeed is None):
                wanted = [name for name in job.contenders if args.methods is None or name in args.methods]
                missing = [name for name in wanted if (job.what, name, hosts, network) not in done]
                if missing:
                    todo.setdefault((hosts, network), []).append((job, missing))
    if not todo:
        return
    if (reason := available()) is not None:
        raise SystemExit(f"no emulated hosts here: {reason}")
    append(args.results, describe_machine(deepspeed=deepspeed))
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns) as progress:
        task = progress.add_task("", total=sum(len(names) for jobs in todo.values() for _, names in jobs))
        for (hosts, network), jobs in todo.items():
            with Cluster(hosts=hosts, rate=network) as cluster:
                for job, contenders in jobs:
                    where = f"{network}, {hosts} hosts, {job.what}"
                    progress.update(task, description=f"{where}: {', '.join(contenders)}")
                    for line in _lines(job, contenders, cluster, args):
                        append(args.results, setting.mark(line))
                        progress.console.print(f"{where}: {_news(line)}", highlight=False)
                    progress.advance(task, len(contenders))


def _lines(job: Job, contenders: Sequence[str], cluster: Cluster, args: argparse.Namespace) -> Iterator[dict]:
    where = {"what": job.what, "network": cluster.rate, "hosts": len(cluster.names), "load": os.getloadavg()[0]}
    began = time.monotonic()
    measured, problem = job.run(cluster, args, contenders)
    took = {"took_s": round((time.monotonic() - began) / len(contenders), 1)}
    for contender in contenders:
        yield {"contender": contender, **where, **took, **measured.get(contender, {"error": problem})}


def _news(line: dict) -> str:
    outcome = f"{min(line['seconds']):.3f} s" if "seconds" in line else line["error"]
    return f"{line['contender']} {outcome} (in {line['took_s']:.0f} s)"


def _key(line: dict) -> tuple:
    return line["what"], line["contender"], line["hosts"], line["network"]


# ---------------------------------------------------------------- command line


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    contenders = [contender for job in all_jobs(True) for contender in job.contenders]
    parser = argparse.ArgumentParser(prog="bench.py suite", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--networks", nargs="+", default=["100mbit", "1gbit", "none"], help="rates; none: unshaped")
    add("--hosts", type=int, nargs="+", default=[4, 2])
    add("--methods", nargs="+", choices=contenders, metavar="METHOD", help="default: all of " + ", ".join(contenders))
    add("--elements", type=int, default=25_000_000, help="of the collective")
    add("--size", default="25m-short", help="of the GPT that is trained; see train/model.py")
    add("--batch", type=int, default=1, help="sequences per rank and step")
    add("--steps", type=int, default=5, help="measured ones, at most; with local steps one cycle")
    add("--repeats", type=int, default=9, help="of a collective, at most; dense: a third")
    add("--peer-steps", type=int, default=2, help="measured ones of DeepSpeed's")
    add("--budget-s", type=float, default=14.0, help="no step or repetition starts after so many measured seconds")
    add_results(parser, "bench")
    add("--report-only", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    setting = Setting(args.elements, args.size, args.batch)
    if not args.report_only:
        measure_missing(args, setting)
    lines = read_lines(args.results)
    text = report(lines, setting)
    print(text)
    figure = args.results.with_suffix(".png")
    draw(lines, setting, figure)
    record = f"{text}\n![Seconds per step, by what they go into]({figure.name})\n"
    write_record(args.results.with_suffix(".md"), record, args.results)
