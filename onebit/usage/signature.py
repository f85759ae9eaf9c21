"""Complete signatures: lists the options that `**common: Unpack[CommonOptions]` hides from help() and notebooks.

Type checkers read the TypedDicts. Python shows only `**common`, unless `@shows_all_options` has replaced it with the
options themselves, with the defaults of the base's constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from .contract import SharedOptions, TorchOptions

C = TypeVar("C", bound=type)

_TORCHS = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
}  # fmt: skip


def shows_all_options(options: type) -> Callable[[C], C]:
    """A class decorator: lists every option with its default in the signature, and describes it in the docstring.

    Args:
        options: The TypedDict of the constructor's `**`. Defaults come from the constructors of the bases, and torch's.
    """

    def decorate(cls: C) -> C:
        init: Any = cls.__init__  # type: ignore[misc]
        own = inspect.signature(init)
        listed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {p.name for p in listed}
        found = _keywords(cls)
        for name in getattr(options, "__annotations__", {}):
            if name not in taken:
                listed.append(found[name])
        init.__signature__ = own.replace(parameters=listed)
        if cls.__doc__ and options.__doc__:  # python -OO has none
            told = [each for each in (options, SharedOptions, TorchOptions) if _has_all_of(options, each)]
            abouts = [inspect.cleandoc(each.__doc__ or "").partition("\n\n")[2] for each in dict.fromkeys(told)]
            cls.__doc__ = "\n".join((f"{inspect.cleandoc(cls.__doc__)}\n\nOptions of the whole family.", *abouts, ""))
        return cls

    return decorate


def _has_all_of(options: type, others: type) -> bool:
    return set(others.__annotations__) <= set(options.__annotations__)


def _keywords(cls: type) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of the constructors that this class inherits, and torch's."""
    found = {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=TorchOptions.__annotations__[name]
        )
        for name, default in _TORCHS.items()
    }
    for base in reversed(cls.__mro__[1:]):
        init = vars(base).get("__init__")
        if init is not None and base.__module__.startswith("onebit."):
            for name, parameter in inspect.signature(init).parameters.items():
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    found[name] = parameter
    return found
