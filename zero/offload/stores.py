"""The stores of one run: all in one place, opened one after the other, counted and closed together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from .files import FileStore
from .memory import MemoryStore
from .state import OffloadStats
from .store import Store


@dataclass
class Stores:
    """to: "cpu", or a folder. device: of stores in memory. The rest: see `FileStore` and `MemoryStore`."""

    to: str | os.PathLike[str]
    device: torch.device
    is_pinned: bool
    buffer_count: int
    threads: int
    rank: int
    all: list[Store] = field(default_factory=list)

    def open(self, nbytes: int, lease_bytes: int) -> Store:
        """Another one. Raises StoreError where there is no room for it."""
        if self.to == "cpu":
            made: Store = MemoryStore(nbytes, self.device, is_pinned=self.is_pinned and self.device.type == "cpu")
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
