"""Shared part of the transports between processes: checks before each collective, and the record of the last ones.

Rests on `base.py` (the contract), `edge.py` and `notes.py`. Read `torch_distributed.py` or `mpi.py` next.

Shape legend: W ranks, B bytes of one frame.
"""

from __future__ import annotations

import collections
import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .base import Channel, Transport, Work
from .edge import DoneWork, Staged, check_all_gather, check_all_to_all, check_contiguous, check_shift, check_split
from .notes import HISTORY, Numbering, Operation


class NetworkedTransport(Transport):
    """Checks a collective's tensors, and stages them on its own device if the network cannot send them directly.

    Then it numbers the operation, counts its bytes, and the subclass launches it: `_all_to_all` and the others.
    """

    sent_bytes = 0

    def __init__(self, rank: int, world_size: int, timeout_s: float):
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._names: Sequence[int] = range(world_size)  # rank numbers in messages: those of the transport split from
        self._splits: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._launched: collections.deque[Operation] = collections.deque(maxlen=HISTORY)
        self._numbering = Numbering(itertools.count(1))
        self._is_closed = False
        self._on_release: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def has_failed(self) -> bool: ...

    @abstractmethod
    def reaches(self, device: torch.device) -> bool: ...

    # ---------------------------------------------------------------- collectives

    def all_to_all(self, out_WB: Tensor, in_WB: Tensor) -> Work:
        check_all_to_all(self.rank, self.world_size, out_WB, in_WB)
        if not self.reaches(in_WB.device):
            return Staged(self).all_to_all(out_WB, in_WB)
        row_bytes = in_WB[0].nbytes
        operation = self._count("all_to_all", row_bytes, row_bytes * (self.world_size - 1))
        return self._all_to_all(operation, out_WB, in_WB)

    def all_gather(self, out_WB: Tensor, in_B: Tensor) -> Work:
        check_all_gather(self.rank, self.world_size, out_WB, in_B)
        if not self.reaches(in_B.device):
            return Staged(self).all_gather(out_WB, in_B)
        operation = self._count("all_gather", in_B.nbytes, in_B.nbytes * (self.world_size - 1))
        return self._all_gather(operation, out_WB, in_B)

    def all_reduce(self, x: Tensor) -> Work:
        check_contiguous(self.rank, "all_reduce", x)
        if not self.reaches(x.device):
            return Staged(self).all_reduce(x)
        operation = self._count("all_reduce", x.nbytes, 2 * x.nbytes * (self.world_size - 1) // self.world_size)
        return self._all_reduce(operation, x)

    def broadcast(self, x: Tensor, src: int) -> Work:
        check_contiguous(self.rank, "broadcast", x)
        if not self.reaches(x.device):
            return Staged(self).broadcast(x, src)
        sent_bytes = x.nbytes * (self.world_size - 1) if self.rank == src else 0
        operation = self._count(f"broadcast from rank {self._names[src]}", x.nbytes, sent_bytes)
        return self._broadcast(operation, x, src)

    def shift(self, out_B: Tensor, in_B: Tensor, by: int) -> Work:
        check_shift(self.rank, self.world_size, out_B, in_B, by)
        if by == 0:
            out_B.copy_(in_B)
            return DoneWork()
        if not self.reaches(in_B.device):
            return Staged(self).shift(out_B, in_B, by)
        operation = self._count(f"shift by {by}", 0, in_B.nbytes)  # the same on all ranks, whatever their lengths
        return self._shift(operation, out_B, in_B, by)

    @abstractmethod
    def _all_to_all(self, operation: Operation, out_WB: Tensor, in_WB: Tensor) -> Work: ...

    @abstractmethod
    def _all_gather(self, operation: Operation, out_WB: Tensor, in_B: Tensor) -> Work: ...

    @abstractmethod
    def _all_reduce(self, operation: Operation, x: Tensor) -> Work: ...

    @abstractmethod
    def _broadcast(self, operation: Operation, x: Tensor, src: int) -> Work: ...

    @abstractmethod
    def _shift(self, operation: Operation, out_B: Tensor, in_B: Tensor, by: int) -> Work: ...

    # ---------------------------------------------------------------- record of launches, and close

    def new_channel(self) -> Channel:
        return self._numbering.new_channel()

    def _count(self, name: str, nbytes: int, sent_bytes: int = 0) -> Operation:
        """The next operation, with the same number on all ranks. Adds to sent_bytes."""
        self.sent_bytes += sent_bytes
        operation = self._numbering.operation(name, nbytes)
        self._launched.append(operation)
        return operation

    def _begin_split(self, ranks: Sequence[int]) -> tuple[list[int], Operation]:
        """The numbers of these ranks in messages, and the operation that splits them off."""
        check_split(self.rank, self.world_size, ranks)
        self._splits[tuple(ranks)] += 1
        names = [self._names[rank] for rank in ranks]
        return names, Operation(f"split {self._splits[tuple(ranks)]} into ranks {names}", 0)

    def close(self) -> None:
        """Wait for all ranks, unless a PeerError was raised; then release everything. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self.has_failed:
                self._barrier(self._count("the barrier of close()", 0))
        finally:
            self._release()

    def on_release(self, call: Callable[[], None]) -> None:
        """See `Transport`."""
        self._on_release.append(call)

    def _is_released(self) -> None:
        """Call those that `on_release` has added."""
        while self._on_release and not self.has_failed:
            self._on_release.pop()()

    @abstractmethod
    def _barrier(self, operation: Operation) -> None: ...

    @abstractmethod
    def _release(self) -> None: ...
