"""The loader over a sampler: this rank's micro-batches, cut to the curriculum's length, with an exact resume position.

Every rank draws the sample numbers of all global batches and reads only its own parts, so nothing is sent. Workers read
ahead of training: the saved state is the one after the last micro-batch yielded, not after the last one read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .sampler import Drawn, Sampler, State
from .sequence import reshape, truncate

# Metrics with these names change the batch, with the difficulty as the new length.
SHAPING: Mapping[str, Callable[[Any, int], Any]] = {"seqlen_truncate": truncate, "seqlen_reshape": reshape}


class CurriculumLoader:
    """Yields this rank's micro-batches of the batches that a sampler draws. One `iter()` is one pass over the data.

    A pass has `sampler.batches_per_pass` global batches. Sends nothing: all ranks draw the same sample numbers.

    Args:
        dataset: A map-style dataset.
        sampler: Draws the global batches. All ranks need equal ones.
        rank: This rank among those that read different data, 0 by default.
        world_size: How many such ranks there are, 1 by default.
        parts_per_rank: Micro-batches of this rank in a global batch (gradient accumulation steps), 1 by default.
        passes: The most passes that may be read; None (default) for no limit.
        shaping: By the name of a metric, a function (batch, difficulty) that changes the batch. By default
            "seqlen_truncate" truncates and "seqlen_reshape" reshapes.
        **options: Passed on to torch's DataLoader, for example collate_fn, num_workers.

    Attributes:
        process: None, or a function (batch, {"current_difficulties": {metric: difficulty}}) that returns the batch to
            yield. May be set at any time.
        difficulties: The difficulties of the last micro-batch yielded.
        lr_scale: The learning rate factor of the last micro-batch yielded.

    Raises:
        ValueError: The dataset has fewer samples than a global batch.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        sampler: Sampler,
        *,
        rank: int = 0,
        world_size: int = 1,
        parts_per_rank: int = 1,
        passes: int | None = None,
        shaping: Mapping[str, Callable[[Any, int], Any]] = SHAPING,
        **options: object,
    ):
        self.dataset, self.sampler = dataset, sampler
        self._rank, self._world_size, self._parts = rank, world_size, parts_per_rank
        self._passes, self._shaping, self._options = passes, shaping, options
        self.process: Callable[[Any, Mapping[str, Any]], Any] | None = None
        self.difficulties: Mapping[str, int] = {}
        self.lr_scale = 1.0
        self._state, self._parts_done = sampler.state_dict(), 0
        self._passes_done = self._of_pass = 0
        if sampler.batches_per_pass == 0:
            raise ValueError("the dataset has fewer samples than a global batch; lower train_batch_size")

    @property
    def batch_size(self) -> str:
        """A description of the batch size for messages."""
        return f"{self._parts} parts"

    def __len__(self) -> int:
        """Micro-batches of this rank in a pass."""
        return self.sampler.batches_per_pass * self._parts

    def __iter__(self) -> Iterator[Any]:
        if self._passes is not None and self._passes_done >= self._passes:
            raise RuntimeError(
                f"all {self._passes} passes over the data have been read; raise data_sampling.num_epochs to continue"
            )
        self.sampler.load_state_dict(self._state)
        drawing = _Drawing(self, self.sampler.batches_per_pass - self._of_pass)
        # DataLoader would draw a seed from torch's global generator at every iter(), and dropout after a resume would
        # differ from the uninterrupted run's.
        generator = torch.Generator().manual_seed(self.sampler.batches_done)
        options: dict[str, Any] = {"generator": generator, **self._options}
        for batch in DataLoader(self.dataset, batch_sampler=drawing, **options):
            drawn, after = drawing.waiting[0]
            self.difficulties, self.lr_scale = drawn.difficulties, drawn.lr_scale
            self._parts_done += 1
            if self._parts_done == self._parts:
                drawing.waiting.popleft()
                self._state, self._parts_done = after, 0
                self._of_pass += 1
                if self._of_pass == drawing.batches_of_pass:
                    self._of_pass, self._passes_done = 0, self._passes_done + 1
            yield self._shaped(batch, drawn)

    def _shaped(self, batch: object, drawn: Drawn) -> object:
        for name, shape in self._shaping.items():
            if name in drawn.difficulties:
                batch = shape(batch, drawn.difficulties[name])
        if self.process is not None:
            batch = self.process(batch, {"current_difficulties": dict(drawn.difficulties)})
        return batch

    def state_dict(self) -> State:
        """The position after the last micro-batch yielded: plain numbers, the same on every rank."""
        return {
            "sampler": self._state,
            "parts_done": self._parts_done,
            "parts": self._parts * self._world_size,
            "passes_done": self._passes_done,
            "of_pass": self._of_pass,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the position that `state_dict` gave. The number of ranks may change between global batches.

        Raises:
            ValueError: The state is from a loader without a curriculum, from another dataset, or from the middle of a
                global batch with another number of parts.
        """
        if "sampler" not in state_dict:
            raise ValueError(
                "the checkpoint's data position is that of a run without a curriculum; resume it without "
                "data_efficiency.data_sampling, or load with load_module_only=True"
            )
        done, parts = state_dict["parts_done"], self._parts * self._world_size
        if done and parts != state_dict["parts"]:
            raise ValueError(
                f"this position is {done} micro-batches within a global batch of {state_dict['parts']}, and one has "
                f"{parts} here; save between two global batches to resume with another number of ranks"
            )
        self.sampler.load_state_dict(state_dict["sampler"])
        self._state, self._parts_done = dict(state_dict["sampler"]), done
        self._passes_done, self._of_pass = state_dict["passes_done"], state_dict["of_pass"]


class _Drawing:
    """The batch sampler for the rest of a pass: yields this rank's parts.

    Workers draw ahead, so `waiting` keeps, for each global batch not yet fully yielded, the batch and the sampler's
    state after it.
    """

    def __init__(self, loader: CurriculumLoader, count: int):
        self._loader, self._count = loader, count
        self.batches_of_pass = loader._of_pass + count
        self.waiting: deque[tuple[Drawn, State]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        loader, skipped = self._loader, self._loader._parts_done
        world_size, parts = loader._world_size, loader._parts
        for _ in range(self._count):
            drawn = loader.sampler.draw(parts * world_size)
            self.waiting.append((drawn, loader.sampler.state_dict()))
            for part in drawn.parts[loader._rank :: world_size][skipped:]:
                yield [int(index) for index in part]
            skipped = 0
