"""What holds offloaded bytes: the contract of `MemoryStore`, here, and of `FileStore` in `files.py`.

A store is one flat space of bytes. Who wants some borrows them: `read` begins to fetch, `Lease.wait` gives tensors to
read and change, `write` begins to store them, `drop` forgets the changes. A lease ends with `write` or `drop`, in any
order. Extents begin and end at multiples of `PAGE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

PAGE = 4096


class StoreError(OSError):
    """A store could not keep its promise: the disk is full, the folder not writable, a file cut short or unreadable."""


class Extent(NamedTuple):
    """A range of a store's bytes, at multiples of PAGE."""

    offset: int
    nbytes: int

    def overlaps(self, other: Extent) -> bool:
        """Whether both have a byte."""
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


@dataclass(frozen=True)
class Lease:
    """Borrowed bytes. wait: one uint8 tensor for each extent; blocks until they are there, raises StoreError.

    is_there: whether `wait` would not block.
    """

    extents: Sequence[Extent]
    wait: Callable[[], list[Tensor]]
    buffer: object = None
    is_there: Callable[[], bool] = lambda: True


class Lender(Protocol):
    """Who gives leases: a `Store`, or a `StagedStore` of it. One thread calls; what it began goes on in others."""

    def read(self, extents: Sequence[Extent], *, fresh: bool = False) -> Lease:
        """Begin to fetch. fresh: the caller writes every byte that it will ever read: nothing is fetched."""

    def write(self, lease: Lease) -> None:
        """Begin to store what the lease's tensors hold now; the lease ends."""

    def drop(self, lease: Lease) -> None:
        """End a lease whose bytes have not changed."""

    def settle(self) -> None:
        """Until what was written is the store's to read; may be on its way to a disk."""


class Store(Lender, Protocol):
    """See the module docstring.

    wait_s: seconds in which the caller waited for it. read_bytes, written_bytes: moved between memory and the store.
    """

    nbytes: int
    wait_s: float
    read_bytes: int
    written_bytes: int

    def has_lease(self) -> bool:
        """Whether `read` may be called before another lease has ended."""

    def flush(self) -> None:
        """Until all that was written is stored. Raises StoreError where it could not be."""

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of the store as a tensor, without a copy: for checkpoints. Between steps; flushes first."""

    def close(self) -> None:
        """Give everything back. Views that are still held stay valid; nothing else may be called."""

    def describe(self) -> str:
        """Where the bytes lie, and how they get there."""


def rounded(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class MemoryStore:
    """nbytes of memory of a device; is_pinned: page-locked, for copies that overlap with computing. See `Store`.

    Nothing is copied: a lease's tensors are the store's own bytes.
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
    """Page-lock memory where it lies. torch's pin_memory() would round the size up to a power of two.

    Raises MemoryError where the driver refuses.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise MemoryError(
            f"CUDA could not page-lock {memory.numel()} bytes of host memory (error {code}); "
            "raise `ulimit -l`, or pass pin_memory=False"
        )


def unlock(memory: Tensor) -> None:
    """Undo `lock`, once no copy of it is under way."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
