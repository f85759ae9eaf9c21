"""Difficulty metrics of samples: length, vocabulary rarity, effective length, a function of the user's.

A metric turns a list of samples into one number each, many at a time. `measuring.py` applies them to a whole dataset.
A sample is a tensor of tokens, an array, a list, or a tuple or dict of which one entry is; see `tokens_of`.
Source: arXiv 2212.03597, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Field = int | str | None


class Metric(Protocol):
    """dtype: of the numbers. Must be picklable where workers are started by spawn."""

    @property
    def dtype(self) -> str: ...
    def __call__(self, samples: Sequence[object]) -> Array: ...


def tokens_of(sample: object, field: Field = None) -> Array:
    """The tokens of a sample, one-dimensional. field: which entry of a tuple or dict; None: the first, or "input_ids".

    Raises TypeError where there are none, with what came.
    """
    if isinstance(sample, Mapping):
        name = "input_ids" if field is None else field
        if name not in sample:
            raise TypeError(f"a sample has the entries {', '.join(map(str, sample))}, not {name!r}; pass field=")
        sample = sample[name]
    elif isinstance(sample, tuple) or (isinstance(sample, list) and sample and not isinstance(sample[0], int)):
        sample = sample[field if isinstance(field, int) else 0]
    tokens = sample.numpy() if isinstance(sample, torch.Tensor) else np.asarray(sample)
    if tokens.shape == (0,):
        return tokens.astype(np.int64)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(
            f"expected a sample's tokens as one row of integers, got {tokens.dtype} of shape {tokens.shape}; pass "
            "field= to say where they are, or a UserMetric"
        )
    return tokens


@dataclass(frozen=True)
class Length:
    """Tokens in a sample."""

    field: Field = None
    dtype = "int64"

    def __call__(self, samples: Sequence[object]) -> Array:
        return np.fromiter((len(tokens_of(s, self.field)) for s in samples), np.int64, len(samples))


@dataclass(frozen=True)
class EffectiveLength:
    """Tokens that are not padding: of samples padded to one length."""

    padding: int
    field: Field = None
    dtype = "int64"

    def __call__(self, samples: Sequence[object]) -> Array:
        rows, starts = _joined(samples, self.field)
        return _sums((rows != self.padding).astype(np.int64), starts)


@dataclass(frozen=True, eq=False)
class VocabularyRarity:
    """-Σ log p(w) over a sample's tokens, in nats. counts: how often each token stands in the dataset.

    `count_vocabulary` gives the counts. padding: a token that does not count. Raises ValueError where a sample has a
    token that was never counted.
    """

    counts: Array
    padding: int | None = None
    field: Field = None
    dtype = "float64"

    def __call__(self, samples: Sequence[object]) -> Array:
        rows, starts = _joined(samples, self.field)
        counts = np.asarray(self.counts, np.float64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(counts) or not counts[rows].all()):
            bad = next(int(w) for w in rows if not (0 <= w < len(counts) and counts[w]))
            raise ValueError(f"token {bad} was never counted: the counts are of another dataset")
        if self.padding is not None:
            counts = counts.copy()
            counts[self.padding] = 0.0
        with np.errstate(divide="ignore"):
            cost = np.log(counts.sum()) - np.log(counts)
        cost[counts == 0] = 0.0  # padding; nothing else that is not counted comes so far
        return _sums(cost[rows], starts)


@dataclass(frozen=True)
class UserMetric:
    """A function of one sample. Raises ValueError where it gives what is no finite number."""

    function: Callable[[Any], float]
    dtype = "float64"

    def __call__(self, samples: Sequence[object]) -> Array:
        values = np.fromiter((float(self.function(s)) for s in samples), np.float64, len(samples))
        if not np.isfinite(values).all():
            raise ValueError(
                f"a metric must be a finite number, {self.function!r} gave {values[~np.isfinite(values)][0]}"
            )
        return values


def counts_of(samples: Sequence[object], size: int, field: Field = None) -> Array:
    """How often each of `size` tokens stands in these samples. Raises ValueError on a token beyond."""
    rows, _ = _joined(samples, field)
    if len(rows) and (rows.min() < 0 or rows.max() >= size):
        raise ValueError(
            f"token {int(rows.max() if rows.max() >= size else rows.min())} is beyond a vocabulary of {size}"
        )
    return np.bincount(rows, minlength=size)


def _joined(samples: Sequence[object], field: Field) -> tuple[Array, Array]:
    """All tokens in one row, and where each sample begins; the end as well."""
    rows = [tokens_of(s, field) for s in samples]
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return (np.concatenate(rows) if rows else np.zeros(0, np.int64)), starts


def _sums(values: Array, starts: Array) -> Array:
    """Of each sample, also of one without tokens; the bits do not depend on the samples around it."""
    sums = np.zeros(len(starts) - 1, values.dtype)
    has_tokens = starts[:-1] < starts[1:]
    if has_tokens.any():
        sums[has_tokens] = np.add.reduceat(values, starts[:-1][has_tokens])
    return sums
