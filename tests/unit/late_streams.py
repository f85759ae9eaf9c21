"""Streams of a device that is not there: copies happen as late as their waits allow, or as early as can be.

Whoever reads what a copy brings without waiting for it, or changes what one still reads, gets other bytes in one of
the two. What the device computes, the host does at once here, so a copy that should wait for it and does not is seen
by what it is told to wait for: `LateStreams` refuses one that waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onebit.zero.offload.staged import HostBuffers, StagedStore


@dataclass(eq=False)
class Mark:
    """number: of the marks that were made before."""

    number: int

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def hold(self) -> None:
        pass


@dataclass(eq=False)
class Copy:
    streams: LateStreams
    source: Tensor
    into: Tensor
    after: Sequence[Mark | Copy]
    queue: deque[Copy]
    is_done: bool = False

    def is_over(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.streams.waits += not self.is_done
        self.run()

    def hold(self) -> None:
        self.run()

    def run(self) -> None:
        while not self.is_done:
            first = self.queue.popleft()  # a stream does its copies in order
            for moment in first.after:
                if isinstance(moment, Copy):
                    moment.run()
            first.into.copy_(first.source)
            first.is_done = True


@dataclass
class LateStreams:
    """waits: of the host, for copies that had not happened. copies: all.

    near, host: buffers, and their bytes.
    """

    is_early: bool = False
    waits: int = 0
    marks: int = 0
    copies: list[Copy] = field(default_factory=list)
    near: dict[int, int] = field(default_factory=dict)
    host: dict[int, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)

    def __post_init__(self) -> None:
        self._there: deque[Copy] = deque()
        self._back: deque[Copy] = deque()

    def mark(self) -> Mark:
        self.marks += 1
        return Mark(self.marks)

    def copy(self, source: Tensor, into: Tensor, after: Sequence[Mark | Copy]) -> Copy:
        there = storage(into) in self.near or storage(source) in self.host
        back = storage(source) in self.near or storage(into) in self.host
        assert there != back, "one end is the device's"
        assert after, "a copy that does not wait for what the device computes"
        made = Copy(self, source, into, list(after), self._there if there else self._back)
        made.queue.append(made)
        self.copies.append(made)
        if self.is_early:
            made.run()
        return made


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def in_use(monkeypatch, streams: LateStreams) -> LateStreams:
    """Have Offload think that parameters on the CPU lie on a device with these streams."""
    make_store, make_buffers = StagedStore.__init__, HostBuffers.__init__

    def staged(self: StagedStore, *args: object, **named: object) -> None:
        make_store(self, *args, **named)  # type: ignore[arg-type]
        streams.near |= {storage(buffer.memory): buffer.memory.nbytes for buffer in self._free}

    def buffers(self: HostBuffers, *args: object, **named: object) -> None:
        make_buffers(self, *args, **named)  # type: ignore[arg-type]
        streams.host |= {storage(buffer): buffer.nbytes for buffer in self._buffers}

    monkeypatch.setattr(StagedStore, "__init__", staged)
    monkeypatch.setattr(HostBuffers, "__init__", buffers)
    monkeypatch.setattr("onebit.zero.offload.optimizer.streams_of", lambda device: streams)
    return streams


def random_bytes(nbytes: int, seed: int) -> Tensor:
    return torch.randint(256, [nbytes], dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
