"""The rules for keys of a DeepSpeed JSON: types, ranges, defaults.

A block is a frozen dataclass, derived from `Block`, whose fields are made by `key` (a value) and `block` (an inner
block): the dataclass is the list of known keys, with the file's defaults. Keys that DeepSpeed knows and this package
does not need are `Inert`s, in the mapping `inert` of the class. `reader.py` turns parsed JSON into such a dataclass and
back; the blocks themselves are in `sections.py`, `optimizers.py`, `lr_schedules.py` and `whole.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")

AUTO = "auto"
_KEY, _BLOCK, _NAMED = "key", "block", "named blocks"


@dataclass(frozen=True)
class Kind:
    """A type of value. read: converts a value of this type; raises TypeError on anything else."""

    name: str
    read: Callable[[object], object]


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _integer(value: object) -> int:
    if _number(value) != int(_number(value)):
        raise TypeError
    return int(cast(float, value))


def _auto_or_integer(value: object) -> int | str:
    return AUTO if value == AUTO else _integer(value)


def _every(value: object) -> int | str | dict[str, object]:
    return _object(value) if isinstance(value, Mapping) else _auto_or_integer(value)


def _period(value: object) -> int | None:
    return None if value in (None, math.inf) else _integer(value)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise TypeError


def _list(value: object) -> list[object]:
    if isinstance(value, list | tuple):
        return list(value)
    raise TypeError


def _pair(value: object) -> tuple[float, float]:
    first, second = _several(value)
    return first, second


def _several(value: object) -> tuple[float, ...]:
    return tuple(_number(item) for item in _list(value))


def _integers(value: object) -> tuple[int, ...]:
    return tuple(_integer(item) for item in _list(value))


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(_text(each) for each in value)
    raise TypeError


def _names(value: object) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else _texts(value)


def _rates(value: object) -> float | tuple[float, ...]:
    return _several(value) if isinstance(value, list | tuple) else _number(value)


def _object(value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


BOOL = Kind("true or false", _boolean)
INT = Kind("an integer", _integer)
FLOAT = Kind("a number", _number)
TEXT = Kind("a string", _text)
PAIR = Kind("a list of two numbers", _pair)
INTS = Kind("a list of integers", _integers)
TEXTS = Kind("a list of strings", _texts)
NAMES = Kind("a string or a list of strings", _names)
RATES = Kind("a number, or a list with one for each parameter group,", _rates)
STEPS = Kind('a number of steps or "auto"', _auto_or_integer)
DEGREE = Kind('an integer or "auto"', _auto_or_integer)
EVERY = Kind('a number of steps, "auto", or an object that says when', _every)
PERIOD = Kind("an integer, or null for never", _period)
LIST = Kind("a list", _list)
OBJECT = Kind("an object", _object)
ANYTHING = Kind("anything", lambda value: value)


@dataclass(frozen=True)
class Key:
    """The rules of a key. least, most: inclusive bounds; above, below: exclusive ones. None: unbounded.

    fill: the argument of `read_config` that replaces "auto" or an absent key. asks: "auto" without that argument is an
    error, instead of the default. required: an absent key is an error, too. null: it may be null, which becomes None,
    the default of nearly all such keys.
    """

    kind: Kind
    fill: str | None = None
    asks: bool = False
    required: bool = False
    null: bool = False
    choices: tuple[object, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def takes_auto(self) -> bool:
        """Whether "auto" is a proper value of this key, instead of a request for the caller's."""
        return self.kind in (STEPS, DEGREE, EVERY) or AUTO in self.choices

    def expected(self) -> str:
        """A description of the accepted values."""
        if self.choices:
            return "one of " + ", ".join(as_json(choice) for choice in self.choices)
        bounds = [("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below)]
        limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        return f"{self.kind.name} {limits}".strip() + (" or null" if self.null else "")

    def read(self, value: object, where: str) -> object:
        """The converted value. Raises TypeError (type) or ValueError (range), with the expected and the given value."""
        if value is None and self.null:
            return None
        try:
            taken = self.kind.read(value)
        except (TypeError, ValueError) as wrong:
            raise TypeError(f"{where}: expected {self.expected()}, got {as_json(value)}") from wrong
        if self.choices:
            taken = next((c for c in self.choices if folded(c) == folded(taken)), MISSING)
        if taken is MISSING or not all(self._is_within(number) for number in _numbers(taken)):
            raise ValueError(f"{where}: expected {self.expected()}, got {as_json(value)}")
        return taken

    def _is_within(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


MISSING = object()


@dataclass(frozen=True)
class Inert:
    """A key that DeepSpeed knows and that has no effect here. why: reason in the warning or the error.

    kind: its type, or the keys of its block. fine: values that match what happens anyway. asks: whether a block
    switches something on. refused: an error instead of a warning, if ignoring it would train another model or sum.
    """

    kind: Kind | Mapping[str, object]
    why: str
    fine: tuple[object, ...] = ()
    refused: bool = False
    asks: Callable[[object], bool] | None = None


def key(default: T, kind: Kind, **rules: object) -> T:
    """A field of a block; rules: see `Key`."""
    return field(default=default, metadata={_KEY: Key(kind, **rules)})  # type: ignore[arg-type]


def required_key(kind: Kind, **rules: object) -> Any:
    """A field of a block that has no default."""
    return field(metadata={_KEY: Key(kind, required=True, **rules)})  # type: ignore[arg-type]


def block(cls: type[T]) -> T:
    """A field that is a block; absent: its defaults."""
    # Blocks are frozen, so all configurations share one that is absent, and it is checked once, here.
    return field(default=cls(), metadata={_BLOCK: cls})


def named_blocks(cls: type[T]) -> Mapping[str, T]:
    """A field that is an object of blocks under names that the user chooses; absent: none."""
    return field(default_factory=dict, metadata={_NAMED: cls})


@cache
def keys_of(cls: type) -> Mapping[str, Key]:
    """The values of a block class, by name."""
    return {f.name: f.metadata[_KEY] for f in dataclasses.fields(cls) if _KEY in f.metadata}


@cache
def blocks_of(cls: type) -> Mapping[str, type]:
    """The blocks in a block class, by name."""
    return {f.name: f.metadata[_BLOCK] for f in dataclasses.fields(cls) if _BLOCK in f.metadata}


@cache
def named_blocks_of(cls: type) -> Mapping[str, type]:
    """The objects of blocks in a block class, by name."""
    return {f.name: f.metadata[_NAMED] for f in dataclasses.fields(cls) if _NAMED in f.metadata}


@dataclass(frozen=True)
class Block:
    """Base of a block. Raises TypeError or ValueError, however it is made, if a value breaks the rule of its key.

    Lists become tuples, as if the block came from a file.
    """

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, rule in keys_of(cls).items():
            object.__setattr__(self, name, rule.read(getattr(self, name), f"{cls.__name__}.{name}"))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value by its key, as a dict does: in DeepSpeed `engine.config` is the file's."""
        return getattr(self, name, default)


def changed(made: Block) -> list[str]:
    """The names of the keys and blocks in a block that are not at their defaults, in the order of its class."""
    names = []
    for f in dataclasses.fields(made):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if getattr(made, f.name) != default:
            names.append(f.name)
    return names


def is_set(made: Block, place: str) -> bool:
    """Whether a key or block is not at its default.

    Args:
        made: The outermost block, as a `Config`.
        place: The names from there on, as in "onebit.local_steps".
    """
    *outer, name = place.split(".")
    for each in outer:
        made = getattr(made, each)
    return name in changed(made)


def folded(value: object) -> object:
    return value.lower() if isinstance(value, str) else (type(value) is bool, value)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, tuple):
        yield from value


def as_json(value: object) -> str:
    """A value in the notation of a file, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
