"""The variance between dense steps: it is frozen as D, and momentum is kept as m/D.

1-bit Adam and 1-bit LAMB keep m/D, packed as the frames received last, and D = √max(v̂, floor·blockmean) + eps as the
last dense step left it. This file makes both from Adam's moments (`freeze`), takes a mean gradient into them
(`refresh`), and computes the weight of each gradient. The arithmetic is in `arithmetic/adam.py`; `onebit_adam.py`
decides when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from .arithmetic.adam import BLOCKS_AT_A_TIME, denominator_, sums_of_live_blocks
from .arithmetic.schedule import variance_weight
from .checkpoint.change_world_size import resize
from .layout.bucket import Bucket
from .model_parallel import ModelParallelGroup
from .step.replicated import Replicated
from .usage.contract import Group, State, eps_of

T = TypeVar("T")

_SEES_GRADIENTS = ("exp_avg_sq", "momentum_buffer")  # flat state that a gradient other than zero leaves its trace in


@dataclass
class FrozenVariance:
    """Makes and refreshes the D of every bucket, and keeps the numbers for it; these are the same on all ranks.

    Attributes:
        floor: Least variance, as a share of a block's mean, see `floor_of_blocks`.
        fallback: Variance of blocks that have never seen a gradient. Default 1.
        last_dense: For each group, the last step after which its variance was updated.
        total: For each group, the sum of the weights in its variance.
        unseen: For each group, the number of steps before the first in which any gradient in the model was not zero:
            the warm-up is counted from there. None until then.
        births: For each bucket, the number of steps that its group had taken before each parameter's first gradient;
            -1 for a parameter that has had none. A layer that is unfrozen later has no older gradients in its variance.
        remainders: For each bucket, 1 - the sum of the weights in its group's variance before each parameter's birth;
            kept from the freeze on. 1 for parameters that were there from the beginning.
        joined: For each group, the number of steps after which layers last joined it; refreshes count from there, too.
    """

    floor: float
    fallback: float = 1.0
    last_dense: dict[int, int] = field(default_factory=dict)
    total: dict[int, float] = field(default_factory=dict)
    unseen: dict[int, int] | None = None
    births: dict[int, list[int]] = field(default_factory=dict)
    remainders: dict[int, list[float]] = field(default_factory=dict)
    joined: dict[int, int] = field(default_factory=dict)

    def look(self, buckets: Sequence[Bucket], before: Sequence[int], parts: ModelParallelGroup) -> None:
        """Until the model has seen a gradient, check whether it has. All parts of the model.

        Waits for the device: in an ordinary run in its first step only.

        Args:
            buckets: All buckets, in warm-up: some may have other moments than a variance.
            before: For each group, the number of steps that would be `unseen`.
            parts: The ranks that hold the parts of this replica.
        """
        if self.unseen is None:
            moments = [bucket.flat[name] for bucket in buckets for name in _SEES_GRADIENTS if name in bucket.flat]
            has_seen = not moments or any(bool(moment.any()) for moment in moments)
            if parts.total(float(has_seen), 0.0)[0] > 0.0:
                self.unseen = dict(enumerate(before))

    def seen_steps(self, g: int, step: int) -> int:
        """Number of steps since the model has seen a gradient, among the first `step` steps of group g."""
        return 0 if self.unseen is None else step - self.unseen.get(g, 0)

    def refreshed_for(self, g: int, step: int) -> int:
        """Number of steps, among the first `step` of group g, since its refreshes began, or last began anew."""
        return min(self.seen_steps(g, step), step - self.joined.get(g, 0))

    # ---------------------------------------------------------------- parameters that join later

    def note_births(self, bucket: Bucket, seen: Sequence[bool]) -> int:
        """Record which parameters have their first gradient in this step; returns how many elements of the model join.

        Args:
            bucket: The bucket, its step counted.
            seen: For each of its parameters, whether any rank has a gradient.
        """
        births = self.births.setdefault(bucket.index, [-1] * len(bucket.params))
        if -1 not in births:
            return 0
        joined, total = 0, self.total.get(bucket.group_index, 0.0)
        for k, (birth, is_seen) in enumerate(zip(births, seen, strict=True)):
            if birth < 0 and is_seen:
                births[k] = bucket.step - 1
                joined += bucket.layout.shapes[k].numel()
                if bucket.index in self.remainders:
                    self.remainders[bucket.index][k] = 1.0 - total
        return joined

    def ages(self, bucket: Bucket) -> list[int] | None:
        """For each parameter, the steps from its first gradient on, at least 1; None: all are as old as their group."""
        births, first = self.births.get(bucket.index, []), (self.unseen or {}).get(bucket.group_index, 0)
        if all(birth <= first for birth in births):
            return None
        return [max(bucket.step - max(birth, first), 1) for birth in births]

    def _share_J(self, bucket: Bucket, share: float, weight: float) -> float | Tensor:
        """The weight of a gradient in each block's variance: `share`, or float32 [W·J, 1] if parameters differ."""
        remainders, total = self.remainders.get(bucket.index, []), self.total[bucket.group_index]
        if all(remainder == 1.0 for remainder in remainders):
            return share
        share_J = torch.full(
            (bucket.layout.numel // bucket.layout.block, 1), share, device=bucket.device, dtype=torch.float32
        )
        for view, remainder in zip(bucket.layout.by_parameter(share_J), remainders, strict=True):
            if 0.0 < remainder < 1.0:  # the rest of this parameter's own weights is (1 - total)/remainder
                view.fill_(weight / (1.0 - (1.0 - weight) * min(1.0, (1.0 - total) / remainder)))
        return share_J

    # ---------------------------------------------------------------- what a gradient weighs

    def share(self, g: int, beta2: float, step: int) -> float:
        """The weight that the gradient of `step` would have in group g's bias-corrected variance.

        Args:
            g: Index of the group.
            beta2: Decay of the variance.
            step: Number of the step.
        """
        weight = variance_weight(beta2, step - self.last_dense[g])
        return weight / self._total_after(g, weight)

    def _total_after(self, g: int, weight: float) -> float:
        return (1.0 - weight) * self.total[g] + weight

    def count_dense(self, g: int, beta2: float, step: int) -> None:
        """Count the gradient of `step`, which group g has taken in.

        Args:
            g: Index of the group.
            beta2: Decay of the variance.
            step: Number of the step.
        """
        if g in self.total:
            self.total[g] = self._total_after(g, variance_weight(beta2, step - self.last_dense[g]))
        self.last_dense[g] = step

    # ---------------------------------------------------------------- freeze and refresh

    def begin(
        self, due: Sequence[tuple[Bucket, float]], parts: ModelParallelGroup, block: int, *, is_first: bool
    ) -> None:
        """v ← v̂ for buckets whose warm-up is over. All parts of the model, with buckets or without.

        Args:
            due: These buckets, each with the sum of the weights in its moving average.
            parts: The ranks that hold the parts of this replica.
            block: Elements of a block.
            is_first: Whether nothing was frozen before. If not, the fallback stays as it is.
        """
        for bucket, total in due:
            g = bucket.group_index
            self.total[g], self.last_dense[g] = total, bucket.step
            self.remainders[bucket.index] = [1.0] * len(bucket.params)
            if total == 1.0 or (ages := self.ages(bucket)) is None:
                bucket.flat["exp_avg_sq"].div_(total)
                continue
            beta2, seen = bucket.group["betas"][1], self.seen_steps(g, bucket.step)
            for k, (view, age) in enumerate(
                zip(bucket.layout.flat_views(bucket.flat["exp_avg_sq"]), ages, strict=True)
            ):
                view.div_(1.0 - beta2**age)
                self.remainders[bucket.index][k] = beta2 ** (seen - age)
        if is_first:
            sums = [sums_of_live_blocks(b.flat["exp_avg_sq"], b.counts, b.share_J, block) for b, _ in due]
            total, elements = parts.total(sum(of_v for of_v, _ in sums), sum(its for _, its in sums))
            self.fallback = total / elements if elements else 1.0

    def freeze(self, bucket: Bucket, m: Tensor, v_hat: Tensor, eps: float, *, is_divided: bool = False) -> Tensor:
        """The bucket's D ← D(v̂), in v̂'s memory; returns m/D, in m's memory.

        Args:
            bucket: The bucket.
            m: Momentum, float32 [W·N].
            v_hat: Bias-corrected variance, float32 [W·N].
            eps: Term of D.
            is_divided: Whether m is m/D already. Default False.
        """
        bucket.live_J = v_hat.view(-1, bucket.layout.block).any(1)
        bucket.flat["denominator"] = self._denominator(bucket, v_hat, eps)
        return m if is_divided else m.div_(v_hat)

    def refresh(self, bucket: Bucket, g: Tensor, last_average: Tensor, group: Group) -> Tensor:
        """Take the mean gradient g into v, compute D anew, and return the new m/D ← β1·m/D + (1-β1)·g/D.

        Works in the memory of D, g (which becomes g/D) and last_average, and little else.

        Frames and errors stay as they are: they contain updates, made or carried over. Converted into gradients by the
        old D and back by the new one, the noise of compression would grow without bound if a block's D collapses.

        Args:
            bucket: The bucket.
            g: Mean gradient, float32 [W·N], overwritten.
            last_average: m/D, float32 [W·N], overwritten with the result.
            group: The options of its group.
        """
        assert bucket.live_J is not None
        beta1, beta2 = group["betas"]
        D, block = bucket.flat["denominator"], bucket.layout.block
        v = D.sub_(eps_of(group)).square_()  # v̂, or the floor for elements below it
        known_J = bucket.counts.view(-1) * bucket.live_J  # per block: elements without padding, 0 before any gradient
        weight = variance_weight(beta2, bucket.step - self.last_dense[bucket.group_index])
        share = self._share_J(bucket, self.share(bucket.group_index, beta2, bucket.step), weight)
        of_blocks: list[Tensor] = [v.view(-1, block), g.view(-1, block), known_J]
        if isinstance(share, Tensor):
            of_blocks.append(share)
        parts = zip(*(x.split(BLOCKS_AT_A_TIME) for x in of_blocks), strict=True)
        # Padding and blocks without a gradient have only the floor so far: their variance is zero.
        for v_Jn, g_Jn, known, *own in parts:
            v_Jn.masked_fill_(torch.arange(block, device=v.device) >= known.unsqueeze(1), 0.0)
            v_Jn.lerp_(g_Jn.square(), own[0] if own else share)
        bucket.live_J = v.view(-1, block).any(1)
        self._denominator(bucket, v, eps_of(group))  # in place
        return last_average.lerp_(g.div_(D), 1.0 - beta1)

    def _denominator(self, bucket: Bucket, v: Tensor, eps: float) -> Tensor:
        return denominator_(v, bucket.layout, bucket.counts, eps=eps, floor=self.floor, fallback=self.fallback)

    # ---------------------------------------------------------------- checkpoints

    def record(self, buckets: Sequence[Bucket]) -> State:
        """The entries of a checkpoint, as plain numbers and tensors."""
        return {
            "fallback": self.fallback,
            "last_dense": dict(self.last_dense),
            "variance_total": dict(self.total),
            "unseen": self.unseen if self.unseen is None else dict(self.unseen),
            "joined": dict(self.joined),
            "live_blocks": [bucket.live_J for bucket in buckets],
            "births": [self._of(self.births, bucket, -1) for bucket in buckets],
            "remainders": [self._of(self.remainders, bucket, 1.0) for bucket in buckets],
        }

    @staticmethod
    def _of(table: dict[int, list[T]], bucket: Bucket, default: T) -> list[T]:
        return list(table.get(bucket.index, [default] * len(bucket.params)))

    def load_record(self, record: State, buckets: Sequence[Bucket]) -> None:
        """Take back entries from `record`; blocks are cut or padded for this number of ranks."""
        self.fallback = record["fallback"]
        self.unseen = record.get("unseen", {})  # older records have no such entry
        self.last_dense, self.total = dict(record["last_dense"]), dict(record["variance_total"])
        self.joined = dict(record.get("joined", {}))
        births = record.get("births", [[0] * len(bucket.params) for bucket in buckets])
        remainders = record.get("remainders", [[1.0] * len(bucket.params) for bucket in buckets])
        self.births = {bucket.index: list(of) for bucket, of in zip(buckets, births, strict=True)}
        self.remainders = {
            bucket.index: list(of)
            for bucket, of in zip(buckets, remainders, strict=True)
            if bucket.group_index in self.total
        }
        for bucket, live_J in zip(buckets, record["live_blocks"], strict=True):
            blocks = bucket.layout.numel // bucket.layout.block
            bucket.live_J = None if live_J is None else resize(live_J, blocks).to(bucket.device)


def pack_momentum(placement: Replicated, bucket: Bucket, m: Tensor, beta1: float) -> None:
    """frames ← m (here m/D), and worker error += β1·r for the residual r, so that the next β1·m + e is the same.

    Args:
        placement: Has the codec.
        bucket: The bucket; frames and worker error are modified.
        m: m/D, float32 [W·N], overwritten with r.
        beta1: Decay of the momentum.
    """
    assert bucket.frames is not None and bucket.ef is not None
    placement.codec.encode(bucket.rows(m), None, bucket.frames, bucket.counts)
    bucket.ef.worker.add_(bucket.own_rows(m).view(-1), alpha=beta1)
