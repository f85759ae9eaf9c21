"""Monitoring of the engine: scalars for TensorBoard, CSV files, W&B and Comet, and the time of each part of a step.

Rank 0 writes, without communication: the loss is that of rank 0's samples, as in DeepSpeed. `engine.py` calls it.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .config.sections import Comet, Monitor, Wandb
from .config.whole import Config

log = logging.getLogger(__name__)

_PREFIX = "Train/Samples/"

# A function of values by tag, and the number of samples seen.
Writer = Callable[[Mapping[str, float], int], None]


def open_monitors(config: Config, rank: int) -> list[Writer]:
    """The writers of the configuration, on rank 0; none elsewhere. Tags begin with Train/Samples/.

    Raises ImportError, on every rank, if a package of an enabled one is not installed.
    """
    writers = []
    if config.tensorboard.enabled:
        writers.append(_tensorboard(config.tensorboard, rank))
    if config.csv_monitor.enabled:
        writers.append(_csv_files(config.csv_monitor))
    if config.wandb.enabled:
        writers.append(_wandb(config.wandb, rank))
    if config.comet.enabled:
        writers.append(_comet(config.comet, rank))
    return writers if rank == 0 else []


def _tensorboard(monitor: Monitor, rank: int) -> Writer:
    try:
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError("No module named 'tensorboard'")
        if rank == 0:  # the import takes two seconds
            from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"rank {rank}: the block tensorboard is enabled and tensorboard is missing; run pip install "
            "'onebit[train]', or enable csv_monitor instead"
        ) from error
    opened: list[SummaryWriter] = []

    def write(values: Mapping[str, float], samples: int) -> None:
        if not opened:
            opened.append(SummaryWriter(log_dir=os.path.join(monitor.output_path, monitor.job_name)))
        for tag, value in values.items():
            opened[0].add_scalar(_PREFIX + tag, value, samples)
        opened[0].flush()

    return write


def _package(name: str, block: str, rank: int) -> ModuleType:
    """The package that a block needs. Raises ImportError, which names both."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"rank {rank}: the block {block} is enabled and {name} is missing; run pip install {name}, or enable "
            "csv_monitor instead"
        ) from error


def _wandb(settings: Wandb, rank: int) -> Writer:
    wandb = _package("wandb", "wandb", rank)
    runs: list[Any] = []

    def write(values: Mapping[str, float], samples: int) -> None:
        if not runs:
            runs.append(wandb.init(project=settings.project, group=settings.group, entity=settings.team))
        runs[0].log({_PREFIX + tag: value for tag, value in values.items()}, step=samples)

    return write


def _comet(settings: Comet, rank: int) -> Writer:
    comet = _package("comet_ml", "comet", rank)
    given = {name: getattr(settings, name)
             for name in ("api_key", "project", "workspace", "experiment_key", "mode", "online")}  # fmt: skip
    opened: list[Any] = []
    last = -settings.samples_log_interval

    def write(values: Mapping[str, float], samples: int) -> None:
        nonlocal last
        if not opened:
            opened.append(comet.start(**given))
            if settings.experiment_name is not None:
                opened[0].set_name(settings.experiment_name)
        if samples - last >= settings.samples_log_interval:
            last = samples
            opened[0].log_metrics({_PREFIX + tag: value for tag, value in values.items()}, step=samples)

    return write


def _csv_files(monitor: Monitor) -> Writer:
    """One file per tag, Train_Samples_lr.csv, with the columns step (in samples) and lr. A resumed run appends."""
    folder = Path(monitor.output_path, monitor.job_name)

    def write(values: Mapping[str, float], samples: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for tag, value in values.items():
            path = folder / (_PREFIX.replace("/", "_") + f"{tag}.csv")
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", tag])
                rows.writerow([samples, value])

    return write


@dataclass
class WallClock:
    """Milliseconds in the parts of steps, added up until they are logged.

    The parts are forward, backward and step; a pipeline's run takes the place of the first two.

    On CUDA it synchronises after each part, as DeepSpeed does: the parts are exact, and steps are slower, because
    nothing overlaps.
    """

    steps: int = 0
    ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of this block to a part."""
        began = _now()
        yield
        self.ms[part] = self.ms.get(part, 0.0) + 1e3 * (_now() - began)
        self.steps += part == "step"

    def report(self) -> None:
        """Log the means over the steps since the last report."""
        if self.steps:
            means = (f"{part} {ms / self.steps:.2f}" for part, ms in self.ms.items())
            log.info("milliseconds per step: %s", ", ".join(means))
            self.steps, self.ms = 0, {}


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
