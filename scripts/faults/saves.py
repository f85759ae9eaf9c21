"""Saves that are cut off: killed at every call that changes a file, torn writes, lost power, a full disk, a broken one.

`shim.c`, preloaded, counts these calls and strikes at the n-th. A save of each kind of checkpoint runs first
unharmed, for its list of calls; then once for every call and way to strike, in a process of its own. Afterwards another
process loads what is there: the checkpoint before or the new one, to the bit; the next save must work, and leave
nothing but checkpoints.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from faults.case import HUNG, NAMELESS, REFUSED, REMAINS, SILENT, Case, End, Outcome, Tools, first_line
from faults.kinds import ENGINE, IN_BACKGROUND, REPLICAS, Kind, named
from faults.ranks import call_in_fork

KILL, TORN, POWER, FULL, EIO = range(5)
_MODES = {KILL: "killed before", TORN: "killed after half of", POWER: "power lost before", FULL: "disk full from",
          EIO: "EIO in"}  # fmt: skip
_MAKES = ("open", "write", "mkdir", "truncate", "link")
_WHOLE = re.compile(r"latest|step_\d+")
_PATIENCE_S = 60.0


# ---------------------------------------------------------------- the shim


def why_no_shim() -> str:
    """Why calls cannot be counted in this process; empty where they can."""
    if hasattr(ctypes.CDLL(None), "faults_arm"):
        return ""
    return "faults/shim.c is not preloaded: faults.py does it where a C compiler is found"


def _arm(folder: Path, at: int, mode: int, log: Path) -> None:
    """Strike at this call (0: at none). log: gets all calls."""
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    ctypes.CDLL(None).faults_arm(os.fsencode(folder), ctypes.c_long(at), mode, file)


# ---------------------------------------------------------------- what is struck


@dataclass(frozen=True)
class Story:
    """What was saved before, and the save that is struck."""

    name: str
    before: Sequence[float]
    struck: float

    @property
    def allowed(self) -> set[float | None]:
        """What may be found after a kill."""
        return {self.before[-1] if self.before else None, self.struck}


STORIES = (
    Story("the first save", [], 1.0),
    Story("the third save", [1.0, 2.0], 3.0),
    Story("a save of the same step again", [1.0, 2.0], 2.5),
)
_NEXT = 9.0


# ---------------------------------------------------------------- strikes


def _calls(kind: Kind, story: Story, folder: Path) -> list[str]:
    """The calls of an unharmed save, in order: "rename latest"."""
    log = folder / "calls"

    def work() -> None:
        save, _ = kind.open(folder / "run")
        for value in story.before:
            save(value)
        _arm(folder / "run", 0, KILL, log)
        save(story.struck)

    end = call_in_fork(work, _PATIENCE_S)
    if end.what != "returned":
        raise RuntimeError(f"a save of {kind.name} fails without any fault: {end.text}")
    return log.read_text().splitlines()


def _strike(kind: Kind, story: Story, folder: Path, at: int, mode: int, log: Path) -> End:
    """Save with a strike. Value: None, or what happened where the process lived on: [error or None, what it loads]."""

    def work() -> list[object]:
        save, load = kind.open(folder)
        for value in story.before:
            save(value)
        _arm(folder, at, mode, log)
        error = None
        try:
            save(story.struck)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        ctypes.CDLL(None).faults_disarm()
        return [error, load()]

    return call_in_fork(work, _PATIENCE_S)


def _load_and_go_on(kind: Kind, folder: Path) -> End:
    """In a new process: [what is found, what is found after one more save, what else lies there]."""

    def work() -> list[object]:
        save, load = kind.open(folder)
        found = load()
        save(_NEXT)
        return [found, load(), _remains(folder)]

    return call_in_fork(work, _PATIENCE_S)


def _remains(folder: Path) -> list[str]:
    tops = [path.name for path in folder.iterdir() if not _WHOLE.fullmatch(path.name)]
    inside = [path.relative_to(folder) for path in folder.glob("step_*/*") if "tmp" in path.name]
    return sorted([*tops, *map(str, inside)])


def _judge_kill(fault: str, story: Story, after: End) -> Outcome:
    if after.what != "returned":
        return Outcome(fault, HUNG if after.what == "running" else REFUSED, f"the next run: {first_line(after.text)}")
    found, then, remains = after.value  # type: ignore[misc]
    if found not in story.allowed:
        return Outcome(fault, SILENT, f"the next run loads {named(found)}, expected {_or(story)}")
    if then != _NEXT:
        return Outcome(fault, SILENT, f"after the next save it loads {named(then)}")
    if remains and story.before:  # of a run that had saved nothing yet, the next one cannot know what was its own
        return Outcome(fault, REMAINS, f"after the next save: {remains[:3]}")
    return Outcome(fault)


def _judge_error(fault: str, story: Story, struck: End, after: End) -> Outcome:
    """A save whose disk fails says so and leaves the checkpoint before. None where only making room has failed."""
    if struck.what != "returned":
        return Outcome(fault, HUNG if struck.what == "running" else REFUSED, f"the run: {first_line(struck.text)}")
    error, found = struck.value  # type: ignore[misc]
    if error is None and (found != story.struck or not re.search(r": (unlink|rmdir|mkdir) ", fault)):
        return Outcome(fault, SILENT, f"no error, and the run loads {named(found)}")
    if error is not None and not re.search(r"^CheckpointError: .*rank \d", error):
        return Outcome(fault, NAMELESS, first_line(error))
    if found not in story.allowed:
        return Outcome(fault, SILENT, f"the run loads {named(found)}, expected {_or(story)}")
    return _judge_kill(fault, story, after)


def _or(story: Story) -> str:
    return " or ".join(map(named, story.allowed))


def _strikes(kind: Kind, story: Story, modes: Sequence[int], quick: int, full: int | None, tools: Tools) -> Iterator:
    calls = _calls(kind, story, tools.folder)
    faults = [(at, mode) for mode in modes for at, call in enumerate(calls, 1) if _is_struck(mode, call)]
    for number, (at, mode) in enumerate(tools.some(faults, quick, full)):
        folder, log = tools.folder / str(number), tools.folder / "calls"
        struck = _strike(kind, story, folder, at, mode, log)
        hit = [line[1:] for line in log.read_text().splitlines() if line.startswith("!")]
        if hit:  # threads of ranks: the save may have taken fewer calls this time
            fault = f"{_MODES[mode]} call {at} of {len(calls)}: {hit[0]}"
            after = _load_and_go_on(kind, folder)
            is_alive = mode in (FULL, EIO)
            yield _judge_error(fault, story, struck, after) if is_alive else _judge_kill(fault, story, after)
        shutil.rmtree(folder, ignore_errors=True)


def _is_struck(mode: int, call: str) -> bool:
    name = call.split()[0]
    if mode == TORN:
        return name == "write"
    if mode == POWER:
        return name in ("rename", "fsync", "mkdir")
    return mode != FULL or name in _MAKES


def cases() -> Iterator[Case]:
    kill = "SIGKILL before each call that changes a file, in the middle of each write, and with unsynced data lost"
    fail = "ENOSPC from each such call on, and EIO in each"
    for kind in (REPLICAS, ENGINE, IN_BACKGROUND):
        for story in STORIES:
            yield Case(
                f"{kind.name}: {story.name}, killed",
                "the checkpoint before or the new one loads, whole; the next save works and leaves nothing but the "
                "hidden folder of a first save, of which no run knows whose it is",
                kill,
                "another process loads, saves, lists the folder",
                partial(_strikes, kind, story, (KILL, TORN, POWER), 3, 60 if "background" in kind.name else None),
                is_quick=story.name == "a save of the same step again" and "background" not in kind.name,
                cost_s=12.0,
                why_not=why_no_shim,
            )
        story = STORIES[1]
        yield Case(
            f"{kind.name}: {story.name}, the disk fails",
            "CheckpointError that names the rank, on all; the checkpoint before loads; the next save works",
            fail,
            "the run's error, what it loads then, and what another process loads",
            partial(_strikes, kind, story, (FULL, EIO), 3, 40),
            is_quick=kind.name == "engine",
            cost_s=12.0,
            why_not=why_no_shim,
        )
