"""Leaf modules: stage 3 gathers each as one, so that ranks may run different parts of it, e.g. different experts.

The mark is in the module. `fsdp.blocks_of` reads it, so it has to be there before the model is sharded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from ..config.sections import LeafModule

log = logging.getLogger(__name__)

_MARK = "is_leaf_module"
_Fits = Callable[[str, nn.Module], bool]
T = TypeVar("T")


def is_leaf(module: nn.Module) -> bool:
    """Whether the module has the mark."""
    return _MARK in module.__dict__


def mark(module: nn.Module, is_leaf: bool = True) -> None:
    """Set or remove the mark."""
    if is_leaf:
        module.__dict__[_MARK] = True
    else:
        module.__dict__.pop(_MARK, None)


def find(
    model: nn.Module,
    classes: Sequence[type[nn.Module] | str] = (),
    names: Sequence[str] = (),
    name_suffixes: Sequence[str] = (),
) -> tuple[list[nn.Module], list[type[nn.Module] | str]]:
    """Return the modules that at least one entry describes, each once, and the entries that describe none.

    Args:
        model: The model.
        classes: Classes, derived ones included, or names of classes, with the Python module's name or without.
        names: Names of modules, as in `named_modules`.
        name_suffixes: Ends of such names.
    """
    asked: list[tuple[type[nn.Module] | str, _Fits]] = [(each, _of_class(each)) for each in _listed(classes)]
    asked += [(each, lambda name, _, each=each: name == each) for each in _listed(names)]  # type: ignore[misc]
    asked += [(each, lambda name, _, each=each: name.endswith(each)) for each in _listed(name_suffixes)]  # type: ignore[misc]
    found: dict[nn.Module, None] = {}
    missing = []
    for entry, fits in asked:
        fitting = [module for name, module in model.named_modules() if fits(name, module)]
        found |= dict.fromkeys(fitting)
        if not fitting:
            missing.append(entry)
    return list(found), missing


def _listed(given: Sequence[T]) -> Sequence[T | str]:
    return (given,) if isinstance(given, str) else given  # a string is no list of its letters


def _of_class(asked: type[nn.Module] | str) -> _Fits:
    if isinstance(asked, type):
        return lambda _, module: isinstance(module, asked)
    return lambda _, module: asked in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")


def mark_configured(model: nn.Module, asked: LeafModule, *, warns: bool) -> None:
    """Mark the modules that the configuration's "leaf_module" describes.

    Args:
        model: The whole model, before it is sharded.
        asked: The block.
        warns: Whether to log the names that no module has, and that nothing fits at all. Lists of classes serve
            several families of models, so a class may be absent.
    """
    found, missing = find(model, asked.classes, asked.names, asked.name_suffixes)
    for module in found:
        mark(module)
    unknown = [each for each in missing if each in (*asked.names, *asked.name_suffixes)]
    if warns and unknown:
        log.warning("zero_optimization.leaf_module: no module of the model has the name %s", ", ".join(unknown))
    elif warns and missing and not found:
        log.warning("zero_optimization.leaf_module: the model has no module of these classes")
