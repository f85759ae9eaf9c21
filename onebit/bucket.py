"""A bucket: some parameters of one group, where they lie flat, their state, and their exchange under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .clip import dot, has_squares
from .comm import Codec, ErrorFeedback, ExchangeTask, Hierarchy, Wire
from .flat import Layout
from .frozen import gradient_of
from .marks import GradientMark, gradient_bits
from .model_parallel import local


@dataclass
class Bucket:
    """Some parameters of one group, their flat state, and their exchange.

    first: how many parameters the buckets before it hold. hierarchy: says which rows this rank exchanges across nodes
    (all of them in a flat world), and which it averages. share_K: of each parameter's squares, what this rank counts in
    sums over the model (see `ModelParallelGroup.copies`). flat: the state that has one element per element, by name.
    layers: what a leaf knows of each parameter, by name. live_J: which blocks have ever seen a gradient. floor_J: the
    least variance in each block. frames: the packed m/D, uint8 [W, B], once compression has begun. wires: buffers by
    codec; wire: the one of the exchange under way.
    """

    index: int
    first: int
    hierarchy: Hierarchy
    group_index: int
    device: torch.device
    params: list[Tensor]
    names: list[str]
    layout: Layout
    counts: Tensor
    share_K: tuple[float, ...]
    phase: str = ""
    flat: dict[str, Tensor] = field(default_factory=dict)
    frames: Tensor | None = None
    layers: dict[str, Tensor] = field(default_factory=dict)
    live_J: Tensor | None = None
    floor_J: Tensor | None = None
    ef: ErrorFeedback | None = None
    wires: dict[Codec, Wire] = field(default_factory=dict)
    wire: Wire | None = None
    task: ExchangeTask | None = None
    sent: list[GradientMark] = field(default_factory=list)
    sent_bits: Tensor | None = None
    complete: int = 0
    _x: Tensor | None = None
    _x_views: list[Tensor] = field(default_factory=list)

    @property
    def x(self) -> Tensor:
        """float32 [W·N], zeros when first asked for; gradients come in, what is to be subtracted goes out."""
        if self._x is None:
            self._x = torch.zeros(self.layout.numel, device=self.device)
        return self._x

    @property
    def x_views(self) -> list[Tensor]:
        """x, by parameter."""
        if not self._x_views:
            self._x_views = self.layout.views(self.x)
        return self._x_views

    @property
    def x_bytes(self) -> int:
        """What x takes now."""
        return 0 if self._x is None else self._x.nbytes

    @property
    def held(self) -> list[Tensor]:
        """What this rank holds of the parameters, where it lies."""
        return [local(p) for p in self.params]

    def release_x(self) -> None:
        """Give x's memory back until it is asked for again."""
        self._x, self._x_views = None, []

    def gradients(self) -> list[Tensor | None]:
        """The gradients where they lie, of what this rank holds; None for what is frozen now.

        Raises RuntimeError on sparse and partial ones.
        """
        for p, name in zip(self.params, self.names, strict=True):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{name} has a {p.grad.layout} gradient; onebit needs dense ones (nn.Embedding(..., sparse=False))"
                )
            if p.grad is not None and getattr(p.grad, "placements", None) != getattr(p, "placements", None):
                raise RuntimeError(
                    f"the gradient of {name} is placed as {getattr(p.grad, 'placements', 'a plain tensor')}, the "
                    f"parameter as {getattr(p, 'placements', 'a plain tensor')}; redistribute it in a hook"
                )
        grads = map(gradient_of, self.params)
        return [None if grad is None else local(grad) for grad in grads]

    def gather(self, grads: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """x ← scale · the gradients; zeros where there is none."""
        for view, grad in zip(self.x_views, grads, strict=True):
            if grad is None:
                view.zero_()
        present = [(view, grad) for view, grad in zip(self.x_views, grads, strict=True) if grad is not None]
        if present:
            views, gathered = zip(*present, strict=True)
            torch._foreach_copy_(views, gathered)
        if scale != 1.0:
            self.x.mul_(scale)

    def mark_sent(self, *, with_bits: bool) -> None:
        """The gradients are being sent as they are now."""
        self.sent = [GradientMark.of(p) for p in self.params]
        self.sent_bits = gradient_bits(self.gradients()) if with_bits else None

    def changed(self) -> list[str]:
        """The parameters whose gradients are no longer those that were sent."""
        triples = zip(self.params, self.names, self.sent, strict=True)
        return [name for p, name, mark in triples if not mark.is_still(p)]

    def is_edited_unseen(self) -> bool:
        """Whether gradients that have not changed as far as torch can tell have other bits. False if not marked."""
        return self.sent_bits is not None and not torch.equal(self.sent_bits, gradient_bits(self.gradients()))

    def bad(self) -> list[str]:
        """The parameters whose gradients on this rank are not finite, or too large for a variance."""
        pairs = zip(map(gradient_of, self.params), self.names, strict=True)
        return [name for grad, name in pairs if grad is not None and not bool(has_squares(local(grad)))]

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the state that has the same bits on every replica, when these are synchronised."""
        for name, tensor in (*self.flat.items(), ("packed momentum", self.frames)):
            if tensor is not None:
                yield f"{name} of the bucket that begins with {self.names[0]}", tensor

    def new_errors(self, dtype: torch.dtype) -> ErrorFeedback:
        """Nothing owed: worker error [H·N], for the own rows, and server error [N]."""
        layout, L = self.layout, self.hierarchy.local_size
        return ErrorFeedback.zeros(layout.numel, layout.world_size, local_size=L, dtype=dtype, device=self.device)

    def own_rows(self, flat: Tensor) -> Tensor:
        """The rows of a flat tensor that this rank exchanges across nodes, [H, ...]. A view."""
        return self.hierarchy.rows(flat)

    def own_chunk(self, flat: Tensor) -> Tensor:
        """The chunk of a flat tensor that this rank averages."""
        return flat.view(self.layout.world_size, -1)[self.hierarchy.owner]

    @cached_property
    def share_J(self) -> Tensor | None:
        """share_K by block, float64 [W·J]; None where all are 1."""
        if all(share == 1.0 for share in self.share_K):
            return None
        shares = torch.zeros(self.layout.numel // self.layout.block, dtype=torch.float64, device=self.device)
        for view, share in zip(self.layout.by_parameter(shares), self.share_K, strict=True):
            view.fill_(share)
        return shares

    def own_squares(self) -> float:
        """The sum of squares of x over the chunk that this rank averages, of what counts here."""
        chunk = self.own_chunk(self.x)
        if self.share_J is None:
            return dot(chunk, chunk)
        squares_J = chunk.view(-1, self.layout.block).double().square().sum(1)
        return float((squares_J * self.own_chunk(self.share_J)).sum())

    def spread(self, own: Tensor) -> Tensor:
        """A flat tensor [W·N] that holds these own rows, and zeros. In a flat world they themselves."""
        if self.hierarchy.local_size == 1:
            return own.view(-1)
        flat = own.new_zeros(self.layout.numel)
        rows = self.own_rows(flat)
        rows.copy_(own.view(rows.shape))
        return flat
