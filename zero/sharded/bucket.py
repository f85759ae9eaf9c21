"""A sharded bucket: some parameters of one group, the chunk of them that this rank owns, and their state.

The flat layout is the family's (`onebit/layout/flat.py`): W equal chunks, one per rank. The momentum of the whole
bucket is every rank's own; variance and master weights exist once, each chunk's at its owner. Here are where things lie
and how they move between parameters and chunks; the arithmetic is in `arithmetic.py`.

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk, K parameters of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import SignCodec
from ...comm.messages import numbers_on
from ...layout.flat import Layout
from ...layout.masters import NAME as MASTER
from ...layout.masters import Masters
from ...usage.contract import State
from ...usage.frozen import dense_gradients


class ParamSlice(NamedTuple):
    """Elements start to stop of parameter k, flat, lie in the chunk from element `at` on."""

    k: int
    start: int
    stop: int
    at: int


def pieces_of(layout: Layout, rank: int) -> list[ParamSlice]:
    """The parts of the parameters that lie in this rank's chunk."""
    first, end = rank * layout.chunk, (rank + 1) * layout.chunk
    pieces = []
    for k, (offset, shape) in enumerate(zip(layout.offsets, layout.shapes, strict=True)):
        start, stop = max(offset, first), min(offset + shape.numel(), end)
        if start < stop:
            pieces.append(ParamSlice(k, start - offset, stop - offset, start - first))
    return pieces


@dataclass
class ShardedBucket:
    """Parameters, layout, and the state of them that this rank keeps.

    first: how many parameters the buckets before it hold. counts: int32 [W, J], real elements of each block.
    momentum: [W·N], float32 or bfloat16: what is left of c when its frame is sent, c - (1-β1)·q. variance: float32 [N].
    owned: float32 [N], the master weights; at stage 0 the error of the updates that were sent, and masters are whole on
    every rank, of parameters of less than float32. steps: per parameter,
    the steps in which some rank had a gradient for it, 0-dimensional. is_warm: whether the last step was one of the
    warm-up, and until the first, whether there is one. received: all ranks' last frames of the own chunk, kept only
    for clipping. mean: float32 [N], their mean: in the warm-up, and where they were loaded from a checkpoint.
    grad_stats: of the last step, float32 numbers of no dimensions; see `health.GradStats`. ready: at stage 2, the
    parameters whose gradients have come in this backward pass. gate: bool, of no dimensions, of the step under way
    where its votes are read late: False on all ranks where it is skipped.
    """

    index: int
    first: int
    group_index: int
    group: State
    rank: int
    device: torch.device
    params: list[Tensor]
    names: list[str]
    layout: Layout
    counts: Tensor
    momentum: Tensor
    variance: Tensor
    owned: Tensor
    steps: list[Tensor]
    is_warm: bool = False
    received: Tensor | None = None
    mean: Tensor | None = None
    grad_stats: Sequence[Tensor] | None = None
    ready: set[Tensor] = field(default_factory=set)
    gate: Tensor | None = None
    masters: Masters = field(default_factory=lambda: Masters(()))

    @classmethod
    def new(
        cls,
        index: int,
        first: int,
        group_index: int,
        group: State,
        members: Sequence[tuple[Tensor, str]],
        layout: Layout,
        rank: int,
        momentum_dtype: torch.dtype,
        is_warm: bool = False,
        *,
        is_whole: bool = False,
    ) -> ShardedBucket:
        """Zeroed state for these parameters, all on one device."""
        device = members[0][0].device
        return cls(
            index=index,
            first=first,
            group_index=group_index,
            group=group,
            rank=rank,
            device=device,
            params=[p for p, _ in members],
            names=[name for _, name in members],
            layout=layout,
            counts=layout.counts(device),
            momentum=torch.zeros(layout.numel, dtype=momentum_dtype, device=device),
            variance=torch.zeros(layout.chunk, device=device, dtype=torch.float32),
            owned=torch.zeros(layout.chunk, device=device, dtype=torch.float32),
            steps=[torch.tensor(0.0, dtype=torch.float32, device="cpu") for _ in members],
            is_warm=is_warm,
            masters=Masters([p for p, _ in members] if is_whole else ()),
        )

    def states(self) -> list[dict[str, Tensor]]:
        """The state of each parameter by name, as optimizer.state shows it."""
        pairs = zip(self.steps, self.layout.views(self.momentum), strict=True)
        shown = [{"step": step, "momentum": momentum} for step, momentum in pairs]
        for state, master in zip(shown, self.masters.views, strict=bool(self.masters.views)):
            if master is not None:
                state[MASTER] = master
        return shown

    @cached_property
    def pieces(self) -> list[ParamSlice]:
        """What of the parameters this rank owns."""
        return pieces_of(self.layout, self.rank)

    @cached_property
    def parameter_of_block(self) -> Tensor:
        """Which parameter each block belongs to, int64 [W, J]; 0 in the padding at the end."""
        of_block = torch.zeros(self.layout.numel // self.layout.block, dtype=torch.int64, device="cpu")
        for k, blocks in enumerate(self.layout.by_parameter(of_block)):
            blocks.fill_(k)
        return of_block.view(self.layout.world_size, -1).to(self.device)

    @cached_property
    def padding_of_ragged(self) -> tuple[Tensor, Tensor]:
        """The own blocks that are partly padding, int64 [R], and where theirs is, bool [R, block]."""
        counts_J = self.counts[self.rank]
        ragged = torch.nonzero((counts_J > 0) & (counts_J < self.layout.block)).view(-1)
        return ragged, torch.arange(self.layout.block, device=self.device) >= counts_J[ragged].unsqueeze(1)

    def blocks_of(self, seen: Sequence[bool]) -> Tensor | None:
        """What is said of each parameter, of each of its blocks: bool [W, J]; None where it is true of all.

        Where there is a gate, and it is not open, False of all.
        """
        if not all(seen):
            return self.behind_gate(seen)[self.parameter_of_block]
        return None if self.gate is None else self.gate.expand(self.counts.shape)

    def behind_gate(self, seen: Sequence[bool]) -> Tensor:
        """The same of each parameter, bool [K]."""
        seen_K = numbers_on(self.device, seen, torch.bool)
        return seen_K if self.gate is None else seen_K & self.gate

    @cached_property
    def own_divisors(self) -> Tensor:
        """Real elements of each own block, int32 [J], and 1 where there is none."""
        return self.counts[self.rank].clamp(min=1)

    def gradients(self) -> list[Tensor | None]:
        """The gradients where they lie; see `dense_gradients`."""
        return dense_gradients(self.rank, self.params, self.names, self.layout.shapes, self.device)

    def free_gradients(self) -> None:
        """At stage 2: what they held is in the momentum, or left out."""
        for p in self.params:
            p.grad = None

    def gather_gradients(self, scale: float | Tensor) -> Tensor:
        """scale · the gradients, float32 [W·N]; zeros where there is none, and in the padding.

        scale: where it is a tensor, of no dimensions.
        """
        x = torch.zeros(self.layout.numel, device=self.device, dtype=torch.float32)
        pairs = zip(self.layout.views(x), self.gradients(), strict=True)
        present = [(view, grad) for view, grad in pairs if grad is not None]
        if present:
            views, grads = zip(*present, strict=True)
            torch._foreach_copy_(views, grads)
        return _scaled_(x, scale)

    def scaled_gradients(self, scale: float | Tensor) -> tuple[list[Tensor | None], float]:
        """The gradients, and what they are to be multiplied by. A scale on the device is multiplied into a copy."""
        if not isinstance(scale, Tensor):
            return self.gradients(), scale
        return [x.view(-1) for x in self.layout.views(self.gather_gradients(scale))], 1.0

    def own_gradients(self, scale: float | Tensor) -> Tensor:
        """scale · the gradients of the own chunk, float32 [N]; zeros where there is none, and in the padding."""
        chunk, grads = torch.zeros(self.layout.chunk, device=self.device, dtype=torch.float32), self.gradients()
        own = [(chunk[at : at + stop - start], grads[k], start, stop) for k, start, stop, at in self.pieces]
        present = [(view, grad.reshape(-1)[start:stop]) for view, grad, start, stop in own if grad is not None]
        if present:
            views, parts = zip(*present, strict=True)
            torch._foreach_copy_(views, parts)
        return _scaled_(chunk, scale)

    def gather_replica(self) -> Tensor:
        """The own chunk of the parameters as every rank holds them, float32 [N]; zeros in the padding."""
        chunk = torch.zeros(self.layout.chunk, device=self.device, dtype=torch.float32)
        if self.pieces:
            own = [chunk[at : at + stop - start] for _, start, stop, at in self.pieces]
            torch._foreach_copy_(own, [self.params[k].detach().reshape(-1)[a:b] for k, a, b, _ in self.pieces])
        return chunk

    def mean_momentum(self, codec: SignCodec, beta1: float) -> Tensor | None:
        """m̂ of the own chunk as the last step had it, float32 [N]; None before there is one.

        Needs `received`, or `mean`.
        """
        if self.received is None:
            mean = None if self.mean is None else self.mean.clone()
        else:
            mean = torch.empty(self.layout.chunk, device=self.device, dtype=torch.float32)
            codec.decode_mean(self.received, mean)
        if mean is not None:
            mean.view(-1, self.layout.block).mul_(self.correction(beta1))
        return mean

    def products(self, grads: Sequence[Tensor | None], codec: SignCodec, beta1: float) -> list[Tensor]:
        """<g, m̂> on the own chunk, with m̂ as the last step left it, float64: one number; none where it is 0."""
        mean_hat = self.mean_momentum(codec, beta1)
        if mean_hat is None:
            return []
        products = []
        for k, start, stop, at in self.pieces:
            if (g := grads[k]) is not None:
                products.append(torch.dot(g.reshape(-1)[start:stop].float(), mean_hat[at : at + stop - start]))
        return [torch.stack(products).sum(dtype=torch.float64)] if products else []

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have come."""
        return len(self.ready) == len(self.params)

    def corrections(self, *betas: float) -> tuple[float, ...] | Tensor:
        """1/(1 - β^t) of each β for each own block, with the steps of its parameter, float32 [len(betas), J].

        0 where there was none. A number of each β where it is the same for all blocks.
        """
        counts = [int(step) for step in self.steps]
        rows = [[1.0 / (1.0 - beta**t) if t else 0.0 for t in counts] for beta in betas]
        if len(set(counts)) == 1:
            return tuple(row[0] for row in rows)
        table = numbers_on(self.device, [number for row in rows for number in row], torch.float32)
        return table.view(len(betas), -1)[:, self.parameter_of_block[self.rank]]

    def correction(self, beta: float) -> Tensor | float:
        """The same of one β, float32 [J, 1], or a number."""
        (each,) = self.corrections(beta)
        return each.unsqueeze(1) if isinstance(each, Tensor) else each

    def state_bytes(self) -> int:
        """Bytes of the state that this rank keeps."""
        kept = (self.momentum, self.variance, self.owned, self.masters.flat, self.received, self.mean)
        return sum(t.nbytes for t in kept if t is not None)


def _scaled_(x: Tensor, scale: float | Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        return x.mul_(scale.to(x.device))
    return x.mul_(scale) if scale != 1.0 else x
