"""Who has come to a rendezvous: a list of lines in one order for all, and what it comes to.

Every process that comes adds a line. Whether all have met, or who is missing, is decided by a line on the list, so that
all who read it decide alike, however late they look. Of a process that was killed a line stays: under a launcher's
agent, which keeps its store when it starts all processes anew, the last that has come as a rank is the one that counts,
and all say that they see the same processes before they have met. Nothing here communicates.
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
    """What is wrong with these processes as a whole, and what to do; "" where nothing is."""
    sizes = sorted({arrival.world_size for arrival in arrivals})
    if len(sizes) > 1:
        said = (f"{size} for rank {from_where([a for a in arrivals if a.world_size == size])}" for size in sizes)
        return f"WORLD_SIZE differs: {', '.join(said)}; start all processes with the same"
    for rank in sorted({arrival.rank for arrival in arrivals}):
        same = sorted({arrival for arrival in arrivals if arrival.rank == rank})
        if len(same) > 1:
            where = " and ".join(f"process {each.pid} on {each.host}" for each in same)
            return f"{where} are both rank {rank}; start each process with its own RANK"
    return ""


def from_where(arrivals: Iterable[Arrival]) -> str:
    """The numbers of ranks and processes, host by host: "0 2 on a (process 110 111), 1 on b (process 120)"."""
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
    """Of a list on which not all have met. problem: "" where someone's time is up, after timeout_s."""

    problem: str
    timeout_s: float = 0.0


@dataclass
class Start:
    """What a list says of one start of all processes, up to the line that decides it.

    number: of starts on the list before it; lines: of arrivals, on the whole list; here: who counts as each rank;
    seeing: the ranks that see all others.
    """

    number: int
    lines: int
    here: dict[int, Arrival] = field(default_factory=dict)
    seeing: set[int] = field(default_factory=set)
    has_met: bool = False
    end: End | None = None
    objection: str = ""
    """What the process that reads has to say: another has come in its place, or with other numbers."""

    @property
    def world_size(self) -> int:
        """Of those who are here, which is one; 0: none is."""
        return next((each.world_size for each in self.here.values()), 0)

    @property
    def is_complete(self) -> bool:
        return 0 < self.world_size == len(self.here)

    def absent(self) -> list[int]:
        """The ranks that have not come; where all have, those that do not say that they see the others."""
        everybody = set(range(self.world_size))
        return sorted(everybody - self.here.keys() or everybody - self.seeing)


def comes(token: str, me: Arrival) -> str:
    """The line of a process that comes. token: which no other line has."""
    return _line(_COMES, token, *astuple(me))


def sees(me: Arrival, start: Start) -> str:
    """The line of a process that sees all others. It counts while nobody else comes."""
    return _line(_SEES, me.rank, start.lines)


def ends(end: End, start: Start) -> str:
    """The line that ends a start, unless someone has come meanwhile: who wrote it then looks again."""
    return _line(_ENDS, end.problem, end.timeout_s, start.lines)


def _line(*what: object) -> str:
    return json.dumps(what) + "\n"


def read(text: str, token: str, *, keeps_old_lines: bool) -> Start:
    """What the list comes to for the process whose line has the token, up to what decides for it.

    keeps_old_lines: it may be older than the processes, as in an agent's store. Else two processes of one rank
    contradict each other, all have met where all have come, and a list that has ended is of no more use.
    """
    mine: Arrival | None = None
    everybody: set[Arrival] = set()
    start = Start(0, 0)
    for line in text.splitlines():
        what, *said = json.loads(line)
        if what == _COMES:
            arrival = Arrival(*said[1:])
            if said[0] == token:
                mine = arrival
            elif mine is not None:
                start.objection = start.objection or contradiction({mine, arrival})
            everybody.add(arrival)
            start = _with(start, arrival)
            if not keeps_old_lines:
                problem = contradiction(everybody)
                start.end = End(problem) if problem else None
                start.has_met = not problem and start.is_complete
        elif what == _SEES and said[1] == start.lines and start.is_complete:
            start.seeing.add(said[0])
            start.has_met = start.seeing >= start.here.keys()
        elif what == _ENDS and said[2] == start.lines and start.here:
            start.end = End(*said[:2])
        if start.end is not None and not keeps_old_lines:
            return start
        if start.end is not None or start.has_met:
            if mine is not None:
                return start
            start = Start(start.number + 1, start.lines)
    return start


def _with(start: Start, arrival: Arrival) -> Start:
    """One more has come: who stood in its place, or came with another number of ranks, is of an earlier start."""
    alike = {rank: each for rank, each in start.here.items() if each.world_size == arrival.world_size}
    return Start(start.number, start.lines + 1, alike | {arrival.rank: arrival}, objection=start.objection)
