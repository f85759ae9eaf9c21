"""The loader over a sampler: this rank's micro-batches, cut to the curriculum's length, and an exact place to resume.

Every rank draws all global batches, numbers only, and reads its own parts: nothing is sent. Batches read ahead by
workers do not count: the state is that after the micro-batch yielded last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .sampler import Drawn, Sampler, State
from .sequence import reshape, truncate

# Metrics of these names change the batches themselves.
SHAPING: Mapping[str, Callable[[Any, int], Any]] = {"seqlen_truncate": truncate, "seqlen_reshape": reshape}


class CurriculumLoader:
    """Micro-batches of this rank, `parts_per_rank` for each global batch of the sampler; an `iter()` is one pass.

    A pass has as many global batches as make the dataset's number of samples. passes: the most that may be read; None:
    no end. shaping: what the difficulty of a metric does to a batch, by the metric's name: called with (batch,
    difficulty). process: called with (batch, {"current_difficulties": by metric}), gives the batch in its place; may be
    set later. difficulties, lr_scale: of the micro-batch yielded last. options: of torch's DataLoader.
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
            raise ValueError("the dataset has less samples than a global batch; lower train_batch_size")

    @property
    def batch_size(self) -> str:
        """For messages."""
        return f"{self._parts} parts"

    def __len__(self) -> int:
        """Micro-batches of a pass."""
        return self.sampler.batches_per_pass * self._parts

    def __iter__(self) -> Iterator[Any]:
        if self._passes is not None and self._passes_done >= self._passes:
            raise RuntimeError(
                f"the {self._passes} passes over the data are read; raise data_sampling.num_epochs to go on"
            )
        self.sampler.load_state_dict(self._state)
        drawing = _Drawing(self, self.sampler.batches_per_pass - self._of_pass)
        # Of its own: torch's would be advanced by every iteration, and with it the dropout of a resumed run.
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
        """Plain numbers, the same on every rank."""
        return {
            "sampler": self._state,
            "parts_done": self._parts_done,
            "parts": self._parts * self._world_size,
            "passes_done": self._passes_done,
            "of_pass": self._of_pass,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there; in another world between two global batches. Raises ValueError elsewhere."""
        if "sampler" not in state_dict:
            raise ValueError(
                "the checkpoint's data position is that of a run without a curriculum; resume it without "
                "data_efficiency.data_sampling, or load with load_module_only=True"
            )
        done, parts = state_dict["parts_done"], self._parts * self._world_size
        if done and parts != state_dict["parts"]:
            raise ValueError(
                f"this position lies {done} micro-batches within a global batch of {state_dict['parts']}, and one has "
                f"{parts} here; save between global batches to go on in another world"
            )
        self.sampler.load_state_dict(state_dict["sampler"])
        self._state, self._parts_done = dict(state_dict["sampler"]), done
        self._passes_done, self._of_pass = state_dict["passes_done"], state_dict["of_pass"]


class _Drawing:
    """The batch sampler of a pass's rest: this rank's parts, and of each global batch what `waiting` keeps."""

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
