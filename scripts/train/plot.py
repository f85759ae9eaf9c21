"""Draw runs of train.py: validation loss against steps, and against what it cost on the network.

python scripts/train.py plot runs/demo/adamw.csv runs/demo/onebit-adam.csv --out runs/demo/loss.png
python scripts/train.py plot runs/demo/adamw.csv runs/demo/onebit-adam.csv --out runs/demo/report.html
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from provenance import record_path

from train.page import Run, write_page
from train.report import read_csv


@dataclass(frozen=True)
class Curve:
    """One run: its training loss per step, and its validation loss at some of them. Megabytes are rank 0's, summed."""

    label: str
    steps: list[int]
    losses: list[float]
    megabytes: list[float]
    validated: list[int]
    val_losses: list[float]
    is_wire: bool


def read_curve(path: Path, label: str) -> Curve:
    rows = read_csv(path)
    is_wire = all(row["wire_bytes"] for row in rows)
    megabytes = [s / 1e6 for s in accumulate(int(row["wire_bytes" if is_wire else "sent_bytes"]) for row in rows)]
    validated = [k for k, row in enumerate(rows) if row["val_loss"]]
    return Curve(
        label=label,
        steps=[int(row["step"]) for row in rows],
        losses=[float(row["loss"]) for row in rows],
        megabytes=megabytes,
        validated=validated,
        val_losses=[float(rows[k]["val_loss"]) for k in validated],
        is_wire=is_wire,
    )


def draw(curves: Sequence[Curve], out: Path, title: str = "") -> None:
    """Write a PNG with both panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    against_steps, against_bytes = figure.subplots(1, 2, sharey=True)
    for index, curve in enumerate(curves):
        color = f"C{index}"
        against_steps.plot(curve.steps, curve.losses, color=color, alpha=0.25, linewidth=1)
        against_steps.plot([curve.steps[k] for k in curve.validated], curve.val_losses, color=color, label=curve.label)
        megabytes = [curve.megabytes[k] for k in curve.validated]
        against_bytes.plot(megabytes, curve.val_losses, color=color, marker=".", label=curve.label)
    against_steps.set(xlabel="step", ylabel="loss, nats per byte (thin: training, thick: validation)")
    counted = (
        "on the wire, counted by the kernel" if all(curve.is_wire for curve in curves) else "handed to the network"
    )
    against_bytes.set(xlabel=f"MB sent by rank 0 ({counted})", xscale="log")
    for axes in (against_steps, against_bytes):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="train.py plot", description="Draw runs of train.py side by side.")
    parser.add_argument("csv", nargs="+", type=Path)
    add = parser.add_argument
    add(
        "--out",
        type=record_path,
        required=True,
        metavar="FILE",
        help="a .png, or an .html with a table and more",
    )
    add("--title", default="")
    args = parser.parse_args(argv)
    if args.out.suffix == ".html":
        write_page([Run(path.stem, read_csv(path)) for path in args.csv], args.out, args.title or "Training")
        return
    draw([read_curve(path, path.stem) for path in args.csv], args.out, args.title)
