"""Clipping by the norm of the mean gradient: exact in warm-up, estimated afterwards.

In warm-up all ranks have the mean gradient, so its norm is exact. Once ranks exchange momentum instead, no rank has it;
the norm is then estimated from numbers that each rank computes of its own gradients. Both are bit-identical on all
ranks.

An estimate needs all gradients, and buckets should leave during backward. So they leave with the factor that the steps
before lead to expect. Once the norm is known, the worker error is put right: frames + error are what they would be with
the factor that the norm asks for. Uncorrected, such steps cost up to 4 % of the loss; corrected, nothing
(scripts/records/clip_2026-11.md). A step whose factor was more than `MOST_TOO_LARGE` times too large is sent once more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..agreement.step_vote import StepVote
from ..arithmetic.squares import gradient_dots, gradient_sums, sums_in_turn
from ..comm import MomentumInputs, MomentumWeights, Transport
from ..comm.messages import gather_bytes
from ..model_parallel import ModelParallelGroup

if TYPE_CHECKING:
    from ..layout.bucket import Bucket
    from ..layout.buckets import Buckets
    from ..rule import Rule

Number = TypeVar("Number", float, Tensor)

MOST_TOO_LARGE = 2.0
"""A step is sent once more if its factor was this many times too large: a spike must not move parameters as it is."""


_NO_WEIGHTS = MomentumWeights(keep=0.0, add=0.0, own=0.0)


@dataclass
class Clipper:
    """Computes clip factors by the rule of torch.nn.utils.clip_grad_norm_: factor = min(1, max_norm/norm).

    Attributes:
        max_norm: Largest norm of the mean gradient; 0 turns clipping off.
        average: Moving average of the clip factors, with the momentum's β1, and its total weight.
        norm: The last norm for which a factor was asked; None if it was not finite.
    """

    max_norm: float
    average: tuple[float, float] = field(default=(0.0, 0.0), repr=False)
    norm: float | None = field(default=None, repr=False)

    def factor(self, norm: float) -> float:
        """The factor for gradients of this norm; NaN if the norm is not finite."""
        self.norm = norm if math.isfinite(norm) else None
        return min(1.0, self.max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan

    def estimated_factor(self, votes: Sequence[StepVote], world_size: int) -> float:
        """The factor for gradients that are not averaged yet. Sends nothing.

        Args:
            votes: The votes of all ranks, or this rank's own.
            world_size: Number of ranks.
        """
        sums = [(vote.norm_squared, vote.product) for vote in votes]
        return self.factor(estimated_norm(sums, world_size, self.expected))

    def late_factor(self, sums_W2: Tensor, world_size: int) -> Tensor:
        """`estimated_factor` of votes that the host has not read. Does not wait for the device; `norm` does not change.

        Args:
            sums_W2: norm_squared and product of each rank's vote, float64 [W, 2], all of them finite.
            world_size: Number of ranks.

        Returns:
            The factor, float64, of no dimensions, on the device of the sums.
        """
        norm = estimated_norm([row.unbind() for row in sums_W2], world_size, self.expected)
        # We divide a tensor by a tensor: torch rounds twice when it divides a number by a tensor.
        return torch.full_like(norm, self.max_norm).div_(norm + 1e-6).clamp_(max=1.0)

    @property
    def expected(self) -> float:
        """The average of the clip factors so far, with which a step is sent before its norm is known."""
        average, weight = self.average
        return min(1.0, average / weight) if weight > 0.0 else 1.0

    def remember(self, factor: float, beta1: float) -> None:
        """Add the clip factor of a step that was taken to the moving average.

        Args:
            factor: The clip factor.
            beta1: Decay of the average, the momentum's.
        """
        average, weight = self.average
        self.average = beta1 * average + (1.0 - beta1) * factor, beta1 * weight + (1.0 - beta1)


def estimated_norm(sums: Sequence[Sequence[Number]], world_size: int, mean_clip_factor: float) -> Number:
    """Estimate ‖mean g‖ from sums that each rank knows: ‖μ‖² + σ²/n with ‖μ‖² ≈ <ḡ, m̂>/k.

    N² = mean‖g_i‖²/n + (1 - 1/n)·max(0, mean <g_i, m̂>/k); k undoes the clipping of the gradients that m̂ averages.
    Exact for a world of one. Sums run in rank order, so that all ranks get the same bits.

    Args:
        sums: norm_squared and product of the votes of all n ranks, or of one rank, from which the means are estimated.
            Floats, or tensors of no dimensions.
        world_size: Number of ranks n.
        mean_clip_factor: The moving average k of the clip factors.
    """
    n, columns = world_size, tuple(zip(*sums, strict=True))
    mean_squared, product = (sum(column[1:], start=column[0]) / len(sums) for column in columns)
    common = product / mean_clip_factor
    common = (common + abs(common)) / 2  # max(0, common), for a tensor too
    return (mean_squared / n + (1.0 - 1.0 / n) * common) ** 0.5  # type: ignore[no-any-return]


class GradientNorm:
    """Computes the sums from which the clipper takes its norm, over all buckets and all parts of the model."""

    def __init__(self, transport: Transport, parts: ModelParallelGroup, buckets: Buckets[Bucket], rule: Rule):
        self._transport, self._parts, self._buckets, self._rule = transport, parts, buckets, rule

    def of_means(self, means: Sequence[Tensor | None]) -> float:
        """The norm of the mean gradients. All ranks. Sends as `exact_norm` does.

        Args:
            means: Mean gradient of each bucket, float32 [W·N]; None for a bucket without one.
        """
        squares = sum(b.own_squares(g) for b, g in zip(self._buckets, means, strict=True) if g is not None)
        return exact_norm(self._transport, self._parts, squares, self._buckets[0].device)

    def own_sums(self, scale: float) -> tuple[float, float]:
        """‖g‖² and <g, m̂> of this replica's gradients times scale. All ranks that hold its parts."""
        norm_squared = product = 0.0
        dots = gradient_dots(lambda: self._gradients_and_momenta(self._buckets))
        for share, (squares, products) in zip(self._shares(self._buckets), dots, strict=True):
            norm_squared += share * scale * scale * squares
            product += share * scale * products
        norm_squared, product = self._parts.total(norm_squared, product)
        return norm_squared, product

    def own_sums_on_device(self, scale: float) -> Tensor:
        """`own_sums` for a model in one piece, as a tensor on the device; see `gradient_sums`.

        Takes the sums that encoding has left in the buckets (`Bucket.sums_WJ2`), and computes the others.
        """
        device = self._buckets[0].device
        sums: list[Tensor] = []
        weights, others = [], []
        for bucket in self._buckets:
            if (factored := self._rule.factored_momentum(bucket)) is None:
                others.append(bucket)
                continue
            factor, m, D = factored
            if (sums_WJ2 := bucket.sums_WJ2) is None:
                momentum = MomentumInputs(bucket.masked_gradients(), bucket.layout.segments, D, m, _NO_WEIGHTS)
                sums_WJ2 = torch.empty(*bucket.counts.shape, 2, device=bucket.device, dtype=torch.float32)
                self._rule.codec.momentum_sums(momentum, sums_WJ2)
            sums += sums_WJ2.sum((0, 1), dtype=torch.float64).unbind()
            weights += [scale * scale, scale * factor]
        total = sums_in_turn(sums, weights, device, columns=2)
        if others and device.type == "cpu":
            total = total + gradient_sums(self._gradients_and_momenta(others), self._shares(others), scale, device)
        elif others:
            total = total + gradient_sums(self._whole(others), [1.0] * len(others), scale, device)
        return total

    def _whole(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradients and the momentum of every bucket, flat. On a GPU one product of each parameter costs more."""
        for bucket in buckets:
            m = self._rule.momentum(bucket)
            flat = torch.zeros_like(m)
            pairs = zip(bucket.layout.views(flat), bucket.masked_gradients(), strict=True)
            if present := [(view, g) for view, g in pairs if g is not None]:
                views, grads = zip(*present, strict=True)
                torch._foreach_copy_(views, grads)
            yield flat, m

    @staticmethod
    def _shares(buckets: Iterable[Bucket]) -> list[float]:
        """This rank's share of the sums, for every parameter that has a gradient here."""
        pairs = [pair for b in buckets for pair in zip(b.gradients(), b.share_K, strict=True)]
        return [share for g, share in pairs if g is not None]

    def _gradients_and_momenta(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient and momentum of every parameter that has a gradient here; a momentum may be a copy."""
        for bucket in buckets:
            m_views = bucket.layout.flat_views(self._rule.momentum(bucket))
            pairs = zip(bucket.masked_gradients(), m_views, strict=True)
            yield from ((g, m) for g, m in pairs if g is not None)


def exact_norm(
    transport: Transport, model_parallel_group: ModelParallelGroup, own_squares: float, device: torch.device
) -> float:
    """The norm of a tensor that all ranks hold, from the sum of squares that each rank has computed of its own part.

    It covers all shards together, and is the same on all ranks, however many threads each has. All ranks. Sends 8 bytes
    to each peer.

    Args:
        transport: Between the replicas.
        model_parallel_group: The ranks that hold the parts of this replica.
        own_squares: Sum of squares over this rank's part.
        device: Device of the messages.
    """
    shares = gather_bytes(transport, struct.pack("<d", own_squares), device)
    (total,) = model_parallel_group.total(sum(struct.unpack("<d", share)[0] for share in shares))
    return float(total**0.5)
