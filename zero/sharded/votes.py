"""What votes on the gradients of buckets say, and those of stage 2 that the host reads at the end of the step.

The latter on GPUs that the transport reaches. Gradients leave during backward, and a bucket whose gradients are not
finite on any rank is skipped by all. Where the host would have to wait for that, a flag on the device takes its place.
Blocks of a bucket that is not good then count as blocks without a gradient, whose values nobody reads, so that no
tensor of it changes. What the host has counted is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...agreement.step_vote import Ballot
from ...step.clip import sums_in_turn
from .bucket import ShardedBucket
from .exchange import Sharded


def own_sums(
    placement: Sharded, buckets: Sequence[ShardedBucket], scale: float, beta1s: Sequence[float] | None
) -> Tensor:
    """This rank's ‖g‖², finite where all of g is; where it clips <g, m̂> too: float64 [1 or 2]. Waits for nothing.

    scale: what gradients are to be multiplied by. beta1s: of each bucket; None: nothing is clipped.
    """
    device = buckets[0].device
    parts: dict[object, list[Tensor]] = {}  # by bucket; by device where nobody asks for the sum's last bit
    products: list[Tensor] = []
    for k, bucket in enumerate(buckets):
        grads = bucket.gradients()
        part = parts.setdefault(bucket.device if beta1s is None else bucket.index, [])
        part += [g for g in grads if g is not None]
        if beta1s is not None:
            products += bucket.products(grads, placement.config.codec, beta1s[k])
    norms = [torch.stack(torch._foreach_norm(part, dtype=torch.float32)) for part in parts.values() if part]
    squares = [norm.square().sum(dtype=torch.float64) for norm in norms]
    norm_squared = sums_in_turn(squares, [scale * scale] * len(squares), device)
    if beta1s is None:
        return norm_squared
    # The estimate takes the mean over ranks of products; here each rank has its chunks' part of one product.
    product = sums_in_turn(products, [scale] * len(products), device) * placement.transport.world_size
    return torch.cat([norm_squared, product])


@dataclass
class LateVote:
    """A bucket's vote under way, its gate, and what the host counts in its step, as it was before.

    norms: of the gradients on this rank, float32, of the parameters that names say.
    """

    bucket: ShardedBucket
    ballot: Ballot
    norms: Tensor | None
    names: Sequence[str]
    gate: Tensor = field(init=False)
    _steps: Sequence[float] = field(init=False)
    _kept: tuple[bool, Tensor | None, Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        bucket = self.bucket
        self._steps = [float(step) for step in bucket.steps]
        self._kept = bucket.is_warm, bucket.received, bucket.mean
        self.gate = bucket.gate = self.ballot.gate()

    def undo(self) -> None:
        """The bucket takes no step: counts are what they were. Tensors are, by its gate."""
        bucket = self.bucket
        for step, before in zip(bucket.steps, self._steps, strict=True):
            step.fill_(before)
        bucket.is_warm, bucket.received, bucket.mean = self._kept

    def bad(self) -> list[str]:
        """The parameters whose gradients on this rank are not finite. Waits for the device."""
        if self.norms is None:
            return []
        flags = self.norms.isfinite().tolist()
        return [name for name, is_finite in zip(self.names, flags, strict=True) if not is_finite]
