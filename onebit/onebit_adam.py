"""1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888): AdamW for a short warm-up, then one-bit momentum.

`AdamRule` is the paper, a step of one bucket from top to bottom; `OnebitAdam` is the optimizer that uses it. The
variance between dense steps is in `frozen_variance.py`, the schedule in `arithmetic/schedule.py`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .arithmetic.adam import adam_denominator, adam_direction_, laprop_direction_
from .arithmetic.schedule import DenseSteps
from .checkpoint.parameter_state import ParameterState, flat_of, spread_over
from .comm import Bf16Codec, Codec, Log4Codec, MomentumWeights, codec_named
from .frozen_variance import FrozenVariance, pack_momentum
from .layout.bucket import Bucket
from .layout.flat import Layout
from .optimizer import CommonOptions, CompressedOptimizer
from .rule import LARGEST_MOVE, Factored, Rule, codec_of_gradients
from .step.bucket_step import Answer, BucketStep, Decision, Meeting
from .usage.contract import State, check_is_switch, check_number, eps_of
from .usage.signature import shows_all_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


def as_float32(number: float) -> float:
    """The number rounded to float32."""
    return ctypes.c_float(number).value


MOMENTUM_OF = ("gradients", "moves")

LEAST_JOINED = 0.01
"""Share of its group from which layers that join later begin the refreshes anew; smaller ones wait for the next."""


class AdamRule(Rule):
    """1-bit Adam's three kinds of steps, scheduled by `DenseSteps`.

    - *warmup*: the mean gradient is exchanged in `warmup_codec`; m and v are Adam's, or m is LaProp's: see
      `OnebitAdam`.
    - *compressed*: c_i = β1·m/D + (1-β1)·g_i/D + e_i is sent in one bit in both phases; the result is the new m/D.
      g_i/D is g_i/√(D² + w·g_i²): a gradient far beyond the old D counts in D.
    - *refresh*: the mean gradient ḡ is exchanged in `warmup_codec` again; v takes it in, D is computed anew, and
      m/D ← β1·m/D + (1-β1)·ḡ/D.

    Args:
        schedule: Which steps exchange gradients.
        warmup_codec: Format of gradients.
        bias_correction: Whether m and v are corrected for their start from zero.
        variance_floor: Least variance, as a share of a block's mean.
        momentum_of: "gradients" (default) or "moves", as in `OnebitAdam`.
    """

    kind = "1-bit Adam"
    adam_names: ClassVar = {"exp_avg_update": "exp_avg"}
    of_parameters: ClassVar[tuple[str, ...]] = ("live_blocks", "births", "remainders")
    can_be_delayed: ClassVar[bool] = True
    common: ClassVar[tuple[str, ...]] = ("denominator",)

    def __init__(
        self,
        schedule: DenseSteps,
        warmup_codec: Codec,
        *,
        bias_correction: bool,
        variance_floor: float,
        momentum_of: str = "gradients",
    ):
        if momentum_of not in MOMENTUM_OF:
            raise ValueError(f"momentum_of must be one of {', '.join(MOMENTUM_OF)}, got {momentum_of!r}")
        self.schedule = schedule
        self.momentum_of = momentum_of
        self.warmup_codec = warmup_codec
        self.bias_correction = bias_correction
        self.variance = FrozenVariance(variance_floor)
        self._joined: dict[int, int] = {}  # by group, elements whose first gradient came in this step
        self._dense: Sequence[bool] = ()  # by group, whether this step exchanges gradients

    def check(self, name: str) -> None:
        check_number(name, "variance_floor", self.variance.floor)
        check_is_switch(name, "bias_correction", self.bias_correction)

    def options(self) -> dict[str, object]:
        return {
            "rule": self.schedule,
            "warmup_codec": self.warmup_codec,
            "variance_floor": self.variance.floor,
            "bias_correction": self.bias_correction,
            "momentum_of": self.momentum_of,
        }

    # ---------------------------------------------------------------- a step of one bucket

    def step(self, bucket: Bucket, scale: float) -> BucketStep:
        if self.averages_gradients(bucket):
            return self.dense_step(bucket, scale)
        return self.compressed_step(bucket, scale)

    def dense_step(self, bucket: Bucket, scale: float) -> BucketStep:
        """A warm-up step or a refresh of a bucket: exchanges gradients."""
        group = bucket.group
        g, decision = yield from self.placement.mean_gradient(bucket, self._codec_of_gradients(), scale)
        self._note_births(bucket, decision)
        if bucket.phase == "warmup":
            moments = (g, bucket.flat[self._moment], bucket.flat["exp_avg_sq"])
            options = {"betas": group["betas"], "eps": eps_of(group), "bias_correction": self.bias_correction}
            direction_ = laprop_direction_ if self._averages_moves else adam_direction_
            if (ages := self.variance.ages(bucket)) is None:
                direction_(*moments, step=self._seen_steps(bucket), **options)  # g ← m̂/D
            else:  # layers that were unfrozen later: each by its own count, as in torch
                for *of_one, age in zip(*map(bucket.layout.flat_views, moments), ages, strict=True):
                    direction_(*of_one, step=age, **options)
        else:
            m_over_D = self.variance.refresh(bucket, g, self.last_average(bucket), group)
            g.copy_(m_over_D)
            pack_momentum(self.placement, bucket, m_over_D, group["betas"][0])
            del m_over_D  # this step may wait for other buckets below: free the memory first
            self.mask_state(bucket)
            bucket.wires.pop(self.warmup_codec, None)  # refreshes are rare: their buffers are not kept
            g.mul_(self._correction(bucket))
        weight_K, decay_K = yield from self.dense_weights(bucket)
        self._move(bucket, decision, weight_K, decay_K)

    def compressed_step(self, bucket: Bucket, scale: float) -> BucketStep:
        """A step of a bucket that exchanges momentum in one bit."""
        (beta1, _), share = bucket.group["betas"], self._share_of_a_gradient(bucket)
        D, old = bucket.rows(bucket.flat["denominator"]), bucket.frames
        assert old is not None and bucket.ef is not None
        self.observe(bucket, scale, share / self.placement.world_size)
        own = share / self.placement.hierarchy.nodes
        momentum = MomentumWeights(keep=beta1, add=1.0 - beta1, own=own, unscale=scale)
        decision = yield from self.placement.average_momentum(bucket, D, old, momentum)
        self.take_over(bucket, decision)

    def send_again(self, bucket: Bucket, sent: Tensor) -> BucketStep:
        decision = yield from self.placement.send_again(bucket, sent)
        self.take_over(bucket, decision)

    def ahead(self, bucket: Bucket) -> float:
        group = bucket.group
        weight: float = float(group["lr"]) * group["betas"][0] * self._correction(bucket)  # where Nesterov looks
        return weight

    def look_ahead(self, bucket: Bucket, decision: Decision, weight: float) -> None:
        if bucket.masks is None:
            number, one = self.placement.constant(bucket, weight), self.placement.constant(bucket, 1.0)
            self.placement.apply(bucket, decision, bucket.frames, number, one)
            return
        views = bucket.layout.views(self.last_average(bucket))
        for p, view, is_moving in zip(bucket.local_values, views, decision.of(bucket), strict=True):
            if is_moving:
                p.add_(view, alpha=weight)

    def take_over(self, bucket: Bucket, decision: Decision) -> None:
        """The rest of a compressed step, after an exchange that was good: residuals, momentum, parameters."""
        assert bucket.ef is not None
        self._note_births(bucket, decision)
        bucket.ef.commit()
        frames = self.placement.swap_frames(bucket)  # the frames that have arrived are the new m/D
        if bucket.masks is not None:
            self.mask_state(bucket)
            weight_K, decay_K = self.weights(bucket)
            weight_K.mul_(self._correction(bucket))
            self.codec.decode(frames, bucket.rows(bucket.buffer))
            self._move(bucket, decision, weight_K, decay_K)
        elif decision.moves:
            self.placement.apply(bucket, decision, frames, *self.moves(bucket))

    def follow(self, bucket: Bucket, decision: Decision) -> None:
        if bucket.masks is None:  # with masks they have moved: their update is in memory that the next exchange uses
            self.placement.apply(bucket, decision, bucket.frames, *self.moves(bucket))

    def prepare_commit(self, decision: Decision) -> None:
        arrived = [b for b in self.buckets if self.keeps_variance(b) and not self.averages_gradients(b)]
        self.placement.bound_(arrived, LARGEST_MOVE)

    def why_members_stay(self) -> str:
        return ""

    def observe(self, bucket: Bucket, scale: float, own: float) -> None:
        """Called with scale·g_i before it is sent, for LAMB, which estimates the change of D from it."""

    def weights(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """weight and decay in p ← (1 - decay)·p - weight·m̂/D for each parameter of the bucket, float32 [K]."""
        group, K = bucket.group, len(bucket.params)
        lr = float(group["lr"])
        weight, decay = (
            torch.full((K,), number, device=bucket.device, dtype=torch.float32)
            for number in (lr, lr * group["weight_decay"])
        )
        return weight, decay

    def dense_weights(self, bucket: Bucket) -> Generator[Meeting, Answer, tuple[Tensor, Tensor]]:
        """`weights` in a dense step, with m̂/D in the bucket's buffer. A generator: LAMB's buckets meet here."""
        yield from ()
        return self.weights(bucket)

    def moves(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """weight and keep in p ← keep·p + weight·(m/D in the frames), for a compressed step. float32 [K]; only read."""
        group = bucket.group
        lr, correction = as_float32(float(group["lr"])), as_float32(self._correction(bucket))
        decay = as_float32(float(group["lr"]) * group["weight_decay"])
        # A product of two float32 is exact in float64, and so is 1 - decay: both are rounded once.
        weight, keep = -as_float32(lr * correction), as_float32(1.0 - decay)
        return self.placement.constant(bucket, weight), self.placement.constant(bucket, keep)

    def _move(self, bucket: Bucket, decision: Decision, weight_K: Tensor, decay_K: Tensor) -> None:
        """p ← (1 - decay)·p - weight·m̂/D for each parameter, with m̂/D in the buffer."""
        for view, p, weight, decay in zip(bucket.views, bucket.local_values, weight_K, decay_K, strict=True):
            view.mul_(weight).addcmul_(p.float(), decay)
        self.placement.move(bucket, decision)

    def _note_births(self, bucket: Bucket, decision: Decision) -> None:
        if joined := self.variance.note_births(bucket, decision.of(bucket)):
            self._joined[bucket.group_index] = self._joined.get(bucket.group_index, 0) + joined

    # ---------------------------------------------------------------- which kind of step

    def begin_step(self) -> None:
        self._dense = [self._is_dense(g, int(count)) for g, count in enumerate(self.steps)]

    def averages_gradients(self, bucket: Bucket) -> bool:
        return self._dense[bucket.group_index]

    def is_delayed(self) -> bool:
        return not any(self._dense) and self.schedule.may_delay(int(min(self.steps)))

    def keeps_variance(self, bucket: Bucket) -> bool:
        """Whether the bucket has a variance and takes these steps: here all do."""
        return True

    def _is_dense(self, g: int, step: int) -> bool:
        """Whether gradients of group g are exchanged in the step after this number of steps."""
        if self.policy.compresses is False or self.schedule.is_dense(self.variance.seen_steps(g, step)):
            return True
        joined = self.variance.joined.get(g)
        return joined is not None and step >= joined and self.schedule.is_dense(step - joined)

    def _rests(self, g: int, step: int) -> bool:
        """Whether no gradients of group g are exchanged for a while after this number of steps."""
        joined = self.variance.joined.get(g)
        late = joined is None or self.schedule.rests(step - joined)
        return late and self.schedule.rests(self.variance.seen_steps(g, step))

    def round_name(self) -> str:
        return "compressed" if any(not self.averages_gradients(bucket) for bucket in self.buckets) else "dense"

    def _codec_of_gradients(self) -> Codec:
        return Bf16Codec(self.codec.block) if self.policy.compresses is False else self.warmup_codec

    def _share_of_a_gradient(self, bucket: Bucket) -> float:
        """The weight of a rank's own gradient in D, before it is divided among the ranks that send one: `normalised`.

        In the first steps with "auto" it is that of a refresh in this step, and later 1 - β2, as in Adam: a larger one
        bounds the few large gradients of a model that has learnt nearly all, so that it learns the rest late
        (scripts/records/warmup_2026-11.md).
        """
        g, beta2 = bucket.group_index, float(bucket.group["betas"][1])
        if not self.schedule.is_guarded(self.variance.refreshed_for(g, bucket.step)):
            return 1.0 - beta2
        return self.variance.share(g, beta2, bucket.step + 1)

    def _correction(self, bucket: Bucket) -> float:
        """1/(1 - β1^t)."""
        beta1: float = bucket.group["betas"][0]
        has_stepped = self.bias_correction and bucket.step > 0
        return 1.0 / (1.0 - beta1 ** self._seen_steps(bucket)) if has_stepped else 1.0

    # ---------------------------------------------------------------- the freeze

    def after_step(self) -> str:
        for g, (count, was_dense) in enumerate(zip(self.steps, self._dense, strict=True)):
            if was_dense:
                self.variance.count_dense(g, self.buckets.groups[g]["betas"][1], int(count))
        first = self.buckets[0]
        is_refresh = first.phase == "compressed" and self.averages_gradients(first)
        phase = "refresh" if is_refresh else first.phase
        self._look([max(int(count) - 1, 0) for count in self.steps])
        self._restart_refreshes()  # layers have joined late only if the model had seen a gradient before
        self._freeze_where_due()
        self._release_buffers()
        return phase

    def _restart_refreshes(self) -> None:
        """Refresh as at the beginning if layers had their first gradient: only refreshes measure their variance.

        Not in a model in parts, whose ranks take the same kinds of steps without knowing each other's layers.
        """
        if self._joined and self.parts.whole.world_size == 1:
            for g, joined in self._joined.items():
                in_group = sum(bucket.layout.parameter_numel for bucket in self.buckets if bucket.group_index == g)
                is_new = int(self.steps[g]) - 1 > (self.variance.unseen or {}).get(g, 0)
                if is_new and joined >= LEAST_JOINED * in_group and self.schedule.freeze_step == "auto":
                    self.variance.joined[g] = int(self.steps[g])
        self._joined.clear()

    def end_interrupted_step(self) -> None:
        self._restart_refreshes()
        self._freeze_where_due()  # measures the network if no member has done so

    def _release_buffers(self) -> None:
        """Free the buffers of buckets that exchange no gradients for a while. A hierarchy uses them in every step."""
        if not self.policy.compresses or self.placement.hierarchy.local_size > 1:
            return
        rests = [self._rests(g, int(count)) for g, count in enumerate(self.steps)]
        for bucket in filter(self.keeps_variance, self.buckets):
            if rests[bucket.group_index] and bucket.masks is None:
                bucket.release_buffer()

    def _look(self, before: Sequence[int]) -> None:
        """See `FrozenVariance.look`."""
        self.variance.look(self.buckets, before, self.parts)

    def _count_from_the_first(self) -> None:
        """Count the warm-up from the first step: a dense state does not record when its variance saw a gradient."""
        self.variance.unseen = None
        self.variance.births = {bucket.index: [0] * len(bucket.params) for bucket in self.buckets if bucket.step > 0}
        self._look([0] * len(self.steps))

    def _freeze_where_due(self) -> None:
        """End the warm-up of the groups that exchange momentum next: v becomes D, and m is packed into frames."""
        warming = (bucket for bucket in self.buckets if bucket.phase == "warmup")
        due = [bucket for bucket in warming if not self._is_dense(bucket.group_index, bucket.step)]
        if not due or not self.policy.decide():
            return
        is_first = all(bucket.phase == "warmup" for bucket in filter(self.keeps_variance, self.buckets))
        of_variance = [(bucket, self._total(bucket)) for bucket in filter(self.keeps_variance, due)]
        self.variance.begin(of_variance, self.parts, self.codec.block, is_first=is_first)
        for bucket in due:
            self.freeze(bucket)
        if self.placement.transport.rank == 0:
            log.info("one-bit momentum from here, after step %d", due[0].step)

    def _total(self, bucket: Bucket) -> float:
        """The sum of the weights in Adam's v."""
        beta2 = bucket.group["betas"][1]
        return 1.0 - beta2 ** self._seen_steps(bucket) if self.bias_correction else 1.0

    def _seen_steps(self, bucket: Bucket) -> int:
        """The t of bias corrections: steps that have left nothing in m and v do not count. At least 1."""
        return max(self.variance.seen_steps(bucket.group_index, bucket.step), 1)

    def freeze(self, bucket: Bucket) -> None:
        """End the bucket's warm-up."""
        group, m, v_hat = bucket.group, bucket.flat[self._moment], bucket.flat["exp_avg_sq"]
        self._enter(bucket, "compressed")
        self._allocate_compressed(bucket)
        m_over_D = self.variance.freeze(bucket, m, v_hat, eps_of(group), is_divided=self._averages_moves)
        pack_momentum(self.placement, bucket, m_over_D, group["betas"][0])
        self.mask_state(bucket)
        self.buckets.publish(bucket)

    # ---------------------------------------------------------------- state

    @property
    def _averages_moves(self) -> bool:
        return self.momentum_of == "moves"

    @property
    def _moment(self) -> str:
        """Name of the warm-up's m. For an average of updates another one: torch's AdamW would take it for its m."""
        return "exp_avg_update" if self._averages_moves else "exp_avg"

    def _denominator(self, bucket: Bucket) -> Tensor:
        """√v̂ + eps of the warm-up."""
        group = bucket.group
        v, beta2, eps = bucket.flat["exp_avg_sq"], group["betas"][1], eps_of(group)
        return adam_denominator(v, beta2, eps, step=self._seen_steps(bucket), bias_correction=self.bias_correction)

    def check_state(self, where: str, state: State) -> None:
        """Raise ValueError if the state's warm-up averages something else; after the warm-up both are the same."""
        names = {name for entry in state["state"].values() for name in entry}
        found = [each for each, name in zip(MOMENTUM_OF, ("exp_avg", "exp_avg_update"), strict=True) if name in names]
        if "onebit" in state and any(each != self.momentum_of for each in found):
            raise ValueError(
                f"{where}its warm-up averages {found[0]}, this one {self.momentum_of}; construct the optimizer with "
                f"momentum_of={found[0]!r}, or load none"
            )

    def allocate(self, bucket: Bucket, phase: str) -> None:
        n, device = bucket.layout.numel, bucket.device
        self._enter(bucket, phase)
        if phase == "warmup":
            bucket.flat = {
                name: torch.zeros(n, device=device, dtype=torch.float32) for name in (self._moment, "exp_avg_sq")
            }
        else:
            bucket.flat = {"denominator": torch.ones(n, device=device, dtype=torch.float32)}
            self._allocate_compressed(bucket)

    def _enter(self, bucket: Bucket, phase: str) -> None:
        """Begin a phase: the bucket gives up all its state, except the parameters and their masters."""
        bucket.phase, bucket.flat = phase, {}
        bucket.frames, bucket.ef, bucket.live_J = None, None, None
        bucket.wires.clear()
        bucket.release_buffer()

    def _allocate_compressed(self, bucket: Bucket) -> None:
        """Allocate the state that the bucket has besides D."""
        n, W, device = bucket.layout.numel, self.placement.world_size, bucket.device
        bucket.ef = self.placement.new_errors(bucket)
        bucket.frames = torch.zeros(W, self.codec.frame_bytes(n // W), dtype=torch.uint8, device=device)
        bucket.live_J = torch.zeros(n // bucket.layout.block, dtype=torch.bool, device=device)

    def momentum(self, bucket: Bucket) -> Tensor:
        correction = self._correction(bucket)
        if bucket.frames is None:
            m = bucket.flat[self._moment] * correction
            return m.mul_(self._denominator(bucket)) if self._averages_moves else m
        return self.last_average(bucket).mul_(bucket.flat["denominator"]).mul_(correction)

    def factored_momentum(self, bucket: Bucket) -> Factored | None:
        if bucket.frames is None or bucket.masks is not None:
            return None
        return self._correction(bucket), bucket.frames, bucket.rows(bucket.flat["denominator"])

    def last_average(self, bucket: Bucket) -> Tensor:
        update, may_move = self.placement.unpacked(bucket, bucket.frames), bucket.may_move()
        return update if may_move is None else update.mul_(may_move)

    def mask_state(self, bucket: Bucket) -> None:
        super().mask_state(bucket)
        may_move = bucket.may_move()
        if may_move is not None and bucket.frames is not None and bucket.ef is not None:
            # Sign frames contain no zeros. So subtract their masked values from the residual: β1·m + e is then 0 there.
            too_much = self.placement.unpacked(bucket, bucket.frames).mul_(1.0 - may_move)
            beta1 = bucket.group["betas"][0]
            bucket.ef.worker.sub_(bucket.own_rows(too_much).reshape(-1), alpha=beta1)

    def record(self) -> State:
        return self.variance.record(self.buckets)

    def load_record(self, record: State) -> None:
        self.variance.load_record(record, self.buckets)

    def take_apart(self, record: State, index: int, layout: Layout, states: Sequence[ParameterState]) -> None:
        frames, live_J = record["buckets"][index]["frames"], record["live_blocks"][index]
        if frames is not None:
            m = torch.empty(layout.numel, dtype=torch.float32, device="cpu")
            codec = codec_named(record.get("codec", "sign"), layout.block)
            codec.decode(frames.cpu(), m.view(layout.world_size, -1))
            spread_over(layout, states, "momentum", m)
        if live_J is not None:
            spread_over(layout, states, "is_live", live_J.repeat_interleave(layout.block))
        K = len(states)
        births, remainders = (
            record.get(name, {index: [old] * K}) for name, old in (("births", 0), ("remainders", 1.0))
        )
        for one, birth, remainder in zip(states, births[index], remainders[index], strict=True):
            one.numbers |= {
                "birth": torch.tensor(birth, dtype=torch.int64, device="cpu"),
                "remainder": torch.tensor(remainder, dtype=torch.float64, device="cpu"),
            }

    def pack(self, bucket: Bucket, states: Sequence[ParameterState], beta1: float) -> Tensor | None:
        """Pack m into frames anew. If its blocks are not those in which it was packed, that leaves a residual r.

        β1·r is added to the worker error: the next exchange sends β1·m + e, as if nothing had been packed.
        """
        layout, codec = bucket.layout, self.codec.on_host()
        m = flat_of(layout, states, "momentum")
        if m is None:
            return None
        frames = torch.empty(layout.world_size, codec.frame_bytes(layout.chunk), dtype=torch.uint8, device="cpu")
        codec.encode(m.view(layout.world_size, -1), None, frames, layout.counts())
        for one, residual in zip(states, layout.views(m), strict=True):
            del one.elements["momentum"]
            one.elements["worker_error"] = one.elements["worker_error"].float().add(residual, alpha=beta1)
        return frames

    def put_together(self, of_buckets: Sequence[tuple[Bucket, Sequence[ParameterState]]]) -> State:
        """The live blocks, of which any element was live; and the births and remainders of the parameters."""
        live, births, remainders = [], [], []
        for bucket, states in of_buckets:
            is_live = flat_of(bucket.layout, states, "is_live")
            live.append(None if is_live is None else is_live.view(-1, bucket.layout.block).any(1))
            for one in states:
                one.elements.pop("is_live", None)
            births.append([int(one.numbers.pop("birth", 0)) for one in states])
            remainders.append([float(one.numbers.pop("remainder", 1.0)) for one in states])
        return {"live_blocks": live, "births": births, "remainders": remainders}

    def adopt_dense_state(self) -> None:
        self._count_from_the_first()
        if self._averages_moves:
            for bucket in self.buckets:
                if bucket.step > 0:
                    bucket.flat[self._moment].div_(self._denominator(bucket))  # was AdamW's m
        self._freeze_where_due()


@shows_all_options(CommonOptions)
class OnebitAdam(CompressedOptimizer):
    """AdamW whose data-parallel traffic is about two bits per parameter and step, after a short warm-up.

    Give it the plain model's parameters (not wrapped in DDP) and each rank's own loss; it averages over ranks itself.
    All ranks construct it with the same arguments and parameters, and call step() together; rank 0's initial values are
    sent to all. After the warm-up, per step and bucket:

    1. Each rank computes c_i = β1·m/D + (1-β1)·g_i/D + e_i, with D = √max(v̂, floor·blockmean) + eps as the last dense
       step left it (a g_i far beyond D counts in D: the divisor is √(D² + w·g_i²)). The signs and scales of c_i are
       sent to the chunks' owners; the rest becomes e_i.
    2. The owner averages, adds its own error, compresses again and sends the result to all. Bounded by 8, it is the new
       m/D.
    3. p ← p - lr·(m̂/D + wd·p).

    The paper compresses m. D is the same on all ranks and fixed, so compressing m/D is the same algorithm in other
    coordinates, in which all elements of a block have about the same size. Otherwise an element with a small D takes
    its block's scale and moves by s/D; see `docs/differences.md`. Source: arXiv 2102.02888.

    State on each rank, bytes per parameter: 8 in warm-up; then D 4, worker error 4 (bf16: 2), server error 4/W (2/W),
    m/D 0.13. Sends per rank 2·(W-1)/W·(4 + 16/block) bits per parameter in a dense step (`Int8Codec`: 8 in place of 4),
    2·(W-1)/W·(1 + 16/block) in the others.

    Args:
        params: Parameters or groups, the same on all ranks.
        lr: Learning rate, read from param_groups in every step, like the next three. Default 1e-3.
        betas: Decay of momentum and variance; that of the variance acts in dense steps. Default (.9, .999).
        eps: Added to D; acts in dense steps. Default 1e-8.
        weight_decay: Decoupled weight decay. Default 1e-2.
        freeze_step: Number of warm-up steps, after which the variance never changes, as in the paper. "auto" (default):
            4 steps, and a refresh of the variance now and then, in 4 steps of every doubling of the step count: 32 of
            the first 1,000 steps.
        warmup_codec: Format of gradients in warm-up and refreshes. `IdentityCodec` sends them in full, `Int8Codec` in
            eight bits. Default None: `Log4Codec`, four bits.
        bias_correction: Whether m and v are corrected for their start from zero. Default True.
        variance_floor: Least variance, as a share of its block's mean; see `floor_of_blocks`. Default .01.
        momentum_of: What the warm-up's m averages. "gradients" (default): as Adam's, the step is m̂/D. "moves": each
            gradient is divided by the D of its own step first, as in LaProp (arXiv 2002.04839), and as m/D is averaged
            after the warm-up in any case.
        **common: See `CommonOptions`.

    Raises:
        ValueError: An option is out of its range, or parameters differ between ranks; the message names them.
        TypeError: An option has the wrong type, or a parameter an unsupported dtype.
    """

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int | str = "auto",
        warmup_codec: Codec | None = None,
        bias_correction: bool = True,
        variance_floor: float = 0.01,
        momentum_of: str = "gradients",
        **common: Unpack[CommonOptions],
    ):
        rule = AdamRule(
            DenseSteps(freeze_step),
            codec_of_gradients(warmup_codec, common.get("codec"), Log4Codec),
            bias_correction=bias_correction,
            variance_floor=variance_floor,
            momentum_of=momentum_of,
        )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, rule, **common)
