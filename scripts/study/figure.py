"""The figure of a study: one line for each optimizer, its gap to the dense twin and its loss against traffic.

A row for each setting. Left: how far the loss lies above or below the dense twin's, with the 95 % interval over seeds
as a band, and the target as a stripe. Right: loss against the bits sent so far. Variants of an optimizer, and settings
that were run with one seed, are in the tables of `report.py`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from study.catalog import TASKS
from study.report import TARGET_GAP, best_lr, gap_with_interval, runs_by_lr, settings_of
from study.run import METHODS, Result, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_SEEDS = 3  # of a band: of two seeds the interval is 25 deviations wide, and says nothing
_LEAST_GAP = 0.03  # of the left panel's half height
_JUDGED = (
    0.3  # the share of the run that may leave the left panel: losses fall too steeply there for a gap to mean much
)
COLOURS = {
    "adamw": "#333333",
    "lamb": "#999999",
    "laprop": "#777777",
    "onebit-adam": "#0072b2",
    "onebit-lamb": "#009e73",
    "muon": "#999999",
    "onebit-muon": "#882255",
    "zero-one-adam": "#d55e00",
    "sharded-onebit-adam": "#0072b2",
    "sharded-onebit-lamb": "#009e73",
    "sharded-zero-one-adam": "#d55e00",
}
"""By optimizer; the eye keeps an algorithm apart from the next whatever form it takes."""


@dataclass(frozen=True)
class Line:
    """An optimizer in a setting, mean over seeds. gaps: (mean, half the interval) at every step; None for a twin."""

    name: str
    seeds: int
    steps: Sequence[int]
    losses: Sequence[float]
    bits: Sequence[float]
    gaps: Sequence[tuple[float, float]] | None

    @property
    def colour(self) -> str:
        return COLOURS[family(self.name)]


def family(method: str) -> str:
    """The optimizer that a method of the study is a variant of."""
    return re.split("[ ,]", method)[0]


def lines_of(results: Sequence[Result], setting: Setting) -> list[Line]:
    """The first variant of every optimizer, at its best learning rate: what its defaults do."""
    by_method = {method: runs[best_lr(runs)] for method, runs in runs_by_lr(results, setting).items()}
    firsts = [next(variants) for _, variants in groupby(sorted(by_method, key=_place), key=family)]
    return [_line(method, by_method) for method in sorted(firsts, key=list(METHODS).index)]


def _place(method: str) -> tuple[str, int]:
    return family(method), list(METHODS).index(method)


def _line(method: str, by_method: Mapping[str, Mapping[int, Result]]) -> Line:
    runs, twins = by_method[method], by_method.get(METHODS[method].twin, {})
    points = list(zip(*(run.curve for run in runs.values()), strict=True))
    paired = sorted(runs.keys() & twins.keys())
    gaps = [
        gap_with_interval([runs[seed].curve[k].loss for seed in paired], [twins[seed].curve[k].loss for seed in paired])
        for k in range(len(points) if paired else 0)
    ]
    return Line(
        method,
        len(paired or runs),
        [column[0].step for column in points],
        [statistics.fmean(point.loss for point in column) for column in points],
        [statistics.fmean(point.bits for point in column) for column in points],
        gaps or None,
    )


def shown_settings(results: Sequence[Result]) -> list[Setting]:
    """Those in which something was run with several seeds; where there are none, all."""
    settings = settings_of(results)
    several = [s for s in settings if any(line.seeds > 1 for line in lines_of(results, s))]
    return several or settings


def draw(results: Sequence[Result], out: Path) -> None:
    """Write a PNG."""
    from matplotlib.figure import Figure

    settings = shown_settings(results)
    figure = Figure(figsize=(11, 0.6 + 3.1 * len(settings)), layout="constrained")
    figure.suptitle(
        f"One bit against dense: equal steps, best learning rates; bands: 95 % interval of {_LEAST_SEEDS} seeds or more"
    )
    rows = figure.subplots(len(settings), 2, squeeze=False, width_ratios=(1, 1.15))
    for setting, (left, right) in zip(settings, rows, strict=True):
        lines = lines_of(results, setting)
        _draw_gaps(left, lines)
        _draw_traffic(right, lines, "linear" if setting.ranks == 1 else "log")
        left.set_title(f"{setting}, {_seeds(lines)}", loc="left", fontsize=10)
        right.set_ylabel(f"loss, {TASKS[setting.task].unit}")
    figure.savefig(out, dpi=90)


def _seeds(lines: Sequence[Line]) -> str:
    counts = sorted({line.seeds for line in lines})
    return f"{' or '.join(map(str, counts))} seed{'s' if counts != [1] else ''}"


def _draw_gaps(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import MaxNLocator

    measured = [line for line in lines if line.gaps is not None]
    ends, half_height = [], _LEAST_GAP
    for line in measured:
        means, halves = zip(*(line.gaps or ()), strict=True)
        axes.plot(line.steps, means, color=line.colour, linewidth=1.8)
        if line.seeds >= _LEAST_SEEDS:
            low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
            axes.fill_between(line.steps, low, high, color=line.colour, alpha=0.15, linewidth=0)
        judged = [abs(m) for m in means[math.ceil(_JUDGED * len(means)) :] if math.isfinite(m)]
        half_height = max(half_height, 1.25 * max(judged, default=0.0))
        ends.append((means[-1], line))
    axes.axhspan(-TARGET_GAP, TARGET_GAP, color="#333333", alpha=0.08, linewidth=0)
    axes.axhline(0.0, color=COLOURS["adamw"], linewidth=1.2)
    last = max((line.steps[-1] for line in lines), default=1)
    axes.set(ylim=(-half_height, half_height), xlim=(0, last), xlabel="step", ylabel="loss, relative to the dense twin")
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda gap, _: f"{gap:+.0%}" if gap else "dense")
    axes.grid(alpha=0.25)
    places = _spread([mean for mean, _ in ends], 0.17 * half_height, half_height)
    for place, (_, line) in zip(places, ends, strict=True):
        axes.annotate(
            " " + line.name.replace(", ", ",\n "), (last, place), color=line.colour, va="center", fontsize=8.5,
            annotation_clip=False,
        )  # fmt: skip


def saving(line: Line, lines: Sequence[Line]) -> str:
    """How much less a method sends than its dense twin, of the lines that are drawn; or that it is dense."""
    method = METHODS[line.name]
    twins = [other for other in lines if other.name == method.twin and not method.is_dense]
    return f"{twins[0].bits[-1] / line.bits[-1]:.0f} × fewer bits" if twins else "float32" if method.is_dense else ""


def _draw_traffic(axes: Axes, lines: Sequence[Line], scale: str) -> None:
    by_traffic = sorted(lines, key=lambda line: line.bits[-1])
    for line in by_traffic:
        axes.plot(line.bits, line.losses, color=line.colour, linewidth=1.8)
        axes.plot(line.bits[-1], line.losses[-1], "o", color=line.colour, markersize=5)
    axes.set(xlabel="bits sent per parameter, so far", xscale=scale, yscale="log")
    _plain_ticks(axes)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * (3.0 if scale == "log" else 1.5))  # the upper right is empty: losses fall
    for k, line in enumerate(by_traffic):
        axes.annotate(
            f"{family(line.name)}: {saving(line, lines)}", (0.98, 0.93 - 0.085 * k), xycoords="axes fraction",
            color=line.colour, ha="right", va="center", fontsize=8.5,
        )  # fmt: skip
    axes.grid(alpha=0.25)


def _plain_ticks(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _spread(places: Sequence[float], apart: float, most: float) -> list[float]:
    """The places, moved as little as it takes to lie so far apart, within ±most."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = [max(-most, min(most, place)) for place in places]
    for below, k in pairwise(order):
        found[k] = max(found[k], found[below] + apart)
    over = max(0.0, max(found, default=0.0) - most)
    return [place - over for place in found]
