"""Starts that fail: ranks that never come, come twice, come to the wrong place, or die on the way.

Promised is an error on every rank that came, within the timeout, that names the rank which is missing or wrong.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from faults.case import MISNAMED, Case, Outcome, Promise, Tools, judge
from faults.peers import MARGIN_S, TIMEOUT_S
from faults.ranks import Rank, fork_ranks
from onebit import comm

RANKS = 3


@dataclass(frozen=True)
class Start:
    """How three ranks start. comes: which of them at all. env: what some of them find in their environment instead.

    before: what some do before `comm.init`. levels: what they give it. names: the ranks that every error must name;
    says: a pattern of what it says. exempt: ranks that are not asked. is_harmless: all is well. gets: the signal that
    its one exempt rank gets at a random moment. told: a pattern of the error that exempt ranks get, if they come.
    """

    names: frozenset[int] = frozenset()
    comes: tuple[int, ...] = (0, 1, 2)
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    before: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    levels: Mapping[int, int] = field(default_factory=dict)
    exempt: frozenset[int] = frozenset()
    is_harmless: bool = False
    gets: signal.Signals | None = None
    says: str = "Error: "
    told: str = ""


def _raise() -> None:
    raise RuntimeError("an error of its own")


def _of(*ranks: int) -> frozenset[int]:
    return frozenset(ranks)


_listeners: list[socket.socket] = []


def _occupy(address: str) -> None:
    """Listen at the master's port, and never answer."""
    _listeners.append(socket.create_server((address, int(os.environ["MASTER_PORT"]))))


STARTS: dict[str, Start] = {
    "rank 2 never comes": Start(_of(2), comes=(0, 1)),
    "rank 0 never comes": Start(_of(0), comes=(1, 2)),
    "ranks 1 and 2 never come": Start(_of(1, 2), comes=(0,)),
    "rank 1 raises before it comes": Start(_of(1), before={1: _raise}, exempt=_of(1)),
    "rank 0 raises before it comes": Start(_of(0), before={0: _raise}, exempt=_of(0)),
    "rank 2 exits before it comes": Start(_of(2), before={2: lambda: os._exit(0)}, exempt=_of(2)),
    "rank 1 comes as a second rank 2": Start(
        env={1: {"RANK": "2", "LOCAL_RANK": "2"}}, says=r"\bboth rank 2\b|\brank \[?1\b"
    ),
    "rank 2 comes as a second rank 0": Start(
        env={2: {"RANK": "0", "LOCAL_RANK": "0"}}, says=r"\bboth rank 0\b|\brank \[?2\b"
    ),
    "rank 1 believes in 2 ranks": Start(_of(1), env={1: {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}}),
    "rank 1 believes in 4 ranks": Start(_of(1), env={1: {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}}),
    "rank 0 believes in 2 ranks": Start(_of(0), env={0: {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}}),
    "rank 1 has a number beyond the ranks": Start(env={1: {"RANK": "5"}}, says=r"RANK=5|\brank \[?1\b"),
    "rank 1 has another port": Start(_of(1), env={1: {"MASTER_PORT": "1"}}),
    "rank 2 has a host that is not there": Start(_of(2), env={2: {"MASTER_ADDR": "no-such-host.invalid"}}),
    "rank 1 gives other levels": Start(levels={1: 3}, says=r"\(1, 3, 1\)"),
    "rank 2 late by half the timeout": Start(before={2: lambda: time.sleep(TIMEOUT_S / 2)}, is_harmless=True),
    "rank 1 late by more than the timeout": Start(
        _of(1),
        before={1: lambda: time.sleep(TIMEOUT_S + MARGIN_S)},
        exempt=_of(1),
        told="given up waiting for this rank",
    ),
    "somebody else holds the port of rank 0": Start(before={0: lambda: _occupy("")}, says=r"MASTER_PORT|\brank \[?0\b"),
    "somebody who never answers is reached at the port of rank 0": Start(
        before={0: lambda: _occupy("127.0.0.1")}, says=r"MASTER_PORT|\brank \[?0\b"
    ),
    "rank 1 is killed as it comes": Start(_of(1), gets=signal.SIGKILL, exempt=_of(1)),
    "rank 0, which hosts the store, is stopped as it comes": Start(_of(0), gets=signal.SIGSTOP, exempt=_of(0)),
}


def work(start: Start, number: int, rank: Rank) -> float:
    torch.set_num_threads(1)
    os.environ.update({"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)})
    os.environ.update({"RANK": str(number), "LOCAL_RANK": str(number), **start.env.get(number, {})})
    rank.note_fault()
    start.before.get(number, lambda: None)()
    transport = comm.init("gloo", timeout_s=TIMEOUT_S, levels=start.levels.get(number, 1))
    x = torch.ones(100)
    transport.all_reduce(x).wait()
    transport.close()
    return float(x[0])


def _run(names: list[str], tools: Tools) -> Iterator[Outcome]:
    for name in tools.some(names, 1):
        start = STARTS[name]
        for kill_s in [tools.random.uniform(0.0, 0.3) for _ in range(6)] if start.gets else [None]:
            fault = name if kill_s is None else f"{name}, {kill_s:.2f} s after its start"
            yield from _try(fault, start, kill_s)


def _try(fault: str, start: Start, kill_s: float | None) -> Iterator[Outcome]:
    def kill(pids: Mapping[int, int]) -> None:
        if kill_s is not None and start.gets is not None:
            time.sleep(kill_s)
            os.kill(pids[min(start.exempt)], start.gets)

    victims = {start.comes.index(rank) for rank in start.exempt}
    ends = fork_ranks(
        [partial(work, start, number) for number in start.comes],
        patience_s=3 * TIMEOUT_S + 2 * MARGIN_S + 10.0,
        victims=victims,
        grace_s=2 * TIMEOUT_S,
        env={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        meanwhile=kill,
    )
    by_rank = {number: ends[place] for place, number in enumerate(start.comes)}
    if start.gets and any(end.value == RANKS for end in by_rank.values()):
        return  # all had met by then
    everybody = frozenset(range(RANKS))
    within_s = TIMEOUT_S + MARGIN_S + (1.0 if start.gets == signal.SIGSTOP else 0.0)  # the store may look up names
    promise = Promise(start.says, start.names, everybody, within_s)
    promise = Promise() if start.is_harmless else promise
    for rank in start.exempt if start.told else ():
        if not re.search(start.told, by_rank[rank].text):
            yield Outcome(fault, MISNAMED, f"rank {rank} is not told that it is late: {by_rank[rank].text[:300]}")
            return
    yield judge(fault, by_rank, promise, victims=start.exempt, is_right=lambda rank, value: value == RANKS)


def cases() -> Iterator[Case]:
    groups = {
        "ranks that never come": [name for name in STARTS if "never" in name or "before" in name],
        "ranks in the wrong place": [name for name, start in STARTS.items() if start.env or start.levels],
        "ranks that are late or die": [
            name for name in STARTS if "late" in name or "as it comes" in name or "port" in name
        ],
    }
    for group, names in groups.items():
        names = [name for name in names if all(name not in groups[other] for other in groups if other < group)]
        yield Case(
            group,
            f"an error on every rank that came, within {TIMEOUT_S:g} s, that names the missing or wrong rank",
            "; ".join(names),
            f"errors and ends of every rank; {MARGIN_S:g} s of tolerance; Gloo",
            partial(_run, names),
            is_quick=group == "ranks in the wrong place",
            cost_s=60.0,
        )
