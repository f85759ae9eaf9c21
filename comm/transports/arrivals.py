"""Which processes have come to a rendezvous: a list of lines, in one order for all readers, and its meaning.

Every process that arrives adds a line. Whether all have met, or which are missing, is decided by a line on the list:
every reader decides the same, however late it looks. The line of a killed process stays. A launcher's agent keeps its
store when it starts all processes anew; there the latest process of each rank counts, and all must write that they see
the same processes before they have met. Nothing here communicates.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass, field

_COMES, _SEES, _ENDS = "comes", "sees all", "ends"


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
    """What is wrong with these processes as a group, and what to do; "" if nothing is."""
    sizes = sorted({arrival.world_size for arrival in arrivals})
    if len(sizes) > 1:
        parts = (f"{size} for rank {from_where([a for a in arrivals if a.world_size == size])}" for size in sizes)
        return f"WORLD_SIZE differs: {', '.join(parts)}; start all processes with the same"
    for rank in sorted({arrival.rank for arrival in arrivals}):
        same = sorted({arrival for arrival in arrivals if arrival.rank == rank})
        if len(same) > 1:
            where = " and ".join(f"process {each.pid} on {each.host}" for each in same)
            return f"{where} are both rank {rank}; start each process with its own RANK"
    return ""


def from_where(arrivals: Iterable[Arrival]) -> str:
    """Ranks and process ids, host by host: "0 2 on a (process 110 111), 1 on b (process 120)"."""
    by_host: dict[str, list[Arrival]] = {}
    for arrival in sorted(arrivals):
        by_host.setdefault(arrival.host, []).append(arrival)
    return ", ".join(
        f"{listed(each.rank for each in here)} on {host} (process {listed(each.pid for each in here)})"
        for host, here in by_host.items()
    )


def listed(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


@dataclass(frozen=True)
class End:
    """The end of a list on which not all have met. problem: what is wrong; "" if a rank's timeout_s has passed."""

    problem: str
    timeout_s: float = 0.0


@dataclass
class Start:
    """One start of all processes, as the list describes it up to the line that decides it.

    number: starts on the list before this one. lines: arrivals on the whole list so far. here: the process that counts
    as each rank. seeing: ranks that have written that they see all others.
    """

    number: int
    lines: int
    here: dict[int, Arrival] = field(default_factory=dict)
    seeing: set[int] = field(default_factory=set)
    has_met: bool = False
    end: End | None = None
    objection: str = ""
    """What contradicts the process that reads: another one has come in its place, or with another world size."""

    @property
    def world_size(self) -> int:
        """The world size, on which all that are here agree; 0 if none is here."""
        return next((each.world_size for each in self.here.values()), 0)

    @property
    def is_complete(self) -> bool:
        return 0 < self.world_size == len(self.here)

    def absent(self) -> list[int]:
        """The ranks that have not come; if all have, those that have not written that they see the others."""
        everybody = set(range(self.world_size))
        return sorted(everybody - self.here.keys() or everybody - self.seeing)


def comes(token: str, me: Arrival) -> str:
    """The line of a process that arrives. token: unique on the list."""
    return _line(_COMES, token, *astuple(me))


def sees(me: Arrival, start: Start) -> str:
    """The line of a process that sees all others. It is void once another process arrives."""
    return _line(_SEES, me.rank, start.lines)


def ends(end: End, start: Start) -> str:
    """The line that ends a start. It is void if a process has arrived meanwhile; its writer then looks again."""
    return _line(_ENDS, end.problem, end.timeout_s, start.lines)


def _line(*what: object) -> str:
    return json.dumps(what) + "\n"


def read(text: str, token: str, *, keeps_old_lines: bool) -> Start:
    """The start that the list describes for the process with this token, up to the line that decides it.

    keeps_old_lines: the list may be older than the processes, as in an agent's store. If not, two processes of one rank
    are a contradiction, all have met once all have come, and a list that has ended stays so.
    """
    mine: Arrival | None = None
    everybody: set[Arrival] = set()
    start = Start(0, 0)
    for line in text.splitlines():
        what, *fields = json.loads(line)
        if what == _COMES:
            arrival = Arrival(*fields[1:])
            if fields[0] == token:
                mine = arrival
            elif mine is not None:
                start.objection = start.objection or contradiction({mine, arrival})
            everybody.add(arrival)
            start = _with(start, arrival)
            if not keeps_old_lines:
                problem = contradiction(everybody)
                start.end = End(problem) if problem else None
                start.has_met = not problem and start.is_complete
        elif what == _SEES and fields[1] == start.lines and start.is_complete:
            start.seeing.add(fields[0])
            start.has_met = start.seeing >= start.here.keys()
        elif what == _ENDS and fields[2] == start.lines and start.here:
            start.end = End(*fields[:2])
        if start.end is not None and not keeps_old_lines:
            return start
        if start.end is not None or start.has_met:
            if mine is not None:
                return start
            start = Start(start.number + 1, start.lines)
    return start


def _with(start: Start, arrival: Arrival) -> Start:
    """Add an arrival. Processes of the same rank, or of another world size, belonged to an earlier start."""
    alike = {rank: each for rank, each in start.here.items() if each.world_size == arrival.world_size}
    return Start(start.number, start.lines + 1, alike | {arrival.rank: arrival}, objection=start.objection)
