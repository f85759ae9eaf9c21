"""Where parameters are stepped, and the stores of one run: opened one after the other, counted and closed together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from .files import FileStore
from .layout import Layout
from .state import OffloadStats
from .store import MemoryStore, Store


@dataclass(frozen=True)
class Place:
    """Some of the parameters: how their state lies in a store, and the device on which they are stepped."""

    layout: Layout
    store: Store
    device: torch.device


@dataclass
class Stores:
    """to: "cpu", or a folder. The rest: see `FileStore` and `MemoryStore`."""

    to: str | os.PathLike[str]
    is_pinned: bool
    buffer_count: int
    threads: int
    rank: int
    all: list[Store] = field(default_factory=list)

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

    def count(self, stats: OffloadStats) -> None:
        """What they have moved, and how long the run waited for it."""
        stats.wait_s = sum(store.wait_s for store in self.all)
        stats.read_bytes = sum(store.read_bytes for store in self.all)
        stats.written_bytes = sum(store.written_bytes for store in self.all)

    def describe(self) -> str:
        return "; ".join(store.describe() for store in self.all)

    def close(self) -> None:
        """Give memory and files back."""
        for store in self.all:
            store.close()
