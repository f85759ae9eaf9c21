"""What the runs of a study say: tables of losses, paired gaps and traffic. The figure is in `figure.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from bench.record import here
from reports import table

from onebit.arithmetic.schedule import VarianceUpdates
from study.catalog import TASKS
from study.run import METHODS, Result, Setting
from study.tasks import corpus

TARGET_GAP = 0.01
_TARGET = "1 %"
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip


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

{here()}

Validation loss after equal steps, mean over seeds, each method at the best of the learning rates below. Gap: relative
to the dense twin with the same seed and data, ± half of the 95 % interval (t over seeds). Bits: payload sent by a rank
per parameter and step, mean over the run, dense phases included; "in full" counts also what a rank keeps for itself.
"Bytes in all": sent per parameter in the whole run. Simulated ranks; dense methods are counted as a float32 ring.

Text {corpus().sha256[:12]}; {len(results)} runs of revision {revisions}, {sum(r.seconds for r in results):.0f} s in
all.
"""
    return "\n".join([header, *(_section(setting, runs_by_lr(results, setting)) for setting in settings)])


def _section(setting: Setting, by_method: dict[str, Runs]) -> str:
    best = {method: best_lr(runs) for method, runs in by_method.items()}
    chosen = {method: by_method[method][best[method]] for method in by_method}
    swept = {method: swept_losses(runs) for method, runs in by_method.items()}
    lines = [
        f"## {setting}",
        "",
        f"Loss in {TASKS[setting.task].unit}.",
        "",
        table(HEADS, (_row(method, best[method], chosen) for method in by_method)),
        "",
        *_edges(by_method, best),
        _peer(setting.steps),
        "",
        "The sweep:",
        "",
        table(("learning rate", *swept), _sweep(swept)),
    ]
    return "\n".join(lines) + "\n"


HEADS = (
    "method", "learning rate", "seeds", "loss", "gap", f"within {_TARGET}", "bits sent", "bits in full", "bytes in all"
)  # fmt: skip


def _row(method: str, lr: float, chosen: dict[str, dict[int, Result]]) -> list[str]:
    runs, twin = chosen[method], METHODS[method].twin
    traffic = [
        statistics.mean(getattr(run, name) for run in runs.values())
        for name in ("bits_per_step", "bits_in_full", "bytes_sent")
    ]
    cells = [method, f"{lr:g}", str(len(runs)), _loss(_mean_loss(runs.values())), *_gap(runs, chosen.get(twin))]
    return [*cells, *(f"{value:.4g}" for value in traffic)]


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


def _sweep(swept: dict[str, dict[float, float]]) -> Iterator[list[str]]:
    for lr in sorted({lr for column in swept.values() for lr in column}):
        yield [f"{lr:g}", *(_loss(column[lr]) if lr in column else "" for column in swept.values())]


def _mean_loss(runs: Iterable[Result]) -> float:
    return statistics.fmean(run.loss for run in runs)


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if loss < 100 else f"{loss:.3g}" if math.isfinite(loss) else "diverged"
