"""A fault, its promise and its verdict: what every section of `faults.py` yields, and how an ending is judged.

A `Case` is one row of the record: a promise, and a function that injects faults and yields an `Outcome` for each. The
verdict is a pure function of what was promised and of how the ranks ended (`judge`), so nobody's eye is in it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

AS_PROMISED = "as promised"
SILENT = "wrong without a word"
HUNG = "hung"
CRASH = "crash in C++"
NAMELESS = "error that names nobody"
MISNAMED = "error that names another"
LATE = "error too late"
OTHER = "another error than promised"
REFUSED = "error where none was promised"
REMAINS = "leaves files behind"
VERDICTS = (AS_PROMISED, SILENT, HUNG, CRASH, REFUSED, LATE, NAMELESS, MISNAMED, OTHER, REMAINS)
"""The first is what is hoped for; the others begin with the worst."""


@dataclass(frozen=True)
class Outcome:
    """One injected fault. seconds: from the fault to the last error that it brought; None: no error, or not measured.

    count: how many alike faults this line stands for.
    """

    fault: str
    verdict: str = AS_PROMISED
    detail: str = ""
    seconds: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Tools:
    """What a case is given. random: its own, seeded. folder: an empty one, removed afterwards. quick: a few faults."""

    random: random.Random
    folder: Path
    quick: bool = False

    def some(self, faults: list, quick: int, full: int | None = None) -> list:
        """A sample of the faults in their order: so many of them in a quick run; full: in a long one (None: all)."""
        most = quick if self.quick else full
        if most is None or len(faults) <= most:
            return faults
        return [faults[k] for k in sorted(self.random.sample(range(len(faults)), most))]


@dataclass(frozen=True)
class Case:
    """name: unique in its section. is_quick: part of a quick run. cost_s: about how long, for the order of a full one.

    why_not: why this machine cannot run it; empty where it can.
    """

    name: str
    promised: str
    injected: str
    observed: str
    run: Callable[[Tools], Iterator[Outcome]]
    is_quick: bool = False
    cost_s: float = 5.0
    why_not: Callable[[], str] = lambda: ""


# ---------------------------------------------------------------- how ranks end


@dataclass(frozen=True)
class End:
    """How one rank ended. what: "returned", "raised", "died" (of a signal or with an exit status) or "running".

    text: the error with its type, or the last it wrote. seconds: since the fault; None where there was none yet.
    number: of the signal, or the exit status.
    """

    what: str
    text: str = ""
    value: object = None
    seconds: float | None = None
    number: int = 0


@dataclass(frozen=True)
class Promise:
    """What the ranks that are not at fault must come to.

    error: a pattern of the type and text of the error that each of them raises; None: no error, and right values.
    names: the ranks at fault, which every error must name, and nobody else but its own rank (`also`: these may be named
    too). within_s: from the fault to the error.
    """

    error: str | None = None
    names: Set[int] = frozenset()
    also: Set[int] = frozenset()
    within_s: float = float("inf")


_OWN = re.compile(r"^\w+: rank \d+: ")
_RANKS = re.compile(r"\branks? (\[[\d, ]+\]|\d+(?:(?:, | and )\d+)*)")


def ranks_named(text: str) -> set[int]:
    """The ranks an error speaks of, without the one that it says is speaking."""
    named = set()
    for found in _RANKS.findall(_OWN.sub("", text)):
        named |= {int(number) for number in re.findall(r"\d+", found)}
    return named


def judge(
    fault: str,
    ends: Mapping[int, End],
    promise: Promise,
    *,
    victims: Set[int] = frozenset(),
    is_right: Callable[[int, object], bool] = lambda rank, value: True,
) -> Outcome:
    """The worst that any rank came to. victims: whose own end is not looked at, unless it is a crash."""
    found = [_judge_one(rank, end, promise, rank in victims, is_right) for rank, end in sorted(ends.items())]
    verdict, detail = min(found, key=lambda pair: _SEVERITY.index(pair[0]), default=(AS_PROMISED, ""))
    times = [end.seconds for rank, end in ends.items() if end.what == "raised" and end.seconds and rank not in victims]
    return Outcome(fault, verdict, detail, max(times, default=None) if promise.error else None)


_SEVERITY = (*VERDICTS[1:], AS_PROMISED)
_CRASHES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}


def _judge_one(
    rank: int, end: End, promise: Promise, is_victim: bool, is_right: Callable[[int, object], bool]
) -> tuple[str, str]:
    said = f"rank {rank}: {first_line(end.text)}"
    if end.what == "died" and end.number in _CRASHES:
        return CRASH, f"rank {rank}: {_CRASHES[end.number]}: {last_line(end.text)}"
    if is_victim:
        return AS_PROMISED, ""
    if end.what == "running":
        return HUNG, f"rank {rank} was still running"
    if end.what == "died":
        return (NAMELESS if promise.error else REFUSED), f"rank {rank} died of {end.number}: {last_line(end.text)}"
    if end.what == "returned":
        if promise.error is not None:
            return SILENT, f"rank {rank} ended without an error"
        return (AS_PROMISED, "") if is_right(rank, end.value) else (SILENT, f"rank {rank}: other values")
    if promise.error is None:
        return REFUSED, said
    if (end.seconds or 0.0) > promise.within_s:
        return LATE, f"after {end.seconds:.1f} s: {said}"
    named = ranks_named(end.text)
    if not re.search(promise.error, end.text, re.DOTALL):
        return OTHER, said
    if not promise.names <= named:
        return (MISNAMED if named - {rank} else NAMELESS), said
    if named - promise.names - promise.also - {rank}:
        return MISNAMED, said
    return AS_PROMISED, ""


def first_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[0][:400] if lines else ""


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:400] if lines else ""
