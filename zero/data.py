"""The data loader of the engine: every rank its share of a dataset, and a place in it that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset


class ShardedLoader:
    """Batches of this rank's share of a dataset, an epoch for every `iter()`. No communication.

    Epoch e is a permutation seeded by (seed, e); rank r takes elements r, r + world_size, ... of it, and what does not
    divide evenly among the ranks is dropped, as is a last incomplete batch where drop_last. `state_dict` says how many
    batches of which epoch were handed out; an iteration after `load_state_dict` begins there, without reading what came
    before. options: of torch's DataLoader (num_workers, collate_fn, pin_memory, ...). Raises ValueError where the
    dataset has fewer elements than there are ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: object,
    ):
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self._rank, self._world_size = rank, world_size
        self._shuffle, self._drop_last, self._options = shuffle, drop_last, options
        self.epoch = self.batches_done = 0
        if (n := len(cast(Sized, dataset))) < world_size:
            raise ValueError(f"the dataset has {n} elements for {world_size} ranks; each needs at least one")

    def __len__(self) -> int:
        """Batches in an epoch."""
        mine = len(cast(Sized, self.dataset)) // self._world_size
        return mine // self.batch_size if self._drop_last else -(-mine // self.batch_size)

    def __iter__(self) -> Iterator:
        if self.batches_done >= len(self):
            self.epoch, self.batches_done = self.epoch + 1, 0
        mine = self._share()
        starts = range(self.batches_done * self.batch_size, len(self) * self.batch_size, self.batch_size)
        batches = [mine[start : start + self.batch_size] for start in starts]
        loader: DataLoader = DataLoader(self.dataset, batch_sampler=batches, **self._options)  # type: ignore[arg-type]
        for batch in loader:
            self.batches_done += 1
            yield batch

    def _share(self) -> list[int]:
        n = len(cast(Sized, self.dataset))
        order = list(range(n))
        if self._shuffle:
            generator = torch.Generator().manual_seed((self.seed << 32) ^ self.epoch)
            order = torch.randperm(n, generator=generator).tolist()
        return order[: n - n % self._world_size][self._rank :: self._world_size]

    def state_dict(self) -> dict:
        """Plain numbers, the same on every rank."""
        return {"epoch": self.epoch, "batches_done": self.batches_done, "seed": self.seed}

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on from there. In a world of another size, an epoch's share of every rank is another one."""
        self.epoch, self.batches_done, self.seed = (state_dict[k] for k in ("epoch", "batches_done", "seed"))


def forever(loader: ShardedLoader) -> Iterator:
    """Batch after batch, epoch after epoch."""
    if len(loader) == 0:
        raise ValueError(f"an epoch has no batch of {loader.batch_size}: the dataset is too small for drop_last")
    while True:
        yield from loader
