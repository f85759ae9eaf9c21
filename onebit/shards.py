"""One replica in several shards: what the ranks that hold them must know of each other.

An optimizer's link joins the ranks that hold the same shard of different replicas, and carries all it compresses. What
concerns a model as a whole (its norm, whether a step is good, an error that ends it) is settled here, by the ranks that
hold the shards of one replica. A model in one piece is one shard, and takes the same path.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import Transport
from .replicas import gather_bytes, gather_tensors, gather_texts


def local(tensor: Tensor) -> Tensor:
    """The elements of a tensor that this rank holds, where they lie: a DTensor's local shard, any other tensor itself.

    Asked for anew in every step: FSDP2 keeps the DTensor, but may move what it shards.
    """
    # Not isinstance: importing torch.distributed.tensor takes a second, and who has a DTensor has imported it.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


def count_edits_apart_(grad: Tensor | None) -> None:
    """Give a DTensor's local elements a version counter of their own; any other tensor stays as it is.

    FSDP2 cuts a module's gradients out of one tensor, with one counter for all: where the next micro-batch adds to one
    of them, all would look edited.
    """
    if hasattr(grad, "_local_tensor"):
        grad._local_tensor = grad._local_tensor.data  # type: ignore[union-attr]  # the same memory, a new counter


@dataclass(frozen=True)
class Shards:
    """The ranks that hold the shards of this replica; each operation by all of them, alike, the same bits on all.

    Which parameters have a gradient needs no vote: FSDP2 reduces a gradient over all shards, or none has it.
    """

    link: Transport

    def gather(self, *numbers: float) -> list[tuple[float, ...]]:
        """Every shard's numbers, in rank order. Sends 8 bytes per number to each peer."""
        if self.link.world_size == 1:  # every step of an unsharded model asks
            return [numbers]
        pattern = struct.Struct(f"<{len(numbers)}d")
        return [pattern.unpack(row) for row in gather_bytes(self.link, pattern.pack(*numbers), self._device)]

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over the shards, in rank order."""
        return [sum(column) for column in zip(*self.gather(*numbers), strict=True)]

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on all shards."""
        return all(flag for (flag,) in self.gather(float(is_so)))

    def total_of_rows(self, table: Tensor) -> Tensor:
        """A tensor's sum over the shards, in rank order; of one shape on all. Sends (S-1)·nbytes per rank."""
        first, *others = gather_tensors(self.link, table)
        for other in others:
            first = first + other
        return first

    def norms(self, held: Tensor) -> Tensor:
        """The norms of whole layers, from those of the shards that the ranks hold. float32, any shape."""
        return self.total_of_rows(held.double().square()).sqrt().float()

    def together(self, kind: type[Exception], check: Callable[[], None]) -> None:
        """Run a check of this shard; where it raises `kind` on one shard, that is raised on all."""
        mine: Exception | None = None
        try:
            check()
        except kind as error:
            mine = error
        texts = gather_texts(self.link, "" if mine is None else str(mine), self._device)
        if mine is not None:
            raise mine
        if found := next(filter(None, texts), None):
            raise kind(found)

    def check_holds(self, p: Tensor, name: str) -> None:
        """Raise ValueError unless p is sharded over as many ranks as these: its sums are taken over them."""
        mesh = getattr(p, "device_mesh", None)
        held = 1 if mesh is None else mesh.size()
        is_whole = mesh is not None and held > 1 and not all(place.is_shard() for place in p.placements)  # type: ignore[attr-defined]
        if held != self.link.world_size or is_whole:
            found = "replicated" if is_whole else f"in {held} shard{'s' * (held > 1)}"
            raise ValueError(
                f"shard {self.link.rank}: {name} is {found}, the optimizer's shards are {self.link.world_size} ranks; "
                "shard all parameters over one mesh axis (onebit.zero.fsdp.shard does) and pass shards=, the transport "
                "between the ranks of that axis"
            )

    @property
    def _device(self) -> torch.device:
        return getattr(self.link, "device", torch.device("cpu"))
