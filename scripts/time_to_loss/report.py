"""Both halves joined: the seconds of a run are those of its steps by phase; the loss that a budget of seconds buys."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance import revision
from reports import table

from onebit.cli.numbers import rate
from time_to_loss.losses import Found
from time_to_loss.seconds import Timed
from time_to_loss.ways import ALONE, PLAIN, WAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUDGETS_S = (120.0, 400.0, 1350.0, 4500.0)
_LIKE = {"refresh": "warmup", "idle": "compressed"}  # phases that take the time of another where none was timed
WHOLE_STEPS = (1000, 2000)  # of the runs whose seconds stand in tables
_OURS, _OTHERS = {"linewidth": 2.2, "zorder": 3}, {"linewidth": 1.5, "linestyle": "--", "zorder": 2}
_FAMILIES: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"color": "#0072b2", **_OURS},
    "OnebitMuon": {"color": "#56b4e9", **_OURS},
    "Muon in local": {"label": "Muon in local steps of one bit", "color": "#aa4499", **_OURS},
    "ZeroOneAdam": {"color": "#d55e00", **_OURS},
    "sharded": {"label": "sharded across nodes", "color": "#009e73", **_OURS},
    "local": {"label": "local steps in one bit", "color": "#882255", **_OURS},
    "DDP": {"label": "DDP, float32 or bfloat16", "color": "#000000", **_OTHERS},
    "Muon, DDP": {"label": "Muon under DDP, bfloat16", "color": "#999933", **_OTHERS},
    "PowerSGD": {"color": "#888888", **_OTHERS},
    "DeMo": {"color": "#cc79a7", **_OTHERS},
    "DiLoCo": {"color": "#e69f00", **_OTHERS},
    "Muon in DiLoCo": {"color": "#ddcc77", **_OTHERS},
    "DeepSpeed": {"label": "DeepSpeed 0.19.6, one bit", "color": "#7b4b2a", **_OTHERS},
    "one worker": {"label": "one worker alone", "color": "#117733", "linestyle": ":", "linewidth": 2.0},
}
_TICKS_S = {
    120: "2 min", 300: "5 min", 600: "10 min", 1800: "30 min", 3600: "1 h", 7200: "2 h", 18000: "5 h", 36000: "10 h",
    86400: "1 day",
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A way on a network: what runs of several lengths took and reached, the shortest first."""

    way: str
    seconds: Sequence[float]
    losses: Sequence[float]

    def at(self, budget_s: float) -> float | None:
        """The loss after a budget of seconds, between two runs by the logarithm of the seconds.

        None: no run is so short. Of more seconds than the longest run takes, its loss.
        """
        if budget_s < self.seconds[0]:
            return None
        pairs = list(zip(self.seconds, self.losses, strict=True))
        for (s0, loss0), (s1, loss1) in pairwise(pairs):
            if budget_s <= s1:
                share = math.log(budget_s / s0) / math.log(s1 / s0)
                return loss0 + share * (loss1 - loss0)
        return self.losses[-1]


def curves(found: Sequence[Found], timed: Sequence[Timed]) -> dict[str, list[Curve]]:
    """By network, the slowest first. A way's loss at a length: the mean over seeds at the rate that suits it best."""
    by_network: dict[str, list[Curve]] = {}
    for one in sorted(everyones(timed), key=lambda one: (rate(one.rate), list(WAYS).index(one.way))):
        source = WAYS[one.way].loss_of or one.way
        lengths = sorted({f.run.steps for f in found if f.run.way == source})
        points = [(_seconds(runs[0], one), statistics.mean(f.loss for f in runs))
                  for runs in (best_runs(found, source, steps) for steps in lengths)]  # fmt: skip
        if points:
            by_network.setdefault(one.rate, []).append(Curve(one.way, *zip(*points, strict=True)))
    return by_network


def frontier(lines: Sequence[Curve]) -> list[tuple[float, float]]:
    """Seconds and loss of these ways' best runs: the lower convex hull over the logarithm of the seconds, downwards."""
    hull: list[tuple[float, float]] = []
    for seconds, loss in sorted(point for line in lines for point in zip(line.seconds, line.losses, strict=True)):
        if hull and loss >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (seconds, loss)):
            hull.pop()
        hull.append((seconds, loss))
    return hull


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / math.log(right[0] / left[0])


def everyones(timed: Sequence[Timed]) -> list[Timed]:
    """With those of the ways that take the same seconds as another, on networks where they were not timed."""
    own = {(one.rate, one.way) for one in timed}
    same = [replace(one, way=way.name) for way in WAYS.values() for one in timed if way.time_of == one.way]
    return [*timed, *(one for one in same if (one.rate, one.way) not in own)]


def best_runs(found: Sequence[Found], way: str, steps: int) -> list[Found]:
    """All seeds of the learning rate with the least mean loss, of those with the most seeds."""
    by_rate: dict[float, list[Found]] = {}
    for one in found:
        if (one.run.way, one.run.steps) == (way, steps):
            by_rate.setdefault(one.run.lr, []).append(one)
    most = max(map(len, by_rate.values()))
    return min(
        (runs for runs in by_rate.values() if len(runs) == most), key=lambda runs: statistics.mean(f.loss for f in runs)
    )


def _seconds(run: Found, timed: Timed) -> float:
    """Of the whole run. Raises KeyError where a phase was not timed."""
    if set(timed.seconds) == {PLAIN}:
        return run.run.steps * timed.seconds[PLAIN]
    return sum(
        count * timed.seconds[phase if phase in timed.seconds else _LIKE[phase]] for phase, count in run.phases.items()
    )


# ---------------------------------------------------------------- the text


def report(found: Sequence[Found], timed: Sequence[Timed], control: Sequence[Timed] = ()) -> Iterator[str]:
    """Markdown, part by part. control: steps on another number of hosts, with a table of their own."""
    first, by_network = timed[0], curves(found, timed)
    runs = [f.run for f in found]
    yield "# Time to loss\n"
    yield (
        f"Losses: {runs[0].task}, {runs[0].ranks} ranks of {runs[0].rows} rows, "
        f"{', '.join(map(str, sorted({r.steps for r in runs})))} steps, seeds "
        f"{', '.join(map(str, sorted({r.seed for r in runs})))}, each at the best of the rates "
        f"{', '.join(f'{lr:g}' for lr in sorted({r.lr for r in runs}))}. Seconds: {first.hosts} emulated hosts, "
        f"{first.params / 1e6:g} M parameters, {first.compute_s:g} s of computing by sleeping, steps timed by "
        f"phase. A run's seconds are those of its steps. Revision {revision()}.\n"
    )
    own = {one.way for one in timed}
    if any("Muon" in run.way and run.way not in own and WAYS[run.way].time_of for run in runs):
        yield (
            "Seconds of Muon are those of the same traffic with AdamW, without Newton-Schulz iterations: 30 n "
            "operations per parameter of matrices n wide, a twentieth of what the model computes (6 per parameter and "
            "token) at n = 1,024 and 100,000 tokens per rank and step.\n"
        )
    for network, lines in by_network.items():
        yield from _table(network, lines, {t.way: t for t in everyones(timed) if t.rate == network})
    for steps in WHOLE_STEPS:
        yield from _whole_runs(found, everyones(timed), list(by_network), steps)
    yield from _losses(found)
    if control:
        yield from _on_other_hosts(control)


def _table(network: str, lines: Sequence[Curve], timed: Mapping[str, Timed]) -> Iterator[str]:
    yield f"\n## {network}\n\nLoss after each budget of seconds; *: the longest run takes less, and this is its loss.\n"
    rows = []
    bought = {line.way: [line.at(budget) for budget in BUDGETS_S] for line in lines}
    best = [min((row[k] for row in bought.values() if row[k] is not None), default=None) for k in range(len(BUDGETS_S))]
    for line in lines:
        cells = []
        for budget, loss, least in zip(BUDGETS_S, bought[line.way], best, strict=True):
            text = "" if loss is None else f"{loss:.3f}" + "*" * (budget > line.seconds[-1])
            cells.append(f"**{text}**" if loss is not None and loss == least else text)
        rows.append([line.way, _phases(timed[line.way]), *cells])
    yield table(("", "seconds of a step, by phase", *(f"{budget:g} s" for budget in BUDGETS_S)), rows, names=2)


def _phases(timed: Timed) -> str:
    return ", ".join(
        f"{seconds:.2f}" + (f" {phase}" if phase != PLAIN else "") for phase, seconds in timed.seconds.items()
    )


def _whole_runs(found: Sequence[Found], timed: Sequence[Timed], networks: Sequence[str], steps: int) -> Iterator[str]:
    ranks = found[0].run.ranks
    yield f"\n## Runs of {steps} steps\n"
    yield (
        f"Whole ones: warm-ups, refreshes and rounds are in the bits and in the seconds. Bits: sent by a rank per "
        f"parameter and step; DDP sends {2 * (ranks - 1) / ranks * 32:g} in float32 and half of them in bfloat16.\n"
    )
    seconds_of, rows = {(one.way, one.rate): one for one in timed}, []
    for way in WAYS.values():
        source = way.loss_of or way.name
        if not any((f.run.way, f.run.steps) == (source, steps) for f in found):
            continue
        runs = best_runs(found, source, steps)
        bits = "" if WAYS[source].is_one_worker else f"{runs[0].bits / steps:.2f}"
        cells = [seconds_of.get((way.name, network)) for network in networks]
        seconds = ["" if one is None else f"{_seconds(runs[0], one):.0f}" for one in cells]
        rows.append([way.name, f"{statistics.mean(f.loss for f in runs):.3f}", bits, *seconds])
    yield table(("", "loss", "bits", *(f"{network}, s" for network in networks)), rows)


def _losses(found: Sequence[Found]) -> Iterator[str]:
    lengths = sorted({f.run.steps for f in found})
    yield "\n## Losses by steps\n\nThe mean at the best rate; in brackets the seeds' least and most, and the rate.\n"
    rows = []
    for way in (way for way in WAYS if any(f.run.way == way for f in found)):
        cells = []
        for steps in lengths:
            if not any((f.run.way, f.run.steps) == (way, steps) for f in found):
                cells.append("")
                continue
            runs = best_runs(found, way, steps)
            losses = [f.loss for f in runs]
            seeds = f"{min(losses):.3f} to {max(losses):.3f}; " if len(losses) > 1 else ""
            cells.append(f"{statistics.mean(losses):.3f} ({seeds}{runs[0].run.lr:g})")
        rows.append([way, *cells])
    yield table(("", *lengths), rows)


def _on_other_hosts(control: Sequence[Timed]) -> Iterator[str]:
    """Seconds by phase; of the phase that most steps are in also times those of one worker alone."""
    first, rates = control[0], sorted({one.rate for one in control}, key=rate)
    yield f"\n## The same steps on {first.hosts} hosts\n"
    yield (
        f"{first.params / 1e6:g} M parameters, {first.compute_s:g} s of computing by sleeping. Emulated hosts share "
        "the cores of one machine: fewer wait less for these. In brackets: the phase that most steps are in, times "
        "one worker alone.\n"
    )
    of_steps, rows = {(one.way, one.rate): one for one in everyones(control)}, []
    for way in (way for way in WAYS.values() if any((way.name, each) in of_steps for each in rates)):
        cells = []
        for each in rates:
            one, alone = of_steps.get((way.name, each)), of_steps.get((ALONE, each))
            cells.append("" if one is None else _phases(one))
            if one is not None and alone is not None:
                cells[-1] += f" ({one.seconds[way.phases[-1]] / alone.seconds[PLAIN]:.2f})"
        rows.append([way.name, *cells])
    yield table(("", *rates), rows, names=1 + len(rates))


# ---------------------------------------------------------------- the picture


def draw(found: Sequence[Found], timed: Sequence[Timed], path: Path) -> None:
    """Loss against seconds, a panel for each network, the slowest first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_network = curves(found, timed)
    figure, panels = pyplot.subplots(
        1, len(by_network), figsize=(4.6 * len(by_network), 4.8), squeeze=False, sharey=True
    )
    for panel, (network, curves_here) in zip(panels[0], by_network.items(), strict=True):
        _draw_panel(panel, network, curves_here)
    panels[0][0].set_ylabel("validation loss, nats per byte")
    lines = {line.get_label(): line for panel in panels[0] for line in panel.get_lines()}
    figure.legend(lines.values(), lines, loc="lower center", ncol=5, fontsize=9, frameon=False)
    figure.suptitle("Loss that time buys: the best of each family; solid: ours, dashed: others", fontsize=11)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Axes, network: str, lines: Sequence[Curve]) -> None:
    for family, style in _FAMILIES.items():
        if points := frontier([line for line in lines if line.way.startswith(family)]):
            panel.plot(*zip(*points, strict=True), marker=".", **{"label": family} | style)
    panel.set(title=network.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s"), xscale="log")
    least, most = panel.get_xlim()
    apart = 2 if most > 100 * least else 1
    ticks = {s: text for s, text in list(_TICKS_S.items())[::apart] if least < s < most}
    panel.set_xticks(list(ticks), list(ticks.values()))
    panel.minorticks_off()
    panel.grid(alpha=0.2)
