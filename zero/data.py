"""The data loader of the engine: each rank's share of a dataset, with a position that checkpoints contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset


class Loader(Protocol):
    """A loader for an engine: `ShardedLoader`, `data_efficiency.CurriculumLoader`, or your own with these methods.

    Attributes:
        dataset: The whole dataset.
    """

    dataset: Dataset[object]

    @property
    def batch_size(self) -> object:
        """Samples of a micro-batch of this rank."""
        ...

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch, batch by batch; then the next epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position.

        Args:
            state_dict: From `state_dict()`.
        """
        ...


def size_of(dataset: object) -> int:
    """Return the number of a dataset's samples.

    Args:
        dataset: The dataset.

    Raises:
        TypeError: It has no length or no items.
    """
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"expected a map-style dataset, with a length and items, got {type(dataset).__name__}: make a list of its "
            "samples, or draw batches from a DataLoader of your own, on each rank its part"
        )
    return len(dataset)


class ShardedLoader:
    """Batches of this rank's share of a dataset, an epoch for every `iter()`. No communication.

    A loop that was left early is continued by the next `iter()`: it gets the rest of the epoch. A last incomplete batch
    has as many samples on every rank, and counts as much as any other in the mean over the micro-batches of a step,
    which may be of two epochs.

    Epoch e is a permutation seeded by (seed, e); rank r takes elements r, r + world_size, ... of it. A remainder that
    does not divide evenly among the ranks is dropped. `state_dict` has the epoch and the number of elements that all
    ranks have read; an iteration after `load_state_dict` continues from there. The batches of all ranks together are
    the next elements of the epoch, for any number of ranks: with the same global batch size a step has the same
    elements in any world, as long as an epoch is a whole number of steps.

    Args:
        dataset: The whole dataset, with a length.
        batch_size: Samples of a batch of this rank.
        rank: This rank among those that read different data.
        world_size: Number of these ranks.
        seed: Seed of the permutations. Default 0.
        shuffle: Whether to permute. Default True.
        drop_last: Whether to drop a last incomplete batch. Default False.
        **options: Options of torch's DataLoader (num_workers, collate_fn, pin_memory, ...).

    Raises:
        ValueError: The dataset has fewer elements than there are ranks, or batch_size is below 1.
        TypeError: It has no length or no items.
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
        self._first = 0  # first element of this epoch's shares; not 0 if a world with other batches has read a part
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if (n := size_of(dataset)) < world_size:
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
        # A separate generator: every iteration would advance torch's, and change the dropout of a resumed run.
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
        """The position in the data: plain numbers, the same on every rank."""
        if self._is_over():
            return {"epoch": self.epoch + 1, "samples_done": 0, "seed": self.seed}
        samples_done = self._first + self.batches_done * self.batch_size * self._world_size
        return {"epoch": self.epoch, "samples_done": samples_done, "seed": self.seed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from a position, also if batch size or number of ranks have changed.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It is the position of a curriculum.
        """
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
    """Batches without end, epoch after epoch.

    Args:
        loader: The loader.

    Raises:
        ValueError: An epoch has no batch.
    """
    if len(loader) == 0:
        raise ValueError(
            f"an epoch has no batch of {loader.batch_size}: the dataset is too small for drop_last; lower the batch "
            "size, or set drop_last to False"
        )
    while True:
        yield from loader
