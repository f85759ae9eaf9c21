"""Loss against tokens: curriculum, dropped tokens and both, beside the full run; what their own time is in a step.

    python scripts/study.py data-efficiency --results runs/data.jsonl --record scripts/records/data_efficiency.md
    python scripts/study.py data-efficiency --cost

A byte LM on one rank. Every method is swept over the same learning rates with the first seed, and run with all seeds at
its best one. "full" trains on all tokens; the others on half of them: as many steps, whose samples, sequences or layers
are smaller, or half the steps. Rates follow consumed tokens. The record says for each method how far its loss is from
the full run's, paired by seed, and how many seconds of the processor it took; the figure shows loss against tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
from provenance import add_record, check_record, revision
from reports import add_missing, panels_of, publish, read_lines, table
from torch import Tensor
from torch.utils.data import Dataset
from train.model import GPT, SIZES, build_model, decay_groups
from train.run import Windows

import onebit
from onebit.comm import SimTransport
from onebit.zero.data_efficiency import (
    CurriculumLoader,
    CurriculumMetric,
    CurriculumSampler,
    Root,
    TokenLR,
    VocabularyRarity,
    drop_tokens,
)
from onebit.zero.data_efficiency.metrics import Array, counts_of
from study.run import WEIGHT_DECAY
from study.tasks import corpus

METHODS = ("full", "half", "curriculum", "dropping", "both")
OPTIMIZERS = ("adamw", "onebit-adam")
LRS = (1e-3, 2e-3, 4e-3)
CLAIMS = "The papers claim 2 × less data at equal quality (GPT-3 1.3B) and, by dropping alone, 25.6 % less wall clock."
_POINTS, _VALIDATION = 16, 64


@dataclass(frozen=True)
class Job:
    """tokens: of the full run; the others consume half."""

    method: str
    optimizer: str
    lr: float
    seed: int
    size: str
    tokens: int
    batch_size: int


@dataclass(frozen=True)
class Result:
    """curve: (tokens consumed, counted by layers, and the validation loss). seconds: of the processor, without these
    validations: what a quiet machine takes, as there is one thread."""

    job: Job
    curve: tuple[tuple[float, float], ...]
    seconds: float
    revision: str

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


class Pieces(Dataset[Tensor]):
    """The training text in pieces of context + 1 bytes."""

    def __init__(self, context: int):
        text = np.frombuffer(corpus().train, np.uint8)
        n = len(text) // (context + 1)
        self.rows = torch.from_numpy(text[: n * (context + 1)].copy()).view(n, context + 1).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def rarity(self) -> Array:
        rows = list(self.rows)
        return VocabularyRarity(np.maximum(1, counts_of(rows, 256)))(rows)


def validate(model: GPT) -> float:
    """Over a fixed set of held-out windows, all tokens kept."""
    model.eval()
    windows = Windows(corpus(), model.context).validation(0, 1, _VALIDATION)
    with torch.no_grad():
        loss = statistics.fmean(float(model.loss(part)) for part in windows.split(16))
    model.train()
    return loss


def run_job(job: Job) -> Result:
    """One training, on one rank and one thread."""
    torch.set_num_threads(1)
    size, pieces = SIZES[job.size], Pieces(SIZES[job.size].context)
    budget = job.tokens if job.method == "full" else job.tokens // 2
    steps = job.tokens // (job.batch_size * size.context)
    has_curriculum, drops = job.method in ("curriculum", "both"), job.method in ("dropping", "both")
    metrics = {}
    if has_curriculum:
        rising = max(1, steps // 3)
        by_rarity = Root(20, 100, rising, degree=2.0)
        shape = Root(size.context // 4, size.context + 1, rising, multiple=8)
        metrics["rarity"] = CurriculumMetric(by_rarity, pieces.rarity(), "percentile")
        metrics["seqlen_truncate"] = CurriculumMetric(shape, clustering_type="single_cluster")
    sampler = CurriculumSampler(len(pieces), job.batch_size, metrics, seed=job.seed)
    loader = CurriculumLoader(pieces, sampler)
    model = build_model(job.size, job.seed)
    dropping = None
    if drops:
        dropping = drop_tokens(
            model, "blocks.*", Root(size.context // 4, size.context, max(1, steps // 2), 8), seed=job.seed
        )
    groups = decay_groups(model, WEIGHT_DECAY)
    if job.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=job.lr)
    else:
        optimizer = onebit.OnebitAdam(groups, lr=job.lr, compression="always", transport=SimTransport())
    schedule = TokenLR(optimizer, budget, budget // 10, min_fraction=0.1)
    consumed, curve, began, validating = 0.0, [], time.process_time(), 0.0
    batches = chain.from_iterable(repeat(loader))
    while schedule.tokens < budget:
        windows = next(batches)
        model.loss(windows).backward()
        optimizer.step()
        optimizer.zero_grad()
        rows, length = windows.shape[0], windows.shape[1] - 1
        cost = length if dropping is None else dropping.layer_tokens(length, size.layers) / size.layers
        if dropping is not None:
            dropping.advance()
        consumed += rows * cost
        schedule.step(tokens=round(rows * cost))
        if consumed * _POINTS >= (len(curve) + 1) * budget or schedule.tokens >= budget:
            paused = time.process_time()
            curve.append((consumed, validate(model)))
            validating += time.process_time() - paused
    seconds = time.process_time() - began - validating
    return Result(job, tuple(curve), seconds, revision())


# ---------------------------------------------------------------- many runs


def read_results(path: Path) -> dict[Job, Result]:
    """The runs that a file of JSON lines holds."""
    found = {}
    for line in read_lines(path):
        job = Job(**line["job"])
        found[job] = Result(job, tuple(map(tuple, line["curve"])), line["seconds"], line["revision"])
    return found


def line_of(job: Job) -> dict:
    result = run_job(job)
    return {"loss": result.loss, **asdict(result)}


def best_lr(results: Mapping[Job, Result], method: str, optimizer: str) -> float:
    """Of the first seed."""
    of = [r for job, r in results.items() if (job.method, job.optimizer, job.seed) == (method, optimizer, 0)]
    return min(of, key=lambda result: result.loss).job.lr


def study(args: argparse.Namespace) -> None:
    """The sweep, then all seeds at each method's best learning rate."""

    def job(method: str, optimizer: str, lr: float, seed: int) -> Job:
        return Job(method, optimizer, lr, seed, args.size, args.tokens, args.batch_size)

    pairs = [(method, optimizer) for optimizer in OPTIMIZERS for method in args.methods]
    sweep = [job(*pair, lr, 0) for pair in pairs for lr in args.lrs]
    add_missing(sweep, read_results(args.results), line_of, args.results, title="learning rates")
    known = read_results(args.results)
    chosen = [job(*pair, best_lr(known, *pair), seed) for pair in pairs for seed in range(args.seeds)]
    add_missing(chosen, known, line_of, args.results, title="seeds")


# ---------------------------------------------------------------- what is said


@dataclass(frozen=True)
class Row:
    """A method against the full run of the same optimizer, paired by seed. gap: relative, of each seed."""

    method: str
    optimizer: str
    lr: float
    losses: list[float]
    gaps: list[float]
    seconds: float
    tokens: float

    @property
    def holds(self) -> bool:
        return bool(self.gaps) and statistics.fmean(self.gaps) <= 0.01


def rows_of(results: Mapping[Job, Result]) -> list[Row]:
    """One for each method and optimizer."""
    rows = []
    for optimizer in dict.fromkeys(job.optimizer for job in results):
        of: dict[str, dict[int, Result]] = {}
        for method in dict.fromkeys(job.method for job in results if job.optimizer == optimizer):
            lr = best_lr(results, method, optimizer)
            chosen = {j.seed: r for j, r in results.items() if (j.method, j.optimizer, j.lr) == (method, optimizer, lr)}
            of[method] = dict(sorted(chosen.items()))
        for method, runs in of.items():
            full = of.get("full", {})
            gaps = [run.loss / full[seed].loss - 1 for seed, run in runs.items() if seed in full]
            first = next(iter(runs.values()))
            seconds = statistics.median(run.seconds for run in runs.values())
            losses = [run.loss for run in runs.values()]
            rows.append(Row(method, optimizer, first.job.lr, losses, gaps, seconds, first.curve[-1][0]))
    return rows


def report(results: Mapping[Job, Result]) -> str:
    """Markdown."""
    rows = rows_of(results)
    head = ["method", "optimizer", "lr", "tokens", "loss", "gap to full", "worth", "CPU seconds", "within 1 %"]
    cells = []
    for row in rows:
        gap = "" if row.method == "full" else " ".join(f"{100 * g:+.2f} %" for g in row.gaps)
        verdict = "" if row.method == "full" else "yes" if row.holds else "no"
        known = [row.method, row.optimizer, f"{row.lr:g}", f"{row.tokens:.3g}", f"{statistics.fmean(row.losses):.4f}"]
        cells.append([*known, gap, worth_of(row, rows), f"{row.seconds:.0f}", verdict])
    job = next(iter(results))
    said = f"Byte LM {job.size}, {job.tokens:,} tokens in the full run, batches of {job.batch_size}; one rank."
    revisions = ", ".join(sorted({result.revision for result in results.values()}))
    worth = (
        "Worth: how many tokens the plain run needs for this loss, over those used here, on the straight line between "
        "the logarithms of the half and the full run."
    )
    return f"# Loss against tokens\n\n{said}\nRevision {revisions}. {CLAIMS} {worth}\n\n{table(head, cells, 2)}\n"


def worth_of(row: Row, rows: Sequence[Row]) -> str:
    """As the report says it; nothing for the plain runs themselves."""
    plain = {each.method: each for each in rows if each.optimizer == row.optimizer and each.method in ("half", "full")}
    if row.method in plain or len(plain) < 2:
        return ""
    half, full = ((math.log(plain[k].tokens), math.log(statistics.fmean(plain[k].losses))) for k in ("half", "full"))
    slope = (full[1] - half[1]) / (full[0] - half[0])
    tokens = half[0] + (math.log(statistics.fmean(row.losses)) - half[1]) / slope
    return f"{math.exp(tokens) / row.tokens:.2f} ×"


def draw(results: Mapping[Job, Result], path: Path) -> None:
    """Loss against tokens, a panel for each optimizer: the mean over seeds, at each method's best learning rate."""
    colours = dict(zip(METHODS, ("#333333", "#999999", "#0072b2", "#d55e00", "#009e73"), strict=True))
    optimizers = list(dict.fromkeys(job.optimizer for job in results))
    with panels_of(path, optimizers, (5, 3.6), xlabel="tokens, counted by layers") as axes:
        axes[0].set_ylabel("validation loss, nats per byte")
        for axis, optimizer in zip(axes, optimizers, strict=True):
            for row in (row for row in rows_of(results) if row.optimizer == optimizer):
                key = (row.method, optimizer, row.lr)
                runs = [r for j, r in results.items() if (j.method, j.optimizer, j.lr) == key]
                points = list(zip(*(run.curve for run in runs), strict=False))
                x, y = ([statistics.fmean(p[k] for p in point) for point in points] for k in (0, 1))
                axis.plot(x, y, color=colours[row.method], label=row.method)


# ---------------------------------------------------------------- cost


def cost(size: str, batch_size: int, repeats: int) -> dict[str, float]:
    """CPU milliseconds, medians: a step; drawing a global batch; all layers' positions, gathering and scattering."""
    context, model = SIZES[size].context, build_model(size, 0)
    pieces = Pieces(context)
    metric = CurriculumMetric(Root(100, 100, 1), pieces.rarity(), "percentile")
    sampler = CurriculumSampler(len(pieces), batch_size, {"rarity": metric})
    windows = pieces.rows[:batch_size]
    step = _median_ms(lambda: model.loss(windows).backward(), repeats)
    model.zero_grad()
    x = torch.randn(batch_size, context, SIZES[size].width, requires_grad=True)
    bare = torch.nn.ModuleList(torch.nn.Identity() for _ in range(SIZES[size].layers))
    plain = _median_ms(lambda: _through(bare, x), repeats)
    drop_tokens(bare, "*", Root(context // 2, context // 2, 1))
    dropped = _median_ms(lambda: _through(bare, x), repeats)
    state = sampler.state_dict
    drawing = _median_ms(lambda: (sampler.draw(), state()), repeats)
    return {"step": step, "sampler": drawing, "dropping": dropped - plain}


def _through(layers: Iterable[torch.nn.Module], x: Tensor) -> None:
    for layer in layers:
        x = layer(x)
    x.sum().backward()


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        began = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times[2:])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--size", choices=SIZES, default="small")
    add("--tokens", type=int, default=4_096_000, help="of the full run")
    add("--batch-size", type=int, default=16)
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--lrs", type=float, nargs="+", default=list(LRS))
    add("--seeds", type=int, default=3)
    add("--results", type=Path, default=Path("runs/data_efficiency.jsonl"), metavar="FILE")
    add_record(parser, "the report, with its figure beside it as .png")
    add("--report-only", action="store_true", help="run nothing")
    add("--cost", action="store_true", help="measure the parts' own time in a step instead")
    add("--repeats", type=int, default=20, help="of --cost")
    args = parser.parse_args(argv)
    if not args.report_only and not args.cost:
        check_record(parser, args.results)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.cost:
        said = cost(args.size, args.batch_size, args.repeats)
        shares = {name: f"{ms:.3f} ms, {100 * ms / said['step']:.2f} % of a step" for name, ms in said.items()}
        print("\n".join(f"{name}: {share}" for name, share in shares.items()))
        return
    if not args.report_only:
        study(args)
    results = read_results(args.results)
    publish(args, report(results), args.results, shows="Loss against tokens", draw=partial(draw, results))
