"""The rendezvous: members agree on who is in a run, epoch by epoch, in a store of torch's that outlives each of them.

An epoch is a set of members, in the order of their ranks. A member that wants to be in the next one writes its name
under that epoch's number, and waits for the roster. A member of the epoch before closes it once every other one has
come or has fallen silent: each counts up a number in the store as long as its process lives. `compare_set` lets one
roster be written. A member that comes later is a newcomer of the epoch after.

Between changes the store is needed for these numbers alone, and may be away. Values are JSON with an HMAC keyed by the
run's token, so that a process without the token cannot write one; nothing is unpickled. With the signs of life go what
`published.py` has for onlookers.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..comm import PeerError
from .published import MOST_EPOCHS, MOST_NAMES, TELL_S, Meter, Watched, about_here, here, read_signed, sign

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_POLL_S, POLL_S = 0.001, 0.02
FOUND_LOOKS = 5  # of the first member of a run, for which a founder waits
MOST_WRITES = 50  # of a name: a store that comes back empty takes one more
LEAVE_S = 5.0


class MembershipError(RuntimeError):
    """A member has no place in the run.

    No member of the last epoch came, the run has ended, or the store belongs to another run or does not answer.
    """


@dataclass(frozen=True)
class Roster:
    """The members of an epoch; or a member and the newcomer to which it gives a copy of its state.

    Attributes:
        epoch: Number of the epoch, from 1; 0 before the first. Of a copy, its number times -1.
        names: Names of the members, in rank order.
    """

    epoch: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Patience:
    """How long members wait, in seconds.

    Attributes:
        beat_s: Time between two signs of life. Default 0.1.
        suspect_s: Silence after which a member counts as lost if a connection to it has broken. Default 0.5.
        silent_s: Silence after which it counts as lost if no connection has broken. Default 5.
        busy_s: Time to wait for a member that lives, and may be computing. Default 300.
        wait_s: Time that a newcomer waits to be let in. Default 300.
        look_s: Time between the first member's looks for newcomers. Default 0.1.
        away_s: Time for which the store may be away at a change. Default 60.
    """

    beat_s: float = 0.1
    suspect_s: float = 0.5
    silent_s: float = 5.0
    busy_s: float = 300.0
    wait_s: float = 300.0
    look_s: float = 0.1
    away_s: float = 60.0


class Gives(Protocol):
    """What gives newcomers a copy of a member's state: see `copying.Giver`."""

    def answer(self, pair: Roster) -> str | None:
        """Begin a copy: "". Why there will be none; or None: not yet."""


class Rendezvous:
    """Where one member meets the others.

    Args:
        connect: Returns a store of torch's that all members reach, over a new connection: a TCPStore in a process that
            outlives them.
        name: Name of this member, which no other has; a process that starts again takes another.
        token: A secret of the run, the same on all members. Default "".
        founders: Number of members for which the first epoch waits, the same on all. Default 1.
        min_members: Least number of members, the same on all; newcomers that wait count. Default 1.
        patience: How long to wait. Default: `Patience()`.
        ranks: Number of ranks of a member, the same on all. Default 1.

    Raises:
        ValueError: The name is taken, or the members of the run have another number of ranks.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        name: str,
        *,
        token: str = "",
        founders: int = 1,
        min_members: int = 1,
        patience: Patience | None = None,
        ranks: int = 1,
    ):
        self.name, self.founders, self.patience = name, founders, patience or Patience()
        self._store, self._beats = _Steady(connect, self.patience.away_s), _Steady(connect, 0.0)
        # Of the first two members: who has died between two exchanges is known to be silent when the next one fails.
        self._heard, self._turn = _Silences(self._beats), 0
        self._token, self._strange = token, set[str]()  # keys of entries without the token
        if self._store.add(f"name/{name}", 1) > 1:
            raise ValueError(f"a member of this run is or was called {name}; take another name, or none")
        self._ranks = ranks
        self._store.compare_set("ranks", "", self._signed("ranks", {"ranks": ranks}))
        try:
            theirs = int(self._read("ranks")["ranks"])
        except MembershipError:  # a stranger came first, who must not keep members out
            self._write("ranks", {"ranks": (theirs := ranks)})
        if theirs != ranks:
            raise ValueError(f"the members of this run have {theirs} ranks each, and this one has {ranks}")
        self._lock, self._now = threading.Lock(), Roster(0, ())
        self._meter, self._about, self._beat_count = Meter(), about_here(), 0
        self._changes: dict[int, dict[str, object]] = {}  # the last ones, to be published if this member is the first
        self._published = set[int]()
        self.min_members, self._told_of, self._in_run = min_members, 0, False
        self._gives: Callable[[], Gives | None] = lambda: None
        self._asked, self._to_answer = 0, list[int]()  # numbers of newcomers' questions
        self.copied: float | None = None
        """Of a newcomer: the share of the run's state that it has copied. For onlookers."""
        self._ended = threading.Event()
        self.is_awaited = threading.Event()
        """Set if a newcomer waits for the next epoch, as far as this member has looked. The first one looks for all."""
        self.is_over = threading.Event()
        """Set if another member of this epoch waits for the next, as far as this member has looked."""
        self._thread = threading.Thread(target=self._live, name="onebit-members", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def meet(
        self,
        last: Roster | None,
        missed: Collection[str] = (),
        *,
        lets_in: bool = True,
        when_left: Callable[[], None] = lambda: None,
    ) -> Roster:
        """Wait for the next epoch, and be in it.

        Args:
            last: The epoch in which this member was. None: it is new.
            missed: Members of that epoch to which a connection has broken, or which were silent. Default ().
            lets_in: Whether newcomers may come in with this epoch, if this member closes it. Default True. False: they
                count for `min_members`, and come in with a later one.
            when_left: Called once if the others have gone on without this member, before it comes to them again.

        Returns:
            The roster of the new epoch.

        Raises:
            MembershipError: As a newcomer, after `wait_s`, or once the run has ended.
        """
        deadline = time.monotonic() + self.patience.wait_s
        before = last or self._newest()
        while True:
            roster = self._next(before, sorted(missed), deadline, lets_in)
            if self.name in roster.names:
                with self._lock:
                    self._now, self.copied = roster, None
                    self.is_awaited.clear()
                    self.is_over.clear()
                return roster
            before, missed = roster, ()  # this epoch was closed without this member: try the one after
            if last is not None:
                last = None
                with self._lock:
                    self._now = Roster(0, ())
                when_left()
                before, deadline = self._newest() or roster, time.monotonic() + self.patience.wait_s

    def gives(self, giver: Gives) -> None:
        """Let this one answer newcomers, if this member is the first. It is not kept alive."""
        self._gives = weakref.ref(giver)

    def ask(self) -> Roster | None:
        """As a newcomer, ask the first member for a copy of its state, and wait for the answer.

        Returns:
            The member and this newcomer. None: there is no run yet, or no copy; the log has the reason.

        Raises:
            MembershipError: The store does not answer.
        """
        silences, deadline = _Silences(self._store), time.monotonic() + self.patience.wait_s
        newest = self._newest()
        if newest is None or not self._store.check(["begun"]):
            return None
        while time.monotonic() < deadline:
            giver, number, why = newest.names[0], self._store.add("copy", 1), ""
            question, answer = f"copy/{number}", f"copy/{number}/answer"
            self._write(question, {"name": self.name, "giver": giver})
            pauses = _pauses()
            while self._store.check([question]) and not (why or self._store.check([answer])):
                if silences.of(giver) > self.patience.silent_s or self._store.check(["ended"]):
                    why = f"{giver} does not answer"
                elif time.monotonic() > deadline:
                    why = f"{giver} has others to give one for {self.patience.wait_s:g} s"
                elif (newest := self._newest() or newest).names[0] != giver:
                    why = "another member is the first now"
                time.sleep(next(pauses))
            if not self._store.check([question]):  # the store has come back empty: ask again
                continue
            self._store.compare_set(answer, "", self._signed(answer, {"why": why}))  # the first answer stands
            why = str(self._read(answer)["why"])
            if not why:
                return Roster(-number, (giver, self.name))
            if newest.names[0] == giver:
                log.info("%s: no copy of the state before the change: %s", self.name, why)
                break
        return None

    def has_begun(self, roster: Roster) -> bool:
        """Whether there has been an epoch: from then on a member has the run's state, or it is lost.

        Args:
            roster: The epoch in which this member is.

        Raises:
            PeerError: The others have begun a later one: this member was silent for too long.
        """
        if not self._store.check(["begun"]):
            return False
        newest = self._newest()
        if newest is not None and newest.epoch > roster.epoch:
            raise PeerError(f"{self.name}: the others have gone on from epoch {roster.epoch} to {newest.epoch}")
        self._in_run = True
        return True

    def confirm(self, roster: Roster, what: str, within_s: float = math.inf) -> None:
        """Wait until all members of an epoch have confirmed this point.

        Args:
            roster: The epoch.
            what: Name of the point.
            within_s: Seconds to wait for members that live. Default: no limit.

        Raises:
            PeerError: A member falls silent meanwhile, has given this epoch up, or is late.
        """
        silences, absent, deadline = _Silences(self._store), list(roster.names), time.monotonic() + within_s
        pauses = _pauses()
        while absent := [n for n in absent if not self._store.check([f"{what}/{roster.epoch}/{n}"])]:
            if self.name in absent:  # not before that look: a connection that has broken loses what is written first
                self._store.set(f"{what}/{roster.epoch}/{self.name}", "yes")
            # No connection has broken: it may be busy, with the copy of a large state, and hold Python's lock.
            silent = [name for name in absent if silences.of(name) > self.patience.silent_s]
            if silent:
                ranks = [roster.names.index(name) for name in silent]
                raise PeerError(f"{self.name}: {', '.join(silent)} fell silent as epoch {roster.epoch} began", ranks)
            # It lives, and waits for this member in the next epoch.
            if left := [name for name in self._arrived(roster.epoch + 1)[0] if name in absent]:
                raise PeerError(f"{self.name}: {', '.join(left)} gave up epoch {roster.epoch} as it began")
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name}: {', '.join(absent)} did not come to the {what} within {within_s:g} s")
            time.sleep(next(pauses))

    def begin(self) -> None:
        """Note in the store that the run has begun."""
        self._store.set("begun", "yes")
        self._in_run = True

    def note_change(self, optimizer: Watched, seconds: float, why: str) -> None:
        """Keep what a change cost, for onlookers; nothing is sent here. From now on this optimizer's steps are counted.

        Args:
            optimizer: Over the members of the epoch that begins.
            seconds: Duration of the change.
            why: The error that ended the epoch before; empty if none did.
        """
        self._meter.watch(optimizer)
        now, step = self._now, optimizer.steps_taken() + 1
        found = {"names": now.names, "at": time.time(), "step": step, "seconds": seconds, "why": why[:500]}
        if now.names[0] != self.name:  # the first member has published those before
            self._published.update(self._changes)
        self._changes[now.epoch] = found
        for epoch in sorted(self._changes)[:-MOST_EPOCHS]:
            del self._changes[epoch]

    def end(self, why: str) -> None:
        """Tell waiting newcomers that the run has ended, if the store can be reached.

        Args:
            why: The reason, for their message.
        """
        self.leave()
        with suppress(MembershipError):
            self._tell(self._meter.read())
            self._beats.set("ended", self._signed("ended", {"why": why, "at": time.time()}))

    def leave(self) -> None:
        """Give no more signs of life, and wait for the thread that gave them: a Python that ends with it may abort."""
        self._ended.set()
        self._thread.join(LEAVE_S)
        atexit.unregister(self.leave)

    def _live(self) -> None:
        looked, told = time.monotonic(), float("-inf")
        while not self._ended.wait(self.patience.beat_s):
            try:
                self._beats.add(_beat(self.name), 1)
                now, progress = self._now, self._meter.read()  # at each beat: it sees when steps end
                is_first = now.names[:1] == (self.name,)
                if time.monotonic() - told >= TELL_S:
                    told = time.monotonic()
                    self._tell(progress)
                elif is_first:
                    self._publish_change()
                if now.epoch and time.monotonic() - looked >= self.patience.look_s:
                    looked = time.monotonic()
                    self._look(now)
            except MembershipError as error:  # a store that is away must not stop a member
                log.debug("%s", error)

    def _look(self, now: Roster) -> None:
        """See who waits for the next epoch. The first member looks for newcomers."""
        is_first = now.names[:1] == (self.name,)
        if is_first:
            self._publish_again(now)
            self._answer()
        if self.name in now.names[:2]:
            self._heard.of(now.names[self._turn % len(now.names)])  # one at a look: each takes a time of the network's
            self._turn += 1
        waits = self._arrived(now.epoch + 1, self._beats)[0] if self._beats.add(here(now.epoch + 1), 0) > 0 else []
        with self._lock:
            if now is not self._now:
                return
            if is_first and waits:
                self.is_awaited.set()
            if any(name in now.names and name != self.name for name in waits):
                self.is_over.set()

    def _answer(self) -> None:
        """Answer newcomers that ask for a copy of the state."""
        asked = self._beats.add("copy", 0)
        pending = [*self._to_answer, *range(max(self._asked, asked - MOST_NAMES) + 1, asked + 1)]
        self._asked, self._to_answer = asked, []
        for number in pending[-MOST_NAMES:]:
            key, gives = f"copy/{number}", self._gives()
            try:
                question = self._read(key, self._beats) if self._beats.check([key]) else None
            except MembershipError as error:  # a stranger
                log.warning("%s: %s", self.name, error)
                continue
            if question is None:  # it has its number, and is being written
                self._to_answer.append(number)
                continue
            if question["giver"] != self.name or self._beats.check([f"{key}/answer"]):
                continue
            pair = Roster(-number, (self.name, str(question["name"])))
            why = "this run copies states at changes alone" if gives is None else gives.answer(pair)
            if why is None:
                self._to_answer.append(number)
            else:
                key = f"{key}/answer"
                self._beats.compare_set(key, "", self._signed(key, {"why": why}))

    def _tell(self, progress: dict[str, object]) -> None:
        self._beat_count += 1
        period_s, key = max(TELL_S, self.patience.beat_s), f"about/{self.name}"
        now = {"beats": self._beat_count, "at": time.time(), "tell_s": period_s, "founders": self.founders}
        now |= {} if self.copied is None else {"copied": self.copied}
        self._beats.set(key, self._signed(key, self._about | progress | now))

    def _publish_change(self) -> None:
        """One at a beat: over a slow link each takes time, in which no sign of life is given."""
        pending = {epoch: its for epoch, its in dict(self._changes).items() if epoch not in self._published}
        if pending:
            key = f"change/{(epoch := max(pending))}"
            self._beats.set(key, self._signed(key, pending[epoch]))
            self._published.add(epoch)

    def _publish_again(self, now: Roster) -> None:
        """Write the members into a store that has come back empty, before a newcomer takes it for a new run's."""
        key = f"roster/{now.epoch}"
        if not self._beats.check(["newest", key]):
            self._beats.set("ranks", self._signed("ranks", {"ranks": self._ranks}))
            if self._in_run:  # else it may be the first epoch, whose roster has no number yet
                self._beats.set("begun", "yes")
            self._beats.set(key, self._signed(key, {"epoch": now.epoch, "names": list(now.names)}))
            # One that was cut off may tell of an epoch that is over, and be the first or the last to do so.
            if not self._beats.check(["newest"]) or int(self._read("newest", self._beats)["epoch"]) < now.epoch:
                self._beats.set("newest", self._signed("newest", {"epoch": str(now.epoch)}))
            self._published.clear()
            self._asked, self._to_answer = 0, []

    # ---------------------------------------------------------------- one epoch

    def _next(self, before: Roster | None, missed: Sequence[str], deadline: float, lets_in: bool) -> Roster:
        epoch = 1 if before is None else before.epoch + 1
        began, writes, pauses = time.monotonic(), 0, _pauses()
        silences, of_suspects = _Silences(self._store), _Silences(self._store, dict(self._heard.seen))
        while (roster := self._read_roster(epoch)) is None:
            if before is None and (newest := self._newest()) is not None and newest.epoch > epoch:
                return newest  # no new run: the store had come back empty, and the members have told it of theirs
            now, (arrived, suspects) = time.monotonic(), self._arrived(epoch)
            if self.name not in arrived:  # at first, and again once the store has come back empty
                if (writes := writes + 1) > MOST_WRITES:  # something else writes there
                    raise MembershipError(
                        f"{self.name}: the rendezvous keeps no name for epoch {epoch}: {MOST_WRITES} were written "
                        "there, and none could be read; give every run a rendezvous of its own"
                    )
                key = f"{here(epoch)}/{self._store.add(here(epoch), 1)}"
                self._write(key, {"name": self.name, "missed": list(missed)})
            elif self._may_found(arrived, now - began) if before is None else self.name in before.names:
                absent = [] if before is None else [name for name in before.names if name not in arrived]
                are_silent = [
                    of_suspects.of(name) > self.patience.suspect_s
                    if name in suspects
                    else silences.of(name) > self.patience.silent_s
                    for name in absent
                ]
                if all(are_silent) or now - began > self.patience.busy_s:
                    if len(arrived) >= self.min_members:
                        self._close(before, epoch, arrived, lets_in)
                        continue
                    self._tell_of_few(epoch, arrived)
            elif now > deadline or self._store.check(["ended"]):
                waited = f"{self.name} has waited {self.patience.wait_s - deadline + now:.1f} s for epoch {epoch}: "
                raise MembershipError(waited + self._why_none(before, arrived))
            time.sleep(next(pauses))
        return roster

    def _may_found(self, arrived: Sequence[str], waited_s: float) -> bool:
        # Or this is a run's rendezvous that has come back empty, and its members have yet to tell it of themselves.
        return len(arrived) >= self.founders and waited_s >= FOUND_LOOKS * self.patience.look_s

    def _tell_of_few(self, epoch: int, arrived: Sequence[str]) -> None:
        if epoch != self._told_of:
            self._told_of = epoch
            log.warning(
                "%s: %d of min_members=%d members are here (%s): training stands still until more join",
                self.name,
                len(arrived),
                self.min_members,
                ", ".join(arrived),
            )

    def _close(self, before: Roster | None, epoch: int, arrived: Sequence[str], lets_in: bool) -> None:
        names = [] if before is None else [name for name in before.names if name in arrived]
        if lets_in:
            names += [name for name in arrived if name not in names]
        key = f"roster/{epoch}"
        # If several members close the epoch, the first roster stands.
        self._store.compare_set(key, "", self._signed(key, {"epoch": epoch, "names": names}))
        self._write("newest", {"epoch": str(epoch)})

    def _why_none(self, before: Roster | None, arrived: Sequence[str]) -> str:
        if self._store.check(["ended"]):
            return f"the run has ended: {self._read('ended')['why']}"
        if before is None:
            strange = f"; {len(self._strange)} came without this run's token" if self._strange else ""
            return f"{len(arrived)} of {self.founders} founders have come ({', '.join(arrived)}){strange}"
        names = ", ".join(before.names)
        return f"no member of epoch {before.epoch} ({names}) has come: they are lost, or stuck in a step"

    def _arrived(self, epoch: int, store: _Steady | None = None) -> tuple[list[str], set[str]]:
        """The names of the members that have come, in order, and of those that any of them misses."""
        store = store or self._store
        names: dict[str, None] = {}
        missed: set[str] = set()
        for k in range(1, store.add(here(epoch), 0) + 1):
            if store.check([key := f"{here(epoch)}/{k}"]):
                try:
                    found = self._read(key, store)
                except MembershipError as error:  # a stranger must not end the run of others
                    if key not in self._strange:
                        log.warning("%s: %s", self.name, error)
                    self._strange.add(key)
                    continue
                names[str(found["name"])] = None
                missed.update(map(str, found["missed"]))
        return list(names), missed

    def _newest(self) -> Roster | None:
        return self._read_roster(int(self._read("newest")["epoch"])) if self._store.check(["newest"]) else None

    def _read_roster(self, epoch: int) -> Roster | None:
        key = f"roster/{epoch}"
        return Roster(epoch, tuple(map(str, self._read(key)["names"]))) if self._store.check([key]) else None

    # ---------------------------------------------------------------- signed values

    def _write(self, key: str, value: dict[str, object]) -> None:
        self._store.set(key, self._signed(key, value))

    def _signed(self, key: str, value: dict[str, object]) -> str:
        return sign(self._token, key, value)

    def _read(self, key: str, store: _Steady | None = None) -> dict[str, Any]:
        try:
            return read_signed(self._token, key, (store or self._store).get(key))
        except ValueError as error:
            raise MembershipError(
                f"{key} in the store was not written with this run's token: another run uses the store, or a stranger; "
                "give every member the same token, and every run its own rendezvous"
            ) from error


def _pauses() -> Iterator[float]:
    """Seconds between looks at the store, at first short: members mostly come within milliseconds of each other."""
    pause = FIRST_POLL_S
    while True:
        yield pause
        pause = min(2 * pause, POLL_S)


class _Steady:
    """A store whose connection is made anew when it breaks. Raises MembershipError if the store is away too long."""

    def __init__(self, connect: Callable[[], Store], away_s: float):
        self._connect, self._away_s = connect, away_s
        self._store: Store | None = connect()

    def _do(self, call: Callable[[Store], T]) -> T:
        deadline = time.monotonic() + self._away_s
        while True:
            try:
                self._store = self._store or self._connect()
                return call(self._store)
            except RuntimeError as error:
                self._store = None
                if time.monotonic() >= deadline:
                    raise MembershipError(f"the rendezvous does not answer: {error}") from error
                time.sleep(0.2)

    def add(self, key: str, amount: int) -> int:
        return self._do(lambda store: store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._do(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._do(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        return self._do(lambda store: store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        self._do(lambda store: store.compare_set(key, expected, desired))


@dataclass
class _Silences:
    """Measures how long members have given no sign of life, since this object first looked, or one it continues."""

    store: _Steady
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The last signs of life: by name their number, and when it was first seen."""

    def of(self, name: str) -> float:
        """Seconds since this member's last sign of life."""
        count, now = self.store.add(_beat(name), 0), time.monotonic()
        if name not in self.seen or self.seen[name][0] != count:
            self.seen[name] = count, now
        return now - self.seen[name][1]


def _beat(name: str) -> str:
    return f"beat/{name}"
