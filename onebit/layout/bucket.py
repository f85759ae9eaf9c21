"""A bucket: some parameters of one group, their flat layout, and their state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..arithmetic.squares import bad_gradients, dot
from ..comm import Codec, ErrorFeedback, Hierarchy, Wire
from ..model_parallel import local
from ..usage.contract import State
from ..usage.gradients import dense_gradients, gradient_of
from .flat import Layout
from .masters import NAME as MASTER
from .masters import Masters


@dataclass
class Bucket:
    """Some parameters of one group, and their flat state.

    Attributes:
        index: Position in `Buckets`.
        first: Number of parameters in the buckets before it.
        rank: This rank, for messages.
        hierarchy: Which rows this rank exchanges between nodes (all of them in a flat world), and which it averages.
        group_index: Index of its group.
        group: The options of its group, one of the optimizer's param groups.
        device: Device of its parameters and state.
        params: Its parameters.
        names: Their names, for messages.
        layout: Their layout, in this rank's parts of them.
        counts: Real elements of each block, int32 [W, J].
        share_K: For each parameter, the share of its squares that this rank counts in sums over the model; see
            `ModelParallelGroup.copies`.
        steps: Number of steps that its group has taken, a tensor of no dimensions on the host, shared by the group's
            buckets.
        phase: "warmup", or the rule's name of a later phase.
        flat: State with one element per element, by name, each [W·N].
        of_this_rank: Names of the flat state that each rank has for itself; the rest is the same on all.
        frames: The packed m/D, uint8 [W, B]; None before compression has begun.
        layers: Values that a rule keeps for each parameter, by name.
        live_J: Which blocks have ever seen a gradient.
        floor_J: The least variance in each block.
        ef: Worker and server errors; None before compression has begun.
        masters: float32 masters of parameters in bfloat16 or float16.
        wires: Buffers of exchanges, by codec.
        masks: For each parameter, 0 for elements that may not move. None: all may move.
        sums_WJ2: `momentum_sums` of the gradients that this step has encoded, float32 [W, J, 2]; None: not computed.
    """

    index: int
    first: int
    rank: int
    hierarchy: Hierarchy
    group_index: int
    group: State
    device: torch.device
    params: list[Tensor]
    names: list[str]
    layout: Layout
    counts: Tensor
    share_K: tuple[float, ...]
    steps: Tensor
    phase: str = ""
    flat: dict[str, Tensor] = field(default_factory=dict)
    of_this_rank: tuple[str, ...] = ()
    frames: Tensor | None = None
    layers: dict[str, Tensor] = field(default_factory=dict)
    live_J: Tensor | None = None
    floor_J: Tensor | None = None
    ef: ErrorFeedback | None = None
    masters: Masters = field(init=False)
    wires: dict[Codec, Wire] = field(default_factory=dict)
    masks: list[Tensor] | None = None
    sums_WJ2: Tensor | None = None
    _buffer: Tensor | None = None
    _views: dict[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.masters = Masters(self.params)

    @property
    def step(self) -> int:
        """Number of steps that its group has taken."""
        return int(self.steps)

    @property
    def buffer(self) -> Tensor:
        """Scratch memory, float32 [W·N], zeros when new: gradients at the beginning of a step, the update at its end.

        If the next worker error has this shape and dtype, the buffer is its memory, which is free between steps as
        well. `ErrorFeedback.commit` makes that memory the error: ask for the buffer again after it.
        """
        if self.ef is not None and self.has_spare_error:
            return self.ef.worker_next
        if self._buffer is None:
            self._buffer = torch.zeros(self.layout.numel, device=self.device, dtype=torch.float32)
        return self._buffer

    @property
    def has_spare_error(self) -> bool:
        """Whether the memory of the next worker error serves as the buffer."""
        if self.ef is None:
            return False
        return self.ef.worker_next.dtype == torch.float32 and self.ef.worker_next.numel() == self.layout.numel

    @property
    def views(self) -> list[Tensor]:
        """The parts of the buffer that belong to the parameters, each in its parameter's shape."""
        buffer = self.buffer
        if buffer.data_ptr() not in self._views:
            if len(self._views) == 2:  # the buffer alternates between two errors; views of others are stale
                self._views.clear()
            self._views[buffer.data_ptr()] = self.layout.views(buffer)
        return self._views[buffer.data_ptr()]

    def relay(self, layout: Layout, rank: int) -> None:
        """Lay the bucket out for another set of ranks. The caller must then allocate its flat state anew.

        Args:
            layout: The new layout.
            rank: This rank in the new set.
        """
        self.layout, self.rank = layout, rank
        self.counts = layout.counts(self.device)
        self.__dict__.pop("share_J", None)  # was cached for the old layout
        self.wires.clear()
        self.release_buffer()

    def release_buffer(self) -> None:
        """Free the buffer's memory until the buffer is asked for again."""
        self._buffer = None
        self._views.clear()

    @property
    def local_values(self) -> list[Tensor]:
        """The tensor of each parameter that a step modifies: its float32 master, or this rank's part of it."""
        return self.masters.local_values

    def states(self) -> list[dict[str, Tensor]]:
        """The state of each parameter by name, as optimizer.state shows it. Views of the flat tensors."""
        of = {name: self.layout.views(flat) for name, flat in self.flat.items()}
        shown = [{name: views[k] for name, views in of.items()} for k in range(len(self.params))]
        for state, master in zip(shown, self.masters.views, strict=True):
            if master is not None:
                state[MASTER] = master
        return shown

    def gradients(self) -> list[Tensor | None]:
        """The gradients of this rank's parts of the parameters, not copied; see `dense_gradients`."""
        return dense_gradients(self.rank, self.params, self.names, self.layout.shapes, self.device)

    def masked_gradients(self) -> list[Tensor | None]:
        """The gradients, in new tensors if the bucket has masks. Raises as `gradients`."""
        grads = self.gradients()
        if self.masks is None:
            return grads
        return [None if g is None else g * mask for g, mask in zip(grads, self.masks, strict=True)]

    def may_move(self) -> Tensor | None:
        """1 for elements that the masks let move, 0 for others, float32 [W·N]; None if there are no masks."""
        if self.masks is None:
            return None
        flat = torch.ones(self.layout.numel, device=self.device, dtype=torch.float32)
        for mask, view in zip(self.masks, self.layout.views(flat), strict=True):
            view.copy_(mask != 0)
        return flat

    def gather(self, grads: Sequence[Tensor | None], scale: float = 1.0) -> Tensor:
        """Write scale times the gradients into the buffer, zeros for a parameter without one, and return the buffer.

        Args:
            grads: The gradients of its parameters.
            scale: Their factor. Default 1.
        """
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
        present = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if present:
            views, gathered = zip(*present, strict=True)
            torch._foreach_copy_(views, gathered)
        return self.buffer.mul_(scale) if scale != 1.0 else self.buffer

    def bad(self) -> list[str]:
        """The names of the parameters with gradients on this rank that are not finite, or too large for a variance."""
        pairs = zip(self.names, map(gradient_of, self.params), strict=True)
        return bad_gradients((name, local(grad)) for name, grad in pairs if grad is not None)

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the state that has the same bits on every replica while these are synchronised."""
        shared = [(name, tensor) for name, tensor in self.flat.items() if name not in self.of_this_rank]
        for name, tensor in (*shared, ("masters", self.masters.flat), ("packed momentum", self.frames)):
            if tensor is not None and tensor.numel() > 0:
                yield f"{name} of the bucket that begins with {self.names[0]}", tensor

    def rows(self, flat: Tensor) -> Tensor:
        """A flat tensor as one row for each owner, [W, ...]. A view."""
        return flat.view(self.layout.world_size, -1)

    def own_rows(self, flat: Tensor) -> Tensor:
        """The rows of a flat tensor that this rank exchanges between nodes, [H, ...]. A view."""
        return self.hierarchy.rows(flat)

    def own_chunk(self, flat: Tensor) -> Tensor:
        """The chunk of a flat tensor that this rank averages. A view."""
        return flat.view(self.layout.world_size, -1)[self.hierarchy.owner]

    @cached_property
    def share_J(self) -> Tensor | None:
        """share_K for each block, float64 [W·J]; None if all are 1."""
        if all(share == 1.0 for share in self.share_K):
            return None
        shares = torch.zeros(self.layout.numel // self.layout.block, dtype=torch.float64, device=self.device)
        for view, share in zip(self.layout.by_parameter(shares), self.share_K, strict=True):
            view.fill_(share)
        return shares

    def own_squares(self, flat: Tensor) -> float:
        """The sum of squares over the chunk of a flat tensor that this rank averages, weighted by share_K."""
        chunk = self.own_chunk(flat)
        if self.share_J is None:
            return dot(chunk, chunk)
        squares_J = chunk.view(-1, self.layout.block).double().square().sum(1)
        return float((squares_J * self.own_chunk(self.share_J)).sum())

    def spread(self, own: Tensor) -> Tensor:
        """A flat tensor [W·N] with these values in this rank's own rows, and zeros elsewhere.

        In a flat world a view of own.
        """
        if self.hierarchy.local_size == 1:
            return own.view(-1)
        flat = own.new_zeros(self.layout.numel)
        rows = self.own_rows(flat)
        rows.copy_(own.view(rows.shape))
        return flat

    def state_bytes(self) -> int:
        """Bytes of its state: moments, masters, errors, packed momentum."""
        kept = [
            *self.flat.values(),
            self.masters.flat,
            self.frames,
            *(() if self.ef is None else (self.ef.worker, self.ef.server)),
        ]
        return sum(t.nbytes for t in kept if t is not None)

    def buffers(self) -> list[Tensor]:
        """The tensors that are free between steps: the buffer, the wires, the next errors."""
        tensors = [] if self._buffer is None else [self._buffer]
        for wire in self.wires.values():
            tensors += [t for t in (wire.frames_WB, wire.received_HB, wire.mean) if t is not None]
        return tensors if self.ef is None else [*tensors, self.ef.worker_next, self.ef.server_next]
