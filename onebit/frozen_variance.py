"""What 1-bit Adam and 1-bit LAMB share: a warm-up on gradients, then one-bit momentum over a variance that rests.

After the warm-up the momentum lives in coordinates of the update, as m/D, in the frames in which it last travelled. In
"auto" the variance is refreshed now and then by a step whose gradients travel in eight bits. The arithmetic is in
`adam.py`, the schedule in `schedule.py`; a leaf (`onebit_adam.py`, `onebit_lamb.py`) turns the update into a move.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .adam import adamw_update_, denominator_
from .agreement.step_vote import StepVote
from .base import CommonOptions, CompressedOptimizer, codec_of_gradients
from .bucket import Bucket
from .checkpoint.change_world_size import resize
from .comm import Bf16Codec, Codec, ErrorFeedback, Exchange, MomentumWeights
from .contract import check_number
from .schedule import DenseSteps, variance_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


class FrozenVarianceOptimizer(CompressedOptimizer):
    """Base of 1-bit Adam and 1-bit LAMB; arguments: see `OnebitAdam`. Three kinds of steps, by `DenseSteps`:

    - *warmup*: the mean gradient travels in `warmup_codec`; m and v are Adam's.
    - *compressed*: c_i = β1·m/D + (1-β1)·g_i/D + e_i travels in one bit on both phases; what comes back is the new m/D.
      g_i/D is g_i/√(D² + w·g_i²): a gradient far beyond the old D counts in D.
    - *refresh*: the mean gradient ḡ travels in `warmup_codec` again; v takes it in, D is computed anew, and
      m/D ← β1·m/D + (1-β1)·ḡ/D.
    """

    def __init__(
        self,
        params: object,
        defaults: dict,
        *,
        freeze_step: int | str,
        warmup_codec: Codec | None,
        bias_correction: bool,
        variance_floor: float,
        **common: Unpack[CommonOptions],
    ):
        check_number(type(self).__name__, "variance_floor", variance_floor)
        self.rule = DenseSteps(freeze_step)
        self.variance_floor = variance_floor
        self.bias_correction = bias_correction
        self.warmup_codec = codec_of_gradients(warmup_codec, common)
        self._fallback = 1.0  # the variance of blocks that have never seen a gradient
        self._last_dense: dict[int, int] = {}  # group -> the last step after which its variance was updated
        self._variance_total: dict[int, float] = {}  # group -> the sum of the weights in its variance
        super().__init__(params, defaults, **common)

    def _options(self) -> list[str]:
        names = ("rule", "warmup_codec", "variance_floor", "bias_correction")
        return [*super()._options(), *(f"option {name} = {getattr(self, name)}" for name in names)]

    # ---------------------------------------------------------------- what travels

    def _is_dense(self, bucket: Bucket) -> bool:
        return self._compresses is False or self.rule.is_dense(int(self._steps[bucket.group_index]))

    def _codec(self, bucket: Bucket) -> Codec:
        if self._compresses is False:
            return Bf16Codec(self.codec.block)
        return self.warmup_codec if self._is_dense(bucket) else self.codec

    def _sends_gradients(self, bucket: Bucket) -> bool:
        return self._is_dense(bucket)

    def _round_name(self) -> str:
        return "compressed" if any(not self._is_dense(bucket) for bucket in self._buckets) else "dense"

    def _error_feedback(self, bucket: Bucket) -> ErrorFeedback | None:
        return None if self._is_dense(bucket) else bucket.ef

    def _phases(self, bucket: Bucket, group: dict, codec: Codec, scale: float) -> Exchange:
        """Dense steps: the gradient. Others, in one pass: β1·m/D + (1-β1)·g_i/D, with m/D read from its frames."""
        if self._is_dense(bucket):
            yield from super()._phases(bucket, group, codec, scale)
            return
        assert bucket.frames is not None
        grads, share = self._gradients(bucket), self._weight_of_a_gradient(bucket)
        self._observe(bucket, grads, scale, share / self.transport.world_size)
        beta1 = group["betas"][0]
        weights = MomentumWeights(keep=beta1, add=1.0 - beta1, own=share / self._hierarchy.nodes, unscale=scale)
        D_WN = self._rows(bucket.flat["denominator"])
        yield from self._phases_of_momentum(bucket, grads, D_WN, bucket.frames, weights)

    def _weight_of_a_gradient(self, bucket: Bucket) -> float:
        """What a gradient would weigh in a refresh in this step. Divided among those who send one: see `normalised`.

        Where there are no refreshes, 1 - β2: a weight that grew with the age of a variance that is frozen for good cost
        2 % of the byte LM's loss (scripts/records/study_2026-11.md).
        """
        g = bucket.group_index
        beta2 = self.param_groups[g]["betas"][1]
        if isinstance(self.rule.freeze_step, int):
            return 1.0 - beta2
        return self._share_of_refresh(g, beta2, int(self._steps[g]) + 1)

    def _observe(self, bucket: Bucket, grads: Sequence[Tensor | None], scale: float, own: float) -> None:
        """What a leaf wants to know of scale·g_i over D before it is sent."""

    # ---------------------------------------------------------------- state

    def _allocate(self, bucket: Bucket, phase: str) -> None:
        n, W, device = bucket.layout.numel, self.transport.world_size, bucket.device
        bucket.phase, bucket.frames, bucket.ef, bucket.live_J = phase, None, None, None
        bucket.wires.clear()
        if phase == "warmup":
            bucket.flat = {name: torch.zeros(n, device=device) for name in ("exp_avg", "exp_avg_sq")}
        else:
            bucket.ef = bucket.new_errors(self.error_dtype)
            bucket.flat = {"denominator": torch.ones(n, device=device)}
            bucket.frames = torch.zeros(W, self.codec.frame_bytes(n // W), dtype=torch.uint8, device=device)
            bucket.live_J = torch.zeros(n // self.codec.block, dtype=torch.bool, device=device)

    def momentum(self, bucket: Bucket) -> Tensor:
        correction = self._momentum_correction(bucket, int(self._steps[bucket.group_index]))
        if bucket.frames is None:
            return bucket.flat["exp_avg"] * correction
        return self._last_average(bucket).mul_(bucket.flat["denominator"]).mul_(correction)

    def _last_average(self, bucket: Bucket) -> Tensor:
        update, may_move = self._unpacked(bucket), self._may_move(bucket)
        return update if may_move is None else update.mul_(may_move)

    def _unpacked(self, bucket: Bucket) -> Tensor:
        assert bucket.frames is not None
        update = torch.empty(bucket.layout.numel, device=bucket.device)
        self.codec.decode(bucket.frames, self._rows(update))
        return update

    def _mask_state(self, bucket: Bucket) -> None:
        super()._mask_state(bucket)
        may_move = self._may_move(bucket)
        if may_move is not None and bucket.frames is not None and bucket.ef is not None:
            # A frame of signs holds no zeros. Every rank owes what it says too much, so that β1·m + owed is 0 there.
            too_much = self._unpacked(bucket).mul_(1.0 - may_move)
            beta1 = self.param_groups[bucket.group_index]["betas"][0]
            bucket.ef.worker.sub_(bucket.own_rows(too_much).reshape(-1), alpha=beta1)

    def _momentum_correction(self, bucket: Bucket, step: int) -> float:
        beta1 = self.param_groups[bucket.group_index]["betas"][0]
        return 1.0 / (1.0 - beta1**step) if self.bias_correction and step > 0 else 1.0

    # ---------------------------------------------------------------- a step that is good

    def _commit(self, bucket: Bucket, group: dict, step: int) -> None:
        """Take over errors and moments. Dense steps: bucket.x ← m̂/D, the update."""
        if bucket.phase == "warmup":
            adamw_update_(
                bucket.x,
                bucket.flat["exp_avg"],
                bucket.flat["exp_avg_sq"],
                lr=1.0,
                betas=group["betas"],
                eps=group["eps"],
                step=step,
                bias_correction=self.bias_correction,
            )
        elif self._was_dense(bucket):
            self._refresh(bucket, group, step)
            bucket.x.mul_(self._momentum_correction(bucket, step))
        else:
            wire = bucket.wires[self.codec]
            assert bucket.frames is not None and bucket.ef is not None
            bucket.ef.commit()
            # What landed is the new momentum; the old one's memory receives the next.
            bucket.frames, wire.frames_WB = wire.frames_WB, bucket.frames
            self._mask_state(bucket)

    def _weights_of_layers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """weight, decay: p ← (1 - decay)·p - weight·m̂/D for each parameter of the bucket. float32 [K]."""
        group, K = self.param_groups[bucket.group_index], len(bucket.params)
        lr = float(group["lr"])
        weight, decay = (torch.full((K,), number, device=bucket.device) for number in (lr, lr * group["weight_decay"]))
        return weight, decay

    def _move(self, bucket: Bucket, seen: Sequence[bool]) -> None:
        weight_K, decay_K = self._weights_of_layers(bucket)
        is_dense, is_masked = self._was_dense(bucket), bucket.group_index in self._masks
        if not is_dense:
            assert bucket.frames is not None
            weight_K.mul_(self._momentum_correction(bucket, self._count(bucket)))
            if is_masked:
                self.codec.decode(bucket.frames, self._rows(bucket.x))
        if is_dense or is_masked:
            for view, p, weight, decay in zip(bucket.x_views, bucket.held, weight_K, decay_K, strict=True):
                view.mul_(weight).addcmul_(p.float(), decay)
            super()._move(bucket, seen)
            return
        self._apply(bucket, seen, bucket.frames, -weight_K, 1.0 - decay_K)

    def _count(self, bucket: Bucket) -> int:
        return int(self._steps[bucket.group_index])

    def _was_dense(self, bucket: Bucket) -> bool:
        """Whether gradients travelled in the step that has just been counted."""
        return self._compresses is False or self.rule.is_dense(self._count(bucket) - 1)

    def _refresh(self, bucket: Bucket, group: dict, step: int) -> None:
        """v takes in the mean gradient ḡ in bucket.x, D follows, and bucket.x ← m/D ← β1·m/D + (1-β1)·ḡ/D.

        What is in the frames and in the errors stays as it is: moves, made or owed. Turned into gradients by the old D
        and back by the new one, the noise of compression would grow without bound where a block's D collapses.
        """
        assert bucket.live_J is not None
        beta1, beta2 = group["betas"]
        g, D, block = bucket.x, bucket.flat["denominator"], self.codec.block
        v = (D - group["eps"]).square_()
        known_J = bucket.counts.view(-1) * bucket.live_J  # elements that are no padding and have seen a gradient
        v.view(-1, block).masked_fill_(torch.arange(block, device=v.device) >= known_J.unsqueeze(1), 0.0)
        v.lerp_(g.square(), self._share_of_refresh(bucket.group_index, beta2, step))
        bucket.live_J = v.view(-1, block).any(1)
        self._denominate(bucket, v, group["eps"])
        D.copy_(v)
        torch.lerp(self._last_average(bucket), g.div_(D), 1.0 - beta1, out=g)
        self._pack_momentum(bucket, v.copy_(g), beta1)
        bucket.wires.pop(self.warmup_codec, None)  # refreshes are rare: their buffers are not kept

    def _share_of_refresh(self, g: int, beta2: float, step: int) -> float:
        """The weight of the gradient of `step` in group g's bias-corrected variance."""
        weight = variance_weight(beta2, step - self._last_dense[g])
        return weight / self._total_after(g, weight)

    def _total_after(self, g: int, weight: float) -> float:
        return (1.0 - weight) * self._variance_total[g] + weight

    def _denominate(self, bucket: Bucket, v: Tensor, eps: float) -> None:
        layout, counts = bucket.layout, bucket.counts
        denominator_(v, layout, counts, eps=eps, floor=self.variance_floor, fallback=self._fallback)

    def _pack_momentum(self, bucket: Bucket, m: Tensor, beta1: float) -> None:
        """frames ← m (here m/D); its residual r is owed as β1·r, so that the next β1·m + e is what it would be."""
        assert bucket.frames is not None and bucket.ef is not None
        self.codec.encode(self._rows(m), None, bucket.frames, bucket.counts)
        bucket.ef.worker.add_(bucket.own_rows(m).view(-1), alpha=beta1)
        self._mask_state(bucket)

    # ---------------------------------------------------------------- the freeze

    def _after_step(self, votes: Sequence[StepVote], step: int) -> None:
        steps = [int(count) for count in self._steps]
        dense = [g for g, count in enumerate(steps) if self._compresses is False or self.rule.is_dense(count - 1)]
        for g in dense:
            if g in self._variance_total:
                weight = variance_weight(self.param_groups[g]["betas"][1], steps[g] - self._last_dense[g])
                self._variance_total[g] = self._total_after(g, weight)
            self._last_dense[g] = steps[g]
        first = self._buckets[0]
        is_refresh = first.phase == "compressed" and first.group_index in dense
        self.stats.phase = "refresh" if is_refresh else first.phase
        self._freeze_where_due()
        for bucket in self._buckets:
            # In two levels gradients come through x in every step.
            rests = self._compresses and self._hierarchy.local_size == 1 and self.rule.rests(self._count(bucket))
            if rests and bucket.group_index not in self._masks:
                bucket.release_x()

    def _freeze_where_due(self) -> None:
        """End the warm-up of the groups whose momentum is to travel next: v becomes D, m goes into frames."""
        due = [bucket for bucket in self._buckets if bucket.phase == "warmup" and not self._is_dense(bucket)]
        if not due or not self._should_compress():
            return
        moments = [(bucket.flat["exp_avg"], bucket.flat["exp_avg_sq"]) for bucket in due]
        for bucket, (_, v) in zip(due, moments, strict=True):
            g, step = bucket.group_index, int(self._steps[bucket.group_index])
            total = 1.0 - self.param_groups[g]["betas"][1] ** step if self.bias_correction else 1.0
            self._variance_total[g], self._last_dense[g] = total, step
            v.div_(total)
        if all(bucket.phase == "warmup" for bucket in self._buckets):  # a group added later must not replace it
            self._fallback = self._mean_of_live_blocks(due, [v for _, v in moments])
        for bucket, (m, v) in zip(due, moments, strict=True):
            self._freeze(bucket, m, v)
        if self.transport.rank == 0:
            log.info("one-bit momentum from here, after step %d", int(self._steps[due[0].group_index]))

    def _freeze(self, bucket: Bucket, m: Tensor, v: Tensor) -> None:
        group = self.param_groups[bucket.group_index]
        self._allocate(bucket, "compressed")
        bucket.live_J = v.view(-1, self.codec.block).any(1)
        self._denominate(bucket, v, group["eps"])
        bucket.flat["denominator"] = v
        self._pack_momentum(bucket, m.div_(v), group["betas"][0])
        self._publish(bucket)

    # ---------------------------------------------------------------- checkpoints

    def _extra_state(self) -> dict:
        return super()._extra_state() | {
            "fallback": self._fallback,
            "last_dense": dict(self._last_dense),
            "variance_total": dict(self._variance_total),
            "live_blocks": [bucket.live_J for bucket in self._buckets],
        }

    def _load_extra_state(self, record: dict) -> None:
        super()._load_extra_state(record)
        self._fallback = record["fallback"]
        self._last_dense = dict(record["last_dense"])
        self._variance_total = dict(record["variance_total"])
        for bucket, live_J in zip(self._buckets, record["live_blocks"], strict=True):
            blocks = bucket.layout.numel // self.codec.block
            bucket.live_J = None if live_J is None else resize(live_J, blocks).to(bucket.x.device)

    def _adopt_dense_state(self) -> None:
        self._freeze_where_due()
