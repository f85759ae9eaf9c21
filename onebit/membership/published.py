"""What members publish of a run in its store, and what an onlooker reads there: the values, not the agreement.

Each member writes `about/{name}` with its signs of life, and the first one `change/{epoch}` after a change. Rosters,
newcomers and the run's end are there anyway (`rendezvous.py`). All are JSON with an HMAC keyed by the run's token. An
onlooker writes nothing, believes signed values alone, and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

TELL_S = 1.0
"""Least time between two values of `about/{name}`."""

MOST_LOOK_S = 10.0
"""An onlooker waits for a sign of life for the time of two of them and a half, and no longer than this."""

MOST_EPOCHS = 50
MOST_NAMES = 1000
"""Bounds of what an onlooker reads: without a token anyone can write, and numbers of arrivals are never signed."""

MOST_CHARACTERS, MOST_OF_A_REASON = 60, 200

# ---------------------------------------------------------------- signed values


def sign(token: str, key: str, value: dict[str, object]) -> str:
    """A value as it is written under a key."""
    text = json.dumps(value)
    return f"{_signature(token, key, text)} {text}"


def read_signed(token: str, key: str, data: bytes) -> dict[str, Any]:
    """The value that was written under a key. Raises ValueError if it was not signed by this token, for this key."""
    signature, _, text = data.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(token, key, text).encode()):
        raise ValueError("not signed with this token")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object of JSON, got {type(value).__name__}")
    return value


def _signature(token: str, key: str, text: str) -> str:
    return hmac.new(token.encode(), f"{key}\n{text}".encode(), hashlib.sha256).hexdigest()


def plain(text: object, most: int = MOST_CHARACTERS) -> str:
    """Text of a stranger for a terminal or a page: one short line without control characters."""
    found = str(text)
    shown = "".join(c if c.isprintable() else "?" for c in found[:most])
    return shown if len(found) <= most else f"{shown}…"


def here(epoch: int) -> str:
    """The key that counts who has come to an epoch; the k-th's name is under `here/{epoch}/{k}`."""
    return f"here/{epoch}"


# ---------------------------------------------------------------- what a member writes


class Waits(Protocol):
    """An optimizer's figures of its last step, and of what lost members took with them."""

    comm_ms: float
    lost_residuals: int
    lost_residual_norm: float


class Watched(Protocol):
    """An optimizer whose progress is published."""

    @property
    def stats(self) -> Waits: ...

    def steps_taken(self) -> int: ...


class Meter:
    """Watches an optimizer's steps from the thread that gives signs of life. A step itself costs nothing more.

    Steps are seen at a beat, up to a beat after they ended: the mean is over the last `SPAN` beats that saw new ones.
    """

    SPAN = 17

    def __init__(self) -> None:
        self._optimizer: Callable[[], Watched | None] = lambda: None
        self._seen: deque[tuple[float, int, float]] = deque(maxlen=self.SPAN)

    def watch(self, optimizer: Watched) -> None:
        """Begin anew with this optimizer, at a change of members."""
        self._optimizer = weakref.ref(optimizer)  # the thread must not keep the model
        self._seen = deque(maxlen=self.SPAN)

    def read(self) -> dict[str, object]:
        """Look, and return what is known: steps; seconds of a step, those of waiting; seconds since the last one."""
        optimizer, seen = self._optimizer(), self._seen
        if optimizer is None:
            return {}
        try:
            steps, now = optimizer.steps_taken(), time.monotonic()
        except Exception:  # the optimizer is in use meanwhile, and without signs of life a member counts as lost
            return {}
        if not seen or seen[-1][1] != steps:
            seen.append((now, steps, 1e-3 * optimizer.stats.comm_ms))
        (first, before, _), *later = seen
        found: dict[str, object] = {"steps": steps, "idle_s": now - seen[-1][0]}
        if later and steps > before:
            waits = [waited for _, _, waited in later]
            found |= {"step_s": (later[-1][0] - first) / (steps - before), "waits_s": sum(waits) / len(waits)}
        return found


def about_here() -> dict[str, object]:
    """What a member's process says of itself once and for all."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


# ---------------------------------------------------------------- what an onlooker reads


@dataclass(frozen=True)
class Member:
    """A process, by its signed signs of life.

    Attributes:
        name: Its name in the run.
        is_alive: Whether it has given a sign of life since the onlooker has looked, and not long ago.
        silent_s: Seconds since the last one; None if there was none. By the clocks of both machines if the onlooker
            did not see it.
        host: Name of its machine. Default "".
        pid: Number of its process. Default 0.
        steps: Steps that it has taken; None before it has entered the run.
        step_s: Mean seconds of a step; None until it has seen some in this epoch.
        waits_s: Seconds of them for which `step()` waited for others.
        idle_s: Seconds from its last step to its last sign of life.
        copied: Of a newcomer, the share of the run's state that it has copied; None if it copies nothing.
    """

    name: str
    is_alive: bool
    silent_s: float | None
    host: str = ""
    pid: int = 0
    steps: int | None = None
    step_s: float | None = None
    waits_s: float | None = None
    idle_s: float | None = None
    copied: float | None = None


@dataclass(frozen=True)
class Epoch:
    """An epoch.

    Attributes:
        number: From 1.
        names: Its members, in the order of their ranks.
        has_begun: Whether its members have connected, and the first has published the change.
        at: When, in seconds since 1970, by the first member's clock. Default None.
        step: Its first step. Default None.
        seconds: How long the first member did not train for it. Default None.
        why: The error that ended the epoch before; empty if a newcomer was let in. Default "".
        lost: Names that the epoch before had. None: unknown, the first epoch that the store knows. Default None.
        joined: Names that it had not. None: unknown. Default None.
    """

    number: int
    names: tuple[str, ...]
    has_begun: bool
    at: float | None = None
    step: int | None = None
    seconds: float | None = None
    why: str = ""
    lost: tuple[str, ...] | None = None
    joined: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Stranger:
    """An entry that nobody may believe.

    Attributes:
        key: Its key in the store.
        why: What is wrong with it.
        text: Its beginning.
    """

    key: str
    why: str
    text: str


@dataclass(frozen=True)
class Status:
    """A run as an onlooker sees it.

    Attributes:
        at: When it looked, in seconds since 1970.
        members: The current members, in the order of their ranks; empty before the first epoch.
        waiting: Processes that wait for the next epoch, then those that copy the run's state before they do.
        returning: Current members that have left the epoch already, and wait for the next one: a change is under way.
        epochs: The last ones, in order; at most `MOST_EPOCHS`.
        founders: Number of members for which the first epoch waits; None if unknown.
        ended: Why the run has ended. None: it has not.
        ended_at: When, in seconds since 1970.
        strangers: Entries that are not signed with the token, or whose values cannot be read.
    """

    at: float
    members: tuple[Member, ...]
    waiting: tuple[Member, ...]
    returning: tuple[str, ...]
    epochs: tuple[Epoch, ...]
    founders: int | None
    ended: str | None
    ended_at: float | None
    strangers: tuple[Stranger, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no member has come here yet."""
        return not (self.epochs or self.waiting or self.ended is not None or self.strangers)


class Onlooker:
    """Looks at a run, without writing anything.

    Args:
        token: The run's. Default "".
    """

    def __init__(self, token: str = ""):
        self._token = token
        self._heard: dict[str, tuple[float, float]] = {}  # by name: the beats of the last sign of life, when it came

    def look(self, store: Store) -> Status:
        """The run now. Takes as long as it may take a member to give a sign of life, usually a second.

        Args:
            store: That of its rendezvous.

        Raises:
            RuntimeError: The store does not answer.
        """
        deadline = None
        while True:
            reading = _Reading(store, self._token)
            end = reading.one("ended", _end)
            epochs = self._epochs(reading)
            names = epochs[-1].names if epochs else ()
            arrived = self._arrived(reading, epochs[-1].number + 1 if epochs else 1)
            waiting = [name for name in arrived if name not in names]
            asked = [*names, *waiting][:MOST_NAMES]
            copying = [name for name in self._copying(reading) if name not in asked]
            abouts = self._listen(reading, [*asked, *copying])
            longest_s = max((its["look_s"] for its in abouts.values()), default=0.0)
            deadline = time.monotonic() + longest_s if deadline is None else deadline
            if end is not None or time.monotonic() > deadline or all(self._is_heard(abouts, name) for name in asked):
                break
            time.sleep(0.2)
        found = {name: self._member(abouts, name) for name in [*asked, *copying]}
        # One that has died is in no epoch, and would be listed for ever.
        waiting += [name for name in copying if (s := found[name].silent_s) is not None and s < MOST_LOOK_S]
        founders = [its["founders"] for its in abouts.values()]
        return Status(
            at=time.time(),
            members=tuple(found[name] for name in names if name in found),
            waiting=tuple(found[name] for name in waiting if name in found),
            returning=tuple(name for name in arrived if name in names),
            epochs=tuple(epochs),
            founders=founders[0] if founders else None,
            ended=None if end is None else end[0],
            ended_at=None if end is None else end[1],
            strangers=tuple(reading.strangers.values()),
        )

    # ---------------------------------------------------------------- epochs

    def _epochs(self, reading: _Reading) -> list[Epoch]:
        newest = reading.one("newest", lambda value: int(_number(int(value["epoch"]))))
        if newest is None:  # it may be forged, and then says no more than where to begin to look
            newest = hint if _is_roster(reading, hint := reading.hint("newest")) else 0
        for _ in range(MOST_NAMES):  # it may be old, too: a roster is written first
            if not _is_roster(reading, newest + 1):
                break
            newest += 1
        numbers = range(max(1, newest - MOST_EPOCHS), newest + 1)
        rosters = reading.each([(f"roster/{k}", _roster) for k in numbers])
        changes = reading.each([(f"change/{k}", _change) for k in numbers])
        found: list[Epoch] = []
        last: tuple[str, ...] | None = ()  # of the last epoch that began
        for k in numbers:
            names, change = rosters.get(f"roster/{k}"), changes.get(f"change/{k}")
            if change is not None:
                names = change["names"]  # also of epochs before those that the store has seen
            if names is None:
                continue
            if not found and k > 1:
                last = None
            lost = None if last is None else tuple(name for name in last if name not in names)
            joined = None if last is None else tuple(name for name in names if name not in last)
            rest = {} if change is None else {key: change[key] for key in ("at", "step", "seconds", "why")}
            found.append(Epoch(k, names, change is not None, lost=lost, joined=joined, **rest))
            last = names if change is not None else last
        return found[-MOST_EPOCHS:]

    def _arrived(self, reading: _Reading, epoch: int) -> list[str]:
        """The names of those that have come to an epoch."""
        came = range(1, min(reading.number(here(epoch)), MOST_NAMES) + 1)
        found = reading.each([(f"{here(epoch)}/{k}", lambda value: _name(value["name"])) for k in came])
        return list(dict.fromkeys(found.values()))

    def _copying(self, reading: _Reading) -> list[str]:
        """The names of those that have asked for a copy of the run's state; the last ones."""
        last = reading.number("copy")
        asked = range(max(1, last - MOST_EPOCHS + 1), last + 1)
        found = reading.each([(f"copy/{k}", lambda value: _name(value["name"])) for k in asked])
        return list(dict.fromkeys(found.values()))

    # ---------------------------------------------------------------- signs of life

    def _listen(self, reading: _Reading, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What these say of themselves, by name."""
        keys = {f"about/{name}": name for name in names}
        abouts = {keys[key]: about for key, about in reading.each([(key, _about) for key in keys]).items()}
        for name, about in abouts.items():
            before = self._heard.get(name)
            if before is None:
                self._heard[name] = about["beats"], float("-inf")  # it may be old: the next one counts
            elif about["beats"] > before[0]:
                self._heard[name] = about["beats"], time.monotonic()
        return abouts

    def _is_heard(self, abouts: Mapping[str, dict[str, Any]], name: str) -> bool:
        """Whether the last sign of life is not older than it may be."""
        return name in abouts and time.monotonic() - self._heard[name][1] <= abouts[name]["look_s"]

    def _member(self, abouts: Mapping[str, dict[str, Any]], name: str) -> Member:
        if name not in abouts:
            return Member(name, False, None)
        about, silent_s = abouts[name], time.monotonic() - self._heard[name][1]
        if silent_s == float("inf"):
            silent_s = max(about["look_s"], time.time() - about["at"])
        known = {key: about[key] for key in ("host", "pid", "steps", "step_s", "waits_s", "idle_s", "copied")}
        return Member(name, self._is_heard(abouts, name), silent_s, **known)


def read_end(store: Store, token: str) -> str | None:
    """Why a run has ended; None if it has not. Raises RuntimeError if the store does not answer."""
    end = _Reading(store, token).one("ended", _end)
    return None if end is None else end[0]


@dataclass
class _Reading:
    """Reads a store's values with few questions, and collects those that are not to be believed."""

    store: Store
    token: str
    strangers: dict[str, Stranger] = field(default_factory=dict)

    def one(self, key: str, read: Callable[[dict[str, Any]], T]) -> T | None:
        return self.each([(key, read)]).get(key)

    def each(self, wanted: Sequence[tuple[str, Callable[[dict[str, Any]], T]]]) -> dict[str, T]:
        """Those of these values that are there, signed and of the expected form."""
        found, data = {}, self._data([key for key, _ in wanted])
        for key, read in wanted:
            if key in data:
                try:
                    found[key] = read(read_signed(self.token, key, data[key]))
                except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
                    self._refuse(key, str(error), data[key])
        return found

    def number(self, key: str) -> int:
        """A counter of the store's; 0 if it is missing or no number. Not signed: a bound for what to look at."""
        data = self._data([key]).get(key, b"0")
        if data.isdigit() and len(data) < 20:
            return int(data)
        self._refuse(key, "not a number", data)
        return 0

    def hint(self, key: str) -> int:
        """The epoch that an entry names, even if it is forged."""
        try:
            text = self._data([key])[key].decode(errors="replace").partition(" ")[2]
            return max(0, min(int(json.loads(text)["epoch"]), 1 << 40))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            return 0

    def _data(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those of these that are there. `get` of a missing one would wait for it."""
        if not keys:
            return {}
        if self.store.check(list(keys)):
            return dict(zip(keys, map(bytes, self.store.multi_get(list(keys))), strict=True))
        if len(keys) == 1:
            return {}
        half = len(keys) // 2
        return self._data(keys[:half]) | self._data(keys[half:])

    def _refuse(self, key: str, why: str, data: bytes) -> None:
        text = re.sub("^[0-9a-f]{64} ", "", data[: 4 * MOST_CHARACTERS].decode(errors="replace"))  # with a signature
        self.strangers[key] = Stranger(plain(key), plain(why), plain(text))


def _is_roster(reading: _Reading, epoch: int) -> bool:
    return reading.one(f"roster/{epoch}", _roster) is not None


def _roster(value: dict[str, Any]) -> tuple[str, ...]:
    return _names(value["names"])


def _about(value: dict[str, Any]) -> dict[str, Any]:
    optional = {key: value.get(key) for key in ("steps", "step_s", "waits_s", "idle_s", "copied")}
    found = {key: None if its is None else _number(its) for key, its in optional.items()}
    return {
        **found,
        "steps": None if found["steps"] is None else int(found["steps"]),
        **{key: _number(value[key]) for key in ("beats", "at")},
        "look_s": min(2.5 * _number(value["tell_s"]), MOST_LOOK_S),
        **{key: int(_number(value[key])) for key in ("founders", "pid")},
        "host": plain(value["host"]),
    }


def _change(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "names": _names(value["names"]),
        "at": _number(value["at"]),
        "step": int(_number(value["step"])),
        "seconds": _number(value["seconds"]),
        "why": plain(value["why"], MOST_OF_A_REASON),
    }


def _end(value: dict[str, Any]) -> tuple[str, float]:
    return plain(value["why"], MOST_OF_A_REASON), _number(value["at"])


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("expected a list of names")
    return tuple(map(_name, value[:MOST_NAMES]))


def _name(value: object) -> str:
    return plain(value, MOST_OF_A_REASON)


def _number(value: object) -> float:
    """A number of such a size that it can be shown, also as a time."""
    if not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise ValueError("expected a number from 0 to 1e11")
    return float(value)
