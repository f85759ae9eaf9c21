"""Tiers of tests: `pytest --tier fast`, `--tier usual` and `--tier all`, each with all tests of those before it.

    fast    no processes, no network, nothing slow
    usual   without the tests marked `thorough`
    all     everything; what pytest runs without --tier

A new test needs no mark: it is in the usual tier, and in the fast one where its folder starts no processes. One that
starts a process elsewhere says so by `@pytest.mark.processes`; a fast test that starts one, or opens a socket, fails.

Of a test marked `pairwise` no tier runs the whole product of its parameters: see `pairwise`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

TIERS = ("fast", "usual", "all")
PROCESS_FOLDERS = ("processes", "net", "scripts")
NOT_FAST = ("processes", "net", "slow")
IS_THOROUGH = re.compile(r"^pytestmark = [^\]\n]*\bpytest\.mark\.thorough\b", re.MULTILINE)
"""Of files all of whose tests are."""
EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind", "socket.connect")


def folder_of(path: Path, tests: Path) -> str:
    """The first folder below tests/; empty for files of tests/ itself and for files elsewhere."""
    below = path.relative_to(tests).parts if path.is_relative_to(tests) else ()
    return below[0] if len(below) > 1 else ""


def tier_of(folder: str, marks: set[str]) -> str:
    """The first tier that a test is in."""
    if "thorough" in marks:
        return "all"
    return "usual" if folder in PROCESS_FOLDERS or marks.intersection(NOT_FAST) else "fast"


def runs_in(tier: str, first: str) -> bool:
    """Whether a test whose first tier is `first` runs in `tier`."""
    return TIERS.index(first) <= TIERS.index(tier)


def pairwise(cases: Sequence[Mapping[str, int]]) -> set[int]:
    """Which cases to run so that any two values of two parameters meet that meet in any case.

    cases: of each one a number for every parameter's value. The next one chosen always adds most pairs.
    """
    pairs = {k: set(combinations(sorted(case.items()), 2)) for k, case in enumerate(cases)}
    chosen = set[int]()
    while pairs:
        best = max(pairs, key=lambda k: len(pairs[k]))
        met = pairs.pop(best)
        chosen.add(best)
        pairs = {k: left for k, its in pairs.items() if (left := its - met)}
    return chosen


class Guard:
    """While `test` is the name of a fast test, starting a process or opening a socket raises RuntimeError."""

    def __init__(self) -> None:
        self.test = ""
        sys.addaudithook(self._check)

    def _check(self, event: str, args: tuple[object, ...]) -> None:
        if event in EVENTS and self.test:
            raise RuntimeError(f"{self.test} is in the fast tier, but {event}{args!r}: mark it `processes`")
