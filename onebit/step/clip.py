"""Clipping by the norm of the mean gradient, with one meaning: while it is known, and when it no longer is.

In warm-up the mean gradient is there, and its norm is exact. Once momentum travels in its place nobody holds it; its
norm is then estimated from what each rank knows of its own. Both come out the same on every rank, to the bit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..agreement.step_vote import StepVote
from ..arithmetic.squares import gradient_dots, gradient_sums
from ..comm import Transport
from ..comm.messages import gather_bytes
from ..model_parallel import ModelParallelGroup

if TYPE_CHECKING:
    from ..layout.bucket import Bucket
    from ..layout.buckets import Buckets
    from ..rule import Rule

Number = TypeVar("Number", float, Tensor)


@dataclass
class Clipper:
    """The rule of torch.nn.utils.clip_grad_norm_: factor = min(1, max_norm/norm); max_norm 0: off.

    average: the momentum's moving average, of the factors instead of the gradients, and its weight. norm: the last one
    asked about; None where it was not finite.
    """

    max_norm: float
    average: tuple[float, float] = field(default=(0.0, 0.0), repr=False)
    norm: float | None = field(default=None, repr=False)

    def factor(self, norm: float) -> float:
        """What to multiply gradients by; NaN where the norm is not finite."""
        self.norm = norm if math.isfinite(norm) else None
        return min(1.0, self.max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan

    def estimated_factor(self, votes: Sequence[StepVote], world_size: int) -> float:
        """The factor for gradients that are not averaged yet."""
        sums = [(vote.norm_squared, vote.product) for vote in votes]
        return self.factor(estimated_norm(sums, world_size, self._mean_factor))

    def late_factor(self, sums_W2: Tensor, world_size: int) -> Tensor:
        """The same of votes that the host has not read, where all of their sums are finite; `norm` stays as it is.

        float64, of no dimensions, on the device of the sums, float64 [W, 2]. Waits for nothing.
        """
        norm = estimated_norm([row.unbind() for row in sums_W2], world_size, self._mean_factor)
        # A tensor by a tensor: torch has a number divided by a tensor round twice.
        return torch.full_like(norm, self.max_norm).div_(norm + 1e-6).clamp_(max=1.0)

    @property
    def _mean_factor(self) -> float:
        average, weight = self.average
        return average / weight if weight > 0.0 else 1.0

    def remember(self, factor: float, beta1: float) -> None:
        """A step with this factor was taken."""
        average, weight = self.average
        self.average = beta1 * average + (1.0 - beta1) * factor, beta1 * weight + (1.0 - beta1)


def estimated_norm(sums: Sequence[Sequence[Number]], world_size: int, mean_clip_factor: float) -> Number:
    """An estimate of ‖mean g‖ from what each rank knows: ‖μ‖² + σ²/n with ‖μ‖² ≈ <ḡ, m̂>/k.

    N² = mean‖g_i‖²/n + (1 - 1/n)·max(0, mean <g_i, m̂>/k); k undoes the clipping of the gradients that m̂ averages.
    sums: norm_squared and product of the votes of all n ranks, or of one rank's own, from which the means are
    estimated; floats, or tensors of no dimensions. Exact for a world of one. Sums run in rank order: the same
    everywhere.
    """
    n, columns = world_size, tuple(zip(*sums, strict=True))
    mean_squared, product = (sum(column[1:], start=column[0]) / len(sums) for column in columns)
    common = product / mean_clip_factor
    common = (common + abs(common)) / 2  # max(0, common), of a tensor too
    return (mean_squared / n + (1.0 - 1.0 / n) * common) ** 0.5  # type: ignore[no-any-return]


class GradientNorm:
    """What the clipper asks of a step's gradients: of all buckets, and all parts of the model."""

    def __init__(self, transport: Transport, parts: ModelParallelGroup, buckets: Buckets[Bucket], rule: Rule):
        self._transport, self._parts, self._buckets, self._rule = transport, parts, buckets, rule

    def of_means(self, means: Sequence[Tensor | None]) -> float:
        """Of mean gradients, float32 [W·N], one for each bucket that has one. All ranks; see `exact_norm`."""
        squares = sum(b.own_squares(g) for b, g in zip(self._buckets, means, strict=True) if g is not None)
        return exact_norm(self._transport, self._parts, squares, self._buckets[0].device)

    def own_sums(self, scale: float) -> tuple[float, float]:
        """‖g‖² and <g, m̂> of this replica's gradients times scale. All ranks that hold its parts."""
        norm_squared = product = 0.0
        dots = gradient_dots(self._gradients_and_momenta)
        for share, (squares, products) in zip(self._shares(), dots, strict=True):
            norm_squared += share * scale * scale * squares
            product += share * scale * products
        norm_squared, product = self._parts.total(norm_squared, product)
        return norm_squared, product

    def own_sums_on_device(self, scale: float) -> Tensor:
        """The same of a model in one piece; see `gradient_sums`."""
        return gradient_sums(self._gradients_and_momenta(), self._shares(), scale, self._buckets[0].device)

    def _shares(self) -> list[float]:
        """Of every parameter that has a gradient here, this rank's share of its sums."""
        pairs = [pair for b in self._buckets for pair in zip(b.gradients(), b.share_K, strict=True)]
        return [share for g, share in pairs if g is not None]

    def _gradients_and_momenta(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every parameter that has a gradient here; a momentum may be a copy."""
        for bucket in self._buckets:
            m_views = bucket.layout.flat_views(self._rule.momentum(bucket))
            pairs = zip(bucket.masked_gradients(), m_views, strict=True)
            yield from ((g, m) for g, m in pairs if g is not None)


def exact_norm(
    transport: Transport, model_parallel_group: ModelParallelGroup, own_squares: float, device: torch.device
) -> float:
    """The norm of a tensor that all ranks hold, from the sum of squares that each finds in its own part of it.

    Of all shards together: the same on all ranks, whatever their threads. Sends 8 bytes to each peer.
    """
    shares = gather_bytes(transport, struct.pack("<d", own_squares), device)
    (total,) = model_parallel_group.total(sum(struct.unpack("<d", share)[0] for share in shares))
    return float(total**0.5)
