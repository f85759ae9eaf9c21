"""Where the ranks of a new process group find each other: a store that contains a list of arrivals.

Every rank adds itself to the list and waits until all have met. If the list is not complete in time, or contradicts
itself, one rank ends it, and every rank on it raises the same error: which ranks came, from where, and which are
missing. `arrivals.py` interprets the list. Rests on `torch.distributed.TCPStore`; `launch.py` knows its address.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from . import arrivals
from .arrivals import Arrival, End, Start, from_where
from .base import PeerError
from .edge import ANSWER_S, STORE_S, reason
from .hanging import call_within, connections
from .notes import names_of

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
_LAST_LOOKS_S = 1.0
"""How long after its timeout, and a pause, a rank waits for the note that all see each other, if all have come."""
_SECOND_HOST_S = 5.0
"""How long a second rank 0 waits until the first, which already listens there, has put itself on the list."""
_LIST, _FAILED = "onebit/arrivals", "onebit/failed"
_LINGER_S = 1.0
"""How long the rank that hosts the store outlives an error, so that the others can read it."""

_met_at: set[tuple[str, int]] = set()
"""Addresses at which this process has met others."""


class _EarlierStore(Exception):
    """The store belongs to an earlier group."""


class Rendezvous:
    """The store at address (host, port). Rank 0 hosts it there, unless a launcher's agent does (is_hosted).

    Constructed by every rank. Raises PeerError if there is no answer within timeout_s, ValueError if rank 0 cannot
    listen there.
    """

    def __init__(self, me: Arrival, address: tuple[str, int], timeout_s: float, *, is_hosted: bool = False):
        self._me = me
        self._address = address
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._is_hosted = is_hosted
        self._host = "the launcher's agent" if is_hosted else "rank 0"
        self._host_ranks = () if is_hosted else (0,)
        self._came: Collection[Arrival] = ()
        self._may_be_earlier = bool(me.rank) and not is_hosted
        self._lifeline: socket.socket | None = None  # None if this process hosts the store
        self.store = self._found_store() if me.rank or is_hosted else self._own_store()

    def meet(self) -> dist.Store:
        """Wait until all ranks have come; return the store, under a prefix for this group alone. All ranks, once.

        All that have come raise the same error. Raises PeerError, which names the missing ranks, timeout_s after the
        construction on any rank, or about a second later if all came but not all confirmed it; ValueError if two
        processes have the same rank or disagree on the world size.
        """
        while True:
            try:
                self.store = dist.PrefixStore(f"onebit/groups/{self._met().lines}", self.store)
                _met_at.add(self._address)
                self._may_be_earlier = False
                return self.store
            except _EarlierStore:  # rank 0 is about to close it: it hosts a new store for each group
                time.sleep(_LONGEST_PAUSE_S)
                self._lifeline, self.store = None, self._found_store()

    def _met(self) -> Start:
        """Add this rank to the list, and wait until all have met."""
        me, token = self._me, os.urandom(8).hex()
        self._write(_LIST, arrivals.comes(token, me))
        pause_s, has_said = _FIRST_PAUSE_S, 0
        longest_s = _LONGEST_PAUSE_S + 1e-3 * me.world_size
        while True:
            seconds_left = self._deadline - time.monotonic()  # as it was before this look
            start = arrivals.read(self._read(_LIST), token, keeps_old_lines=self._is_hosted)
            if start.end is not None:
                self._linger()
                raise self._error(start, start.end)
            if start.number and self._may_be_earlier:
                if seconds_left < 0:
                    raise self._no_answer("it is that of an earlier group, which is not closed there")
                raise _EarlierStore
            if start.has_met and start.here.get(me.rank) != me:
                raise self._error(start, End(start.objection))
            if start.has_met:
                self._came = start.here.values()
                return start
            if start.objection or seconds_left < (-longest_s - _LAST_LOOKS_S if start.is_complete else 0):
                # If a rank has arrived meanwhile, it is on the list, and this line is void: read the list again.
                self._write(_LIST, arrivals.ends(End(start.objection, self._timeout_s), start))
                continue
            if start.is_complete and has_said != start.lines:
                self._write(_LIST, arrivals.sees(me, start))
                pause_s, has_said = _FIRST_PAUSE_S, start.lines
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def explain(self, why: str) -> PeerError:
        """The error if all ranks came, but not all connected to each other. Every rank that failed calls it at once."""
        self._write(_FAILED, f"{self._me.rank}\n")
        time.sleep(_LINGER_S)
        absent = sorted(set(range(self._me.world_size)) - set(map(int, self._read(_FAILED).split())))
        self._linger()
        first = (
            f"Missing: {names_of(absent)}; look at the logs of missing ranks first, then"
            if absent
            else "None is missing;"
        )
        return PeerError(
            f"{self._who()}: not all ranks connect to each other ({why}); all came, {from_where(self._came)}. {first} "
            "check for a firewall between their hosts, and the interfaces (GLOO_SOCKET_IFNAME)",
            absent,
        )

    def _error(self, start: Start, end: End) -> PeerError | ValueError:
        if end.problem:
            return ValueError(f"{self._who()}: {end.problem}")
        who = f"{len(start.here)} of {start.world_size} ranks came in {end.timeout_s:g} s"
        if start.is_complete:
            who = f"all {start.world_size} ranks came in {end.timeout_s:g} s, but not all answer any more"
        absent = start.absent()
        hint = f"Missing: {names_of(absent)}; look at the logs of missing ranks first, then check WORLD_SIZE and RANK"
        return PeerError(f"{self._who()}: {who}: {from_where(start.here.values())}. {hint}", absent)

    def _write(self, key: str, line: str) -> None:
        self._ask(lambda: self.store.append(key, line))  # type: ignore[attr-defined]

    def _read(self, key: str) -> str:
        return self._ask(lambda: self.store.get(key)).decode()

    def _ask(self, question: Callable[[], T]) -> T:
        """The store's answer. Raises PeerError if the store has ended or hangs."""
        why = self._why_ended()  # torch would print a C++ stack
        try:
            if not why:
                answer_s = ANSWER_S if self._came else STORE_S  # once all have come, no client connects any more
                seconds = max(self._deadline - time.monotonic(), 0.0) + answer_s
                connected = connections(self._address[1], frozenset())
                return call_within(seconds, question, self._address[1], connected)
        except (RuntimeError, TimeoutError) as error:
            why = reason(error)
        if self._may_be_earlier and self._address in _met_at and time.monotonic() < self._deadline:
            raise _EarlierStore
        raise self._no_answer(why)

    def _no_answer(self, why: str) -> PeerError:
        return PeerError(
            f"{self._who()}: the rendezvous at {self._place()} has ended or hangs ({why}). Missing: {self._host}, "
            "which hosts it; look at its log first",
            self._host_ranks,
        )

    def _why_ended(self) -> str:
        """Why the store has ended; "" while its process lives. An idle connection ends when that process does."""
        try:
            if self._lifeline is None or self._lifeline.recv(1, socket.MSG_PEEK):
                return ""
        except BlockingIOError:
            return ""
        except OSError as error:
            return str(error)
        return "its process has ended"

    def _own_store(self) -> dist.Store:
        try:
            return self._store(is_host=True, timeout_s=self._timeout_s)
        except RuntimeError as error:
            why = reason(error)
        try:
            seconds = max(min(self._deadline - time.monotonic(), _SECOND_HOST_S), 0.1)
            self.store = self._store(is_host=False, timeout_s=seconds)
            # The process that listens there may not have put itself on the list yet.
            self.store.wait([_LIST], timedelta(seconds=seconds))
            self.meet()  # as a second rank 0
        except RuntimeError:
            pass  # not a store, or not one of onebit's
        try:
            socket.getaddrinfo(*self._address)  # torch tries unknown names again, and tells no reason
        except socket.gaierror as error:
            raise ValueError(
                f"{self._who()}: cannot listen at {self._place()}: {error.strerror}; set MASTER_ADDR to a name or an "
                "address of this host that all ranks know"
            ) from None
        raise ValueError(
            f"{self._who()}: cannot listen at {self._place()}: {why}. Another program does, or an earlier run that has "
            "not ended; set MASTER_PORT to a free port of this host, on all ranks"
        )

    def _found_store(self) -> dist.Store:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                self._lifeline = socket.create_connection(self._address, 2.0)
                self._lifeline.setblocking(False)
                weakref.finalize(self, self._lifeline.close)
                break
            except OSError as error:
                why = str(error)
            if time.monotonic() > self._deadline:
                raise PeerError(
                    f"{self._who()}: no answer at {self._place()} within {self._timeout_s:g} s ({why}). Missing: "
                    f"{self._host}, which should listen there, or has given up waiting for this rank; look at its log "
                    "first, then check MASTER_ADDR and MASTER_PORT",
                    self._host_ranks,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            return self._store(is_host=False, timeout_s=max(self._deadline - time.monotonic(), 0.1))
        except RuntimeError as error:
            raise PeerError(
                f"{self._who()}: no rendezvous answers at {self._place()}: {reason(error)}. Another program is "
                f"there, or {self._host} has ended; look at its log first, then set MASTER_PORT to a free port, on all "
                "ranks",
                self._host_ranks,
            ) from None

    def _store(self, *, is_host: bool, timeout_s: float) -> dist.Store:
        """Host the store, or connect to it. Raises RuntimeError."""
        (host, port), timeout = self._address, timedelta(seconds=timeout_s)
        try:
            return call_within(
                timeout_s + 0.2,  # it tries again as long as it has time
                lambda: dist.TCPStore(host, port, self._me.world_size, is_host, timeout, wait_for_workers=False),
                port,
            )
        except TimeoutError as error:  # a process listens there and does not answer
            raise RuntimeError(str(error)) from None

    def _who(self) -> str:
        return f"rank {self._me.rank} of {self._me.world_size}"

    def _place(self) -> str:
        return "{}:{}".format(*self._address)

    def _linger(self) -> None:
        if self._me.rank == 0:
            time.sleep(_LINGER_S)
