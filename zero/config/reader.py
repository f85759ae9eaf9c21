"""From the parsed JSON of a block to its dataclass and back, with errors and warnings.

The rules of each key are in `schema.py`. Every message names the file and the place in it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

from .ignored_keys import FOREIGN, is_comment
from .schema import AUTO, MISSING, OBJECT, Inert, Key, Kind, as_json, blocks_of, folded, keys_of, named_blocks_of

T = TypeVar("T")


class Choice(Protocol):
    """A block {"type": ..., "params": {...}}."""

    @property
    def type(self) -> str: ...
    @property
    def params(self) -> object: ...


@dataclass
class Reading:
    """One reading of a configuration: its source, the values that the caller fills in, and messages to log.

    whole: the outermost block, in which advice on unknown keys looks for them.
    """

    source: str
    fills: Mapping[str, object] = field(default_factory=dict)
    whole: type | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def at(self, where: str, name: str = "") -> str:
        """The place in the file, in words."""
        return f"{self.source}: " + (".".join(part for part in (where, name) if part) or "top level")


def read_block(cls: type[T], given: object, where: str, reading: Reading) -> T:
    """The block `given`, at `where` in the file, as a `cls`.

    Raises ValueError on an unknown key (naming the nearest known one), a value out of range or in contradiction to an
    argument, an "auto" without a value; TypeError on a wrong type.
    """
    data = read_object(given, where, reading)
    inert: Mapping[str, Inert] = getattr(cls, "inert", {})
    keys, blocks, named = keys_of(cls), blocks_of(cls), named_blocks_of(cls)  # type: ignore[arg-type]
    apart: Iterable[str] = getattr(cls, "read_apart", ())
    refuse_unknown(data, [*keys, *blocks, *named, *inert, *apart], where, reading, cls)
    values: dict[str, object] = {}
    for name, rule in keys.items():
        value = _read_key(data, name, rule, where, reading)
        if value is not MISSING:
            values[name] = value
    for name, inner in blocks.items():
        if data.get(name) is not None:
            values[name] = read_block(inner, data[name], _join(where, name), reading)
        # An argument reaches a block that is absent: fp16=True enables it.
        elif any(rule.fill in reading.fills for rule in keys_of(inner).values() if rule.fill):
            values[name] = read_block(inner, {}, _join(where, name), reading)
    for name, inner in named.items():
        if data.get(name) is not None:
            inside = _join(where, name)
            members = read_object(data[name], inside, reading)
            values[name] = {
                member: read_block(inner, given, _join(inside, member), reading)
                for member, given in members.items()
                if not is_comment(member)
            }
    for name, value in data.items():  # in the file's order, which the first error and the warnings follow
        if name in inert:
            _read_inert(value, name, inert[name], where, reading)
    try:
        return cls(**values)
    except (TypeError, ValueError) as wrong:
        raise type(wrong)(f"{reading.at(where)}: {wrong}") from wrong


def write_block(made: object) -> dict[str, object]:
    """The block as a file would contain it; `read_block` of it is equal."""
    cls: type = type(made)
    data: dict[str, object] = {}
    for name in keys_of(cls):
        value = getattr(made, name)
        data[name] = list(value) if isinstance(value, tuple) else value
    for name in named_blocks_of(cls):
        data[name] = {member: write_block(inner) for member, inner in getattr(made, name).items()}
    return data | {name: write_block(getattr(made, name)) for name in blocks_of(cls)}


def read_choice(given: object, where: str, types: Mapping[str, type[T]], reading: Reading) -> tuple[str, T]:
    """A block {"type": ..., "params": {...}}: the name in the spelling of `types`, and the parameters."""
    data = read_object(given, where, reading)
    stray = [name for name in data if name not in ("type", "params", "legacy_fusion")]
    _refuse_params_outside(stray, where, data.get("type"), types, reading)
    name = next((t for t in types if t.lower() == str(data.get("type")).lower()), None)
    if name is None:
        found = nearest(str(data.get("type")), types)
        advice = f'did you mean "{found}"?' if found else "known: " + ", ".join(types)
        got = f'"{data["type"]}"' if "type" in data else "nothing"
        raise ValueError(f"{reading.at(where, 'type')}: expected the name of a known {where}, got {got}; {advice}")
    if data.get("legacy_fusion"):
        reading.warnings.append(f"{reading.at(where, 'legacy_fusion')} has no effect: there is one form of the step")
    params = data.get("params")
    return name, read_block(types[name], {} if params is None else params, f"{where}.params", reading)


def _refuse_params_outside(
    stray: list[str], where: str, name: object, types: Mapping[str, type], reading: Reading
) -> None:
    """Raise ValueError on keys beside "type" and "params"; many are hyper-parameters one level too far out."""
    for key_name in stray:
        if any(key_name in keys_of(cls) for cls in types.values()):
            raise ValueError(f'{reading.at(where)}: unknown key "{key_name}"; it belongs in "{where}.params"')
    refuse_unknown(stray, ["type", "params", "legacy_fusion"], where, reading)


def write_choice(choice: Choice) -> dict[str, object]:
    """The block as a file would contain it."""
    return {"type": choice.type, "params": write_block(choice.params)}


def read_object(given: object, where: str, reading: Reading) -> dict[str, object]:
    """A copy of an object of the file. Raises TypeError if it is not an object."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{reading.at(where)}: expected an object, got {as_json(given)}")
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"{reading.at(where)}: expected keys that are strings, got {name!r}")
    return dict(given)


def refuse_unknown(
    given: Iterable[str], known: Iterable[str], where: str, reading: Reading, cls: type | None = None
) -> None:
    """Raise ValueError on the first unknown key, naming the nearest known one.

    Comments, and keys that other programs read, only add a warning.
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        if is_comment(name):
            reading.warnings.append(f"{reading.at(where, name)} has no effect: it is read as a comment")
        elif not where and name in FOREIGN:
            reading.warnings.append(f"{reading.at(where, name)} has no effect: {FOREIGN[name]}")
        else:
            raise ValueError(
                f"{reading.at(where)}: unknown key {as_json(name)}{_advice(name, known, where, cls, reading)}"
            )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like this one, letter case aside."""
    names = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else None


def _advice(name: str, known: list[str], where: str, cls: type | None, reading: Reading) -> str:
    found = nearest(name, known)
    places = [path for inner, path in _paths(cls, where) if _has(inner, name)] if cls else []
    or_else = f", or did you mean {as_json(found)}?" if found and not places else ""
    if reading.whole is not None and not places:
        places = [""] * _has(reading.whole, name)
        places += [path for inner, path in _paths(reading.whole, "") if _has(inner, name)]
    if 0 < len(places) <= 3:  # "enabled" is in many blocks, of which none is meant
        named = " or ".join("in " + as_json(path) if path else "at the top level" for path in places)
        return f"; it belongs {named}{or_else}"
    if found:
        return f"; did you mean {as_json(found)}?"
    return f"; known here: {', '.join(sorted(known))}; a note of yours begins with an underscore"


def _has(cls: type, name: str) -> bool:
    return name in (*keys_of(cls), *blocks_of(cls), *getattr(cls, "inert", {}))


def _paths(cls: type, path: str) -> Iterator[tuple[type, str]]:
    for name, inner in blocks_of(cls).items():
        yield inner, _join(path, name)
        yield from _paths(inner, _join(path, name))


def _read_key(data: Mapping[str, object], name: str, rule: Key, where: str, reading: Reading) -> object:
    place = reading.at(where, name)
    filled = reading.fills.get(rule.fill, MISSING) if rule.fill else MISSING
    if filled is not MISSING:
        filled = rule.read(filled, f"argument {rule.fill}")
    stands = data.get(name, MISSING)
    if stands is None and rule.null:  # null contradicts no argument
        return None if filled is MISSING else filled
    # "auto" asks for the argument, and is a value itself only for keys that take it, without an argument.
    if stands is not MISSING and (stands != AUTO or (rule.takes_auto and filled is MISSING)):
        value = rule.read(stands, place)
        if filled is not MISSING and filled != value:
            raise ValueError(
                f"{place} is {as_json(stands)}, but the argument {rule.fill} is {as_json(filled)}; drop one"
            )
        return value
    if filled is not MISSING:
        return filled
    if (stands == AUTO and rule.asks) or rule.required:
        state = '"auto"' if stands == AUTO else "missing"
        argument = f", or pass {rule.fill}=... to initialize()" if rule.fill else ""
        raise ValueError(f"{place} is {state}: expected {rule.expected()}; write it there{argument}")
    if stands == AUTO and not rule.null:
        reading.notes.append(f'{place} is "auto" and nothing was given for it: the default is taken')
    return MISSING


def _read_inert(value: object, name: str, rule: Inert, where: str, reading: Reading) -> None:
    place = reading.at(where, name)
    if value is None:
        return
    if isinstance(rule.kind, Mapping):
        if not isinstance(value, bool):
            _check_names(value, rule.kind, _join(where, name), reading)
        asked = (rule.asks or _asks)(value)
    else:
        taken = (
            value if value == AUTO or (rule.kind is OBJECT and value is False) else Key(rule.kind).read(value, place)
        )
        fine = [folded(item) for item in (*rule.fine, AUTO)]
        asked = _asks(taken) if rule.kind is OBJECT else folded(taken) not in fine
    if asked and rule.refused:
        raise ValueError(f"{place} = {as_json(value)} is not supported: {rule.why}")
    if asked:
        reading.warnings.append(f"{place} has no effect: {rule.why}")


def _check_names(value: object, kinds: Mapping[str, object], where: str, reading: Reading) -> None:
    data = read_object(value, where, reading)
    refuse_unknown(data, kinds, where, reading)
    for name, item in data.items():
        if is_comment(name):
            continue
        kind = kinds[name]
        if isinstance(kind, Mapping):
            _check_names(item, kind, _join(where, name), reading)
        elif item is not None and item != AUTO:
            Key(cast(Kind, kind)).read(item, reading.at(where, name))


def _asks(value: object) -> bool:
    """Whether a block switches something on: "enabled" is true in it, or it has no such key and any true value."""
    switches = list(_switches(value))
    return any(switches) if switches else any(_leaves(value))


def _switches(value: object) -> Iterator[bool]:
    if isinstance(value, Mapping):
        if "enabled" in value:
            yield value["enabled"] is True
        for item in value.values():
            yield from _switches(item)


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
