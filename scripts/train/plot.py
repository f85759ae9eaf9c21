"""Draw runs of train.py: validation loss against steps, and against what it cost on the network.

python scripts/train.py plot runs/demo/adamw.csv runs/demo/onebit-adam.csv --out runs/demo/loss.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from provenance import record_path

from train.report import COLUMNS, read_csv


class Run:
    """What train.py --csv wrote. megabytes: from the beginning up to each step, rank 0's."""

    def __init__(self, label: str, rows: Sequence[dict[str, str]]):
        self.label, self.rows = label, rows
        self.is_wire = all(row["wire_bytes"] for row in rows)
        self.steps = self.column("step")
        self.megabytes = [b / 1e6 for b in accumulate(self.column("wire_bytes" if self.is_wire else "sent_bytes"))]

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows]

    def validated(self) -> tuple[list[int], list[float]]:
        """Which rows have a validation loss, and what it is there."""
        found = [k for k, row in enumerate(self.rows) if row["val_loss"]]
        return found, [float(self.rows[k]["val_loss"]) for k in found]


def draw(runs: Sequence[Run], out: Path) -> None:
    """Write a PNG with both panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    against_steps, against_bytes = figure.subplots(1, 2, sharey=True)
    for index, run in enumerate(runs):
        color = f"C{index}"
        against_steps.plot(run.steps, run.column("loss"), color=color, alpha=0.25, linewidth=1)
        rows, losses = run.validated()
        against_steps.plot([run.steps[k] for k in rows], losses, color=color, label=run.label)
        against_bytes.plot([run.megabytes[k] for k in rows], losses, color=color, marker=".", label=run.label)
    against_steps.set(xlabel="step", ylabel="loss, nats per byte (thin: training, thick: validation)")
    counted = "on the wire, counted by the kernel" if all(run.is_wire for run in runs) else "handed to the network"
    has_sent = any(run.megabytes[-1] for run in runs)  # one rank sends nothing
    against_bytes.set(xlabel=f"MB sent by rank 0 ({counted})", xscale="log" if has_sent else "linear")
    for axes in (against_steps, against_bytes):
        axes.grid(alpha=0.3)
        axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def read_run(path: Path) -> Run:
    """Raises ValueError, which names the file, if it is not what train.py --csv wrote."""
    writes = f"train.py --csv {path} writes"
    try:
        rows = read_csv(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}; {writes} it") from error
    if not rows:
        raise ValueError(f"{path} holds no step; {writes} a line for each")
    for name in COLUMNS:
        if name not in rows[0]:
            raise ValueError(f"{path} has no column {name}; {writes} it")
    return Run(path.stem, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="train.py plot", description="Draw runs of train.py side by side.")
    parser.add_argument("csv", nargs="+", type=Path)
    add = parser.add_argument
    add("--out", type=record_path, required=True, metavar="FILE", help="a .png")
    args = parser.parse_args(argv)
    try:
        runs = [read_run(path) for path in args.csv]
    except ValueError as error:
        parser.error(str(error))
    draw(runs, args.out)
