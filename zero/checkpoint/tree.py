"""Nested Python values as one JSON text and a list of tensors, and back: for checkpoints without pickle."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))


def pack(value: object) -> tuple[str, list[Tensor]]:
    """(text, tensors) of nested dicts, lists, tuples, strings, numbers, None and tensors.

    Dict keys are strings, numbers or tuples of these. Tensors are not copied; the text refers to them by their position
    in the list. Raises TypeError, naming the place, for any other type.
    """
    tensors: list[Tensor] = []
    return json.dumps(_pack(value, "", tensors)), tensors


def unpack(text: str, tensors: Sequence[Tensor]) -> object:
    """The inverse of `pack`. Raises ValueError if the text is not from there."""
    try:
        return _unpack(json.loads(text), tensors)
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"this is no packed value: {error}") from error


def select(text: str, names: Collection[str]) -> tuple[str, list[int]]:
    """The entries of a packed dict with these keys: (their text, the numbers of their tensors, in its order)."""
    numbers: list[int] = []
    rows = [row for row in json.loads(text)["dict"] if row[0] in names]
    return json.dumps({"dict": _renumbered(rows, numbers)}), numbers


def _renumbered(packed: object, numbers: list[int]) -> object:
    if isinstance(packed, list):
        return [_renumbered(v, numbers) for v in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, inside),) = packed.items()
    if kind == "tensor":
        numbers.append(inside)
        return {"tensor": len(numbers) - 1}
    return {kind: _renumbered(inside, numbers)}


def _pack(value: object, place: str, tensors: list[Tensor]) -> object:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        rows = [[_pack(k, f"{place}/key", tensors), _pack(v, f"{place}/{k}", tensors)] for k, v in value.items()]
        return {"dict": rows}
    if isinstance(value, tuple):
        return {"tuple": [_pack(v, f"{place}/{k}", tensors) for k, v in enumerate(value)]}
    if isinstance(value, list):
        return [_pack(v, f"{place}/{k}", tensors) for k, v in enumerate(value)]
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}, found at {place or '/'}")


def _unpack(packed: object, tensors: Sequence[Tensor]) -> object:
    if isinstance(packed, list):
        return [_unpack(v, tensors) for v in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, inside),) = packed.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dtype" and isinstance(dtype := getattr(torch, inside), torch.dtype):
        return dtype
    if kind == "tuple":
        return tuple(_unpack(v, tensors) for v in inside)
    if kind != "dict":
        raise ValueError(f"this is no packed value: {kind!r}")
    return {_unpack(k, tensors): _unpack(v, tensors) for k, v in inside}
