"""Checkpoints as files: complete or absent, checked by CRC-32, private to their owner. No communication.

    DIR/latest                    the name of the checkpoint that was saved last: step_00000123
    DIR/step_00000123/stamp.json  step, run, ...; size and CRC-32 of every other file, and its own CRC-32
    DIR/step_00000123/*           the saved files
    DIR/.step_00000123.*          a checkpoint that is being written, replaced or removed; or was, when a run was killed

A checkpoint is written in a hidden folder, flushed, and renamed; then `latest` is replaced. Hidden names are random. A
run marks its checkpoints with its number, and removes no others. Files have mode 0600 and folders 0700, whatever the
umask: to share a checkpoint, chmod it. CRC-32 finds accidents (any flipped bit, any burst of 32); it is no signature.
`folder.py` does the same for all ranks of a run; `scripts/train/checkpoint.py` and `zero/checkpoint/files.py` use it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..usage.contract import State

log = logging.getLogger(__name__)

STAMP = "stamp.json"
_NAME = re.compile(r"step_(\d{8,})")
# new: being written; old: being replaced; gone: being removed; partial: being written, before runs had numbers.
_HIDDEN = re.compile(r"\.(step_\d{8,}|latest)\.(?:(\w+)-\w+\.)?(new|old|gone|partial)")
_PIECE = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Raised on all ranks with the same text, which names the first rank."""


@dataclass(frozen=True)
class Sum:
    """The length of a file in bytes and the CRC-32 of its content."""

    size: int
    crc32: int


# ---------------------------------------------------------------- single files


class SummedFile(io.RawIOBase):
    """A new file that is written from beginning to end, and its sum. Raises FileExistsError, for a link too.

    It is on disk once it is closed. failure: the system's first error, which libraries hide under their own.
    """

    def __init__(self, path: Path):
        self.failure: OSError | None = None
        self._size, self._crc32 = 0, 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def sum(self) -> Sum:
        """Sum of the data written so far."""
        return Sum(self._size, self._crc32)

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        with self._remembering_failure():
            count = os.write(self._descriptor, view)
        self._crc32 = zlib.crc32(view[:count], self._crc32)
        self._size += count
        return count

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            with self._remembering_failure():
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    @contextmanager
    def _remembering_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise


@contextmanager
def create(path: Path) -> Iterator[io.BufferedWriter[SummedFile]]:
    """A new file to write to. At the end of the block it is on disk, and `.raw.sum` is its sum.

    Raises the system's OSError, even if the library that writes raises another one.
    """
    raw = SummedFile(path)
    try:
        with io.BufferedWriter(raw, _PIECE) as file:
            yield file
    except Exception as error:
        if raw.failure is None:
            raise
        raise OSError(raw.failure.errno, raw.failure.strerror, str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden path beside `path`. The file that the block writes there replaces `path`; none stays if it raises."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        yield hidden
        os.replace(hidden, path)
    except BaseException:
        remove(hidden)
        raise


def sum_of(path: Path) -> Sum:
    """Sum of a file on disk. Reads all of it, through 1 MiB of memory. Raises OSError."""
    with open_regular(path) as file:
        size, crc32, piece = 0, 0, memoryview(bytearray(_PIECE))
        while count := file.readinto(piece):
            crc32 = zlib.crc32(piece[:count], crc32)
            size += count
    return Sum(size, crc32)


def open_regular(path: Path) -> io.FileIO:
    """Open a file to read. Raises OSError if it is not a regular file: opening a pipe would wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    return path.open("rb", buffering=0)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that new and renamed files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and the folders above it that do not exist."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)


# ---------------------------------------------------------------- the checkpoints of a folder


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def is_name(text: str) -> bool:
    """Whether `name_of` gives this name for some step."""
    return _NAME.fullmatch(text) is not None


def step_of(name: str) -> int:
    return int(name.removeprefix("step_"))


@dataclass
class CheckpointFiles:
    """The checkpoints in one folder. Only one rank writes, or one on each host if DIR is on that host's own disk.

    run: number of the current run, which removes only checkpoints with this number.
    """

    folder: Path
    run: str
    _has_warned: bool = field(default=False, init=False)

    def names(self) -> list[str]:
        """Names of all checkpoints, complete or not, the newest first."""
        if not self.folder.is_dir():
            return []
        return sorted((p.name for p in self.folder.iterdir() if _NAME.fullmatch(p.name)), key=step_of, reverse=True)

    def latest(self) -> str | None:
        """The name in `latest`; None without that file. Raises CheckpointError if it contains no name."""
        try:
            with open_regular(self.folder / "latest") as file:
                name = file.readall().decode().strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder / 'latest'} cannot be read: {error}") from error
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{self.folder / 'latest'} holds {name[:99]!r}, not a name as step_00000123")
        return name

    def stamp(self, name: str) -> State:
        """A checkpoint's stamp. Raises CheckpointError if it is missing or damaged."""
        return read_stamp(self.folder / name)

    def is_own(self, name: str) -> bool:
        """Whether this run wrote it."""
        try:
            return self.stamp(name).get("run") == self.run
        except CheckpointError:
            return False

    def recover(self, name: str) -> None:
        """Finish replacing a checkpoint if a kill came between the two renames. Any rank, also several at once."""
        target = self.folder / name
        if target.exists() or not self.folder.is_dir():
            return
        for hidden in sorted(self.folder.glob(f".{name}.*")):  # ".new" before ".old"
            if not (match := _HIDDEN.fullmatch(hidden.name)) or match[3] == "gone":
                continue
            try:
                read_stamp(hidden)
                os.rename(hidden, target)
            except CheckpointError:
                continue
            except OSError:
                if not target.exists():  # if it exists, another rank was faster
                    raise
            sync_folder(self.folder)
            return

    def hidden(self, name: str, token: str, suffix: str) -> Path:
        """Path of a checkpoint that is being written ("new"), replaced ("old") or removed ("gone"). token: random."""
        return self.folder / f".{name}.{self.run}-{token}.{suffix}"

    def begin(self, partial: Path, *, is_known: bool) -> None:
        """Make the hidden folder of a new checkpoint, and remove remains that this run left when it was killed.

        is_known: this run has saved or loaded here. If not, raises CheckpointError if another run has a checkpoint of
        the same step or a later one.
        """
        make_folder(self.folder)
        self._clear()
        step = step_of(_name_of_hidden(partial))
        others = [name for name in self.names() if step_of(name) >= step]
        if others and not is_known:
            raise CheckpointError(
                f"{self.folder} holds {others[0]}, which this run did not write and which is not older than its step "
                f"{step}; load it to go on from it, or save to another folder"
            )
        os.mkdir(partial, 0o700)

    def _clear(self) -> None:
        strange = []
        for path in sorted(self.folder.glob(".*")):  # ".new" before ".old"
            if not (match := _HIDDEN.fullmatch(path.name)):
                continue
            if match[2] == self.run:
                self.recover(match[1])
                remove(path)
            else:
                strange.append(path.name)
        if strange and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s holds %s, which another run was writing; remove %s if no other run is at work here",
                self.folder,
                ", ".join(strange[:5]) + (" ..." if len(strange) > 5 else ""),
                "it" if len(strange) == 1 else "them",
            )

    def commit(
        self,
        partial: Path,
        stamp: Mapping[str, object],
        sums: Mapping[str, Sum],
        keep: int | None,
        *,
        is_latest: bool = True,
    ) -> None:
        """Seal and publish a hidden folder whose files are written, then prune. For one rank that writes for all."""
        name = _name_of_hidden(partial)
        self.seal(partial, stamp, sums)
        self.publish(partial)
        if is_latest:
            self.point_at(name)
        self.prune(name, keep)

    def seal(self, partial: Path, stamp: Mapping[str, object], sums: Mapping[str, Sum]) -> None:
        """Write the stamp of a hidden folder, after all its other files."""
        content = dict(stamp) | {
            "run": self.run,
            "files": {name: one.size for name, one in sums.items()},
            "crc32": {name: one.crc32 for name, one in sums.items()},
        }
        content = json.loads(json.dumps(content))
        with create(partial / STAMP) as file:
            file.write(json.dumps(content | {"stamp_crc32": _crc32(content)}).encode())
        sync_folder(partial)

    def publish(self, partial: Path) -> None:
        """Give a sealed folder its name. A folder of that name is replaced, or moved aside if another run wrote it."""
        name = _name_of_hidden(partial)
        target, old = self.folder / name, partial.with_suffix(".old")
        if os.path.lexists(target):
            if not self.is_own(name):
                old = self.folder / f"{name}.aside-{secrets.token_hex(8)}"
                log.warning("%s was not written by this run: it is moved to %s", target, old.name)
            os.rename(target, old)
        os.rename(partial, target)
        sync_folder(self.folder)
        if old == partial.with_suffix(".old"):
            remove(old)

    def point_at(self, name: str) -> None:
        """Make `latest` name this checkpoint."""
        hidden = self.hidden("latest", secrets.token_hex(8), "new")
        try:
            with create(hidden) as file:
                file.write(f"{name}\n".encode())
            os.replace(hidden, self.folder / "latest")
        except Exception:
            remove(hidden)
            raise
        sync_folder(self.folder)

    def prune(self, name: str, keep: int | None) -> None:
        """Remove this run's checkpoints up to that one, except the newest `keep`; None: remove none."""
        if keep is None:
            return
        own = [other for other in self.names() if step_of(other) <= step_of(name) and self.is_own(other)]
        for other in own[keep:]:
            hidden = self.hidden(other, secrets.token_hex(8), "gone")
            with suppress(OSError):  # the next save tries again
                os.rename(self.folder / other, hidden)
                remove(hidden)


def remove(path: Path) -> None:
    """Remove a hidden file or folder, as far as possible; the next save tries again. Removes a link, not its target."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def read_stamp(target: Path) -> State:
    """The stamp of a folder. Raises CheckpointError if it is missing or damaged. Does not check the other files."""
    path = target / STAMP
    try:
        with open_regular(path) as file:
            stamp = json.loads(file.readall())
        if stamp.pop("stamp_crc32") != _crc32(stamp):
            raise ValueError("its CRC-32 is another")
        if not all(type(number) is int for number in (*stamp["files"].values(), *stamp["crc32"].values())):
            raise ValueError("its sizes and sums are no whole numbers")
        if any(Path(name).name != name for name in (*stamp["files"], stamp.get("run", "none"))):
            raise ValueError("it names other folders")
        if not (int(stamp["step"]) >= 0 and int(stamp["world_size"]) > 0):
            raise ValueError("it is of no step or no rank")
        if is_name(target.name) and step_of(target.name) != stamp["step"]:
            raise ValueError(f"it is of step {stamp['step']}, not of this folder's; the files beside it may be whole")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: {target.name} is damaged, or no checkpoint at all") from error
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {reason(error)}") from error
    return cast(State, stamp)


def check_files(target: Path, stamp: Mapping[str, Any], names: Iterable[str]) -> None:
    """Read these files of a checkpoint. Raise CheckpointError unless they are as they were written."""
    for name in names:
        path = target / name
        try:
            size, crc32 = stamp["files"][name], stamp["crc32"][name]
            found = sum_of(path)
        except (OSError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is missing or cannot be read: {reason(error)}") from error
        if found.size != size:
            raise CheckpointError(
                f"{path} is damaged, or {STAMP} beside it is of another save: it has {found.size} bytes, {size} there"
            )
        if found.crc32 != crc32:
            raise CheckpointError(
                f"{path} is damaged, or {STAMP} beside it is of another save: its CRC-32 is {found.crc32:08x}, "
                f"{crc32:08x} there"
            )


def reason(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _name_of_hidden(path: Path) -> str:
    return cast(re.Match[str], _HIDDEN.fullmatch(path.name))[1]


def _crc32(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
