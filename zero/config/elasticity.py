"""The block "elasticity": one batch size that many numbers of ranks can divide among themselves.

    "elasticity": {"enabled": true, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}

With these a step has 1680 samples, on any of 32 numbers of ranks from 1 to 840: a run that is resumed on another number
keeps its batch, and so its learning rate stays right. `batch_sizes` is the whole of it.

Source: DeepSpeed's elasticity, of which 0.19.7 is the last release; `version` 0.1 and 0.2 give the numbers of 0.19.6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from .schema import BOOL, FLOAT, INT, INTS, Block, Inert, key

_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
"""Numbers with more divisors than any smaller one (OEIS A002182)."""


@dataclass(frozen=True)
class Elasticity(Block):
    """Limits of the batch; `read_config` chooses it. Every rank computes the same.

    Attributes:
        max_train_batch_size: Samples of a step at most.
        micro_batch_sizes: Samples that a rank can take at once; the largest that divides its share is taken.
        min_gpus, max_gpus: Between these are the numbers of data-parallel ranks that the batch is chosen for.
        version: 0.1 takes only numbers of ranks that divide this batch. 0.2 takes others too, with another batch, the
            largest that they divide; and counts nodes, of num_gpus_per_node / model_parallel_size data-parallel ranks.
        prefer_larger_batch: Of batches that as many numbers divide, take the larger.
        ignore_non_elastic_batch_info: Ignore other batch sizes of the file, with a warning instead of an error.
    """

    inert: ClassVar[Mapping[str, Inert]] = {"min_time": Inert(INT, "there is no scheduler here that waits", fine=(0,))}

    enabled: bool = key(False, BOOL)
    max_train_batch_size: int | None = key(None, INT, null=True, least=1)
    micro_batch_sizes: tuple[int, ...] = key((), INTS, least=1)
    min_gpus: int = key(1, INT, least=1)
    max_gpus: int = key(10_000, INT, least=1)
    version: float = key(0.2, FLOAT, choices=(0.1, 0.2))
    prefer_larger_batch: bool = key(True, BOOL)
    ignore_non_elastic_batch_info: bool = key(False, BOOL)
    num_gpus_per_node: int = key(1, INT, least=1)
    model_parallel_size: int = key(1, INT, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.enabled:
            return
        if self.max_train_batch_size is None or not self.micro_batch_sizes:
            raise ValueError("elasticity is enabled: write max_train_batch_size and micro_batch_sizes")
        if self.min_gpus > self.max_gpus:
            raise ValueError(f"min_gpus = {self.min_gpus} is above max_gpus = {self.max_gpus}")
        if self.num_gpus_per_node % self.model_parallel_size:
            raise ValueError(
                f"num_gpus_per_node = {self.num_gpus_per_node} is no multiple of model_parallel_size = "
                f"{self.model_parallel_size}"
            )
        if self.version == 0.1 and self.model_parallel_size > 1:
            raise ValueError('model_parallel_size above 1 needs "version": 0.2')
        if max(self.micro_batch_sizes) > self.max_train_batch_size // self._ranks_of_node:
            raise ValueError(
                f"the micro-batch {max(self.micro_batch_sizes)} on each of {self._ranks_of_node} ranks is above "
                f"max_train_batch_size = {self.max_train_batch_size}"
            )

    @property
    def _ranks_of_node(self) -> int:
        """Data-parallel ranks that are there or absent together."""
        return 1 if self.version == 0.1 else self.num_gpus_per_node // self.model_parallel_size

    def batch_sizes(self, ranks: int) -> tuple[int, int]:
        """(samples of a step, samples of a micro-batch) for this number of data-parallel ranks.

        Raises ValueError if this number cannot divide the batch (version 0.1), or is too large for any.
        """
        train, valid = self.choose()
        if ranks not in valid:
            if self.version == 0.1:
                raise ValueError(
                    f"{ranks} data-parallel ranks cannot divide the elastic batch of {train}: start one of "
                    f'{", ".join(map(str, valid)) or "no number"}, or write "version": 0.2'
                )
            train = self._largest_for(ranks)
        return train, max(micro for micro in self.micro_batch_sizes if train // ranks % micro == 0)

    def choose(self) -> tuple[int, Sequence[int]]:
        """(samples of a step, the numbers of data-parallel ranks that divide it): as many numbers as possible."""
        assert self.max_train_batch_size is not None
        micros, at_once = self.micro_batch_sizes, self._ranks_of_node
        most = self.max_train_batch_size // at_once
        bases = [base for base in {*micros, math.lcm(*micros)} if base <= most]
        sizes = [base * max(n for n in _HIGHLY_COMPOSITE if n <= most // base) for base in bases]
        nodes = {size: self._divisions(size) for size in sizes}
        best = max(nodes, key=lambda size: (len(nodes[size]), size if self.prefer_larger_batch else -size))
        return best * at_once, [n * at_once for n in nodes[best]]

    def _divisions(self, size: int) -> list[int]:
        """The numbers of nodes, between the bounds, that can divide `size` in whole micro-batches."""
        at_least, at_most = (limit // self._gpus_of_node for limit in (self.min_gpus, self.max_gpus))
        shares = {size // micro for micro in self.micro_batch_sizes if size % micro == 0}
        at_most = min(at_most or max(shares), max(shares))
        return [n for n in range(max(at_least, 1), at_most + 1) if any(share % n == 0 for share in shares)]

    @property
    def _gpus_of_node(self) -> int:
        return 1 if self.version == 0.1 else self.num_gpus_per_node

    def _largest_for(self, ranks: int) -> int:
        """The largest batch, of those with one kind of micro-batch, that this number of ranks can divide."""
        assert self.max_train_batch_size is not None
        at_once = [micro * ranks for micro in self.micro_batch_sizes]
        sizes = [self.max_train_batch_size // n * n for n in at_once if n <= self.max_train_batch_size]
        if not sizes:
            raise ValueError(
                f"{ranks} data-parallel ranks with the smallest micro-batch take {min(at_once)} samples, more than "
                f"max_train_batch_size = {self.max_train_batch_size}"
            )
        return max(sizes) if self.prefer_larger_batch else min(sizes)
