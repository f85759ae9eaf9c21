"""Difficulty metrics of samples: length, effective length, vocabulary rarity, or a user's own function.

A metric turns a list of samples into an array of one number each. `measuring.py` applies metrics to a whole dataset.
A sample is a tensor, array or list of tokens, or a tuple or dict with such an entry; see `tokens_of`.
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
    """Turns samples into one number each, of type `dtype`. Must be picklable if workers are started by spawn."""

    @property
    def dtype(self) -> str: ...
    def __call__(self, samples: Sequence[object]) -> Array: ...


def tokens_of(sample: object, field: Field = None) -> Array:
    """The tokens of a sample, one-dimensional.

    Args:
        sample: A row of integers as tensor, array or list, or a tuple or dict that holds one.
        field: Which entry of a tuple or dict holds the tokens; None (default) for the first, or "input_ids".

    Raises:
        TypeError: There is no such entry, or it is no row of integers.
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
    """The number of tokens in a sample.

    Args:
        field: Which entry of a tuple or dict holds the tokens; None (default) for the first, or "input_ids".
    """

    field: Field = None
    dtype = "int64"

    def __call__(self, samples: Sequence[object]) -> Array:
        return np.fromiter((len(tokens_of(s, self.field)) for s in samples), np.int64, len(samples))


@dataclass(frozen=True)
class EffectiveLength:
    """The number of tokens in a sample that are not padding, for samples padded to one length.

    Args:
        padding: The padding token.
        field: Which entry of a tuple or dict holds the tokens; None (default) for the first, or "input_ids".
    """

    padding: int
    field: Field = None
    dtype = "int64"

    def __call__(self, samples: Sequence[object]) -> Array:
        rows, starts = _joined(samples, self.field)
        return _sums((rows != self.padding).astype(np.int64), starts)


@dataclass(frozen=True, eq=False)
class VocabularyRarity:
    """The rarity of a sample's tokens: -Σ log p(w) in nats, where p(w) is the share of token w in the dataset.

    Calling it raises ValueError if a sample has a token whose count is zero.

    Args:
        counts: How often each token occurs in the dataset, from `count_vocabulary`.
        padding: A token that adds nothing; None (default) if there is none.
        field: Which entry of a tuple or dict holds the tokens; None (default) for the first, or "input_ids".
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
            raise ValueError(
                f"token {bad} was never counted: the counts are of another dataset; run count_vocabulary on this one"
            )
        if self.padding is not None:
            counts = counts.copy()
            counts[self.padding] = 0.0
        with np.errstate(divide="ignore"):
            cost = np.log(counts.sum()) - np.log(counts)
        cost[counts == 0] = 0.0  # the padding token: the check above rejects all others
        return _sums(cost[rows], starts)


@dataclass(frozen=True)
class UserMetric:
    """A metric from a user's own function. Calling it raises ValueError if a value is not finite.

    Args:
        function: Takes one sample of the dataset and returns a number.
    """

    function: Callable[[Any], float]
    dtype = "float64"

    def __call__(self, samples: Sequence[object]) -> Array:
        values = np.fromiter((float(self.function(s)) for s in samples), np.float64, len(samples))
        if not np.isfinite(values).all():
            raise ValueError(
                f"a metric must be a finite number, {self.function!r} returned {values[~np.isfinite(values)][0]}"
            )
        return values


def counts_of(samples: Sequence[object], size: int, field: Field = None) -> Array:
    """How often each of `size` tokens occurs in these samples.

    Raises:
        ValueError: A token is outside the vocabulary.
    """
    rows, _ = _joined(samples, field)
    if len(rows) and (rows.min() < 0 or rows.max() >= size):
        raise ValueError(
            f"token {int(rows.max() if rows.max() >= size else rows.min())} is beyond a vocabulary of {size}"
        )
    return np.bincount(rows, minlength=size)


def _joined(samples: Sequence[object], field: Field) -> tuple[Array, Array]:
    """All tokens in one row, and the offsets at which samples begin, with the end as the last one."""
    rows = [tokens_of(s, field) for s in samples]
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return (np.concatenate(rows) if rows else np.zeros(0, np.int64)), starts


def _sums(values: Array, starts: Array) -> Array:
    """The sum for each sample, 0 for one without tokens. Its bits do not depend on the samples around it."""
    sums = np.zeros(len(starts) - 1, values.dtype)
    has_tokens = starts[:-1] < starts[1:]
    if has_tokens.any():
        sums[has_tokens] = np.add.reduceat(values, starts[:-1][has_tokens])
    return sums
