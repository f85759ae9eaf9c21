"""A sharded bucket: some parameters of one group, the chunk of them that this rank owns, and their state.

The flat layout is that of the family (`onebit/layout/flat.py`): W equal chunks, one per rank. Every rank has its own
momentum, of the whole bucket; variance and master weights exist once, each chunk's on its owner. This file has the
layout and the copies between parameters and chunks; the arithmetic is in `arithmetic.py`.

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk, K parameters of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import Segments, SignCodec
from ...comm.messages import numbers_on
from ...layout.flat import Layout
from ...layout.masters import NAME as MASTER
from ...layout.masters import Masters
from ...usage.contract import State
from ...usage.gradients import dense_gradients


class ParamSlice(NamedTuple):
    """A part of a flattened parameter that is in a chunk.

    Attributes:
        k: Index of the parameter in its bucket.
        start: Its first element in the chunk.
        stop: The element after its last one in the chunk.
        at: Position of that first element in the chunk.
    """

    k: int
    start: int
    stop: int
    at: int


def pieces_of(layout: Layout, rank: int) -> list[ParamSlice]:
    """Return the parts of the parameters that are in this rank's chunk."""
    first, end = rank * layout.chunk, (rank + 1) * layout.chunk
    pieces = []
    for k, (offset, shape) in enumerate(zip(layout.offsets, layout.shapes, strict=True)):
        start, stop = max(offset, first), min(offset + shape.numel(), end)
        if start < stop:
            pieces.append(ParamSlice(k, start - offset, stop - offset, start - first))
    return pieces


@dataclass
class ShardedBucket:
    """Parameters, their layout, and the state of them that this rank keeps.

    Attributes:
        index: Number of the bucket, from 0.
        first: Number of parameters in the buckets before it.
        group_index: Index of its parameter group.
        group: Its parameter group, as in optimizer.param_groups.
        rank: This rank.
        device: Device of the parameters and of the state.
        params: The parameters.
        names: Their names, for messages.
        layout: Positions of the parameters in the flat bucket.
        counts: Real elements of each block, int32 [W, J].
        momentum: c - (1-β1)·q, the part of c that stays when its frame q is sent; float32 or bfloat16 [W·N].
        variance: float32 [N].
        owned: Master weights, float32 [N]; at stage 0 the residual of the updates that were sent.
        steps: For each parameter the number of steps in which any rank had a gradient for it, 0-dimensional.
        is_warm: Still in warm-up; before the first step, whether warm-up is enabled. Default False.
        is_idle: No rank had a gradient for any of its parameters in the last step that sent anything. Default False.
        received: All ranks' last frames of this rank's chunk, uint8; only kept for clipping. Default None.
        mean: Their mean, float32 [N]; in the warm-up, after a step in which a parameter had no gradient on any rank,
            and after frames were loaded from a checkpoint. Default None.
        grad_stats: Sums of the last step for `health.GradStats`, 0-dimensional float32. Default None.
        ready: Stage 2: parameters that have a gradient from this backward pass. Default: none.
        gate: 0-dimensional bool, in a step with late votes: False on all ranks if they skip it. Default None.
        masters: Stage 0: whole masters of parameters in less than float32, on every rank. Default: none.
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
    is_idle: bool = False
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
        """Make a bucket with zeroed state.

        Args:
            index: Number of the bucket, from 0.
            first: Number of parameters in the buckets before it.
            group_index: Index of its parameter group.
            group: The parameter group.
            members: Parameters and their names; all on one device.
            layout: Positions of the parameters in the flat bucket.
            rank: This rank.
            momentum_dtype: torch.float32 or torch.bfloat16.
            is_warm: Whether it begins with a warm-up. Default False.
            is_whole: Whether masters are whole on every rank, as at stage 0. Default False.
        """
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
        """Return the state of each parameter by name, as in optimizer.state; tensors are views."""
        pairs = zip(self.steps, self.layout.views(self.momentum), strict=True)
        shown = [{"step": step, "momentum": momentum} for step, momentum in pairs]
        for state, master in zip(shown, self.masters.views, strict=bool(self.masters.views)):
            if master is not None:
                state[MASTER] = master
        return shown

    @cached_property
    def pieces(self) -> list[ParamSlice]:
        """The parts of the parameters that this rank owns."""
        return pieces_of(self.layout, self.rank)

    @cached_property
    def parameter_of_block(self) -> Tensor:
        """Index of each block's parameter, int64 [W, J]; 0 in the padding at the end."""
        of_block = torch.zeros(self.layout.numel // self.layout.block, dtype=torch.int64, device="cpu")
        for k, blocks in enumerate(self.layout.by_parameter(of_block)):
            blocks.fill_(k)
        return of_block.view(self.layout.world_size, -1).to(self.device)

    @cached_property
    def padding_of_ragged(self) -> tuple[Tensor, Tensor]:
        """This rank's R blocks that are partly padding: their indices, int64 [R], and a mask of it, bool [R, block]."""
        counts_J = self.counts[self.rank]
        ragged = torch.nonzero((counts_J > 0) & (counts_J < self.layout.block)).view(-1)
        return ragged, torch.arange(self.layout.block, device=self.device) >= counts_J[ragged].unsqueeze(1)

    def blocks_of(self, seen: Sequence[bool]) -> Tensor | None:
        """Expand a flag per parameter to its blocks, bool [W, J]; None if all are True and there is no gate.

        Under a closed gate all are False.
        """
        if not all(seen):
            return self.behind_gate(seen)[self.parameter_of_block]
        return None if self.gate is None else self.gate.expand(self.counts.shape)

    def behind_gate(self, seen: Sequence[bool]) -> Tensor:
        """Copy the flags of the parameters to the device, bool [K]. Under a closed gate all are False."""
        seen_K = numbers_on(self.device, seen, torch.bool)
        return seen_K if self.gate is None else seen_K & self.gate

    @cached_property
    def own_divisors(self) -> Tensor:
        """Real elements of each of this rank's blocks, int32 [J]; 1 for a block without any."""
        return self.counts[self.rank].clamp(min=1)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients without a copy; see `dense_gradients`."""
        return dense_gradients(self.rank, self.params, self.names, self.layout.shapes, self.device)

    def free_gradients(self) -> None:
        """Drop the gradients, at stage 2, after they have gone into the momentum or were left out."""
        for p in self.params:
            p.grad = None

    def gather_gradients(self, scale: float | Tensor) -> Tensor:
        """Return scale · the gradients, float32 [W·N]; zeros for missing gradients and in the padding.

        Args:
            scale: A number or a 0-dimensional tensor.
        """
        x = torch.zeros(self.layout.numel, device=self.device, dtype=torch.float32)
        pairs = zip(self.layout.views(x), self.gradients(), strict=True)
        present = [(view, grad) for view, grad in pairs if grad is not None]
        if present:
            views, grads = zip(*present, strict=True)
            torch._foreach_copy_(views, grads)
        return _scaled_(x, scale)

    def scaled_gradients(self, scale: float | Tensor) -> tuple[list[Tensor | None], float]:
        """Return the gradients and their factor. A tensor scale is multiplied into a copy; the factor is then 1."""
        if not isinstance(scale, Tensor):
            return self.gradients(), scale
        return [x.view(-1) for x in self.layout.views(self.gather_gradients(scale))], 1.0

    def own_gradients(self, scale: float | Tensor) -> Tensor:
        """As `gather_gradients`, of this rank's chunk, float32 [N]. Writes each element once."""
        chunk, grads = torch.empty(self.layout.chunk, device=self.device, dtype=torch.float32), self.gradients()
        views = chunk.split(self._cuts)
        zeros = [view for view, size in zip(views[::2], self._cuts[::2], strict=True) if size]
        own, parts = list[Tensor](), list[Tensor]()
        for view, (k, start, stop, _) in zip(views[1::2], self.pieces, strict=True):
            if (grad := grads[k]) is None:
                zeros.append(view)
            else:
                own.append(view)
                parts.append(grad.reshape(-1)[start:stop])
        if zeros:
            torch._foreach_zero_(zeros)
        if own:
            torch._foreach_copy_(own, parts)
        return _scaled_(chunk, scale)

    @cached_property
    def _cuts(self) -> list[int]:
        """Sizes of what is in this rank's chunk: padding, a piece, padding, ..., a piece, padding."""
        sizes, end = list[int](), 0
        for piece in self.pieces:
            sizes += [piece.at - end, piece.stop - piece.start]
            end = piece.at + sizes[-1]
        return [*sizes, self.layout.chunk - end]

    @cached_property
    def own_segments(self) -> Segments:
        """Positions of `pieces` in this rank's chunk."""
        block = self.layout.block
        first, numels = (
            zip(*((at // block, b - a) for _, a, b, at in self.pieces), strict=True) if self.pieces else ((), ())
        )
        return Segments(first, numels, block)

    def own_replicas(self) -> list[Tensor]:
        """Return `pieces` of the parameters, each of one dimension; without a copy if the parameters are contiguous."""
        return [self.params[k].detach().reshape(-1)[start:stop] for k, start, stop, _ in self.pieces]

    def gather_replica(self) -> Tensor:
        """Return this rank's chunk of the replicated parameters, float32 [N]; zeros in the padding."""
        chunk = torch.zeros(self.layout.chunk, device=self.device, dtype=torch.float32)
        if self.pieces:
            torch._foreach_copy_(self.own_segments.views(chunk), self.own_replicas())
        return chunk

    def mean_momentum(self, codec: SignCodec, beta1: float) -> Tensor | None:
        """Return m̂ of this rank's chunk in the last step, float32 [N]; None without `received` and `mean`."""
        if self.received is None and self.mean is None:
            return None
        mean = self.last_mean(codec)
        mean.view(-1, self.layout.block).mul_(self.correction(beta1))
        return mean

    def last_mean(self, codec: SignCodec) -> Tensor:
        """Return a copy of the ranks' last mean momentum of this rank's chunk, float32 [N]; zeros before the first."""
        if self.received is not None:
            return self.mean_of(self.received, codec)
        return torch.zeros_like(self.owned) if self.mean is None else self.mean.clone()

    def mean_of(self, frames_WB: Tensor, codec: SignCodec) -> Tensor:
        """Decode the mean of all ranks' frames of this rank's chunk, float32 [N]."""
        mean = torch.empty(self.layout.chunk, device=self.device, dtype=torch.float32)
        codec.decode_mean(frames_WB, mean)
        return mean

    def products(self, grads: Sequence[Tensor | None], codec: SignCodec, beta1: float) -> list[Tensor]:
        """Return <g, m̂> on this rank's chunk, with the last step's m̂: one float64 number; [] if it is 0 or unknown.

        Args:
            grads: The bucket's gradients; None for a parameter without one.
            codec: Format of `received`.
            beta1: Decay of the momentum.
        """
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
        """Whether all gradients of this backward pass are there."""
        return len(self.ready) == len(self.params)

    def corrections(self, *betas: float) -> tuple[float, ...] | Tensor:
        """Return 1/(1 - β^t) of each β and each of this rank's blocks, with t the steps of its parameter.

        float32 [len(betas), J], 0 for t = 0; one number for each β if all parameters have the same t.
        """
        counts = [int(step) for step in self.steps]
        rows = [[1.0 / (1.0 - beta**t) if t else 0.0 for t in counts] for beta in betas]
        if len(set(counts)) == 1:
            return tuple(row[0] for row in rows)
        table = numbers_on(self.device, [number for row in rows for number in row], torch.float32)
        return table.view(len(betas), -1)[:, self.parameter_of_block[self.rank]]

    def correction(self, beta: float) -> Tensor | float:
        """As `corrections`, of one β: float32 [J, 1], or a number."""
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
