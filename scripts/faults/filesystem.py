"""Faults at any call that changes a file system: a kill, a full disk, a write that is torn.

    with Faults(folder) as seen:                     # seen.calls: what a save does, in order
        save()
    for n in range(len(seen.calls)):
        with Faults(folder, at=n, fault="die"):      # as `kill -9` there: the rest of the program changes nothing
            save()                                   # raises Died

Counted are Python's calls in `os`, in all threads, on paths under `folder` and on files that were opened there; what
C++ or Rust libraries write by themselves is not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

_ON_PATHS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "truncate", "symlink", "link", "chmod")
_ON_FILES = ("write", "fsync", "ftruncate", "fchmod")


class Died(BaseException):
    """The program ended here."""


class Faults:
    """Counts calls; the one with the number `at`, from 0, meets the fault.

    fault: "die": this call and all later ones in the context raise Died and change nothing. "kill": SIGKILL, for a
    process of its own. A number of `errno`: this call fails so, and if it writes, all later writes do. Half of what
    that call was to write is written, as a disk may. calls: "name path" of every call.
    """

    def __init__(self, folder: Path, at: int | None = None, fault: str | int = "die"):
        self.calls: list[str] = []
        self._folder, self._at, self._fault = str(folder.resolve()), at, fault
        self._lock = threading.Lock()
        self._open: dict[int, str] = {}
        self._patches: list = []
        self._real = {name: getattr(os, name) for name in (*_ON_PATHS, *_ON_FILES, "open", "close")}

    def __enter__(self) -> Faults:
        patched: dict[str, Callable] = {name: self._on_path(name) for name in _ON_PATHS}
        patched |= {name: self._on_file(name) for name in _ON_FILES}
        patched |= {"open": self._on_open, "close": self._on_close}
        # One by one: os.supports_dir_fd and the like hold the functions as they were.
        self._patches = [mock.patch.object(os, name, function) for name, function in patched.items()]
        self._supports = [
            mock.patch.object(os, name, {*getattr(os, name), *patched.values()})
            for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")
        ]
        for patch in (*self._patches, *self._supports):
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in (*self._patches, *self._supports):
            patch.stop()

    @property
    def has_struck(self) -> bool:
        return self._at is not None and len(self.calls) > self._at

    def _path(self, path: object, dir_fd: int | None = None) -> str | None:
        """The path, where it is under the folder."""
        if isinstance(path, int):
            return self._open.get(path)
        text = os.fsdecode(path)  # type: ignore[arg-type]
        if dir_fd is not None:
            return f"{self._open[dir_fd]}/{text}" if dir_fd in self._open else None
        text = os.path.abspath(text)
        return text if text.startswith(self._folder) else None

    def _count(self, name: str, path: str, torn: Callable[[], object] = lambda: None) -> None:
        with self._lock:
            number = len(self.calls)
            self.calls.append(f"{name} {os.path.relpath(path, self._folder)}")
        if self._at is None or number < self._at:
            return
        if number == self._at:
            torn()
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "die":
            raise Died(self.calls[self._at])
        if number == self._at or name == "write":
            raise OSError(self._fault, os.strerror(int(self._fault)), path)

    def _on_path(self, name: str) -> Callable:
        def call(path: object, *args: object, **named: object) -> object:
            dir_fd = named.get("dir_fd", named.get("src_dir_fd"))
            if (where := self._path(path, dir_fd)) is not None:  # type: ignore[arg-type]
                self._count(name, where)
            return self._real[name](path, *args, **named)

        return call

    def _on_file(self, name: str) -> Callable:
        def call(file: int, *args: object) -> object:
            if (where := self._open.get(file)) is not None:
                half = (args[0][: len(args[0]) // 2],) if name == "write" else None  # type: ignore[index, arg-type]
                self._count(name, where, lambda: half and self._real[name](file, *half))
            return self._real[name](file, *args)

        return call

    def _on_open(self, path: object, flags: int, *args: object, **named: object) -> int:
        where = self._path(path, named.get("dir_fd"))  # type: ignore[arg-type]
        if where is not None and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            self._count("open", where)
        file = self._real["open"](path, flags, *args, **named)
        if where is not None:
            self._open[file] = where
        return int(file)

    def _on_close(self, file: int) -> None:
        self._open.pop(file, None)
        self._real["close"](file)
