"""Checkpointing: how all ranks of a run save and load checkpoints in one folder.

They agree before any of them continues: on the folder to write, on the checkpoint to load, on errors. `files.py`
handles the files of one rank; `scripts/train/checkpoint.py` and `zero/checkpoint/files.py` define their content.
"""

from __future__ import annotations

import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar, cast

import torch

from ..comm import PeerError, Transport
from ..comm.messages import gather_texts, raise_on_all_ranks
from ..usage.contract import State
from .files import CheckpointError, CheckpointFiles, name_of, reason, remove, step_of

log = logging.getLogger(__name__)

T = TypeVar("T")

AS_BEFORE = "; the checkpoints before it are as they were"


def is_empty(folder: Path, transport: Transport, device: torch.device | None = None) -> bool:
    """Whether no rank finds a checkpoint in the folder, complete or not. All ranks."""
    found = bool(CheckpointFiles(folder, "").names()) or (folder / "latest").exists()
    return "found" not in gather_texts(transport, "found" if found else "nothing", device)


class Checkpointing(ABC):
    """The checkpoints of one run in one folder. All ranks call every method, which ends the same on all of them.

    Args:
        folder: Folder of the checkpoints.
        transport: Connection to the other ranks.
        keep: Number of this run's newest checkpoints to keep. None: all. Those of other runs always stay.
        device: Device of small messages. Default None: the transport's choice.

    Attributes:
        keep: The same.
        may_replace: Whether checkpoints of other runs may be replaced: from the first that is saved or loaded on.
    """

    _unreadable: ClassVar[tuple[type[BaseException], ...]] = (Exception,)

    def __init__(self, folder: Path, transport: Transport, keep: int | None, device: torch.device | None = None):
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, or None for all, got {keep}")
        self.folder, self.transport, self.keep, self._device = Path(folder), transport, keep, device
        self._files = CheckpointFiles(self.folder, self._token())
        self.may_replace = False

    @abstractmethod
    def _check(self, name: str) -> State:
        """A checkpoint's stamp. Raises CheckpointError unless this rank's part of its files is undamaged."""

    @abstractmethod
    def _advice(self, name: str) -> str:
        """How a user loads this checkpoint instead of the latest, for an error message."""

    # ---------------------------------------------------------------- saving

    def _begin(self, step: int, *, is_shared: bool = False) -> tuple[Path, bool]:
        """Make the hidden folder in which a checkpoint is written. Returns it, and whether this rank made it.

        If ranks see different disks, one rank of each makes it; with is_shared that is an error. Raises
        CheckpointError.
        """
        partial, is_maker = self._files.hidden(name_of(step), self._token(), "new"), False
        try:
            while blind := self._ranks_where(not partial.is_dir()):
                if is_shared and 0 not in blind:
                    raise CheckpointError(
                        f"rank {blind[0]} does not see files that rank 0 makes in {self.folder}: choose a folder that "
                        "all ranks share"
                    )
                is_next = blind[0] == self.transport.rank
                is_maker = is_maker or is_next
                self.together(self._make if is_next else lambda _: None, partial)
        except BaseException:
            if is_maker:
                remove(partial)
            raise
        self.may_replace = True
        return partial, is_maker

    def _make(self, partial: Path) -> None:
        self._files.begin(partial, is_known=self.may_replace)

    # ---------------------------------------------------------------- loading

    def _find(self, tag: str | None = None) -> str | None:
        """The name of the checkpoint to load: the tag, else the latest; None if no rank has any.

        If `latest` is lost, damaged or names nothing, it is the newest undamaged one, and rank 0 logs that. Raises
        CheckpointError if there is none, or if some ranks have checkpoints and others do not.
        """
        if tag:
            return tag
        latest, problem = self._attempt(self._latest)
        rows = [json.loads(answer) for answer in self._gather(json.dumps([latest, problem, self._files.names()]))]
        names = {name for latest, _, names in rows for name in (*names, latest) if name}
        if not names and not any(problem for _, problem, _ in rows):
            return None
        if without := [rank for rank, row in enumerate(rows) if not any(row)]:
            raise CheckpointError(
                f"rank {without} find no checkpoint in {self.folder}, the others have {max(names, key=step_of)}; "
                "start the ranks on the hosts they ran on, or copy the folder there"
            )
        newest = max(names, key=step_of, default=None)
        if all(latest for latest, _, _ in rows):
            name = min((latest for latest, _, _ in rows), key=step_of)
            if newest != name and self.transport.rank == 0:
                log.warning("%s names %s, but there is a newer %s", self.folder / "latest", name, newest)
            return cast(str, name)
        lost = next((problem for _, problem, _ in rows if problem), f"{self.folder / 'latest'} is missing")
        name = self._newest_whole()
        if name is None:
            raise CheckpointError(
                f"{lost}, and no checkpoint in {self.folder} is whole; restore one from a copy, or start in another "
                "folder"
            )
        if self.transport.rank == 0:
            log.warning("%s; taking %s, the newest checkpoint that is whole", lost, name)
        return name

    def _latest(self) -> str | None:
        """As `CheckpointFiles.latest`. Raises CheckpointError also if the checkpoint of that name is missing."""
        name = self._files.latest()
        if name is not None:
            self._files.recover(name)
            if not (self.folder / name).exists():
                raise CheckpointError(f"{self.folder / 'latest'} names {name}, which is not there")
        return name

    def _whole(self, name: str) -> State:
        """The stamp of a checkpoint, after all ranks have found it undamaged."""
        self.together(self._files.recover, name)
        stamp = self.together(self._check, name, hint=lambda: self._offer(name))
        if len(set(self._gather(str(stamp.get("save"))))) > 1:
            raise CheckpointError(
                f"{self.folder / name} was written twice, and some ranks have the first of them{self._offer(name)}"
            )
        return stamp

    def _go_on_from(self, stamp: State) -> None:
        """Continue the run that wrote the checkpoint: from now on its number is this run's."""
        self._files.run = stamp.get("run", self._files.run)
        self.may_replace = True

    def _newest_whole(self, but: str | None = None) -> str | None:
        every: list[set[str]] = [set(json.loads(answer)) for answer in self._gather(json.dumps(self._files.names()))]
        for name in sorted(set.intersection(*every) - {but}, key=step_of, reverse=True):
            stamp, _ = self._attempt(self._check, name)
            writings = set(self._gather("damaged" if stamp is None else str(stamp.get("save"))))
            if len(writings) == 1 and writings != {"damaged"}:
                return name
        return None

    def _offer(self, damaged: str) -> str:
        name = self._newest_whole(but=damaged)
        if name is None:
            return "; no other checkpoint here is whole: restore the file from a copy, or start in another folder"
        return f"; {name} is whole: {self._advice(name)}"

    # ---------------------------------------------------------------- together

    def together(self, work: Callable[..., T], *args: object, hint: Callable[[], str] = lambda: "") -> T:
        """Run work(*args) on every rank; if it fails on one, raise CheckpointError on all."""
        result, problem = self._attempt(work, *args)
        raise_on_all_ranks(self.transport, problem, CheckpointError, self._device, hint)
        return cast(T, result)

    def _attempt(self, work: Callable[..., T], *args: object) -> tuple[T | None, str | None]:
        """(result of work, None), or (None, text of the error)."""
        try:
            return work(*args), None
        except PeerError:
            raise
        except self._unreadable as error:
            log.debug("rank %d: %s", self.transport.rank, error, exc_info=True)
            return None, self._problem(error)

    def _problem(self, error: BaseException) -> str:
        return f"rank {self.transport.rank}: {error if isinstance(error, CheckpointError) else reason(error)}"

    def _ranks_where(self, fact: bool) -> list[int]:
        return [rank for rank, answer in enumerate(self._gather(str(int(fact)))) if answer == "1"]

    def _token(self) -> str:
        """A random text, the same on all ranks."""
        return self._gather(secrets.token_hex(8))[0]

    def _gather(self, text: str) -> list[str]:
        return gather_texts(self.transport, text, self._device)
