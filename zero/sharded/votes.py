"""What votes on the gradients of buckets say, and those that the host reads at the end of the step.

The latter on GPUs that the transport reaches. Where any rank has a gradient that is not finite, all ranks skip the
buckets of the vote: all of them, at stage 2 one. Where the host would have to wait for that, a flag on the device takes
its place. Blocks of a bucket that is not good then count as blocks without a gradient, whose values nobody reads, so
that no tensor of it changes. What the host has counted is given back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...agreement.step_vote import Ballot
from ...step.clip import read_numbers, sums_in_turn
from .bucket import ShardedBucket
from .exchange import Sharded


@dataclass(frozen=True)
class OwnGradients:
    """This rank's gradients of some buckets. names: of their parameters. norms: float32, each of no dimensions.

    sums: their ‖g‖², finite where all of g is; where it clips <g, m̂> too: float64 [1 or 2].
    """

    names: Sequence[str]
    norms: Sequence[Tensor]
    sums: Tensor

    @classmethod
    def of(
        cls, placement: Sharded, buckets: Sequence[ShardedBucket], scale: float, beta1s: Sequence[float] | None
    ) -> OwnGradients:
        """Waits for nothing. scale: of the gradients. beta1s: of each bucket; None: nothing is clipped."""
        device, products = buckets[0].device, []
        there: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        for k, bucket in enumerate(buckets):
            names, parts = there.setdefault(bucket.device, ([], []))
            grads = bucket.gradients()
            names += [name for name, g in zip(bucket.names, grads, strict=True) if g is not None]
            parts += [g for g in grads if g is not None]
            if beta1s is not None:
                products += bucket.products(grads, placement.config.codec, beta1s[k])
        by_device = [torch._foreach_norm(parts, dtype=torch.float32) for _, parts in there.values() if parts]
        squares = [torch.stack(norms).square().sum(dtype=torch.float64) for norms in by_device]
        sums = sums_in_turn(squares, [scale * scale] * len(squares), device)
        if beta1s is not None:
            # The estimate takes the mean over ranks of products; here each rank has its chunks' part of one product.
            product = sums_in_turn(products, [scale] * len(products), device) * placement.transport.world_size
            sums = torch.cat([sums, product])
        return cls(
            [name for names, _ in there.values() for name in names], [n for each in by_device for n in each], sums
        )

    def bad(self) -> list[str]:
        """The parameters whose gradients are not finite, or whose squares are beyond float32. Waits for the device."""
        norms = zip(self.names, read_numbers(self.norms), strict=True)
        return [name for name, norm in norms if not math.isfinite(norm)]


@dataclass
class LateVote:
    """A vote on some buckets under way, its gate, and what the host counts in their step, as it was before."""

    buckets: Sequence[ShardedBucket]
    ballot: Ballot
    gradients: OwnGradients
    gate: Tensor = field(init=False)
    _counted: Sequence[tuple[list[float], bool, Tensor | None, Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._counted = [
            ([float(step) for step in bucket.steps], bucket.is_warm, bucket.received, bucket.mean)
            for bucket in self.buckets
        ]
        self.gate = self.ballot.gate()
        for bucket in self.buckets:
            bucket.gate = self.gate.to(bucket.device)

    def undo(self) -> None:
        """The buckets take no step: counts are what they were. Tensors are, by their gates."""
        for bucket, (steps, is_warm, received, mean) in zip(self.buckets, self._counted, strict=True):
            for step, before in zip(bucket.steps, steps, strict=True):
                step.fill_(before)
            bucket.is_warm, bucket.received, bucket.mean = is_warm, received, mean

    def take(self, messages: Sequence[bytes]) -> None:
        """They are these, unchecked: from here on no bucket has a gate."""
        self.ballot.take(messages)
        for bucket in self.buckets:
            bucket.gate = None
