"""The offline pass: metrics of every sample of a map-style dataset, written as one .npy file per metric.

    counts = count_vocabulary(dataset, 50257, workers=2)
    measure(dataset, {"length": Length(), "rarity": VocabularyRarity(counts)}, "metrics", workers=2)
    values = read_metric("metrics/rarity.npy", dataset)

Workers are those of torch's DataLoader. Memory is bounded: each worker holds `PART` samples, and results go into a
memory map. `measured.json` beside the files records the dataset's fingerprint and how many samples are done, so an
interrupted pass can continue. The values depend neither on the number of workers nor on interruptions.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, TypeVar, cast

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch.utils.data import DataLoader, Dataset

from ..data import size_of
from ..offload.files import reserve
from .metrics import Array, Field, Metric, counts_of

log = logging.getLogger(__name__)

T = TypeVar("T")

PART = 2048
"""Samples that a worker measures at a time."""
STAMP = "measured.json"
_SECONDS_BETWEEN_STAMPS = 5.0
_PROBES = 32


def measure(
    dataset: Dataset[object],
    metrics: Mapping[str, Metric],
    folder: str | os.PathLike[str],
    *,
    workers: int = 0,
    shows_progress: bool = True,
) -> dict[str, Path]:
    """Measure every sample of a dataset, and write folder/NAME.npy for each metric: one number per sample.

    Call it from one process. If the folder is complete already, nothing is done; an interrupted pass continues.

    Args:
        dataset: A map-style dataset.
        metrics: The metrics by name, for example {"length": Length()}.
        folder: Where the files go; it is made if missing.
        workers: Processes that read and measure; 0 (default) for this process alone.
        shows_progress: Whether to show a bar on a terminal, or log lines elsewhere; True by default.

    Returns:
        The path of each metric's file.

    Raises:
        ValueError: No metrics, or the folder holds metrics of another dataset or with other names.
        TypeError: The dataset has no length or no items.
        OSError: The disk is full, or the folder cannot be written.
    """
    if not metrics:
        raise ValueError("expected at least one metric, as {'length': Length()}")
    place, n = Path(folder), size_of(dataset)
    place.mkdir(parents=True, exist_ok=True)
    paths = {name: place / f"{name}.npy" for name in metrics}
    stamp = _begin(place, dataset, metrics, n)
    done = cast(int, stamp["done"])
    if done == n:
        return paths
    rows = {
        name: open_memmap(path, mode="r+" if done else "w+", dtype=metric.dtype, shape=(n,))
        for (name, metric), path in zip(metrics.items(), paths.values(), strict=True)
    }
    for path in () if done else paths.values():
        with path.open("r+b") as file:
            try:
                reserve(file.fileno(), path.stat().st_size)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}: {path}") from error
    saved = time.monotonic()
    with Progress(f"metrics {', '.join(metrics)}", n, done, is_shown=shows_progress) as progress:
        for values in _parts(dataset, range(done, n), partial(_evaluate, metrics), workers):
            count = len(next(iter(values.values())))
            for name, row in rows.items():
                row[done : done + count] = values[name]
            done += count
            progress.at(done)
            if done == n or time.monotonic() - saved > _SECONDS_BETWEEN_STAMPS:
                for row in rows.values():
                    row.flush()
                _write_stamp(place, stamp | {"done": done})
                saved = time.monotonic()
    return paths


def count_vocabulary(
    dataset: Dataset[object], size: int, *, field: Field = None, workers: int = 0, shows_progress: bool = True
) -> Array:
    """Count how often each token occurs in the whole dataset, for `VocabularyRarity`.

    Args:
        dataset: A map-style dataset.
        size: The size of the vocabulary.
        field: Which entry of a tuple or dict holds the tokens; None (default) for the first, or "input_ids".
        workers: Processes that read and count; 0 (default) for this process alone.
        shows_progress: Whether to show a bar on a terminal, or log lines elsewhere; True by default.

    Returns:
        int64 [size], the counts by token.

    Raises:
        ValueError: A token is outside the vocabulary.
        TypeError: A sample has no row of integers, or the dataset no length or items.
    """
    counts, done, n = np.zeros(size, np.int64), 0, size_of(dataset)
    with Progress("vocabulary", n, 0, is_shown=shows_progress) as progress:
        for part, count in _parts(dataset, range(n), partial(_count, size, field), workers):
            counts += part
            done += count
            progress.at(done)
    return counts


def read_metric(path: str | os.PathLike[str], dataset: Dataset[object]) -> Array:
    """The values that `measure` wrote, mapped from disk.

    A .npy file from elsewhere, without measured.json beside it, only has to have the dataset's length.

    Args:
        path: The metric's .npy file.
        dataset: The dataset that it belongs to.

    Returns:
        A read-only array with one number per sample.

    Raises:
        ValueError: The file belongs to another dataset, is unfinished, or is no .npy file of one number per sample.
    """
    file, n = Path(path), size_of(dataset)
    if file.suffix != ".npy":
        raise ValueError(
            f"{file}: expected a .npy file with a number for each sample; measure the dataset with "
            "onebit.zero.data_efficiency.measure, whose files these are"
        )
    values = np.load(file, mmap_mode="r", allow_pickle=False)
    if values.ndim != 1 or len(values) != n or values.dtype.kind not in "iuf":
        raise ValueError(
            f"{file} is of another dataset: expected {n} numbers, one for each sample, got {values.dtype} of shape "
            f"{values.shape}; run measure() on this dataset"
        )
    if (file.parent / STAMP).exists():
        stamp = _read_stamp(file.parent)
        if stamp["fingerprint"] != fingerprint(dataset):
            raise ValueError(
                f"{file} is of another dataset with the same number of samples: {STAMP} beside it has fingerprint "
                f"{stamp['fingerprint']}, this dataset {fingerprint(dataset)}; measure this dataset into another folder"
            )
        if stamp["done"] != n and file.stem in cast(list[str], stamp["metrics"]):
            raise ValueError(f"{file} is not finished: {stamp['done']} of {n} samples; call measure() again")
    return values  # type: ignore[no-any-return]


def fingerprint(dataset: Dataset[object]) -> str:
    """A dataset's fingerprint: 16 hexadecimal digits of a hash over its length and up to 32 samples spread over it."""
    n = size_of(dataset)
    digest = sha256(str(n).encode())
    for index in sorted({round(k * (n - 1) / max(1, _PROBES - 1)) for k in range(_PROBES)}) if n else ():
        _digest(dataset[index], digest.update)
    return digest.hexdigest()[:16]


def _digest(value: object, update: Callable[[bytes], object]) -> None:
    """Hash the values only, not the container's type, which a collate function or a cache may change."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            _digest(value[name], update)
    elif isinstance(value, torch.Tensor | np.ndarray | np.generic):
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        update(array.astype(np.float64 if array.dtype.kind == "f" else array.dtype).tobytes())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            _digest(item, update)
    elif isinstance(value, bool | int | float | str | bytes | None):
        update(repr(value).encode())


def _begin(place: Path, dataset: Dataset[object], metrics: Mapping[str, Metric], n: int) -> dict[str, object]:
    """This pass's stamp: the one in the folder, or a new one.

    Raises:
        ValueError: The folder holds metrics of another dataset, or with other names.
    """
    fresh: dict[str, object] = {
        "samples": n,
        "fingerprint": fingerprint(dataset),
        "metrics": sorted(metrics),
        "done": 0,
    }
    if not (place / STAMP).exists():
        _write_stamp(place, fresh)
        return fresh
    stamp = _read_stamp(place)
    if any(stamp[key] != fresh[key] for key in ("samples", "fingerprint")):
        raise ValueError(
            f"{place} holds metrics of another dataset: of {stamp['samples']} samples, fingerprint "
            f"{stamp['fingerprint']}; this one has {n} and {fresh['fingerprint']}; name another folder"
        )
    if stamp["metrics"] != fresh["metrics"]:
        raise ValueError(
            f"{place} holds the metrics {', '.join(cast(list[str], stamp['metrics']))}, this pass measures "
            f"{', '.join(sorted(metrics))}; use another folder, or measure the same metrics"
        )
    return stamp


def _write_stamp(place: Path, stamp: Mapping[str, object]) -> None:
    """Written to a new file that replaces the old one, so that an interruption leaves a whole stamp."""
    new = place / f"{STAMP}.new"
    new.write_text(json.dumps(stamp))
    new.replace(place / STAMP)


def _read_stamp(place: Path) -> dict[str, object]:
    try:
        stamp = json.loads((place / STAMP).read_text())
        return {key: stamp[key] for key in ("samples", "fingerprint", "metrics", "done")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place / STAMP} is damaged ({error!r}); remove the folder and measure again") from error


def _parts(dataset: Dataset[object], numbers: range, work: Callable[[list[object]], T], workers: int) -> Iterator[T]:
    """The result of `work` on each part of the samples, in order."""
    parts = [range(start, min(start + PART, numbers.stop)) for start in range(numbers.start, numbers.stop, PART)]
    return iter(DataLoader(dataset, batch_sampler=parts, num_workers=workers, collate_fn=work))  # type: ignore[arg-type]


def _evaluate(metrics: Mapping[str, Metric], samples: list[object]) -> dict[str, Array]:
    return {name: metric(samples) for name, metric in metrics.items()}


def _count(size: int, field: Field, samples: list[object]) -> tuple[Array, int]:
    return counts_of(samples, size, field), len(samples)


class Progress:
    """A progress bar on a terminal; elsewhere a log line after every tenth of the whole."""

    def __init__(self, what: str, total: int, done: int = 0, *, is_shown: bool = True, out: IO[str] = sys.stderr):
        self._what, self._total, self._first, self._out = what, total, done, out
        self._is_shown, self._is_terminal = is_shown, out.isatty()
        self._began, self._said = time.monotonic(), -1

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown and self._is_terminal:
            self._out.write("\n")

    def at(self, done: int) -> None:
        """Report that `done` samples are done."""
        share = done / self._total
        step = int(share * (200 if self._is_terminal else 10))
        if not self._is_shown or step == self._said:
            return
        self._said = step
        pace = (done - self._first) / max(time.monotonic() - self._began, 1e-9)
        left_s = (self._total - done) / max(pace, 1e-9)
        progress = f"{self._what}: {done:,} of {self._total:,} samples, {pace:,.0f}/s, {left_s:.0f} s left"
        if self._is_terminal:
            filled = round(30 * share)
            self._out.write(f"\r[{'=' * filled}{' ' * (30 - filled)}] {progress}  ")
            self._out.flush()
        else:
            log.info("%s", progress)
