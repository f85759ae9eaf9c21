"""A part of the check: what it is given, what it finds, and the file that remembers finished ones."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import reports
import torch
from provenance import revision
from reports import read_lines


@dataclass(frozen=True)
class Outcome:
    """Of one check. problem: empty where it held."""

    name: str
    problem: str


@dataclass(frozen=True)
class Setting:
    """device: cuda; cpu in a rehearsal. kernels: by name, those that are there. Others: see the command's options."""

    device: torch.device
    kernels: Sequence[str]
    block: int
    blocks: Sequence[int]
    sizes: Sequence[int]
    steps: int
    elements: int
    model: int
    lengths: Sequence[int]
    repeats: int

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type == "cpu"


@dataclass(frozen=True)
class Section:
    """name: on the command line. about: what stands above its table and its checks."""

    name: str
    title: str
    about: str
    checks: Callable[[Setting], Iterable[Outcome]] | None = None
    table: Callable[[Setting], list[str]] | None = None


@dataclass(frozen=True)
class Found:
    """What a section found. device: its name; a section found on another, or by another revision, is run again."""

    section: str
    device: str
    revision: str
    seconds: float
    table: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.problem]


def outcome(name: str, check: Callable[[], None]) -> Outcome:
    try:
        check()
        return Outcome(name, "")
    except Exception as error:
        traceback.print_exc()
        return Outcome(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def run(section: Section, setting: Setting, device: str) -> Found:
    """All of it. What a part raises is an outcome of its own: the sections behind it are run."""
    began, table, outcomes = time.monotonic(), list[str](), list[Outcome]()

    def check() -> None:
        outcomes.extend(section.checks(setting) if section.checks is not None else ())

    def tabulate() -> None:
        table.extend(section.table(setting) if section.table is not None else ())

    for part, name in ((check, "checks"), (tabulate, "table")):
        whole = outcome(f"{section.name}: its {name} come to an end", part)
        outcomes += [whole] if whole.problem else []
    return Found(section.name, device, revision(), round(time.monotonic() - began, 1), table, outcomes)


# ---------------------------------------------------------------- finished ones


def read(path: Path) -> list[Found]:
    """What a file of JSON lines holds, the latest of each section."""
    found = {}
    for line in read_lines(path):
        found[line["section"]] = Found(**line | {"outcomes": [Outcome(**each) for each in line["outcomes"]]})
    return list(found.values())


def append(path: Path, found: Found) -> None:
    """Raises DirtyTreeError if the file is a record and the tree is no commit."""
    reports.append(path, asdict(found))
