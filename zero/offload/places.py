"""Where parameters are stepped, and the stores of one run: opened one after the other, counted and closed together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from .files import FileStore
from .layout import Layout
from .staged import HostBuffers, StagedStore
from .state import OffloadStats
from .store import Lender, MemoryStore, Store
from .streams import Streams


@dataclass(frozen=True)
class Place:
    """Some of the parameters: how their state lies in a store, and the device on which they are stepped.

    streams: of the other device, on which the parameters lie; None: they lie on this one, or on several.
    """

    layout: Layout
    store: Store
    device: torch.device
    streams: Streams | None = None


@dataclass
class Stores:
    """to: "cpu", or a folder. The rest: see `FileStore` and `MemoryStore`."""

    to: str | os.PathLike[str]
    is_pinned: bool
    buffer_count: int
    threads: int
    rank: int
    all: list[Store] = field(default_factory=list)
    buffers: list[HostBuffers] = field(default_factory=list)

    def open(self, nbytes: int, lease_bytes: int, device: torch.device | None = None) -> Store:
        """Another one; device: in its memory, wherever the others are. Raises StoreError where there is no room."""
        if device is not None:
            made: Store = MemoryStore(nbytes, device)
        elif self.to == "cpu":
            made = MemoryStore(nbytes, is_pinned=self.is_pinned)
        else:
            options = {"buffer_count": self.buffer_count, "threads": self.threads, "rank": self.rank}
            made = FileStore(self.to, nbytes, lease_bytes, is_pinned=self.is_pinned, **options)
        self.all.append(made)
        return made

    def staged(self, store: Store, streams: Streams | None, device: torch.device | None, lease_bytes: int) -> Lender:
        """The store as the device sees it; without streams it is the store itself."""
        if streams is None or device is None:
            return store
        return StagedStore(store, streams, device, lease_bytes, self.buffer_count)

    def host_buffers(self, nbytes: int) -> HostBuffers:
        """For copies of this many bytes at once."""
        made = HostBuffers(nbytes, is_pinned=self.is_pinned)
        self.buffers.append(made)
        return made

    def count(self, stats: OffloadStats) -> None:
        """What they have moved, and how long the run waited for it."""
        stats.wait_s = sum(store.wait_s for store in self.all)
        stats.read_bytes = sum(store.read_bytes for store in self.all)
        stats.written_bytes = sum(store.written_bytes for store in self.all)

    def describe(self) -> str:
        return "; ".join(store.describe() for store in self.all)

    def close(self) -> None:
        """Give memory and files back."""
        for buffers in self.buffers:
            buffers.close()
        for store in self.all:
            store.close()
