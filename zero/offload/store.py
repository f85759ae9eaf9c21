"""What holds offloaded bytes: the contract of a store, and `MemoryStore`. `FileStore` is in `files.py`.

A store is one flat range of bytes. To use some of them, borrow them: `read` begins to fetch them, `Lease.wait` returns
tensors to read and change, `write` begins to store them, and `drop` ends the lease without storing. Leases may end in
any order. Extents begin and end at multiples of `PAGE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

PAGE = 4096


class StoreError(OSError):
    """A store failed: the disk is full, the folder is not writable, or a file was truncated or cannot be read."""


class Extent(NamedTuple):
    """A range of a store's bytes: offset and length, both multiples of 4,096."""

    offset: int
    nbytes: int

    def overlaps(self, other: Extent) -> bool:
        """Whether both ranges have a byte in common."""
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


@dataclass(frozen=True)
class Lease:
    """Borrowed bytes of a store, until `write` or `drop`.

    Attributes:
        extents: The ranges.
        wait: Blocks until the bytes are there, and returns one uint8 tensor for each extent. Raises StoreError.
        buffer: The store's own record of the memory.
        is_there: Returns whether `wait` would return at once.
    """

    extents: Sequence[Extent]
    wait: Callable[[], list[Tensor]]
    buffer: object = None
    is_there: Callable[[], bool] = lambda: True


class Lender(Protocol):
    """What gives leases: a `Store`, or a `StagedStore` over one. Only one thread calls it; others do the work."""

    def read(self, extents: Sequence[Extent], *, fresh: bool = False) -> Lease:
        """Begin to fetch these ranges. fresh: fetch nothing, since the caller will write every byte before reading."""

    def write(self, lease: Lease) -> None:
        """End the lease and begin to store what its tensors hold now."""

    def drop(self, lease: Lease) -> None:
        """End the lease without storing anything."""

    def settle(self) -> None:
        """Wait until the store would return what was written; it may still be on its way to a disk."""


class Store(Lender, Protocol):
    """One flat range of bytes in memory or a file, read and written through leases. Only one thread may call it.

    Attributes:
        nbytes: The size in bytes.
        wait_s: Seconds that callers have waited for it.
        read_bytes: Bytes moved from the store into memory; 0 if it is in memory.
        written_bytes: Bytes moved from memory into the store; 0 if it is in memory.
    """

    nbytes: int
    wait_s: float
    read_bytes: int
    written_bytes: int

    def has_lease(self) -> bool:
        """Whether `read` may be called before another lease has ended."""

    def flush(self) -> None:
        """Wait until everything written is stored.

        Raises:
            StoreError: Something could not be stored.
        """

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of the store as a uint8 tensor without a copy, for checkpoints. Flushes first; only between steps."""

    def close(self) -> None:
        """Free everything. Existing views stay valid; no other method may be called afterwards."""

    def describe(self) -> str:
        """Where the bytes are and how they get there, for messages."""


def rounded(nbytes: int) -> int:
    """nbytes, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class MemoryStore:
    """A `Store` in the memory of the host or a device. Nothing is copied: a lease's tensors are the store's own bytes.

    Args:
        nbytes: The size in bytes.
        device: Where the memory is, "cpu" by default.
        is_pinned: Whether host memory is page-locked, for copies to a GPU that overlap with computing; False by
            default.

    Raises:
        MemoryError: The driver refuses to page-lock the memory.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu", *, is_pinned: bool = False):
        self.nbytes, self.device = nbytes, torch.device(device)
        self.wait_s, self.read_bytes, self.written_bytes = 0.0, 0, 0
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.is_pinned = is_pinned and nbytes > 0
        if self.is_pinned:
            lock(self._bytes)

    def read(self, extents: Sequence[Extent], *, fresh: bool = False) -> Lease:
        parts = [self._bytes.narrow(0, extent.offset, extent.nbytes) for extent in extents]
        return Lease(extents, lambda: parts)

    def write(self, lease: Lease) -> None:
        pass

    def drop(self, lease: Lease) -> None:
        pass

    def settle(self) -> None:
        pass

    def has_lease(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def view(self, offset: int, nbytes: int) -> Tensor:
        return self._bytes.narrow(0, offset, nbytes)

    def close(self) -> None:
        if self.is_pinned:
            unlock(self._bytes)
        self._bytes, self.is_pinned = torch.empty(0, dtype=torch.uint8, device="cpu"), False

    def describe(self) -> str:
        where = f"{self.device.type} memory" if self.device.type != "cpu" else "host memory"
        return f"{self.nbytes / 1e9:.3g} GB of {'page-locked ' if self.is_pinned else ''}{where}"


def lock(memory: Tensor) -> None:
    """Page-lock memory in place. torch's pin_memory() would round the size up to a power of two.

    Raises:
        MemoryError: The driver refuses.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise MemoryError(
            f"CUDA could not page-lock {memory.numel()} bytes of host memory (error {code}); "
            "raise `ulimit -l`, or pass pin_memory=False"
        )


def unlock(memory: Tensor) -> None:
    """Undo `lock`, after waiting for all copies."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
