"""What to train, given before sharding, found again after it: FSDP2 puts new parameters in the place of the old."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

Groups = Callable[[nn.Module], ParamsT]


def trained(model: nn.Module) -> Iterable[Tensor]:
    """All that requires gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def remembered(model: nn.Module, given: ParamsT) -> Groups:
    """A function that gives, of the sharded model, what was given of the plain one, by the parameters' names.

    A parameter that the sharded one does not have is left out: a pipeline's stage has some layers. given: parameters,
    (name, parameter) pairs, or groups of either (dicts with "params"), as torch's optimizers take them. Call it before
    the model is sharded. Raises ValueError where a parameter is not of this model, TypeError on anything else.
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
    """Of a parameter, in whose place it stands."""


def _marked(item: object, names: Mapping[int, str]) -> object:
    if isinstance(item, Tensor):
        if id(item) not in names:
            raise ValueError(
                f"model_parameters holds a tensor of shape {tuple(item.shape)} that is no parameter of the model; give "
                "parameters of the model as it is passed, or a function of the sharded model"
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
