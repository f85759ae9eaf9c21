"""Checkpoints that are either whole or not there: one folder per step, `latest` names the last that all ranks wrote.

    DIR/latest                       the name of the newest whole checkpoint
    DIR/step_00000123/shared.pt      what all ranks have in common, written once per host
    DIR/step_00000123/rank_00002.pt  what is rank 2's own: its optimizer state with the error feedback

DIR may be one folder on a shared file system or a folder of the same name on each host's own disk: every rank reads and
writes in the DIR that it sees, and one rank per host writes the common file. On separate disks a rank has to be resumed
on the host that it ran on. Files are written under a temporary name, flushed to disk and renamed; `latest` is renamed
last, after a vote. The last two checkpoints are kept.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch

from onebit.comm import Transport
from onebit.replicas import gather_bytes, raise_together

T = TypeVar("T")

_STEP = re.compile(r"step_(\d{8})")
_UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Raised on all ranks together, with the same text."""


class CheckpointFolder:
    """The checkpoints of one run, as one rank sees them. Every method is called by all ranks."""

    def __init__(self, folder: Path, link: Transport, device: torch.device):
        self.folder = folder
        self._link, self._device = link, device
        self._previous: int | None = None
        self._together(lambda: folder.mkdir(parents=True, exist_ok=True))
        self._writes_shared = link.rank == self._first_rank_on_this_host()

    def is_empty(self) -> bool:
        """Whether no rank finds a whole checkpoint here."""
        return max(self._newest_steps()) < 0

    def save(self, step: int, shared: dict, own: dict) -> None:
        """Write a checkpoint; when this returns it is on disk for all ranks. Contents as torch.load(weights_only) can
        read them. Raises CheckpointError, on all ranks, where any rank could not write: `latest` is untouched then.
        """
        target = self.folder / _name(step)

        def write() -> None:
            target.mkdir(exist_ok=True)
            stamp = {"step": step, "world_size": self._link.world_size}
            if self._writes_shared:
                self._write(target / "shared.pt", lambda file: torch.save(shared | stamp, file))
            self._write(_own_file(target, self._link.rank), lambda file: torch.save(own | stamp, file))
            _sync_folder(self.folder)

        self._together(write)
        self._together((target / "shared.pt").stat)
        if self._writes_shared:
            self._write(self.folder / "latest", lambda file: file.write(f"{_name(step)}\n".encode()))
            self._remove_all_but({step, self._previous})
        self._previous = step

    def load(self) -> tuple[dict, list[dict]] | None:
        """(what is shared, [what is this rank's own]) of the newest checkpoint that all ranks have; None without one.

        Where it was written by another number of ranks, the list holds what each of those had, in rank order. Raises
        CheckpointError, on all ranks, where it is damaged, or where one rank does not see the files of all old ranks.
        """
        steps = self._newest_steps()
        if max(steps) < 0:
            return None
        if min(steps) < 0:
            missing = [rank for rank, step in enumerate(steps) if step < 0]
            raise CheckpointError(
                f"rank {missing} find no checkpoint in {self.folder}, the others have {_name(max(steps))}; "
                "start the ranks on the hosts they ran on, or copy the folder there"
            )
        step = min(steps)
        contents = self._together(lambda: self._read(step), hint=lambda: self._intact_before(step))
        self._previous = step
        return contents

    def _read(self, step: int) -> tuple[dict, list[dict]]:
        target = self.folder / _name(step)
        if (target / "stamp.json").exists():
            raise CheckpointError(f"{self.folder} holds a run with --zero: resume with it, or name another folder")
        shared = _read_file(target / "shared.pt")
        if shared["world_size"] == self._link.world_size:
            return shared, [_read_file(_own_file(target, self._link.rank))]
        files = [_own_file(target, rank) for rank in range(shared["world_size"])]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"rank {self._link.rank}: {target} was written by {shared['world_size']} ranks, and {missing[0]} is "
                f"not here; resume with as many, or copy all their files to where every rank sees them"
            )
        return shared, [_read_file(file) for file in files]

    def _intact_before(self, step: int) -> str:
        """Tell of an older checkpoint that every rank can read. All ranks, after a failure."""
        older = max((other for other in self._steps_here() if other < step), default=-1)
        if older >= 0 and self._attempt(lambda: self._read(older))[1] is not None:
            older = -1
        steps = set(self._gather_steps(older))
        if len(steps) > 1 or steps == {-1}:
            return "; no older checkpoint is intact on all ranks"
        return f"; {_name(older)} is intact: to resume from it, write its name into {self.folder / 'latest'}"

    def _together(self, work: Callable[[], T], hint: Callable[[], str] = lambda: "") -> T:
        """work() on every rank; where it fails on one, CheckpointError on all."""
        result, problem = self._attempt(work)
        raise_together(self._link, problem, CheckpointError, self._device, hint)
        return cast(T, result)

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """(what work() returned, what went wrong): one of them is None."""
        try:
            return work(), None
        except CheckpointError as error:
            return None, str(error)
        except _UNREADABLE as error:
            return None, f"rank {self._link.rank}: {error}"

    def _write(self, path: Path, write: Callable) -> None:
        temporary = path.with_name(f"{path.name}.tmp{self._link.rank}")
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)

    def _newest_steps(self) -> list[int]:
        """The step that each rank's `latest` names; -1 where there is none."""
        return self._gather_steps(self._together(self._read_latest))

    def _read_latest(self) -> int:
        latest = self.folder / "latest"
        if not latest.exists():
            return -1
        name = latest.read_text().strip()
        if not (match := _STEP.fullmatch(name)):
            raise CheckpointError(f"{latest} holds {name!r}; expected the name of a checkpoint, as step_00000123")
        return int(match[1])

    def _gather_steps(self, step: int) -> list[int]:
        rows = gather_bytes(self._link, step.to_bytes(8, "little", signed=True), self._device)
        return [int.from_bytes(row, "little", signed=True) for row in rows]

    def _steps_here(self) -> list[int]:
        return [int(match[1]) for path in self.folder.iterdir() if (match := _STEP.fullmatch(path.name))]

    def _remove_all_but(self, keep: set[int | None]) -> None:
        for step in set(self._steps_here()) - keep:
            shutil.rmtree(self.folder / _name(step), ignore_errors=True)

    def _first_rank_on_this_host(self) -> int:
        status = self.folder.stat()
        identity = f"{socket.gethostname()} {status.st_dev} {status.st_ino}".encode()[-128:].ljust(128)
        return gather_bytes(self._link, identity, self._device).index(identity)


def _own_file(target: Path, rank: int) -> Path:
    return target / f"rank_{rank:05d}.pt"


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _read_file(path: Path) -> dict:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _sync_folder(folder: Path) -> None:
    """Make the renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
