"""A bucket: some parameters of one group, where they lie flat, their state, and their exchange under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .comm import Codec, ErrorFeedback, Flight, Wire
from .flat import Layout


@dataclass
class Bucket:
    """Some parameters of one group, their flat state, and their exchange.

    first: how many parameters the buckets before it hold. owner: this rank, which owns that chunk of the bucket.
    x: float32 [W·N]; gradients come in, what is sent is made in it, what came back is read from it. flat: the state
    that has one element per element, by name. layers: what a leaf knows of each parameter, by name. live_J: which
    blocks have ever seen a gradient. frames: the packed m/D, uint8 [W, B], once compression has begun. wires: buffers
    by codec; wire: the one of the exchange under way.
    """

    index: int
    first: int
    owner: int
    group_index: int
    params: list[Tensor]
    names: list[str]
    layout: Layout
    x: Tensor
    x_views: list[Tensor]
    counts: Tensor
    phase: str = ""
    flat: dict[str, Tensor] = field(default_factory=dict)
    frames: Tensor | None = None
    layers: dict[str, Tensor] = field(default_factory=dict)
    live_J: Tensor | None = None
    ef: ErrorFeedback | None = None
    wires: dict[Codec, Wire] = field(default_factory=dict)
    wire: Wire | None = None
    flight: Flight | None = None
    gathered: list[tuple[int, int] | None] = field(default_factory=list)
    complete: int = 0

    def gather(self, grad_scale: float = 1.0) -> None:
        """x ← the gradients, divided by grad_scale; zeros where there is none. Raises RuntimeError on sparse ones."""
        for p, name, view in zip(self.params, self.names, self.x_views, strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{name} has a {p.grad.layout} gradient; onebit needs dense ones (nn.Embedding(..., sparse=False))"
                )
        present = [(view, p.grad) for view, p in zip(self.x_views, self.params, strict=True) if p.grad is not None]
        if present:
            views, grads = zip(*present, strict=True)
            torch._foreach_copy_(views, grads)
        if grad_scale != 1.0:
            self.x.mul_(1.0 / grad_scale)
        self.gathered = [_version(p) for p in self.params]

    def changed(self) -> list[str]:
        """The parameters whose gradients are no longer those that were gathered."""
        triples = zip(self.params, self.names, self.gathered, strict=True)
        return [name for p, name, version in triples if version != _version(p)]

    def bad(self) -> list[str]:
        """The parameters whose gradients are not finite on this rank."""
        pairs = zip(self.params, self.names, strict=True)
        return [name for p, name in pairs if p.grad is not None and not bool(p.grad.isfinite().all())]

    def own_chunk(self, flat: Tensor) -> Tensor:
        """The chunk of a flat tensor that rank `owner` owns."""
        return flat.view(self.layout.world_size, -1)[self.owner]


def _version(p: Tensor) -> tuple[int, int] | None:
    return None if p.grad is None else (id(p.grad), p.grad._version)
