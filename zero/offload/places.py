"""Where parameters are updated, and the stores of a run: opened one by one, counted and closed together."""

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
    """Some of the parameters: the layout of their state in a store, and the device that updates them.

    `streams` copy from and to the parameters' device; None if they are on the updating device, or on several.
    """

    layout: Layout
    store: Store
    device: torch.device
    streams: Streams | None = None


@dataclass
class Stores:
    """All stores of an `Offload`, in memory if `to` is "cpu", otherwise in files of that folder."""

    to: str | os.PathLike[str]
    is_pinned: bool
    buffer_count: int
    threads: int
    rank: int
    all: list[Store] = field(default_factory=list)
    buffers: list[HostBuffers] = field(default_factory=list)

    def open(self, nbytes: int, lease_bytes: int, device: torch.device | None = None) -> Store:
        """Open another store; with `device` in that device's memory.

        Raises:
            StoreError: There is no room.
        """
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
        """A lender in the device's memory over the store; without streams the store itself."""
        if streams is None or device is None:
            return store
        return StagedStore(store, streams, device, lease_bytes, self.buffer_count)

    def host_buffers(self, nbytes: int) -> HostBuffers:
        """Host buffers for copies of up to `nbytes` bytes at once."""
        made = HostBuffers(nbytes, is_pinned=self.is_pinned)
        self.buffers.append(made)
        return made

    def count(self, stats: OffloadStats) -> None:
        """Write the bytes moved and the seconds waited into `stats`."""
        stats.wait_s = sum(store.wait_s for store in self.all)
        stats.read_bytes = sum(store.read_bytes for store in self.all)
        stats.written_bytes = sum(store.written_bytes for store in self.all)

    def describe(self) -> str:
        return "; ".join(store.describe() for store in self.all)

    def close(self) -> None:
        """Free memory and files."""
        for buffers in self.buffers:
            buffers.close()
        for store in self.all:
            store.close()
