"""Checkpoints that are either whole or not there: one folder per step, `latest` names the last that all ranks wrote.

    DIR/latest                       the name of the newest whole checkpoint
    DIR/step_00000123/stamp.json     who wrote it, and the checksum of every other file
    DIR/step_00000123/shared.pt      what all ranks have in common, written once per host
    DIR/step_00000123/rank_00002.pt  what is rank 2's own: its optimizer state with the error feedback

DIR may be one folder on a shared file system or a folder of the same name on each host's own disk: every rank reads and
writes in the DIR that it sees, and one rank of each DIR writes the common file. On separate disks a rank has to be
resumed on the host that it ran on. Modes, atomicity and what is ever deleted: see `onebit/checkpoint/files.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from onebit.checkpoint.archive import load_archive
from onebit.checkpoint.files import (
    CheckpointError,
    Sum,
    check_files,
    create,
    name_of,
    reason,
    remove,
    sync_folder,
)
from onebit.checkpoint.folder import AS_BEFORE, Checkpointing
from onebit.comm import Transport

__all__ = ["CheckpointError", "CheckpointFolder"]

_SHARED = "shared.pt"


class CheckpointFolder(Checkpointing):
    """The checkpoints of one run, as one rank sees them. Every method is called by all ranks. keep: see the base."""

    def __init__(self, folder: Path, transport: Transport, device: torch.device, keep: int | None = None):
        super().__init__(folder, transport, keep, device)

    def save(self, step: int, shared: dict, own: dict) -> None:
        """Write a checkpoint; when this returns it is on disk for all ranks. Contents as torch.load(weights_only) can
        read them. Raises CheckpointError, on all ranks, where any rank could not write, or where the folder holds a
        checkpoint of another run that is as new: `latest` and all checkpoints are untouched then, nothing is left over.
        """
        partial, is_maker = self._begin(step)
        about = {"step": step, "world_size": self.transport.world_size}

        def write() -> dict[str, Sum]:
            contents = {_own_file(self.transport.rank): own | about}
            if is_maker:
                contents[_SHARED] = shared | about
            sums = {name: _write(partial / name, content) for name, content in contents.items()}
            sync_folder(partial)
            return sums

        def on_makers(work: Callable[..., None], *args: object, said: str = "") -> None:
            self.together(work if is_maker else lambda *_: None, *args, hint=lambda: said)

        try:
            mine = self.together(write, hint=lambda: AS_BEFORE)
            spelled = self._gather(json.dumps({name: [one.size, one.crc32] for name, one in mine.items()}))
            sums = {name: Sum(*pair) for said in spelled for name, pair in json.loads(said).items()}
            on_makers(self._files.seal, partial, about | {"save": partial.name}, sums | mine, said=AS_BEFORE)
            on_makers(self._files.publish, partial)
        except BaseException:
            if is_maker:
                remove(partial)
            raise
        on_makers(self._files.point_at, name_of(step))
        on_makers(self._files.prune, name_of(step), self.keep)

    def load(self) -> tuple[dict, list[dict]] | None:
        """(what is shared, [what is this rank's own]) of the newest checkpoint that all ranks have; None without one.

        Where it was written by another number of ranks, the list holds what each of those had, in rank order. Raises
        CheckpointError, on all ranks, where it is damaged, or where one rank does not see the files of all old ranks;
        the text names the newest one that is whole.
        """
        name = self._find()
        if name is None:
            return None
        stamp = self._whole(name)
        contents = self.together(self._read, name, stamp["world_size"], hint=lambda: self._offer(name))
        self._go_on_from(stamp)
        return contents

    def _check(self, name: str) -> dict:
        target = self.folder / name
        stamp = self._files.stamp(name)
        if _SHARED not in stamp["files"]:
            raise CheckpointError(f"{self.folder} holds a run with --zero: resume with it, or name another folder")
        check_files(target, stamp, [_SHARED, *self._own_files(target, stamp["world_size"])])
        return stamp

    def _read(self, name: str, world_size: int) -> tuple[dict, list[dict]]:
        target = self.folder / name
        return _load(target / _SHARED), [_load(target / own) for own in self._own_files(target, world_size)]

    def _own_files(self, target: Path, world_size: int) -> list[str]:
        """The names of this rank's own file, or of those of all ranks of another world."""
        if world_size == self.transport.world_size:
            return [_own_file(self.transport.rank)]
        names = []
        for rank in range(world_size):
            names.append(_own_file(rank))
            if not (target / names[-1]).exists():
                raise CheckpointError(
                    f"{target} was written by {world_size} ranks, and {names[-1]} is not here; resume with as many, or "
                    "copy all their files to where every rank sees them"
                )
        return names

    def _advice(self, name: str) -> str:
        return f"to resume from it, write its name into {self.folder / 'latest'}"


def _own_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _write(path: Path, content: dict) -> Sum:
    with create(path) as file:
        torch.save(content, file)
    return file.raw.sum


def _load(path: Path) -> dict:
    try:
        content = load_archive(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} cannot be read: it holds a {type(content).__name__}")
    return content
