"""Finds parameters that were given before sharding again afterwards: FSDP2 replaces them by new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

Groups = Callable[[nn.Module], ParamsT]


def trained(model: nn.Module) -> Iterable[Tensor]:
    """All parameters that require gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def remembered(model: nn.Module, given: ParamsT) -> Groups:
    """A function that finds given parameters in the sharded model by their names. Call it before sharding.

    Parameters that the sharded model does not have are left out, since a pipeline stage has only some layers.

    Args:
        model: The model before sharding.
        given: Parameters, (name, parameter) pairs, or groups of either (dicts with "params"), as in torch's optimizers.

    Raises:
        ValueError: A parameter is not of this model.
        TypeError: `given` holds something else.
    """
    names: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), name)
    marked = [_marked(item, names) for item in ([given] if isinstance(given, Mapping) else given)]

    def find(sharded: nn.Module) -> ParamsT:
        now = dict(sharded.named_parameters(remove_duplicate=False))
        return cast(ParamsT, [_found(item, now) for item in marked if not _is_elsewhere(item, now)])

    return find


class _Name(str):
    """The name of a parameter, in its place."""


def _marked(item: object, names: Mapping[int, str]) -> object:
    if isinstance(item, Tensor):
        if id(item) not in names:
            raise ValueError(
                f"model_parameters holds a tensor of shape {tuple(item.shape)} that is no parameter of the model; pass "
                "parameters of the model that you pass, or a function of the sharded model"
            )
        return _Name(names[id(item)])
    if isinstance(item, Mapping):
        held = item["params"]
        return {**item, "params": [_marked(x, names) for x in ([held] if isinstance(held, Tensor) else held)]}
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor):
        return item[0], _marked(item[1], names)
    raise TypeError(
        f"expected parameters, (name, parameter) pairs or groups of them in model_parameters, got {type(item).__name__}"
    )


def _is_elsewhere(item: object, now: Mapping[str, torch.nn.Parameter]) -> bool:
    return (isinstance(item, _Name) and item not in now) or (isinstance(item, tuple) and _is_elsewhere(item[1], now))


def _found(item: object, now: Mapping[str, torch.nn.Parameter]) -> object:
    if isinstance(item, _Name):
        return now[item]
    if isinstance(item, dict):
        return {**item, "params": [_found(x, now) for x in item["params"] if not _is_elsewhere(x, now)]}
    assert isinstance(item, tuple)
    return item[0], _found(item[1], now)
