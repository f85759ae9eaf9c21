"""0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009): the variance refreshed ever more rarely, momentum in one bit, and
steps in between that send nothing at all. There is no dense warm-up.

`ZeroOneRule` is the paper, a step of one bucket from top to bottom; the policies are in `arithmetic/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .arithmetic.adam import BLOCKS_AT_A_TIME, floor_of_blocks, normalised, sums_of_live_blocks
from .arithmetic.schedule import GUARDED_STEPS, Synchronisations, VarianceUpdates, variance_weight
from .checkpoint.parameter_state import ParameterState
from .comm import Bf16Codec, Codec, LocalStep, MomentumInputs, MomentumWeights, Variance
from .comm.transports.notes import calling
from .layout.bucket import Bucket
from .layout.flat import Layout
from .model_parallel import local
from .optimizer import CommonOptions, CompressedOptimizer
from .rule import LARGEST_MOVE, Factored, Rule, codec_of_gradients
from .step.bucket_step import Arrived, BucketStep, Decision
from .usage.contract import Group, State, check_is_switch, check_number, eps_of
from .usage.gradients import gradient_of
from .usage.signature import shows_all_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Kinds of steps. Idle: every step synchronises and the learning rate is zero, so there is nothing to send.
_VARIANCE, _SYNC, _LOCAL, _IDLE = "variance", "compressed", "local", "idle"


class ZeroOneRule(Rule):
    """0/1 Adam's steps, of a kind that `VarianceUpdates` and `Synchronisations` choose. Mathematics: `ZeroOneAdam`."""

    kind = "0/1 Adam"
    sends_by = ("lr", "betas")
    common: ClassVar[tuple[str, ...]] = ("exp_avg_update", "exp_avg_sq")
    adam_names: ClassVar = {"exp_avg_update": "exp_avg"}  # m/D has another name: torch's AdamW would take it for m
    of_parameters = ("parameters", "waiting")

    def __init__(
        self,
        updates: VarianceUpdates,
        synchronisations: Synchronisations,
        variance_codec: Codec,
        *,
        bias_correction: bool,
        variance_floor: float,
    ):
        self.updates, self.synchronisations, self.variance_codec = updates, synchronisations, variance_codec
        self.variance_floor, self.bias_correction = variance_floor, bias_correction
        self.since_sync = 0  # local steps since the last synchronisation
        self._had_local_steps = False  # before a state was loaded
        self._round = ""  # of the step under way
        self._step_under_way = 1
        self._weights: list[float] = []  # γ of the step under way, by group
        self._is_forced = False
        self._peak_lr = 0.0
        self._unseen: list[int] = []  # by group, steps before the first gradient in the model other than zero
        self._variance_steps = 0  # steps up to and including the last variance step
        self._variance_total: list[float] = []  # the sum of the weights in v, by group
        self._fallback = 1.0
        self._seen_since_sync: set[Tensor] = set()  # parameters with a gradient on this rank since the last one
        self._accumulated_weight: list[float] = []  # G, by group
        self._kept_share: list[float] = []  # product of the weight decays since the last synchronisation, by group

    def check(self, name: str) -> None:
        check_number(name, "variance_floor", self.variance_floor)
        check_is_switch(name, "bias_correction", self.bias_correction)

    def options(self) -> dict[str, object]:
        names = ("updates", "synchronisations", "variance_codec", "variance_floor", "bias_correction")
        return {name: getattr(self, name) for name in names}

    # ---------------------------------------------------------------- which kind of step

    def begin_group(self) -> None:
        self._unseen.append(0)
        self._variance_total.append(0.0)
        self._accumulated_weight.append(0.0)
        self._kept_share.append(1.0)

    def begin_step(self) -> None:
        self._weights = [self._weight(g) for g in range(len(self.steps))]
        self._round, self._step_under_way = self._decide(), int(self.steps[0]) + 1

    def _decide(self) -> str:
        if self.policy.compresses is False:
            return _VARIANCE
        step, lr = self._seen_steps, float(self.buckets.groups[0]["lr"])
        interval = self.synchronisations.interval(step, lr, max(self._peak_lr, lr))
        if interval == 1 and self.since_sync == 0 and self.updates.is_due(step):
            return _VARIANCE
        if self.since_sync + 1 < interval:
            return _LOCAL
        moves = any(w > 0.0 for w in self._weights) or any(w > 0.0 for w in self._accumulated_weight)
        return _SYNC if moves else _IDLE if interval == 1 else _LOCAL

    def begin_again(self) -> None:
        if self.is_silent():  # on all ranks: none has sent anything
            self.begin_step()
        self._weights = [self._weight(g) for g in range(len(self.steps))]

    @property
    def _seen_steps(self) -> int:
        """The first group's steps since the model's first gradient: the schedules count these."""
        return int(self.steps[0]) - self._unseen[0]

    def _weight(self, g: int) -> float:
        """γ = lr/(1-β1^t) of the step under way."""
        return float(self.buckets.groups[g]["lr"]) / self._correction(g, int(self.steps[g]) + 1)

    def begin_forced_sync(self) -> None:
        """Make the next step an extra one, which brings the replicas together without a gradient."""
        self._round, self._is_forced = _SYNC, True
        self._weights = [0.0] * len(self.steps)

    def end_step(self) -> None:
        self._round, self._is_forced = "", False

    def round_name(self) -> str:
        return "sync()" if self._is_forced else self._round

    def averages_gradients(self, bucket: Bucket) -> bool:
        return self._round == _VARIANCE

    def is_silent(self) -> bool:
        return self._round in (_LOCAL, _IDLE)

    @property
    def asks_first(self) -> bool:
        # If the kind of a step follows the learning rate, ranks with different rates would choose different kinds.
        return self.synchronisations.longest > 1

    @property
    def clips_apart(self) -> bool:
        return self.synchronisations.longest > 1 or self._had_local_steps

    def prepare_commit(self, decision: Decision) -> None:
        if self._round == _SYNC:
            for g in range(len(self.buckets.groups)):
                if (weight := self._arriving_weight(g)) > 0.0:  # else residuals alone arrive, which are no moves
                    arrived = [bucket for bucket in self.buckets if bucket.group_index == g]
                    self.placement.bound_(arrived, LARGEST_MOVE * weight)

    def why_members_stay(self) -> str:
        has_local_steps = self.synchronisations.longest > 1
        return "between synchronisations each rank has its own parameters; use local_step_clipper=1" * has_local_steps

    def is_synchronised(self) -> bool:
        return self.since_sync == 0

    def present(self, params: Sequence[Tensor]) -> list[bool]:
        """Whether this rank has a gradient for p, or has had one since the last synchronisation."""
        pairs = zip(params, super().present(params), strict=True)
        return [p in self._seen_since_sync or (is_present and not self._is_forced) for p, is_present in pairs]

    # ---------------------------------------------------------------- a step of one bucket

    def step(self, bucket: Bucket, scale: float) -> BucketStep:
        if self._round == _SYNC and not self.since_sync:
            return self.sync_step(bucket, scale)
        steps = {_VARIANCE: self.variance_step, _SYNC: self.end_local_steps, _LOCAL: self.local_step}
        return steps.get(self._round, self.idle_step)(bucket, scale)

    def variance_step(self, bucket: Bucket, scale: float) -> BucketStep:
        group, m, v = bucket.group, bucket.flat["exp_avg_update"], bucket.flat["exp_avg_sq"]
        dense = Bf16Codec(self.codec.block) if self.policy.compresses is False else self.variance_codec
        g, decision = yield from self.placement.mean_gradient(bucket, dense, scale)
        weight = self._weight_of_variance_step(bucket.group_index)
        v.mul_(1.0 - weight).addcmul_(g, g, value=weight)
        bucket.floor_J = None
        for x, D in self._with_denominators(bucket, self._total_after(bucket.group_index, weight)):
            x.div_(D)
        m.lerp_(g, 1.0 - group["betas"][0])
        torch.mul(m, self._weights[bucket.group_index], out=bucket.buffer)
        self._decay(bucket)
        bucket.wires.pop(self.variance_codec, None)  # variance steps become rare: free their buffers
        self.placement.move(bucket, decision)

    def sync_step(self, bucket: Bucket, scale: float) -> BucketStep:
        """A step if every step synchronises: γ·(β1·m + (1-β1)·g/D) travels, computed and encoded in one pass."""
        group, weight = bucket.group, self._weights[bucket.group_index]
        beta1, own = group["betas"][0], self._share_of_a_gradient(bucket) / self.placement.hierarchy.nodes
        weights = MomentumWeights(keep=weight * beta1, add=weight * (1.0 - beta1), own=own, unscale=scale)
        m = bucket.flat["exp_avg_update"]
        decision = yield from self.placement.average_momentum(bucket, self._variance(bucket), bucket.rows(m), weights)
        self._take_average(bucket)
        self._move_all(bucket, decision, self._kept_this_step(group))

    def end_local_steps(self, bucket: Bucket, scale: float) -> BucketStep:
        """Send u + γ·(β1·m + (1-β1)·g/D), or u if it is forced; all replicas then take the anchor less the mean."""
        group, u, m = bucket.group, bucket.flat["accumulated"], bucket.flat["exp_avg_update"]
        g, beta1 = bucket.group_index, group["betas"][0]
        weight = self._weights[g]
        own = 0.0 if self._is_forced else self._share_of_a_gradient(bucket) / self.placement.world_size
        weights = MomentumWeights(keep=weight * beta1, add=weight * (1.0 - beta1), own=own, unscale=scale)
        if self.placement.hierarchy.local_size == 1:
            grads = [None] * len(bucket.params) if self._is_forced else None
            made_of = self._variance(bucket), bucket.rows(m), weights
            decision = yield from self.placement.average_momentum(bucket, *made_of, added=u, grads=grads)
        else:
            # The ranks of a node add up their updates, not their gradients.
            self._gather_update(bucket, weights)
            decision = yield from self.placement.average(bucket)
        self._take_average(bucket)
        torch._foreach_copy_(bucket.local_values, bucket.layout.views(bucket.flat["anchor"]))
        u.zero_()
        self._move_all(bucket, decision, self._kept_share[g] * self._kept_this_step(group))

    def local_step(self, bucket: Bucket, scale: float) -> BucketStep:
        """Move this rank's own parameters by γ·m_i; nothing is sent."""
        group, weight, m = bucket.group, self._weights[bucket.group_index], bucket.flat["exp_avg_update"]
        grads = bucket.masked_gradients()
        decision: Decision = yield Arrived(grads=grads, scale=scale)
        if decision.grads_nonfinite:
            grads = [None] * len(grads)
        # With lr = 0 u would not hold what m gains, so no synchronisation would make m the same on all ranks again.
        beta1 = group["betas"][0] if weight > 0.0 else 1.0
        own = self._share_of_a_gradient(bucket) / self.placement.world_size
        weights = MomentumWeights(keep=beta1, add=1.0 - beta1, own=own, unscale=scale)
        is_masked = bucket.masks is not None
        moving = zip(bucket.local_values, decision.of(bucket), strict=True)
        params = [p if is_seen and not is_masked else None for p, is_seen in moving]
        if self.since_sync == 0:
            anchors = zip(params, bucket.layout.views(bucket.flat["anchor"]), bucket.local_values, strict=True)
            for anchor, held in [(anchor, held) for p, anchor, held in anchors if p is None]:
                anchor.copy_(held)
        self.codec.local_step(
            LocalStep(
                MomentumInputs(grads, bucket.layout.segments, self._variance(bucket), bucket.rows(m), weights),
                bucket.rows(bucket.flat["accumulated"]),
                bucket.rows(bucket.flat["anchor"]) if self.since_sync == 0 else None,
                params,
                weight=weight,
                kept=self._kept_this_step(group),
            )
        )
        if is_masked:
            torch.mul(m, weight, out=bucket.buffer)
            self._decay(bucket)
            self.placement.move(bucket, decision)

    def idle_step(self, bucket: Bucket, scale: float) -> BucketStep:
        """Nothing moves. The gradient is dropped after the check that it is finite."""
        yield Arrived(grads=bucket.masked_gradients(), scale=scale)

    # ---------------------------------------------------------------- parts of steps

    def _gather_update(self, bucket: Bucket, weights: MomentumWeights) -> None:
        """The buffer ← add·g/D + keep·m + u, or u if the synchronisation is forced."""
        u = bucket.flat["accumulated"]
        if self._is_forced:
            bucket.buffer.copy_(u)
            return
        bucket.gather(bucket.masked_gradients(), weights.unscale)
        for x, D in self._with_denominators(bucket):
            x.copy_(normalised(x, D, weights.own))
        bucket.buffer.mul_(weights.add).add_(bucket.flat["exp_avg_update"], alpha=weights.keep).add_(u)

    def _move_all(self, bucket: Bucket, decision: Decision, kept: float) -> None:
        """p ← kept·p less the values of the frames that have arrived."""
        frames = self.placement.frames(bucket)
        if bucket.masks is not None:
            self.codec.decode(frames, bucket.rows(bucket.buffer))
            if kept != 1.0:
                torch._foreach_add_(bucket.views, bucket.local_values, alpha=1.0 - kept)
            self.placement.move(bucket, decision)
        else:
            numbers = (self.placement.constant(bucket, number) for number in (-1.0, kept))
            self.placement.apply(bucket, decision, frames, *numbers)

    def _take_average(self, bucket: Bucket) -> None:
        """m ← U/G, from the frames that have arrived; the new residuals become current."""
        assert bucket.ef is not None
        g, m = bucket.group_index, bucket.flat["exp_avg_update"]
        bucket.ef.commit()
        weight = self._arriving_weight(g)
        if weight > 0.0:
            self.placement.take(bucket, self.placement.frames(bucket), m, 1.0 / weight)
        self.mask_state(bucket)

    def _arriving_weight(self, g: int) -> float:
        return self._accumulated_weight[g] + self._weights[g]

    def _variance(self, bucket: Bucket, total: float | None = None) -> Variance:
        """The inputs of D. total: the sum of the weights in v, if it has just changed."""
        v, eps = bucket.flat["exp_avg_sq"], eps_of(bucket.group)
        total = self._variance_total[bucket.group_index] if total is None else total
        correction = 1.0 / total if self.bias_correction and total > 0.0 else 1.0
        if bucket.floor_J is None:
            bucket.floor_J = floor_of_blocks(
                v,
                bucket.layout,
                bucket.counts,
                floor=self.variance_floor,
                fallback=self._fallback,
                correction=correction,
            )
        return Variance(bucket.rows(v), bucket.rows(bucket.floor_J), correction, eps)

    def _with_denominators(self, bucket: Bucket, total: float | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The buffer and D, in parts small enough that temporaries stay in a cache. total: as for `_variance`."""
        variance = self._variance(bucket, total)
        block, at_a_time = self.codec.block, BLOCKS_AT_A_TIME
        parts = (bucket.buffer.split(at_a_time * block), variance.v_KN.view(-1).split(at_a_time * block))
        for x, v, floor in zip(*parts, variance.floor_KJ.view(-1).split(at_a_time), strict=True):
            part = Variance(v.unsqueeze(0), floor.unsqueeze(0), variance.correction, variance.eps)
            yield x, part.denominator()[0]

    def _share_of_a_gradient(self, bucket: Bucket) -> float:
        """The weight of a rank's own gradient, as `AdamRule`'s. Callers divide it by the number of senders."""
        beta2: float = bucket.group["betas"][1]
        if self._step_under_way - self._unseen[0] > GUARDED_STEPS:
            return 1.0 - beta2
        weight = variance_weight(beta2, self._step_under_way - self._variance_steps)
        return weight / self._total_after(bucket.group_index, weight)

    def _weight_of_variance_step(self, g: int) -> float:
        return variance_weight(self.buckets.groups[g]["betas"][1], int(self.steps[0]) - self._variance_steps)

    def _total_after(self, g: int, weight: float) -> float:
        return (1.0 - weight) * self._variance_total[g] + weight

    def _kept_this_step(self, group: Group) -> float:
        return 1.0 if self._is_forced else 1.0 - float(group["lr"]) * group["weight_decay"]

    def _decay(self, bucket: Bucket) -> None:
        lost = 1.0 - self._kept_this_step(bucket.group)
        if lost != 0.0:
            torch._foreach_add_(bucket.views, bucket.local_values, alpha=lost)

    def _correction(self, g: int, step: int) -> float:
        """1 - β1^t, with t the steps since the model's first gradient."""
        t = max(step - self._unseen[g], 1)
        return 1.0 - self.buckets.groups[g]["betas"][0] ** t if self.bias_correction and step > 0 else 1.0

    def after_step(self) -> str:
        step, groups = int(self.steps[0]), self.buckets.groups
        self._peak_lr = max(self._peak_lr, float(groups[0]["lr"]))
        if self._round == _VARIANCE:
            self._end_variance_step(step)
        if self._round == _LOCAL:
            self.since_sync += 1
            self._seen_since_sync.update(p for p in self.buckets.params if gradient_of(p) is not None)
            for g, group in enumerate(groups):
                self._accumulated_weight[g] += self._weights[g]
                self._kept_share[g] *= self._kept_this_step(group)
        elif self.since_sync:
            self.since_sync = 0
            self._seen_since_sync.clear()
            self._accumulated_weight = [0.0] * len(groups)
            self._kept_share = [1.0] * len(groups)
        if self._round == _VARIANCE:
            self.end_interrupted_step()
        return self._round

    def _end_variance_step(self, step: int) -> None:
        for g in range(len(self._variance_total)):
            self._variance_total[g] = self._total_after(g, self._weight_of_variance_step(g))
        self._variance_steps = step
        total = elements = 0.0
        for bucket in self.buckets:
            v = bucket.flat["exp_avg_sq"]
            of_v, its = sums_of_live_blocks(v, bucket.counts, bucket.share_J, self.codec.block)
            of_weights = self._variance_total[bucket.group_index] if self.bias_correction else 1.0
            total, elements = total + of_v / of_weights, elements + its
        total, elements = self.parts.total(total, elements)
        self._fallback = total / elements if elements else 1.0
        if not elements:  # no gradient so far: the schedules begin after this step
            self._unseen = [int(count) for count in self.steps]
            self._variance_total = [0.0] * len(self._variance_total)
        for bucket in self.buckets:
            bucket.floor_J = None

    def end_interrupted_step(self) -> None:
        if not self.updates.is_due(self._seen_steps):  # the next step would be the first in one bit
            self.policy.decide()

    # ---------------------------------------------------------------- state

    def allocate(self, bucket: Bucket, phase: str) -> None:
        bucket.phase = phase
        bucket.ef = self.placement.new_errors(bucket)
        names = ["exp_avg_update", "exp_avg_sq"]
        if self.synchronisations.longest > 1:
            names += ["accumulated", "anchor"]
        bucket.flat = {
            name: torch.zeros(bucket.layout.numel, device=bucket.device, dtype=torch.float32) for name in names
        }
        bucket.floor_J = None
        bucket.wires.clear()
        bucket.release_buffer()

    def momentum(self, bucket: Bucket) -> Tensor:
        D = self._variance(bucket).denominator().view(-1)
        return D.mul_(bucket.flat["exp_avg_update"]).div_(self._correction(bucket.group_index, bucket.step))

    def factored_momentum(self, bucket: Bucket) -> Factored | None:
        if bucket.masks is not None:
            return None
        factor = 1.0 / self._correction(bucket.group_index, bucket.step)
        return factor, bucket.rows(bucket.flat["exp_avg_update"]), self._variance(bucket)

    def last_average(self, bucket: Bucket) -> Tensor:
        lr = float(bucket.group["lr"])
        return bucket.flat["exp_avg_update"] * (lr / self._correction(bucket.group_index, bucket.step))

    def record(self) -> State:
        is_apart = self.since_sync > 0
        return {
            "peak_lr": self._peak_lr,
            "unseen": list(self._unseen),
            "variance_steps": self._variance_steps,
            "variance_total": list(self._variance_total),
            "fallback": self._fallback,
            "since_sync": self.since_sync,
            "had_local_steps": self.clips_apart,
            "accumulated_weight": list(self._accumulated_weight),
            "kept_share": list(self._kept_share),
            # Between synchronisations this rank's parameters differ from all others, and no other file contains them.
            "waiting": [p in self._seen_since_sync for p in self.buckets.params] if is_apart else [],
            "parameters": [w.detach().clone() for b in self.buckets for w in b.local_values] if is_apart else [],
        }

    def load_record(self, record: State) -> None:
        self._peak_lr = record["peak_lr"]
        self._unseen = list(record.get("unseen", [0] * len(self._variance_total)))  # older states have none
        self._variance_steps = record["variance_steps"]
        self._variance_total = list(record["variance_total"])
        self._fallback = record["fallback"]
        self.since_sync = record["since_sync"]
        self._had_local_steps = record.get("had_local_steps", True)  # older states have none
        self._accumulated_weight = list(record["accumulated_weight"])
        self._kept_share = list(record["kept_share"])
        params = self.buckets.params
        waiting = record.get("waiting") or [self.since_sync > 0] * len(params)  # the oldest states have none
        self._seen_since_sync = {p for p, waits in zip(params, waiting, strict=True) if waits}
        with torch.no_grad():
            for p, saved in zip(params, record["parameters"], strict=False):
                local(p).copy_(saved)

    def take_apart(self, record: State, index: int, layout: Layout, states: Sequence[ParameterState]) -> None:
        first = sum(len(saved["params"]) for saved in record["buckets"][:index])
        if not record["parameters"]:
            return
        for k, one in enumerate(states, first):
            one.elements["value"] = record["parameters"][k]
            if record.get("waiting"):
                one.numbers["waits"] = torch.tensor(record["waiting"][k], dtype=torch.bool, device="cpu")

    def put_together(self, of_buckets: Sequence[tuple[Bucket, Sequence[ParameterState]]]) -> State:
        states = [one for _, of_bucket in of_buckets for one in of_bucket]
        return {
            "parameters": [one.elements.pop("value") for one in states if "value" in one.elements],
            "waiting": [bool(one.numbers["waits"]) for one in states if "waits" in one.numbers],
        }

    def adopt_dense_state(self) -> None:
        self._unseen = [0] * len(self._unseen)
        self._variance_steps = int(self.steps[0]) if self.steps else 0
        for g, group in enumerate(self.buckets.groups[: len(self._variance_total)]):
            self._variance_total[g] = 1.0 - group["betas"][1] ** int(self.steps[g])
        for bucket in self.buckets:
            bucket.floor_J = None
            bucket.flat["exp_avg_update"].div_(self._variance(bucket).denominator().view(-1))


@shows_all_options(CommonOptions)
class ZeroOneAdam(CompressedOptimizer):
    """AdamW whose ranks send about two bits per parameter and step, or less: some steps send nothing.

    Each step t on rank i, with γ = lr/(1-β1^t), D = √max(v̂, floor·blockmean) + eps, and the momentum m averaging
    moves, gradients divided by D:

    - *variance step* (`VarianceUpdates`, only while every step synchronises): the mean gradient ḡ travels in
      `variance_codec`; v ← (1-w)·v + w·ḡ² with w = `variance_weight`(β2, steps since the last one);
      m ← β1·m + (1-β1)·ḡ/D; p ← p - γ·m.
    - *other steps*: m_i ← β1·m_i + (1-β1)·g_i/D; u_i ← u_i + γ·m_i; G ← G + γ. A *local* step moves this rank's own
      parameters by γ·m_i and sends nothing, not even a vote. A step that *synchronises* (`Synchronisations`) sends u_i
      in one bit with error feedback, receives the mean U, and sets m ← U/G and p ← anchor - U. The anchor is p after
      the last synchronisation, so that the replicas are bit-identical again.

    The paper's m averages gradients and is divided by D when it moves. That is the same while D is constant. When D
    changes, the noise of compression in m would be multiplied by the change, and a block whose variance collapses
    (units that die and wake) would blow up. A g_i far beyond an old D counts in D (`normalised`). See
    `docs/differences.md`. Source: arXiv 2202.06009.

    Weight decay (decoupled) acts in every step and is not part of u. A step with lr = 0 moves nothing, and its gradient
    is dropped. Between synchronisations the replicas differ: call `sync()` on all ranks before evaluation.

    State on each rank, bytes per parameter: m 4, v 4, worker error 4 (bf16: 2), server error 4/W; with
    local_step_clipper > 1 another 8 (u and the anchor). Sends per rank 2·(W-1)/W·(1 + 16/block) bits per parameter and
    synchronisation, 2·(W-1)/W·(8 + 16/block) per variance step.

    Args:
        params: Parameters or groups, the same on all ranks.
        lr: Learning rate. Default 1e-3.
        betas: Decay of momentum and variance. Default (.9, .999).
        eps: Added to D. Default 1e-8.
        weight_decay: Decoupled weight decay. Default 1e-2.
        var_freeze_step: Last step in which the variance may change. Default None: updates only become rarer.
        var_update_scaler: Updates of the variance until the gap between two of them doubles. Default 16.
        local_step_scaler: Steps until the interval between synchronisations doubles, counted from var_freeze_step; or
            "auto": it doubles whenever the first group's learning rate has halved since its peak. Default "auto".
        local_step_clipper: Longest interval between synchronisations, in steps; "auto": 8. Default 1: every step
            synchronises.
        variance_codec: Format of the gradients in variance steps. Default None: `Int8Codec`.
        bias_correction: Whether moments are corrected for their start from zero. Default True.
        variance_floor: Least variance, as in `OnebitAdam`. Default .01.
        **common: See `CommonOptions`.

    Raises:
        ValueError: An option is out of its range, or parameters differ between ranks.
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
        var_freeze_step: int | None = None,
        var_update_scaler: int = 16,
        local_step_scaler: int | str = "auto",
        local_step_clipper: int | str = 1,
        variance_codec: Codec | None = None,
        bias_correction: bool = True,
        variance_floor: float = 0.01,
        **common: Unpack[CommonOptions],
    ):
        rule = ZeroOneRule(
            VarianceUpdates(var_update_scaler, var_freeze_step),
            Synchronisations(local_step_scaler, local_step_clipper, var_freeze_step or 0),
            codec_of_gradients(variance_codec, common.get("codec")),
            bias_correction=bias_correction,
            variance_floor=variance_floor,
        )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, rule, **common)
        self.rule: ZeroOneRule = rule

    @torch.no_grad()
    @calling("optimizer.sync()")
    def sync(self) -> None:
        """Make the replicas bit-identical, before an evaluation or before the model is saved alone. All ranks.

        Sends a one-bit round if there were local steps since the last one, else nothing.
        """
        if self.rule.since_sync:
            self._drop_step()
            self.rule.begin_forced_sync()
            self._take_extra_step()
