"""A page of runs of train.py: a table and five charts in one HTML file, which needs no other file and no network."""

from __future__ import annotations

import html
import io
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 2rem 0; }
figcaption { color: #555; }
svg { width: 100%; height: auto; }
"""
_COLUMNS = ("run", "steps", "loss", "validation loss", "hours", "MB sent", "bits per parameter", "skipped steps")


class Run:
    """What train.py --csv wrote. Hours and megabytes: from the beginning up to each step, rank 0's."""

    def __init__(self, label: str, rows: Sequence[dict[str, str]]):
        if not rows:
            raise ValueError(f"{label}: no step is in this file")
        self.label, self.rows = label, rows
        self.is_wire = all(row["wire_bytes"] for row in rows)
        self.steps = self.column("step")
        self.hours = [s / 3600 for s in accumulate(self.column("step_s"))]
        self.megabytes = [b / 1e6 for b in accumulate(self.column("wire_bytes" if self.is_wire else "sent_bytes"))]

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows]

    def where(self, name: str) -> tuple[list[int], list[float]]:
        """Which rows have the value, and what it is there."""
        found = [k for k, row in enumerate(self.rows) if row[name]]
        return found, [float(self.rows[k][name]) for k in found]

    def summary(self) -> tuple[str, ...]:
        """In the order of `_COLUMNS`. loss: the mean of the last twentieth of the steps."""
        last = self.column("loss")[-max(1, len(self.rows) // 20) :]
        _, validated = self.where("val_loss")
        return (
            self.label,
            f"{len(self.rows):,}",
            f"{statistics.mean(last):.4f}",
            f"{validated[-1]:.4f}" if validated else "",
            f"{self.hours[-1]:.3g}",
            f"{self.megabytes[-1]:,.1f}",
            f"{statistics.mean(self.column('bits_per_parameter')):.2f}",
            self.rows[-1]["skipped"],
        )


def _loss_against(x: Callable[[Run], list[float]]) -> Callable[[Axes, Run, str], None]:
    def draw(axes: Axes, run: Run, color: str) -> None:
        axes.plot(x(run), run.column("loss"), color=color, alpha=0.25, linewidth=1)
        rows, losses = run.where("val_loss")
        axes.plot([x(run)[k] for k in rows], losses, color=color, label=run.label)

    return draw


def _step_time(axes: Axes, run: Run, color: str) -> None:
    axes.plot(run.steps, [1e3 * s for s in run.column("step_s")], color=color, linewidth=0.8, label=run.label)
    axes.fill_between(run.steps, run.column("comm_ms"), color=color, alpha=0.2, linewidth=0)


def _bits(axes: Axes, run: Run, color: str) -> None:
    axes.plot(run.steps, run.column("bits_per_parameter"), color=color, linewidth=0.8, label=run.label)


def _owed(axes: Axes, run: Run, color: str) -> None:
    rows, ratios = run.where("error_norm_ratio")
    axes.plot([run.steps[k] for k in rows], ratios, color=color, label=run.label)


_CHARTS: tuple[tuple[str, str, str, Callable[[Axes, Run, str], None]], ...] = (
    (
        "Loss against time",
        "hours",
        "nats per byte; thick: validation",
        _loss_against(lambda r: r.hours),
    ),
    ("Loss against traffic", "MB sent by rank 0", "nats per byte", _loss_against(lambda r: r.megabytes)),
    ("Seconds of a step", "step", "ms; filled: waiting for the network", _step_time),
    ("Traffic of a step", "step", "bits sent per parameter", _bits),
    ("What compression still owes", "step", "norm, relative to the momentum", _owed),
)


def _figure(title: str, x: str, y: str, draw: Callable[[Axes, Run, str], None], runs: Sequence[Run]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for index, run in enumerate(runs):
        draw(axes, run, f"C{index}")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    drawn = io.StringIO()
    # The same names in the same picture, whenever it is drawn; each picture's its own, as one page holds all.
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    return f"<figure><h2>{html.escape(title)}</h2>\n{svg[svg.index('<svg') :]}</figure>"


def write_page(runs: Sequence[Run], out: Path, title: str) -> None:
    """Write the file."""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in run.summary()) + "</tr>\n" for run in runs
    )
    counted = "counted by the kernel, headers included" if all(run.is_wire for run in runs) else "handed to the network"
    figures = "\n".join(_figure(*chart, runs) for chart in _CHARTS)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n"
        f"<p>Bytes and times are rank 0's; bytes are {counted}.</p>\n{figures}\n</body></html>\n"
    )
