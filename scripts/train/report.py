"""What a run tells: a CSV line per step, a live bar or lines, TensorBoard, a JSON summary. All of it by rank 0.

`Report` is fed one `Row` per step; on the other ranks it is silent. A resumed run continues its CSV where the
checkpoint was written: later lines of the interrupted run are dropped.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TextIO

import torch

from onebit.comm import Transport
from train.corpus import Corpus

PROGRESS = ("auto", "bar", "lines", "none")
_SECONDS_BETWEEN_LINES = 5.0

log = logging.getLogger("train")


@dataclass(kw_only=True)
class Row:
    """One step, as in the CSV. loss: mean over ranks, before the step. sent_bytes, comm_ms, step_s: rank 0's.

    sent_bytes counts all payload this rank sent in the step, including the few bytes by which the ranks agree, without
    what shards move inside a node. bits_per_parameter: of the parameters whose shard this rank has. step_s
    leaves out validation and checkpoints. comm_ms: how long the optimizer waited for the network. val_loss and
    error_norm_ratio: every --eval-every steps. wire_bytes: what the kernel saw leave this host in the step, headers
    included; only known inside an emulated host (`onebit emulate`).
    """

    step: int
    loss: float
    val_loss: float | None = None
    lr: float
    sent_bytes: int
    bits_per_parameter: float
    comm_ms: float
    step_s: float
    error_norm_ratio: float | None = None
    phase: str
    skipped: int
    wire_bytes: int | None = None


COLUMNS = [field.name for field in fields(Row)]


class Report:
    """A context that records rows; rank 0 alone writes anything."""

    def __init__(
        self, args: argparse.Namespace, transport: Transport, corpus: Corpus, parameters: int, first_step: int
    ):
        self._args, self._transport, self._corpus, self._parameters = args, transport, corpus, parameters
        self._rows: list[Row] = []
        self._outputs: list[CsvFile | Bar | Lines | TensorBoard] = []
        if transport.rank == 0:
            self._outputs = _open_outputs(args, corpus, first_step)

    def __enter__(self) -> Report:
        return self

    def add(self, row: Row) -> None:
        self._rows.append(row)
        for output in self._outputs:
            output.add(row)

    def __exit__(self, *failure: object) -> None:
        for output in self._outputs:
            output.close()
        if self._transport.rank == 0 and failure[0] is None:
            log.info(self._last_line())
            if self._args.json is not None:
                self._args.json.parent.mkdir(parents=True, exist_ok=True)
                self._args.json.write_text(json.dumps(self.summary(), indent=1) + "\n")

    def summary(self) -> dict:
        """The run in a few numbers, over the steps that this process made (a resumed run: since it was resumed)."""
        rows, args = self._rows, self._args
        total_bytes = sum(row.sent_bytes for row in rows)
        times_s = [row.step_s for row in rows] or [0.0]
        return {
            "optimizer": args.optimizer,
            "zero": args.zero,
            "dtype": args.dtype,
            "size": args.size,
            "parameters": self._parameters,
            "world_size": self._transport.world_size,
            "transport": type(self._transport).__name__,
            "steps": args.steps,
            "steps_here": len(rows),
            "batch_size": args.batch_size,
            "accumulate": args.accumulate,
            "lr": args.lr,
            "seed": args.seed,
            "corpus": {"python": self._corpus.python, "sha256": self._corpus.sha256},
            "torch": torch.__version__,
            "val_loss": next((row.val_loss for row in reversed(rows) if row.val_loss is not None), None),
            "sent_bytes": total_bytes,
            "bytes_per_parameter_and_step": statistics.fmean([row.bits_per_parameter for row in rows] or [0.0]) / 8,
            "wire_bytes": sum(row.wire_bytes for row in rows if row.wire_bytes is not None) or None,
            "last_bits_per_parameter": rows[-1].bits_per_parameter if rows else None,
            "first_compressed_step": next((row.step for row in rows if row.phase == "compressed"), None),
            "step_s": {"mean": statistics.fmean(times_s), "median": statistics.median(times_s)},
            "seconds": sum(times_s),
            "skipped": rows[-1].skipped if rows else 0,
        }

    def _last_line(self) -> str:
        summary = self.summary()
        val_loss = "not measured" if summary["val_loss"] is None else f"{summary['val_loss']:.4f}"
        return (
            f"{summary['steps_here']} steps in {summary['seconds']:.1f} s, validation loss {val_loss}, "
            f"{summary['bytes_per_parameter_and_step']:.3f} bytes sent per parameter and step"
        )


class CsvFile:
    """The rows, with a `#` line on the text that was read. Floats are written so that they read back to the bit."""

    def __init__(self, path: Path, corpus: Corpus, first_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_csv(path) if int(row["step"]) <= first_step] if first_step and path.exists() else []
        self._file = path.open("w", newline="")
        self._file.write(f"# corpus: Python {corpus.python}, sha256 {corpus.sha256}\n")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._writer.writerows(kept)
        self._file.flush()

    def add(self, row: Row) -> None:
        self._writer.writerow(asdict(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that this module wrote, columns by name."""
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


class Bar:
    """A bar that redraws itself on a terminal."""

    def __init__(self, label: str, steps: int, first_step: int):
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError as error:
            raise ImportError("the bar needs rich: pip install onebit[train], or use --progress lines") from error
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=Console(force_terminal=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(label, total=steps, completed=first_step, news="")
        self._bar.start()

    def add(self, row: Row) -> None:
        news = f"loss {row.loss:.3f}  {row.bits_per_parameter:5.1f} bit/parameter"
        self._bar.update(self._task, completed=row.step, news=news)

    def close(self) -> None:
        self._bar.stop()


class Lines:
    """A line every few seconds, where there is no terminal to draw on."""

    def __init__(self, label: str, steps: int, stream: TextIO):
        self._label, self._steps, self._stream = label, steps, stream
        self._last_s = 0.0

    def add(self, row: Row) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _SECONDS_BETWEEN_LINES and row.step < self._steps:
            return
        self._last_s = now_s
        self._stream.write(
            f"{self._label}  step {row.step}/{self._steps}  loss {row.loss:.3f}  "
            f"{row.bits_per_parameter:.1f} bit/parameter  {row.step_s:.2f} s/step  {row.phase}\n"
        )
        self._stream.flush()

    def close(self) -> None:
        """Nothing is held."""


class TensorBoard:
    """The numeric columns as scalars."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--tensorboard needs the tensorboard package: pip install onebit[train]") from error
        self._writer = SummaryWriter(str(folder))

    def add(self, row: Row) -> None:
        for name, value in asdict(row).items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        self._writer.close()


def _open_outputs(args: argparse.Namespace, corpus: Corpus, first_step: int) -> list:
    outputs: list = []
    if args.csv is not None:
        outputs.append(CsvFile(args.csv, corpus, first_step))
    if args.tensorboard is not None:
        outputs.append(TensorBoard(args.tensorboard))
    shows_bar = args.progress == "bar" or (args.progress == "auto" and sys.stdout.isatty() and _has_rich())
    if shows_bar:
        outputs.append(Bar(args.optimizer, args.steps, first_step))
    elif args.progress != "none":
        outputs.append(Lines(args.optimizer, args.steps, sys.stdout))
    return outputs


def _has_rich() -> bool:
    import importlib.util

    return importlib.util.find_spec("rich") is not None
