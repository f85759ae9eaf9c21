"""Both halves joined: the seconds of a run are those of its steps by phase; the loss that a budget of seconds buys."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from provenance import revision

from onebit.cli.numbers import rate
from time_to_loss.losses import Found
from time_to_loss.seconds import Timed
from time_to_loss.ways import PLAIN, WAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUDGETS_S = (120.0, 400.0, 1350.0, 4500.0)
_LIKE = {"refresh": "warmup", "idle": "compressed"}  # phases that take the time of another where none was timed
_FAMILIES = {
    "one worker": "#56b4e9", "DDP": "#333333", "PowerSGD": "#999999", "DeMo": "#cc79a7", "DiLoCo": "#e69f00",
    "OnebitAdam": "#0072b2", "ZeroOneAdam": "#d55e00", "sharded": "#009e73", "local": "#882255",
}  # fmt: skip
_LEGEND = {
    "one worker": "one worker alone", "sharded": "sharded across nodes", "local": "local steps in one bit",
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A way on a network: what runs of several lengths took and reached, the shortest first."""

    way: str
    seconds: Sequence[float]
    losses: Sequence[float]

    def at(self, budget_s: float) -> float | None:
        """The loss that so many seconds buy, between two runs by the logarithm of the seconds.

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
    """By network. A way's loss at a length is the mean over seeds at the rate that suits it best there."""
    by_network: dict[str, list[Curve]] = {}
    for one in sorted(everyones(timed), key=lambda one: list(WAYS).index(one.way)):
        source = WAYS[one.way].loss_of or one.way
        lengths = sorted({f.run.steps for f in found if f.run.way == source})
        points = [(_seconds(runs[0], one), statistics.mean(f.loss for f in runs))
                  for runs in (best_runs(found, source, steps) for steps in lengths)]  # fmt: skip
        if points:
            by_network.setdefault(one.rate, []).append(Curve(one.way, *zip(*points, strict=True)))
    return by_network


def everyones(timed: Sequence[Timed]) -> list[Timed]:
    """With those of the ways that take the same seconds as another."""
    same = [replace(one, way=way.name) for way in WAYS.values() for one in timed if way.time_of == one.way]
    return [*timed, *same]


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


def report(found: Sequence[Found], timed: Sequence[Timed]) -> Iterator[str]:
    """Markdown, line by line."""
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
    for network, lines in by_network.items():
        yield from _table(network, lines, {t.way: t for t in everyones(timed) if t.rate == network})
    yield from _losses(found)


def _table(network: str, lines: Sequence[Curve], timed: Mapping[str, Timed]) -> Iterator[str]:
    yield f"\n## {network}\n\nLoss that so many seconds buy; *: its longest run takes less, and this is its loss.\n"
    yield "| | seconds of a step, by phase | " + " | ".join(f"{budget:g} s" for budget in BUDGETS_S) + " |"
    yield "| --- | --- |" + " ---: |" * len(BUDGETS_S)
    bought = {line.way: [line.at(budget) for budget in BUDGETS_S] for line in lines}
    best = [min((row[k] for row in bought.values() if row[k] is not None), default=None) for k in range(len(BUDGETS_S))]
    for line in lines:
        phases = ", ".join(
            f"{seconds:.2f}" + (f" {phase}" if phase != PLAIN else "")
            for phase, seconds in timed[line.way].seconds.items()
        )
        cells = []
        for budget, loss, least in zip(BUDGETS_S, bought[line.way], best, strict=True):
            text = "" if loss is None else f"{loss:.3f}" + "*" * (budget > line.seconds[-1])
            cells.append(f"**{text}**" if loss is not None and loss == least else text)
        yield f"| {line.way} | {phases} | " + " | ".join(cells) + " |"


def _losses(found: Sequence[Found]) -> Iterator[str]:
    lengths = sorted({f.run.steps for f in found})
    yield "\n## Losses by steps\n\nAt the best rate, which stands behind.\n"
    yield "| | bits of a rank per parameter and step | " + " | ".join(map(str, lengths)) + " |"
    yield "| --- | ---: |" + " ---: |" * len(lengths)
    for way in dict.fromkeys(f.run.way for f in found):
        cells, bits = [], ""
        for steps in lengths:
            if not any((f.run.way, f.run.steps) == (way, steps) for f in found):
                cells.append("")
                continue
            runs = best_runs(found, way, steps)
            cells.append(f"{statistics.mean(f.loss for f in runs):.3f} ({runs[0].run.lr:g})")
            bits = "" if WAYS[way].is_one_worker else f"{runs[0].bits / steps:.3f}"
        yield f"| {way} | {bits} | " + " | ".join(cells) + " |"


# ---------------------------------------------------------------- the picture


def draw(found: Sequence[Found], timed: Sequence[Timed], path: Path) -> None:
    """Loss against seconds, a panel for each network, the slowest first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_network = dict(sorted(curves(found, timed).items(), key=lambda item: rate(item[0])))
    figure, panels = pyplot.subplots(
        1, len(by_network), figsize=(4.6 * len(by_network), 4.4), squeeze=False, sharey=True
    )
    for panel, (network, lines) in zip(panels[0], by_network.items(), strict=True):
        _draw_panel(panel, network, lines)
    panels[0][0].set_ylabel("validation loss, nats per byte")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=5, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_panel(panel: Axes, network: str, lines: Sequence[Curve]) -> None:
    """Each way thin; of each family the least loss that any of its ways has reached by then."""
    for family, color in _FAMILIES.items():
        members = [line for line in lines if line.way.startswith(family)]
        for line in members:
            panel.plot(line.seconds, line.losses, color=color, alpha=0.25, linewidth=0.8)
        if members:
            times = sorted(second for line in members for second in line.seconds)
            least = [min(loss for line in members if (loss := line.at(t)) is not None) for t in times]
            panel.plot(times, least, color=color, label=_LEGEND.get(family, family), linewidth=2)
    panel.set(title=network, xscale="log", xlabel="seconds")
    panel.grid(alpha=0.2)
