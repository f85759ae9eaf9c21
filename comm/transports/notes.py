"""Notes that a rank leaves for the others when its operation fails, and the conclusion that each draws from them.

A `Note` describes where a rank stands: the operation in which it waited, its last launches, the ranks that it misses.
`conclude` follows notes from rank to rank: to those that left none, and to those that launched something else. How
notes travel depends on the transport: through the store (`torch_distributed.py`) or as messages (`mpi.py`).
"""

from __future__ import annotations

import collections
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from .base import Channel

HISTORY = 32
"""Operations that a rank remembers, to compare them with those of others."""

_call: ContextVar[str] = ContextVar("call", default="")


@contextmanager
def calling(name: str) -> Iterator[bool]:
    """Operations that this thread launches in the block belong to a call that every rank makes: errors name it.

    Yields whether this is the outermost such call; errors name the outermost.
    """
    is_outermost = not _call.get()
    token = _call.set(_call.get() or name)
    try:
        yield is_outermost
    finally:
        _call.reset(token)


@contextmanager
def outside_calls() -> Iterator[None]:
    """Operations that this thread launches in the block belong to no such call, even if the block is within one."""
    token = _call.set("")
    try:
        yield
    finally:
        _call.reset(token)


def call_under_way() -> str:
    """The name that `calling` has set for operations that this thread launches now; "" outside of it."""
    return _call.get()


class Operation(NamedTuple):
    """One operation of a transport. number: position among the launches, the same on every rank; 0: outside of them.

    nbytes: bytes for each peer; for an all_reduce or a broadcast those of the whole tensor. call: see `calling`.
    channel: see `Transport.new_channel`; 0: none.
    """

    name: str
    number: int
    nbytes: int = 0
    call: str = ""
    channel: int = 0

    def __str__(self) -> str:
        name = f"{self.name} in {self.call}" if self.call else self.name
        details = [f"operation {self.number}"] * (self.number > 0) + [f"{self.nbytes} bytes"] * (self.nbytes > 0)
        return f"{name} ({', '.join(details)})" if details else name

    def tag(self, tags: int) -> int:
        """A message tag below `tags` that depends on all fields: ranks that are out of step must not match.

        If two operations in flight share a tag by chance, they match in the order of their launch, which is the same
        on all ranks.
        """
        return zlib.crc32("/".join(map(str, self)).encode()) % tags


class Numbering:
    """Numbers the operations of a rank, from 1 in each channel. channels: yields the number of each new channel."""

    def __init__(self, channels: Iterator[int]):
        self._channels = channels
        self._channel = 0
        self._counts: collections.Counter[int] = collections.Counter()

    def operation(self, name: str, nbytes: int) -> Operation:
        """The next operation in the current channel."""
        self._counts[self._channel] += 1
        # Hooks may launch a channel's operation in a call on one rank and outside of it on another: it has no call.
        call = "" if self._channel else call_under_way()
        return Operation(name, self._counts[self._channel], nbytes, call, self._channel)

    def new_channel(self) -> Channel:
        """See `Transport.new_channel`."""
        return partial(self._in_channel, next(self._channels))

    @contextmanager
    def _in_channel(self, number: int) -> Iterator[None]:
        before, self._channel = self._channel, number
        try:
            yield
        finally:
            self._channel = before


@dataclass(frozen=True)
class Note:
    """Where a rank stands. transport: name of the group of ranks. operation: the one in which it waited.

    launched: its last operations. misses: ranks for which it waits. gave_up: its own timeout has passed; if not, a peer
    broke off. ended: the error that ended this rank; "" if none did.
    """

    transport: str
    operation: Operation
    launched: tuple[Operation, ...]
    misses: tuple[int, ...] = ()
    gave_up: bool = False
    ended: str = ""

    def encode(self) -> bytes:
        """JSON."""
        return json.dumps(
            [self.transport, self.operation, self.launched, self.misses, self.gave_up, self.ended]
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """The inverse of `encode`."""
        transport, operation, launched, misses, *how = json.loads(data)
        return cls(transport, Operation(*operation), tuple(Operation(*each) for each in launched), tuple(misses), *how)

    def in_place_of(self, operation: Operation, transport: str) -> Operation | None:
        """This rank's operation with the same number; None if it has launched none, or too long ago."""
        numbered = [each for each in self.launched if self.transport == transport and each.number > 0]
        same = [each for each in numbered if (each.channel, each.number) == (operation.channel, operation.number)]
        return same[0] if same else None


class Conclusion(NamedTuple):
    """ranks: those to blame, as far as the notes tell. text: sentences about them; "" if nothing is known.

    is_silence: a rank is missing, which the network may explain.
    """

    ranks: tuple[int, ...] = ()
    text: str = ""
    is_silence: bool = True


def conclude(me: int, mine: Note, notes: Mapping[int, Note]) -> Conclusion:
    """Which ranks are to blame, by the notes of the ranks that I miss and of those that they miss in turn.

    A rank without a note is missing. A rank that ended on an error names it in its note. A rank that launched another
    operation than mine is out of step. Any other rank waits, in the same operation or elsewhere, for further ranks,
    which count in its place.
    """
    missing: set[int] = set()
    ended: dict[int, str] = {}
    out_of_step: dict[int, Operation] = {}
    elsewhere: dict[int, Operation] = {}
    seen, to_visit = {me}, set(mine.misses) - {me}
    while to_visit:
        peer = to_visit.pop()
        seen.add(peer)
        note = notes.get(peer)
        if note is None:
            missing.add(peer)
            continue
        if note.ended:
            ended[peer] = note.ended
            continue
        theirs = note.in_place_of(mine.operation, mine.transport)
        if theirs is not None and theirs != mine.operation:
            out_of_step[peer] = theirs
            continue
        if theirs is None and (note.transport, note.operation) != (mine.transport, mine.operation):
            elsewhere[peer] = note.operation
        to_visit |= set(note.misses) - seen

    blamed = missing | ended.keys() | out_of_step.keys() or elsewhere.keys() or set(mine.misses)
    sentences = []
    if ended:
        sentences.append(f"Ended: {'; '.join(f'rank {peer} by {error}' for peer, error in sorted(ended.items()))}")
    if missing:
        whose = "their logs and processes" if len(missing) > 1 else "its log and process"
        why = f" (not in {mine.operation.call}, or ended)" if mine.operation.call else ""
        sentences.append(f"Missing: {names_of(missing)}{why}; look at {whose} first")
    if out_of_step:
        sentence = f"The ranks launched different operations: {_places(out_of_step)}"
        sentences.append(f"{sentence}; all must launch the same ones in the same order")
    if not sentences and elsewhere:
        sentences.append(f"Waiting elsewhere: {_places(elsewhere)}")
    impatient = {peer for peer, note in notes.items() if note.gave_up and me in note.misses}
    if not sentences and impatient and not mine.gave_up:
        sentences.append(f"This rank came too late: {names_of(impatient)} had given up waiting for it")
    if not sentences and blamed:
        sentences.append(f"Missing: {names_of(blamed)}, in the same operation by now: late, or cut off from this rank")
    here = {me: mine.operation} | {peer: note.operation for peer, note in notes.items() if not note.ended}
    calls = sorted({operation.call for operation in here.values()} - {""})
    others = {call: {rank for rank, operation in here.items() if operation.call != call} for call in calls}
    for call in calls if missing or any(others.values()) else ():
        did_not = f", {names_of(others[call])} did not" if others[call] else ""
        sentences.insert(0, f"Every rank must call {call}: {names_of(here.keys() - others[call])} did{did_not}")
    is_silence = not calls and (bool(missing) or not (ended or out_of_step or elsewhere))
    return Conclusion(tuple(sorted(blamed)), ". ".join(sentences), is_silence)


def _places(operations: Mapping[int, Operation]) -> str:
    return "; ".join(f"rank {peer} {operation}" for peer, operation in sorted(operations.items()))


def names_of(ranks: Iterable[int]) -> str:
    """For messages: "rank 1", "ranks 1, 2"."""
    listed = sorted(ranks)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
