"""DeepSpeed's leaf modules of stage 3: see `../parallel/leaves.py`. The JSON has "zero_optimization": {"leaf_module"}.

    zero.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    engine, *_ = zero.initialize(model=model, config=config)

Call these before `initialize`, which reads the marks as it shards the model. A layer of a list is gathered as one in
any case, with the experts in it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..parallel import leaves

log = logging.getLogger(__name__)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is a leaf module."""
    return leaves.is_leaf(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model."""
    return [module for module in model.modules() if leaves.is_leaf(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make one module a leaf module, or no longer.

    Args:
        model: The module.
        flag: Whether it is to be one.
    """
    _mark(model, [model], flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make leaf modules of all modules of these classes, and return them.

    Args:
        model: The model.
        leaf_module_classes: Classes, or their names, with the module's name or without.
        raise_if_not_found: False: a model without such modules stays as it is. Default True.

    Raises:
        ValueError: The model has no such module.
    """
    return _of_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules`, and return the modules of these classes.

    Args:
        model: The model.
        leaf_module_classes: Classes, or their names, with the module's name or without.
        raise_if_not_found: False: a model without such modules stays as it is. Default True.

    Raises:
        ValueError: The model has no such module.
    """
    return _of_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[Any]]:
    """Make leaf modules of the modules with these names, or no longer. Return them, and the names that none has.

    Args:
        model: The model.
        module_names: Names, as in `model.named_modules()`.
        flag: False: they are leaf modules no longer. Default True.
        raise_if_not_found: False: names that no module has are returned only. Default True.

    Raises:
        ValueError: No module has one of the names.
    """
    found, missing = leaves.find(model, names=module_names)
    _require(model, not missing, f"named {missing}", raise_if_not_found)
    return _mark(model, found, flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[Any]]:
    """As `set_z3_leaf_modules_by_name`, by the ends of names.

    Args:
        model: The model.
        module_name_suffixes: Ends of names, as in `model.named_modules()`.
        flag: False: they are leaf modules no longer. Default True.
        raise_if_not_found: False: ends that no name has are returned only. Default True.

    Raises:
        ValueError: No name has one of the ends.
    """
    found, missing = leaves.find(model, name_suffixes=module_name_suffixes)
    _require(model, not missing, f"whose names end in {missing}", raise_if_not_found)
    return _mark(model, found, flag), missing


def _of_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found, missing = leaves.find(model, classes)
    _require(model, bool(found), f"of the classes {missing}", raise_if_not_found)
    return _mark(model, found, flag)


def _require(model: nn.Module, holds: bool, which: str, raise_if_not_found: bool) -> None:
    if raise_if_not_found and not holds:
        raise ValueError(f"{type(model).__name__} has no module {which}")


def _mark(model: nn.Module, found: list[nn.Module], flag: bool) -> list[nn.Module]:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        log.warning("leaf modules have no effect on a model that is sharded already: set them before initialize()")
    for module in found:
        leaves.mark(module, flag)
    return found
