"""Leases in a device's memory over a store elsewhere, and host buffers for single copies. Copies overlap computing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .store import PAGE, Extent, Lease, Store, lock, unlock
from .streams import Moment, Streams


@dataclass(eq=False)
class _Buffer:
    """Of the device. after: what its next use waits for."""

    memory: Tensor
    after: list[Moment]


@dataclass(eq=False)
class _Loan:
    """inner: the store's lease, until its bytes are on their way."""

    extents: Sequence[Extent]
    buffer: _Buffer
    inner: Lease | None

    def parts(self) -> list[Tensor]:
        sizes = [extent.nbytes for extent in self.extents]
        return list(self.buffer.memory[: sum(sizes)].split(sizes))


@dataclass(frozen=True)
class _Copy:
    """A copy between a buffer and a lease of the store, which ends when the copy is over."""

    moment: Moment
    inner: Lease
    is_written: bool


class StagedStore:
    """A `Lender` whose leases are in a device's memory, over a store whose bytes are elsewhere.

    Reads are copied to the device as soon as the store has them, while it computes; writes are copied to the store
    after the work queued on the device so far. The host waits only in `settle`, for a read of bytes that are still
    being written, and if the store has no free lease. There are `count` buffers of `lease_bytes` bytes.
    """

    def __init__(self, store: Store, streams: Streams, device: torch.device, lease_bytes: int, count: int):
        self.store, self._streams = store, streams
        made = [torch.empty(max(PAGE, lease_bytes), dtype=torch.uint8, device=device) for _ in range(count)]
        begun = streams.mark()  # the allocator may return memory that queued work still uses
        self._free = deque(_Buffer(memory, [begun]) for memory in made)
        self._coming: list[_Loan] = []
        self._copying: deque[_Copy] = deque()

    def read(self, extents: Sequence[Extent], *, fresh: bool = False) -> Lease:
        assert self._free, "every buffer is lent out, so waiting for one would never end"
        inner = None
        if not fresh:
            while any(a.overlaps(b) for c in self._copying if c.is_written for a in c.inner.extents for b in extents):
                self._end_first()
            inner = self._borrow(extents)
        loan = _Loan(extents, self._free.popleft(), inner)
        if not fresh:
            self._coming.append(loan)
            self._advance()
        return Lease(extents, partial(self._wait, loan), loan)

    def write(self, lease: Lease) -> None:
        loan = _loan_of(lease)
        parts, inner = self._wait(loan), self._borrow(lease.extents, fresh=True)
        now = self._streams.mark()
        for part, held in zip(parts, inner.wait(), strict=True):
            loan.buffer.after = [self._streams.copy(part, held, [now])]
        self._copying.append(_Copy(loan.buffer.after[-1], inner, is_written=True))
        self._free.append(loan.buffer)

    def drop(self, lease: Lease) -> None:
        loan = _loan_of(lease)
        if loan in self._coming:
            self._coming.remove(loan)
            assert loan.inner is not None
            self.store.drop(loan.inner)
        else:
            pending = [moment for moment in loan.buffer.after if not moment.is_over()]
            loan.buffer.after = [*pending, self._streams.mark()]
        self._free.append(loan.buffer)

    def settle(self) -> None:
        while self._copying:
            self._end_first()

    # ---------------------------------------------------------------- copies

    def _wait(self, loan: _Loan) -> list[Tensor]:
        if loan in self._coming:
            self._begin(loan)
        for moment in loan.buffer.after:
            moment.hold()
        return loan.parts()

    def _begin(self, loan: _Loan) -> None:
        """Begin the copy to the device, after waiting for the store.

        Raises:
            StoreError: The store cannot read the bytes.
        """
        assert loan.inner is not None
        held = loan.inner.wait()
        self._coming.remove(loan)
        after = loan.buffer.after
        for source, part in zip(held, loan.parts(), strict=True):
            loan.buffer.after = [self._streams.copy(source, part, after)]
        self._copying.append(_Copy(loan.buffer.after[-1], loan.inner, is_written=False))

    def _borrow(self, extents: Sequence[Extent], *, fresh: bool = False) -> Lease:
        self._advance()
        while not self.store.has_lease():
            if self._copying:
                self._end_first()
            else:
                self._begin(self._coming[0])
        return self.store.read(extents, fresh=fresh)

    def _advance(self) -> None:
        """Begin the copies that can begin, and end those that are over."""
        while self._coming and self._coming[0].inner is not None and self._coming[0].inner.is_there():
            self._begin(self._coming[0])
        while self._copying and self._copying[0].moment.is_over():
            self._end_first()

    def _end_first(self) -> None:
        copy = self._copying.popleft()
        begin = time.perf_counter()
        copy.moment.wait()
        self.store.wait_s += time.perf_counter() - begin
        self.store.write(copy.inner) if copy.is_written else self.store.drop(copy.inner)


def _loan_of(lease: Lease) -> _Loan:
    assert isinstance(lease.buffer, _Loan)
    return lease.buffer


class HostBuffers:
    """Two buffers of host memory, each for several copies; they take turns. is_pinned: page-locked."""

    def __init__(self, nbytes: int, *, is_pinned: bool):
        self._buffers = [torch.empty(max(PAGE, nbytes), dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._moments: list[Moment | None] = [None, None]
        self._turn, self._at, self.is_pinned = 0, 0, is_pinned
        for buffer in self._buffers if is_pinned else ():
            lock(buffer)

    def begin(self) -> None:
        """The next buffer, once the copies that it was used for are over."""
        self._turn, self._at = 1 - self._turn, 0
        if (moment := self._moments[self._turn]) is not None:
            moment.wait()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Room in the buffer for these elements."""
        nbytes = numel * dtype.itemsize
        room = self._buffers[self._turn][self._at : self._at + nbytes].view(dtype)
        self._at += padded(nbytes)
        return room

    def used_until(self, moment: Moment) -> None:
        """The last copy of those that the buffer is used for."""
        self._moments[self._turn] = moment

    def close(self) -> None:
        for moment in self._moments:
            if moment is not None:
                moment.wait()
        for buffer in self._buffers if self.is_pinned else ():
            unlock(buffer)


def padded(nbytes: int) -> int:
    """What one `take` needs."""
    return -(-nbytes // 64) * 64
