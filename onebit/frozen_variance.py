"""A variance that rests: D, from which momentum takes its coordinates, between the steps that bring gradients.

1-bit Adam and 1-bit LAMB keep m/D, packed as the frames received last, and D = √max(v̂, floor·blockmean) + eps as the
last dense step left it. Here is how both come from Adam's moments (`freeze`), how a refresh takes a mean gradient into
them, and what each gradient weighs. The arithmetic is in `arithmetic/adam.py`; who calls it when, in `onebit_adam.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .arithmetic.adam import BLOCKS_AT_A_TIME, denominator_, sums_of_live_blocks
from .arithmetic.schedule import variance_weight
from .checkpoint.change_world_size import resize
from .layout.bucket import Bucket
from .model_parallel import ModelParallelGroup
from .step.replicated import Replicated
from .usage.contract import Group, State, eps_of


@dataclass
class FrozenVariance:
    """D of every bucket, and the numbers that it rests on; these are the same on all ranks.

    floor: of a block's mean, see `floor_of_blocks`. fallback: the variance of blocks that have never seen a gradient.
    last_dense: by group, the last step after which its variance was updated. total: by group, the sum of the weights in
    its variance. unseen: by group, the steps before the first in which anything in the model had a gradient other than
    zero: a warm-up is counted from there. None until then.
    """

    floor: float
    fallback: float = 1.0
    last_dense: dict[int, int] = field(default_factory=dict)
    total: dict[int, float] = field(default_factory=dict)
    unseen: dict[int, int] | None = None

    def look(self, buckets: Sequence[Bucket], before: Sequence[int], parts: ModelParallelGroup) -> None:
        """Until a variance has taken in a gradient, look whether one has. All parts of the model.

        buckets: those with a variance. before: by group, the steps that would then be `unseen`. Waits for the device:
        in a common run in its first step alone.
        """
        if self.unseen is None:
            has_seen = not buckets or any(bool(bucket.flat["exp_avg_sq"].any()) for bucket in buckets)
            if parts.total(float(has_seen), 0.0)[0] > 0.0:
                self.unseen = dict(enumerate(before))

    def seen_steps(self, g: int, step: int) -> int:
        """Of the first `step` steps of group g, those since its model has seen a gradient."""
        return 0 if self.unseen is None else step - self.unseen.get(g, 0)

    # ---------------------------------------------------------------- what a gradient weighs

    def share(self, g: int, beta2: float, step: int) -> float:
        """The weight that the gradient of `step` would have in group g's bias-corrected variance."""
        weight = variance_weight(beta2, step - self.last_dense[g])
        return weight / self._total_after(g, weight)

    def _total_after(self, g: int, weight: float) -> float:
        return (1.0 - weight) * self.total[g] + weight

    def count_dense(self, g: int, beta2: float, step: int) -> None:
        """Group g has taken in the gradient of `step`."""
        if g in self.total:
            self.total[g] = self._total_after(g, variance_weight(beta2, step - self.last_dense[g]))
        self.last_dense[g] = step

    # ---------------------------------------------------------------- freeze and refresh

    def begin(
        self, due: Sequence[tuple[Bucket, float]], parts: ModelParallelGroup, block: int, *, is_first: bool
    ) -> None:
        """v ← v̂ of these buckets, whose warm-up is over. With each, the weight that its moving average has by now.

        is_first: nothing was frozen before; what is frozen later must not replace the fallback. All parts of the model,
        with buckets or without.
        """
        for bucket, total in due:
            self.total[bucket.group_index], self.last_dense[bucket.group_index] = total, bucket.step
            bucket.flat["exp_avg_sq"].div_(total)
        if is_first:
            variances = [bucket.flat["exp_avg_sq"] for bucket, _ in due]
            total, elements = parts.total(*sums_of_live_blocks(variances, [b.share_J for b, _ in due], block))
            self.fallback = total / elements if elements else 1.0

    def freeze(self, bucket: Bucket, m: Tensor, v_hat: Tensor, eps: float, *, is_divided: bool = False) -> Tensor:
        """The bucket's D ← D(v̂), in v̂'s memory; m ← m/D, unless it is divided, which is given back."""
        bucket.live_J = v_hat.view(-1, bucket.layout.block).any(1)
        bucket.flat["denominator"] = self._denominator(bucket, v_hat, eps)
        return m if is_divided else m.div_(v_hat)

    def refresh(self, bucket: Bucket, g: Tensor, last_average: Tensor, group: Group) -> Tensor:
        """v takes in the mean gradient g, D is made anew, and the average ← m/D ← β1·m/D + (1-β1)·g/D is given back.

        In the memory of D, g (which becomes g/D) and the average, and little else.

        What is in the frames and in the errors stays as it is: moves, made or owed. Turned into gradients by the old D
        and back by the new one, the noise of compression would grow without bound where a block's D collapses.
        """
        assert bucket.live_J is not None
        beta1, beta2 = group["betas"]
        D, block = bucket.flat["denominator"], bucket.layout.block
        v = D.sub_(eps_of(group)).square_()
        known_J = bucket.counts.view(-1) * bucket.live_J  # elements that are no padding and have seen a gradient
        share = self.share(bucket.group_index, beta2, bucket.step)
        parts = zip(*(x.split(BLOCKS_AT_A_TIME) for x in (v.view(-1, block), g.view(-1, block), known_J)), strict=True)
        for v_Jn, g_Jn, known in parts:
            v_Jn.masked_fill_(torch.arange(block, device=v.device) >= known.unsqueeze(1), 0.0)
            v_Jn.lerp_(g_Jn.square(), share)
        bucket.live_J = v.view(-1, block).any(1)
        self._denominator(bucket, v, eps_of(group))  # in place
        return last_average.lerp_(g.div_(D), 1.0 - beta1)

    def _denominator(self, bucket: Bucket, v: Tensor, eps: float) -> Tensor:
        return denominator_(v, bucket.layout, bucket.counts, eps=eps, floor=self.floor, fallback=self.fallback)

    # ---------------------------------------------------------------- checkpoints

    def record(self, buckets: Sequence[Bucket]) -> State:
        return {
            "fallback": self.fallback,
            "last_dense": dict(self.last_dense),
            "variance_total": dict(self.total),
            "unseen": self.unseen if self.unseen is None else dict(self.unseen),
            "live_blocks": [bucket.live_J for bucket in buckets],
        }

    def load_record(self, record: State, buckets: Sequence[Bucket]) -> None:
        self.fallback = record["fallback"]
        self.unseen = record.get("unseen", {})  # older ones have none
        self.last_dense, self.total = dict(record["last_dense"]), dict(record["variance_total"])
        for bucket, live_J in zip(buckets, record["live_blocks"], strict=True):
            blocks = bucket.layout.numel // bucket.layout.block
            bucket.live_J = None if live_J is None else resize(live_J, blocks).to(bucket.device)


def pack_momentum(placement: Replicated, bucket: Bucket, m: Tensor, beta1: float) -> None:
    """frames ← m (here m/D); its residual r is owed as β1·r, so that the next β1·m + e is what it would be."""
    assert bucket.frames is not None and bucket.ef is not None
    placement.codec.encode(bucket.rows(m), None, bucket.frames, bucket.counts)
    bucket.ef.worker.add_(bucket.own_rows(m).view(-1), alpha=beta1)
