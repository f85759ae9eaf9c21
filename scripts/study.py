"""Loss and traffic of the optimizers against their dense twins: equal steps, equal learning-rate sweep, paired seeds.

    python scripts/study.py --task byte-lm digits --ranks 4 --results runs/study.jsonl --record scripts/records/study.md

Every method is swept over the same learning rates with the first seeds; the best one is then run with all seeds. Runs
that --results already holds are not run again: a study can be interrupted and extended, and the report is of all that
the file holds. Ranks are simulated: threads of one process over `SimTransport`, each with its own batches, the same
bits as over a network. A dense method sees the concatenation of the ranks' batches, which is the averaged gradient.
The tasks are in tasks.py.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from model import decay_groups
from rich.progress import Progress
from tasks import TASKS, Batch, Task, corpus, load_task
from torch.optim import Optimizer

import onebit
from onebit.comm import IdentityCodec, SimTransport, run_ranks
from onebit.schedule import VarianceUpdates

WEIGHT_DECAY = 0.01
TARGET_GAP = 0.01
_TARGET = "1 %"
_POINTS = 20  # of a curve
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip

# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Method:
    """An optimizer under a name. twin: the dense method it is measured against; None: it is dense itself.

    make(param_groups, link, steps of the run): link is None for a dense method. A learning rate is set in every step.
    """

    name: str
    twin: str | None
    make: Callable[[list[dict], SimTransport | None, int], Optimizer]


def _zero_one_adam(clipper: int) -> Method:
    """Up to `clipper` steps per exchange, doubling as the learning rate halves."""
    return Method(
        "zero-one-adam" if clipper == 1 else f"zero-one-adam H={clipper}",
        "adamw",
        lambda groups, link, steps: onebit.ZeroOneAdam(groups, local_step_clipper=clipper, link=link),
    )


def _zero_one_adam_by_steps(clipper: int) -> Method:
    """Up to `clipper` steps per exchange, doubling with every 16th of the run after its first quarter."""
    return Method(
        f"zero-one-adam H={clipper} by steps",
        "adamw",
        lambda groups, link, steps: onebit.ZeroOneAdam(
            groups,
            var_freeze_step=steps // 4,
            local_step_scaler=max(1, steps // 16),
            local_step_clipper=clipper,
            link=link,
        ),
    )


def _with_peers_schedule(groups: list[dict], link: SimTransport | None, steps: int) -> Optimizer:
    """0/1 Adam with DeepSpeed's defaults: float32 variance rounds, and local steps that no short run ever reaches."""
    options = {"var_freeze_step": 100_000, "var_update_scaler": 16, "local_step_scaler": 32_678}
    return onebit.ZeroOneAdam(groups, local_step_clipper=16, variance_codec=IdentityCodec(), link=link, **options)


METHODS = {
    method.name: method
    for method in (
        Method("adamw", None, lambda groups, link, steps: torch.optim.AdamW(groups)),
        Method("onebit-adam", "adamw", lambda groups, link, steps: onebit.OnebitAdam(groups, link=link)),
        *(_zero_one_adam(clipper) for clipper in (1, 2, 4, 8, 16)),
        *(_zero_one_adam_by_steps(clipper) for clipper in (2, 4, 8, 16)),
        Method("zero-one-adam, peer's schedule", "adamw", _with_peers_schedule),
        Method("lamb", None, lambda groups, link, steps: onebit.Lamb(groups)),
        Method("onebit-lamb", "lamb", lambda groups, link, steps: onebit.OnebitLamb(groups, link=link)),
    )
}


@dataclass(frozen=True)
class Defaults:
    """What a task is run with unless the command line says otherwise. batch_size: per rank."""

    steps: int
    batch_size: int
    seeds: int
    lrs: tuple[float, ...]


DEFAULTS = {
    "byte-lm": Defaults(steps=2000, batch_size=8, seeds=3, lrs=(2e-3, 4e-3, 8e-3, 1.6e-2)),
    "masked-lm": Defaults(steps=2000, batch_size=4, seeds=3, lrs=(2e-3, 4e-3, 8e-3, 1.6e-2)),
    "digits": Defaults(steps=400, batch_size=16, seeds=20, lrs=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)),
}


# ---------------------------------------------------------------- one run


@dataclass(frozen=True)
class Setting:
    """What the runs of one table have in common."""

    task: str
    ranks: int
    steps: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.task}, {self.ranks} ranks, {self.steps} steps, batch {self.batch_size} per rank"


@dataclass(frozen=True)
class Job:
    """One training run. batch_size: per rank."""

    task: str
    method: str
    lr: float
    seed: int
    steps: int
    ranks: int
    batch_size: int

    @property
    def setting(self) -> Setting:
        return Setting(self.task, self.ranks, self.steps, self.batch_size)


@dataclass(frozen=True)
class Point:
    """A place on a run's curve: after `step` steps, with the bits sent so far by rank 0 per parameter."""

    step: int
    loss: float
    bits: float


@dataclass(frozen=True)
class Result:
    """How a run went. Losses are validation losses, inf where they are not finite; seconds are of the whole run.

    Traffic is the payload that rank 0 sent to others: for a dense method that of a ring all-reduce in float32. At the
    curve's last point the replicas are the same; at the others it is rank 0's own model.
    """

    job: Job
    curve: tuple[Point, ...]
    seconds: float
    revision: str

    @property
    def loss(self) -> float:
        return self.curve[-1].loss

    @property
    def bits_per_step(self) -> float:
        """Bits sent per parameter and step, mean over the run."""
        return self.curve[-1].bits / self.job.steps

    @property
    def bits_in_full(self) -> float:
        """The same if a rank counted what it keeps for itself in both legs: ·W/(W-1), which W does not change."""
        return self.bits_per_step * self.job.ranks / max(1, self.job.ranks - 1)

    @property
    def bytes_sent(self) -> float:
        """Bytes sent per parameter in the whole run."""
        return self.curve[-1].bits / 8


def lr_at(job: Job, step: int) -> float:
    """Linear over the first tenth, then a cosine to a tenth of the peak."""
    warmup = max(1, job.steps // 10)
    if step < warmup:
        return job.lr * (step + 1) / warmup
    return job.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (job.steps - warmup))))


def run_job(job: Job) -> Result:
    """Train and validate; a function of the job and of the installed code, but for the time it takes."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    task = load_task(job.task)
    if METHODS[job.method].twin is None:
        curve = _train(job, task, None)
    else:
        curve = run_ranks(job.ranks, lambda link: _train(job, task, link), timeout_s=600)[0]
    return Result(job, tuple(curve), time.perf_counter() - began, revision())


def _train(job: Job, task: Task, link: SimTransport | None) -> list[Point]:
    """One rank's run and, on rank 0, its curve; link None: the run of all ranks at once."""
    model = task.build(job.seed)
    optimizer = METHODS[job.method].make(decay_groups(model, WEIGHT_DECAY), link, job.steps)
    is_first, sent_at_start = link is None or link.rank == 0, 0 if link is None else link.sent_bytes
    numel = sum(p.numel() for p in model.parameters())
    validated = {round(job.steps * k / _POINTS) for k in range(1, _POINTS)} - {0, job.steps}
    curve = []

    def validate(step: int) -> None:
        loss = task.evaluate(model)
        sent = _dense_bits(job.ranks) * step if link is None else 8 * (link.sent_bytes - sent_at_start) / numel
        curve.append(Point(step, loss if math.isfinite(loss) else math.inf, sent))

    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(job, step)
        task.loss(model, _batch(job, task, step, link)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_first and step + 1 in validated:
            validate(step + 1)
    if hasattr(optimizer, "sync"):  # only here: in between it would change the run
        optimizer.sync()
    if is_first:
        validate(job.steps)
    return curve


def _batch(job: Job, task: Task, step: int, link: SimTransport | None) -> Batch:
    ranks = range(job.ranks) if link is None else [link.rank]
    batches = [task.batch(job.seed, step, rank, job.batch_size) for rank in ranks]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _dense_bits(ranks: int) -> float:
    """Bits that a rank sends per parameter and step in a ring all-reduce of float32."""
    return 2 * (ranks - 1) / ranks * 32


@cache
def revision() -> str:
    """The commit this runs from, with -dirty where files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---------------------------------------------------------------- many runs


def read_results(path: Path) -> dict[Job, Result]:
    """The runs a file of JSON lines holds; none where there is no file. Lines cut short by a crash are passed over."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        job = Job(**record["job"])
        curve = tuple(Point(*point) for point in record["curve"])
        results[job] = Result(job, curve, record["seconds"], record["revision"])
    return results


def to_json(result: Result) -> str:
    """One line; `loss` and `bits_per_step` are there for other readers."""
    record = {"job": asdict(result.job), "loss": result.loss, "bits_per_step": result.bits_per_step}
    record["curve"] = [[point.step, point.loss, point.bits] for point in result.curve]
    return json.dumps(record | {"seconds": round(result.seconds, 2), "revision": result.revision})


def run_missing(jobs: Iterable[Job], path: Path, pool: Executor, title: str) -> None:
    """Run the jobs that the file does not hold, and add each to it as soon as it is done."""
    done = read_results(path)
    futures = [pool.submit(run_job, job) for job in dict.fromkeys(jobs) if job not in done]
    if not futures:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a") as file, Progress() as progress:
            file.write("\n" if file.tell() else "")  # the last line may have been cut short
            for future in progress.track(as_completed(futures), total=len(futures), description=title):
                file.write(to_json(future.result()) + "\n")
                file.flush()
    finally:
        for future in futures:
            future.cancel()


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


# ---------------------------------------------------------------- what they say


def settings_of(results: Iterable[Result]) -> list[Setting]:
    """All settings among the results, in the order of TASKS."""
    order = list(TASKS)
    settings = {result.job.setting for result in results}
    return sorted(settings, key=lambda s: (order.index(s.task), s.ranks, s.steps, s.batch_size))


Runs = dict[float, dict[int, Result]]  # of one method in one setting: learning rate -> seed -> run


def runs_by_lr(results: Iterable[Result], setting: Setting) -> dict[str, Runs]:
    """Of every method that has been run in this setting, in the order of METHODS."""
    by_method: dict[str, Runs] = {}
    for result in results:
        job = result.job
        if job.setting == setting:
            by_method.setdefault(job.method, {}).setdefault(job.lr, {})[job.seed] = result
    order = list(METHODS)
    return dict(sorted(by_method.items(), key=lambda item: order.index(item[0])))


def swept_losses(runs: Runs) -> dict[float, float]:
    """The mean loss at every learning rate, over the seeds that all of them were run with."""
    seeds = set.intersection(*(set(by_seed) for by_seed in runs.values()))
    return {
        lr: _mean_loss(run for seed, run in by_seed.items() if seed in seeds or not seeds)
        for lr, by_seed in sorted(runs.items())
    }


def best_lr(runs: Runs) -> float:
    """The learning rate with the least mean loss in the sweep."""
    losses = swept_losses(runs)
    return min(losses, key=losses.__getitem__)


def gap_with_interval(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Mean of the paired relative gaps, and half the width of its 95 % interval (inf for one pair)."""
    if not all(map(math.isfinite, [*losses, *reference])):
        return math.inf, math.inf
    gaps = [a / b - 1 for a, b in zip(losses, reference, strict=True)]
    if len(gaps) == 1:
        return gaps[0], math.inf
    quantile = _T95[min(len(gaps) - 1, len(_T95)) - 1]
    return statistics.mean(gaps), quantile * statistics.stdev(gaps) / math.sqrt(len(gaps))


def verdict(gap: float, half: float) -> str:
    """Whether the mean gap is within TARGET_GAP, and whether the interval is on the same side."""
    is_sure = abs(gap - TARGET_GAP) > half
    return f"{'yes' if gap <= TARGET_GAP else 'no'}, interval {'excludes' if is_sure else 'includes'} {_TARGET}"


def report(results: Sequence[Result]) -> str:
    """Markdown: for every setting the methods at their best learning rates, and the sweep."""
    settings = settings_of(results)
    revisions = ", ".join(sorted({result.revision for result in results}))
    header = f"""\
# Study: loss and traffic against the dense twins

`python {" ".join(_quoted(word) for word in sys.argv)}`

Validation loss after equal steps, mean over seeds, each method at the best of the learning rates below. Gap: relative
to the dense twin with the same seed and data, ± half of the 95 % interval (t over seeds). Bits: payload sent by a rank
per parameter and step, mean over the run, dense phases included; "in full" counts also what a rank keeps for itself.
"Bytes in all": sent per parameter in the whole run. Simulated ranks; dense methods are counted as a float32 ring.

torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, text {corpus().sha256[:12]},
revision {revisions}; {len(results)} runs, {sum(result.seconds for result in results):.0f} s in all.
"""
    return "\n".join([header, *(_section(setting, runs_by_lr(results, setting)) for setting in settings)])


def _section(setting: Setting, by_method: dict[str, Runs]) -> str:
    best = {method: best_lr(runs) for method, runs in by_method.items()}
    chosen = {method: by_method[method][best[method]] for method in by_method}
    lines = [
        f"## {setting}",
        "",
        f"Loss in {TASKS[setting.task].unit}.",
        "",
        f"| method | learning rate | seeds | loss | gap | within {_TARGET} | bits sent | bits in full | bytes in all |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(method, best[method], chosen) for method in by_method),
        "",
        *_edges(by_method, best),
        _peer(setting.steps),
        "",
        "The sweep:",
        "",
        *_sweep(by_method),
    ]
    return "\n".join(lines) + "\n"


def _row(method: str, lr: float, chosen: dict[str, dict[int, Result]]) -> str:
    runs, twin = chosen[method], METHODS[method].twin
    traffic = [
        statistics.mean(getattr(run, name) for run in runs.values())
        for name in ("bits_per_step", "bits_in_full", "bytes_sent")
    ]
    cells = [method, f"{lr:g}", str(len(runs)), _loss(_mean_loss(runs.values())), *_gap(runs, chosen.get(twin or ""))]
    return "| " + " | ".join([*cells, *(f"{value:.4g}" for value in traffic)]) + " |"


def _gap(runs: dict[int, Result], twins: dict[int, Result] | None) -> tuple[str, str]:
    """The cells of the gap and of the verdict on it."""
    seeds = sorted(runs.keys() & twins.keys()) if twins is not None else []
    if twins is None or not seeds:
        return "", ""
    gap, half = gap_with_interval([runs[seed].loss for seed in seeds], [twins[seed].loss for seed in seeds])
    if math.isinf(gap):
        return "diverged", "no"
    return f"{gap:+.2%} ± " + ("?" if math.isinf(half) else f"{half:.2%}"), verdict(gap, half)


def _edges(by_method: dict[str, Runs], best: dict[str, float]) -> Iterator[str]:
    at_edge = [method for method, runs in by_method.items() if best[method] in (min(runs), max(runs))]
    if at_edge:
        yield f"The best learning rate lies at the edge of the grid for {', '.join(at_edge)}."
        yield ""


def _peer(steps: int) -> str:
    """What DeepSpeed 0.19.6 would send in a run of this length, by its own schedules and defaults."""
    variance_rounds = sum(VarianceUpdates(16).is_due(step) for step in range(steps)) / steps
    bits = [1.0 * 64, 0.2 * 64 + 0.8 * 2, variance_rounds * 64 + (1 - variance_rounds) * 2]
    return (
        f"For comparison, DeepSpeed 0.19.6 by its schedules, bits in full: OneBitAdam {bits[0]:.3g} with its default "
        f"freeze_step of 100,000 (it never compresses) and {bits[1]:.3g} with 20 % of the run; ZeroOneAdam "
        f"{bits[2]:.3g} with its defaults ({variance_rounds:.1%} of the steps dense in float32; local steps would "
        "start after step 100,000, so none is skipped)."
    )


def _sweep(by_method: dict[str, Runs]) -> Iterator[str]:
    losses = {method: swept_losses(runs) for method, runs in by_method.items()}
    yield "| learning rate | " + " | ".join(losses) + " |"
    yield "| --- |" + " --- |" * len(losses)
    for lr in sorted({lr for runs in by_method.values() for lr in runs}):
        cells = [_loss(column[lr]) if lr in column else "" for column in losses.values()]
        yield f"| {lr:g} | " + " | ".join(cells) + " |"


def _mean_loss(runs: Iterable[Result]) -> float:
    return statistics.fmean(run.loss for run in runs)


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if loss < 100 else f"{loss:.3g}" if math.isfinite(loss) else "diverged"


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


# ---------------------------------------------------------------- how they went


def draw(results: Sequence[Result], out: Path) -> None:
    """Write a PNG: a row per setting, validation loss against steps and against bits sent, mean over seeds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    settings = settings_of(results)
    figure = Figure(figsize=(10, 3.6 * len(settings)), layout="constrained")
    rows = figure.subplots(len(settings), 2, sharey="row", squeeze=False)
    lines = {}
    for setting, (against_steps, against_bits) in zip(settings, rows, strict=True):
        for method, runs in runs_by_lr(results, setting).items():
            steps, losses, bits = mean_curve(list(runs[best_lr(runs)].values()))
            style = {"color": f"C{list(METHODS).index(method) % 10}", "label": method, "linewidth": 1.2}
            (lines[method],) = against_steps.plot(steps, losses, **style)
            against_bits.plot(bits, losses, marker=".", **style)
        against_steps.set(title=str(setting), xlabel="step", ylabel=f"loss, {TASKS[setting.task].unit}")
        against_bits.set(xlabel="bits sent per parameter", xscale="log" if setting.ranks > 1 else "linear")
        for axes in (against_steps, against_bits):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(alpha=0.3)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=min(5, len(lines)))
    figure.savefig(out, dpi=80)


def mean_curve(runs: Sequence[Result]) -> tuple[list[int], list[float], list[float]]:
    """Steps, and the means over runs of one setting of their losses and of the bits sent so far."""
    points = list(zip(*(run.curve for run in runs), strict=True))
    losses = [statistics.fmean(point.loss for point in column) for column in points]
    return [column[0].step for column in points], losses, [statistics.fmean(p.bits for p in c) for c in points]


# ---------------------------------------------------------------- command line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, default=list(TASKS))
    add("--ranks", type=int, nargs="+", default=[4])
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help=", ".join(METHODS))
    add("--steps", type=int, help="default: the task's, as for the next three")
    add("--seeds", type=int)
    add("--lrs", type=float, nargs="+", metavar="LR")
    add("--batch-size", type=int, help="per rank")
    add("--sweep-seeds", type=int, default=1, help="seeds at every learning rate; all of them at the best one")
    add("--processes", type=int, default=2, help="runs side by side")
    add("--results", type=Path, default=Path("runs/study.jsonl"), metavar="FILE", help="the runs, one JSON line each")
    add("--record", type=Path, metavar="FILE", help="the report, with its figure beside it as .png")
    add("--report-only", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not args.report_only:
        with ProcessPoolExecutor(args.processes) as pool:
            run_study(args, pool)
    results = list(read_results(args.results).values())
    text = report(results)
    print(text)
    if args.record is not None:
        figure = args.record.with_suffix(".png")
        draw(results, figure)
        args.record.write_text(f"{text}\n![Loss against steps and against traffic]({figure.name})\n")


if __name__ == "__main__":
    main()
