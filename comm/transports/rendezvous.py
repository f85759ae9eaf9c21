"""Where the ranks of a new process group find each other, and who has come: a store, and a list of arrivals in it.

Every rank adds itself to the list, waits until it is complete, says so, and waits until all have said so. Where it is
not complete in time, or contradicts itself, somebody ends the list, and every rank on it raises the same error: who is
there and from where, who is missing. A launcher's agent keeps its store when it starts all processes anew: of an
earlier start there are lines on the list then, but nobody who still says what he sees. Rests on
`torch.distributed.TCPStore`; `launch.py` says where the store is.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from .base import PeerError
from .edge import NOTES_S, reason
from .hanging import call_within

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
_SECOND_HOST_S = 5.0
"""How long a second rank 0 waits for the name of the first, which listens in its place."""
_OVER = "over\n"
"""The line that ends a list of arrivals."""
_LINGER_S = 1.0
"""How long the rank that hosts the store outlives an error, so that the others can read it."""


@dataclass(frozen=True, order=True)
class Arrival:
    """A process that has come to the rendezvous."""

    rank: int
    world_size: int
    host: str
    pid: int

    @classmethod
    def here(cls, rank: int, world_size: int) -> Arrival:
        """This process."""
        return cls(rank, world_size, socket.gethostname(), os.getpid())


def contradiction(arrivals: Collection[Arrival]) -> str:
    """What is wrong with these processes as a whole, and what to do; "" where nothing is."""
    sizes = sorted({arrival.world_size for arrival in arrivals})
    if len(sizes) > 1:
        said = (f"{size} for rank {from_where([a for a in arrivals if a.world_size == size])}" for size in sizes)
        return f"WORLD_SIZE differs: {', '.join(said)}; start all processes with the same"
    for rank in sorted({arrival.rank for arrival in arrivals}):
        same = sorted({arrival for arrival in arrivals if arrival.rank == rank})
        if len(same) > 1:
            where = " and ".join(f"process {each.pid} on {each.host}" for each in same)
            return f"{where} are both rank {rank}; start each process with a RANK of its own"
    return ""


def from_where(arrivals: Sequence[Arrival]) -> str:
    """The numbers of ranks and processes, host by host: "0 2 on a (process 110 111), 1 on b (process 120)"."""
    by_host: dict[str, list[Arrival]] = {}
    for arrival in sorted(arrivals):
        by_host.setdefault(arrival.host, []).append(arrival)
    return ", ".join(
        f"{_listed(each.rank for each in here)} on {host} (process {_listed(each.pid for each in here)})"
        for host, here in by_host.items()
    )


def _listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


class Rendezvous:
    """The store at address (host, port). Rank 0 hosts it there, unless a launcher's agent does (is_hosted).

    Constructed by every rank. Raises PeerError where nobody answers there within timeout_s, ValueError where rank 0
    cannot listen there.
    """

    def __init__(self, me: Arrival, address: tuple[str, int], timeout_s: float, *, is_hosted: bool = False):
        self._me = me
        self._address = address
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._is_hosted = is_hosted
        self._host = "the launcher's agent" if is_hosted else "rank 0"
        self._host_ranks = () if is_hosted else (0,)
        self._line = json.dumps(astuple(me)) + "\n"
        self._list = ""
        self._said: set[str] = set()
        self.arrivals: list[Arrival] = []
        self.store = self._found_store() if me.rank or is_hosted else self._own_store()

    def meet(self) -> dist.Store:
        """Wait until all ranks have come; the store, under a prefix that no other group has. All ranks, once for each.

        Raises PeerError, which names the missing ranks, timeout_s after the construction on this rank or any other;
        ValueError where two processes are the same rank or disagree on the world size. All that have come raise alike.
        """
        me = self._me
        # A store may serve several groups of the same processes, one after the other.
        number = self.store.add(f"onebit/groups/{me.rank}/{me.host}/{me.pid}", 1)
        self._list = f"onebit/arrivals/{number}"
        self._write(self._list, self._line)
        pause_s, have_come = _FIRST_PAUSE_S, False
        while True:
            is_late = time.monotonic() > self._deadline
            is_over = self._read(self._list)
            problem = contradiction(self.arrivals) or contradiction({me, *self.arrivals})
            agreed = set() if problem else self._agreed(say=not is_over)
            if len(agreed) == me.world_size:
                self.store = dist.PrefixStore(self._sight(), self.store)
                return self.store
            if is_over:
                self._linger()
                if problem:
                    raise ValueError(f"{self._who()}: {problem}")
                in_time = f"{len(self.arrivals)} of {me.world_size} ranks came in {self._timeout_s:g} s"
                raise self._missing(in_time, agreed)
            if problem or is_late:
                self._write(self._list, _OVER)
                continue  # and raise what the list says up to there, as everybody does
            if bool(agreed) != have_come:
                pause_s, have_come = _FIRST_PAUSE_S, bool(agreed)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S + 1e-3 * me.world_size)

    def explain(self, why: str) -> PeerError:
        """The error for ranks that all came, but did not all connect to each other. Every rank that failed, at once."""
        came, self.arrivals = self.arrivals, []
        self._write("onebit/failed", self._line)
        time.sleep(NOTES_S)
        self._read("onebit/failed")
        self._linger()
        return self._missing(f"not all ranks connect to each other ({why}); all came, {from_where(came)}; still here")

    def _write(self, key: str, line: str) -> None:
        self._ask(lambda: self.store.append(key, line))  # type: ignore[attr-defined]

    def _read(self, key: str) -> bool:
        """Take the arrivals that concern this process from the list there. Whether it is over."""
        text = self._ask(lambda: self.store.get(key)).decode()
        if self._is_hosted:  # a list that was over before this process came is of an earlier start
            before, line, after = text.partition(self._line)
            text = before.rpartition(_OVER)[2] + line + after
        text, over, _ = text.partition(_OVER)
        self.arrivals = [Arrival(*json.loads(line)) for line in text.splitlines()]
        if self._is_hosted:  # so is who has come as a rank before the last that has
            alike = (arrival for arrival in self.arrivals if arrival.world_size == self._me.world_size)
            self.arrivals = list({arrival.rank: arrival for arrival in alike}.values())
        return bool(over)

    def _agreed(self, *, say: bool) -> set[int]:
        """The ranks that live and see all ranks on the list, the same processes as this one. say: so does this one."""
        if len(self.arrivals) < self._me.world_size:
            return set()
        if not self._is_hosted:  # the list is as old as rank 0
            return set(range(self._me.world_size))
        key = f"onebit/seen/{self._sight()}"
        if say and key not in self._said:
            self._write(key, f"{self._me.rank}\n")
            self._said.add(key)
        is_there = self._ask(lambda: self.store.check([key]))
        return set(map(int, self._ask(lambda: self.store.get(key)).split())) if is_there else set()

    def _sight(self) -> str:
        """A name for what is on the list, which no other list has."""
        return hashlib.sha256(repr((self._list, sorted(self.arrivals))).encode()).hexdigest()[:16]

    def _ask(self, question: Callable[[], T]) -> T:
        """What the store answers. Raises PeerError where it has ended."""
        why = _why_no_answer(self._address)  # torch would print a C++ stack
        try:
            if not why:
                return question()
        except RuntimeError as error:
            why = reason(error)
        raise PeerError(
            f"{self._who()}: the rendezvous at {self._place()} has ended ({why}). Missing: {self._host}, which hosted "
            "it; look at its log first",
            self._host_ranks,
        )

    def _missing(self, what: str, present: Iterable[int] = ()) -> PeerError:
        """present: where all are on the list, the ranks that are still there."""
        came = {arrival.rank for arrival in self.arrivals}
        everybody = set(range(self._me.world_size))
        absent = sorted(everybody - came or everybody - set(present))
        return PeerError(
            f"{self._who()}: {what}: {from_where(self.arrivals)}. Missing: rank {_listed(absent)}; look at "
            "the logs of missing ranks first, then check WORLD_SIZE and RANK",
            absent,
        )

    def _own_store(self) -> dist.Store:
        try:
            return self._store(is_host=True, timeout_s=self._timeout_s)
        except RuntimeError as error:
            why = reason(error)
        try:
            seconds = max(min(self._deadline - time.monotonic(), _SECOND_HOST_S), 0.1)
            self.store = self._store(is_host=False, timeout_s=seconds)
            # Whoever listens there may not have put its own name on the list yet.
            self.store.wait(["onebit/arrivals/1"], timedelta(seconds=seconds))
            self.meet()  # as a second rank 0
        except RuntimeError:
            pass  # it is no store, or none of ours
        raise ValueError(
            f"{self._who()}: cannot listen at {self._place()}: {why}. Another program does, or an earlier run that has "
            "not ended; set MASTER_PORT to a free port of this host, on all ranks"
        )

    def _found_store(self) -> dist.Store:
        pause_s = _FIRST_PAUSE_S
        while why := _why_no_answer(self._address):
            if time.monotonic() > self._deadline:
                raise PeerError(
                    f"{self._who()}: nobody answers at {self._place()} within {self._timeout_s:g} s ({why}). Missing: "
                    f"{self._host}, which should listen there; look at its log first, then check MASTER_ADDR and "
                    "MASTER_PORT",
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
        """Raises RuntimeError."""
        (host, port), timeout = self._address, timedelta(seconds=timeout_s)
        try:
            return call_within(
                timeout_s + 0.2,  # it tries again as long as it has time
                lambda: dist.TCPStore(host, port, self._me.world_size, is_host, timeout, wait_for_workers=False),
                port,
            )
        except TimeoutError as error:  # somebody listens there, and says nothing
            raise RuntimeError(str(error)) from None

    def _who(self) -> str:
        return f"rank {self._me.rank} of {self._me.world_size}"

    def _place(self) -> str:
        return "{}:{}".format(*self._address)

    def _linger(self) -> None:
        if self._me.rank == 0:
            time.sleep(_LINGER_S)


def _why_no_answer(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, 2.0).close()
    except OSError as error:
        return str(error)
    return ""
