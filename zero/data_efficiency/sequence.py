"""Shorter sequences of a batch: truncated, or cut into several. Pure functions of nested tensors.

Every tensor whose second dimension is the batch's sequence length is changed in the same way: tokens, labels, padding
masks, position ids. Square masks [B, T, T] and [B, heads, T, T] are truncated in both dimensions, and cannot be
reshaped.
Source: arXiv 2212.03597, section 3.1: truncation-based and reshape-based curriculum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


def length_of(batch: object) -> int | None:
    """The batch's sequence length: the second dimension of the first tensor that has one; None if none has."""
    if isinstance(batch, Tensor):
        return batch.shape[1] if batch.dim() > 1 else None
    return next((n for n in map(length_of, _inside(batch)) if n is not None), None)


def _inside(batch: object) -> Iterable[object]:
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, f.name) for f in fields(batch)]
    return batch if isinstance(batch, list | tuple) else ()


def truncate(batch: T, length: int) -> T:
    """Keep the first `length` tokens of every sequence.

    Args:
        batch: Tensors, nested in tuples, lists, dicts and dataclasses. The first one with two dimensions gives the
            sequence length.
        length: Tokens to keep.

    Returns:
        The batch with its tensors truncated, contiguous as models may ask; the batch itself if it is not longer.
    """
    whole = length_of(batch)
    if whole is None or whole <= length:
        return batch
    return cast(T, _mapped(batch, lambda x: _cut(x, whole, length).contiguous()))


def reshape(batch: T, length: int) -> T:
    """Cut every sequence into several of `length` tokens, which become rows of the batch. A remainder is dropped.

    Args:
        batch: Tensors, nested in tuples, lists, dicts and dataclasses. The first one with two dimensions gives the
            sequence length.
        length: Tokens of the new sequences.

    Returns:
        The batch with reshaped tensors; the batch itself if it is not longer.

    Raises:
        ValueError: A tensor has a row for each sequence, but is not that long, or is a square mask.
    """
    whole = length_of(batch)
    if whole is None or whole <= length:
        return batch
    rows = _rows_of(batch)
    return cast(T, _mapped(batch, lambda x: _fold(x, rows, whole, length)))


def _rows_of(batch: object) -> int:
    """The number of rows of the tensor whose length `length_of` gives."""
    if isinstance(batch, Tensor):
        return batch.shape[0]
    return next(_rows_of(value) for value in _inside(batch) if length_of(value) is not None)


def _cut(x: Tensor, whole: int, length: int) -> Tensor:
    if x.dim() < 2 or x.shape[1] != whole:
        return _cut_square(x, whole, length)
    return _cut_square(x[:, :length], whole, length)


def _cut_square(x: Tensor, whole: int, length: int) -> Tensor:
    """Truncate the last two dimensions of x if it is a mask."""
    is_mask = x.dim() == 4 or (x.dim() == 3 and not x.is_floating_point())
    if is_mask and x.shape[-1] == whole and x.shape[-2] in (1, whole, length):
        return x[..., : min(length, x.shape[-2]), :length]
    return x


def _fold(x: Tensor, rows: int, whole: int, length: int) -> Tensor:
    is_square = x.dim() == 4 or (x.dim() == 3 and not x.is_floating_point() and x.shape[-1] == whole)
    has_length = x.dim() > 1 and x.shape[1] == whole and not is_square
    if not has_length and x.dim() > 0 and x.shape[0] == rows:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} cannot be reshaped with its sequences of {whole} tokens to ones of "
            f"{length}: it has no dimension of {whole}, or is a square mask; pass a padding mask [B, T], or truncate"
        )
    pieces = whole // length
    return x[:, : pieces * length].reshape(x.shape[0] * pieces, length, *x.shape[2:]) if has_length else x


def _mapped(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """Apply `change` to every tensor within nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({key: _mapped(inner, change) for key, inner in value.items()})  # type: ignore[call-arg]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value) if f.init})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cast("type[Any]", type(value))(*(_mapped(inner, change) for inner in value))
    if isinstance(value, list | tuple):
        several = [_mapped(inner, change) for inner in value]
        return several if isinstance(value, list) else tuple(several)
    return value
