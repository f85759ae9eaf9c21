"""A store in one file of a folder: a few threads read and write it in the background, if possible past the page cache.

The file belongs to this run only: it is made under a new name, its space is reserved, and it is unlinked at once, so a
run that ends in any way leaves nothing on the disk. O_DIRECT moves pages between disk and buffers; if the file system
does not support it, ordinary reads and writes are used, and their pages are dropped from the page cache.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from .store import PAGE, Extent, Lease, StoreError, lock, rounded, unlock

log = logging.getLogger(__name__)

_ADVICE = "start again from the last checkpoint"


@dataclass(frozen=True)
class _Buffer:
    """Page-aligned memory, once for system calls and once for torch."""

    pages: memoryview
    tensor: Tensor


class FileStore:
    """A `Store` in a file, which has no name and disappears with the process.

    Args:
        folder: The folder for the file; it is made if missing.
        nbytes: The size in bytes, rounded up to whole pages. All of it is reserved at once.
        lease_bytes: The size of the largest lease in bytes.
        buffer_count: How many leases can be held or in progress at once, 2 or more; 4 by default.
        threads: Threads that read and write, 2 by default.
        rank: This rank, for messages and the file's temporary name; 0 by default.
        is_pinned: Whether buffers are page-locked, for copies to a GPU; False by default.

    Attributes:
        is_direct: Whether O_DIRECT is in use.

    Raises:
        StoreError: The folder is not writable, or its disk has no room.
        ValueError: buffer_count or threads is too small.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        nbytes: int,
        lease_bytes: int,
        *,
        buffer_count: int = 4,
        threads: int = 2,
        rank: int = 0,
        is_pinned: bool = False,
    ):
        if buffer_count < 2 or threads < 1:
            raise ValueError(f"expected buffer_count >= 2 and threads >= 1, got {buffer_count} and {threads}")
        self.folder, self.nbytes = Path(folder), rounded(nbytes)
        self.wait_s, self.read_bytes, self.written_bytes = 0.0, 0, 0
        self._fd, self.is_direct = make_file(self.folder, self.nbytes, rank)
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        self._buffers, self._held, self.is_pinned = buffer_count, 0, is_pinned
        for _ in range(buffer_count):
            pages = mmap.mmap(-1, max(PAGE, rounded(lease_bytes)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            tensor = torch.frombuffer(pages, dtype=torch.uint8)
            if is_pinned:
                lock(tensor)
            self._free.put(_Buffer(memoryview(pages), tensor))
        self._threads = ThreadPoolExecutor(threads, "offload")
        self._writes: list[tuple[Sequence[Extent], Future[None]]] = []
        self._map: mmap.mmap | None = None
        self._count = threading.Lock()

    # ---------------------------------------------------------------- the contract

    def read(self, extents: Sequence[Extent], *, fresh: bool = False) -> Lease:
        self._map = None  # frees the address space of `view` as soon as no tensor holds it
        self._raise_failed()
        assert self.has_lease(), "every buffer is lent out, so waiting for one would never end"
        begin = time.perf_counter()
        buffer = self._free.get()
        self.wait_s += time.perf_counter() - begin
        self._held += 1
        parts, places, at = [], [], 0
        for extent in extents:
            parts.append(buffer.tensor.narrow(0, at, extent.nbytes))
            places.append(buffer.pages[at : at + extent.nbytes])
            at += extent.nbytes
        reading = None
        if not fresh:
            reading = self._threads.submit(self._read_all, extents, places, self._writes_of(extents))

        def wait() -> list[Tensor]:
            if reading is not None:
                begin = time.perf_counter()
                reading.result()
                self.wait_s += time.perf_counter() - begin
            return parts

        return Lease(extents, wait, buffer, lambda: reading is None or (reading.done() and not reading.exception()))

    def write(self, lease: Lease) -> None:
        lease.wait()
        buffer, extents = self._end(lease), lease.extents
        writing = self._threads.submit(self._write_all, extents, buffer, self._writes_of(extents))
        self._writes.append((extents, writing))

    def drop(self, lease: Lease) -> None:
        buffer = self._end(lease)
        with suppress(StoreError):  # nobody has asked for these bytes
            lease.wait()  # the read must end before the buffer is used again
        self._free.put(buffer)

    def settle(self) -> None:
        """Nothing to do: reads and writes wait for earlier writes of the same bytes."""

    def has_lease(self) -> bool:
        return self._held < self._buffers

    def flush(self) -> None:
        begin = time.perf_counter()
        for _, writing in self._writes:
            writing.exception()  # waits; errors are raised below, after all writes have ended
        self.wait_s += time.perf_counter() - begin
        self._raise_failed()

    def view(self, offset: int, nbytes: int) -> Tensor:
        self.flush()
        self._check_size()
        if self._map is None:
            self._map = mmap.mmap(self._fd, self.nbytes)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=nbytes)

    def close(self) -> None:
        if self._fd < 0:
            return
        self._threads.shutdown(wait=True)
        self._map = None
        os.close(self._fd)
        self._fd = -1
        while not self._free.empty():
            buffer = self._free.get()
            if self.is_pinned:
                unlock(buffer.tensor)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0 and hasattr(self, "_threads"):
            self._threads.shutdown(wait=False)
            os.close(self._fd)

    def describe(self) -> str:
        how = "O_DIRECT" if self.is_direct else "the page cache, for its file system has no O_DIRECT"
        return f"{self.nbytes / 1e9:.3g} GB of a file in {self.folder}, through {how}"

    # ---------------------------------------------------------------- in the threads

    def _writes_of(self, extents: Sequence[Extent]) -> list[Future[None]]:
        """The writes in progress that overlap these ranges, for which later reads and writes must wait."""
        return [w for those, w in self._writes if any(a.overlaps(b) for a in those for b in extents)]

    def _read_all(self, extents: Sequence[Extent], places: Sequence[memoryview], earlier: list[Future[None]]) -> None:
        for writing in earlier:
            writing.result()
        self._check_size()
        for extent, place in zip(extents, places, strict=True):
            self._move(extent, place, is_read=True)

    def _write_all(self, extents: Sequence[Extent], buffer: _Buffer, earlier: list[Future[None]]) -> None:
        try:
            for writing in earlier:
                writing.exception()  # waits; each write reports its own error
            self._check_size()
            at = 0
            for extent in extents:
                self._move(extent, buffer.pages[at : at + extent.nbytes], is_read=False)
                at += extent.nbytes
            if not self.is_direct:
                os.fdatasync(self._fd)
        except OSError as error:
            raise error if isinstance(error, StoreError) else self._named(error, "written") from error
        finally:
            self._free.put(buffer)
        self._let_go(extents)

    def _move(self, extent: Extent, place: memoryview, *, is_read: bool) -> None:
        """Read or write one extent, in as many system calls as it takes. These release Python's global lock."""
        call, done = (os.preadv if is_read else os.pwritev), 0
        while done < extent.nbytes:
            try:
                moved = call(self._fd, [place[done:]], extent.offset + done)
            except OSError as error:
                raise self._named(error, "read" if is_read else "written") from error
            if moved == 0 or (is_read and moved % PAGE):
                raise StoreError(
                    errno.EIO,
                    f"{self.describe()}: {done + moved} of {extent.nbytes} bytes came from offset {extent.offset}: "
                    f"the file was cut short below this run; {_ADVICE}",
                )
            done += moved
        with self._count:
            if is_read:
                self.read_bytes += done
            else:
                self.written_bytes += done
        if is_read:
            self._let_go([extent])

    def _let_go(self, extents: Sequence[Extent]) -> None:
        if not self.is_direct:
            for extent in extents:
                os.posix_fadvise(self._fd, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)

    def _check_size(self) -> None:
        """Raise if the file was truncated: a write past its end would silently fill the gap with zeros."""
        if (found := os.fstat(self._fd).st_size) != self.nbytes:
            raise StoreError(
                errno.EIO,
                f"{self.describe()}: the file has {found} bytes now, it was cut short below this run; {_ADVICE}",
            )

    # ---------------------------------------------------------------- errors

    def _end(self, lease: Lease) -> _Buffer:
        self._held -= 1
        assert isinstance(lease.buffer, _Buffer)
        return lease.buffer

    def _raise_failed(self) -> None:
        """Raise the error of a finished write in the calling thread."""
        ended = [writing for _, writing in self._writes if writing.done()]
        self._writes = [(extents, writing) for extents, writing in self._writes if not writing.done()]
        for writing in ended:
            writing.result()

    def _named(self, error: OSError, what: str) -> StoreError:
        if error.errno == errno.ENOSPC:
            return _full(self.folder, self.nbytes, error)
        text = f"{self.describe()}: it could not be {what}: {error.strerror}; {_ADVICE}"
        return StoreError(error.errno, text)


def make_file(folder: Path, nbytes: int, rank: int) -> tuple[int, bool]:
    """The descriptor of a reserved file that no longer has a name, and whether O_DIRECT works.

    Raises:
        StoreError: The folder cannot be made or written, or its disk has no room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(error.errno, f"folder {folder} cannot be made: {error.strerror}; name another") from error
    for direct in (os.O_DIRECT, 0):
        path = folder / f"onebit-offload-{rank}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | direct, 0o600)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                path.unlink(missing_ok=True)
                continue
            raise StoreError(
                error.errno, f"folder {folder} is not writable: {error.strerror}; name another, or change its rights"
            ) from error
        path.unlink()
        try:
            reserve(fd, nbytes)
            if not direct or _takes_direct(fd, nbytes):
                return fd, bool(direct)
            os.close(fd)
        except OSError as error:
            os.close(fd)
            raise (_full(folder, nbytes, error) if error.errno == errno.ENOSPC else error) from error
    raise AssertionError("without O_DIRECT the loop returns or raises")


def reserve(fd: int, nbytes: int) -> None:
    """Give an open file its blocks on the disk: a page of a map that finds none later ends the process by SIGBUS.

    Raises OSError if they do not fit.
    """
    if nbytes == 0:
        return
    there = os.fstatvfs(fd)
    if nbytes > there.f_bavail * there.f_frsize:  # fallocate would fill the disk before it fails
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)


def _takes_direct(fd: int, nbytes: int) -> bool:
    """Whether O_DIRECT works: some file systems open files with it, and then refuse to read a page."""
    if nbytes == 0:
        return True
    try:
        return os.preadv(fd, [mmap.mmap(-1, PAGE)], 0) == PAGE
    except OSError:
        return False


def _full(folder: Path, nbytes: int, error: OSError) -> StoreError:
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    return StoreError(
        errno.ENOSPC,
        f"the disk of {folder} is full: it has {free / 1e9:.4g} GB left, this run's file needs {nbytes / 1e9:.4g} GB; "
        "free some, or name a folder on another disk (onebit plan says what a mode needs)",
    )
