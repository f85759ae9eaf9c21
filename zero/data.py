"""The data loader of the engine: every rank its share of a dataset, and a place in it that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset


class Loader(Protocol):
    """What an engine reads: `ShardedLoader`, or `data_efficiency.CurriculumLoader`."""

    dataset: Dataset[object]

    @property
    def batch_size(self) -> object: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


class ShardedLoader:
    """Batches of this rank's share of a dataset, an epoch for every `iter()`. No communication.

    Epoch e is a permutation seeded by (seed, e); rank r takes elements r, r + world_size, ... of it, and what does not
    divide evenly among the ranks is dropped, as is a last incomplete batch where drop_last. `state_dict` says how many
    elements of which epoch all ranks have read; an iteration after `load_state_dict` goes on from there. All ranks'
    batches together are the next elements of the epoch, however many share them: a step of as many elements is the same
    step in any world, as long as whole steps make an epoch. options: of torch's DataLoader (num_workers, collate_fn,
    pin_memory, ...). Raises ValueError where the dataset has fewer elements than there are ranks.
    """

    def __init__(
        self,
        dataset: Dataset[object],
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
        self._first = 0  # where this epoch's shares begin: not 0 where a world of other batches read what comes before
        if (n := len(cast(Sized, dataset))) < world_size:
            raise ValueError(f"the dataset has {n} elements for {world_size} ranks; each needs at least one")

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._batches_from(0)

    def _batches_from(self, first: int) -> int:
        mine = (len(cast(Sized, self.dataset)) - first) // self._world_size
        return mine // self.batch_size if self._drop_last else -(-mine // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self._is_over():
            self.epoch, self.batches_done, self._first = self.epoch + 1, 0, 0
        mine, stop = self._share(), self._batches_from(self._first) * self.batch_size
        starts = range(self.batches_done * self.batch_size, stop, self.batch_size)
        batches = [mine[start : start + self.batch_size] for start in starts]
        # Of its own: torch's would be advanced by every iteration, and with it the dropout of a resumed run.
        generator = torch.Generator().manual_seed((self.seed << 32) ^ self.epoch)
        options: dict[str, Any] = {"generator": generator, **self._options}
        loader: DataLoader[object] = DataLoader(self.dataset, batch_sampler=batches, **options)
        for batch in loader:
            self.batches_done += 1
            yield batch

    def _is_over(self) -> bool:
        return self.batches_done >= self._batches_from(self._first)

    def _share(self) -> list[int]:
        n = len(cast(Sized, self.dataset))
        order = list(range(n))
        if self._shuffle:
            generator = torch.Generator().manual_seed((self.seed << 32) ^ self.epoch)
            order = torch.randperm(n, generator=generator, device="cpu").tolist()
        rest = order[self._first :]
        return rest[: len(rest) - len(rest) % self._world_size][self._rank :: self._world_size]

    def state_dict(self) -> dict[str, int]:
        """Plain numbers, the same on every rank."""
        if self._is_over():
            return {"epoch": self.epoch + 1, "samples_done": 0, "seed": self.seed}
        samples_done = self._first + self.batches_done * self.batch_size * self._world_size
        return {"epoch": self.epoch, "samples_done": samples_done, "seed": self.seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from there, also where the batches, or the ranks, were others. Raises ValueError on a curriculum's."""
        if "epoch" not in state_dict:
            raise ValueError(
                "the checkpoint's data position is that of a curriculum; resume it with the data_efficiency or "
                "curriculum_learning that it was saved with, or load with load_module_only=True"
            )
        self.epoch, self.seed = state_dict["epoch"], state_dict["seed"]
        if "samples_done" in state_dict:
            samples_in_batch = self.batch_size * self._world_size
            self.batches_done, self._first = divmod(state_dict["samples_done"], samples_in_batch)
        else:  # the first files count batches, of a world of this size
            self.batches_done, self._first = state_dict["batches_done"], 0


def forever(loader: Loader) -> Iterator[Any]:
    """Batch after batch, epoch after epoch."""
    if len(loader) == 0:
        raise ValueError(f"an epoch has no batch of {loader.batch_size}: the dataset is too small for drop_last")
    while True:
        yield from loader
