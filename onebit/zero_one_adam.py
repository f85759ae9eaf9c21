"""0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009): the variance refreshed ever more rarely, momentum in one bit, and
steps in between that send nothing at all. There is no dense warm-up.

The policies are in `schedule.py`; what the family shares is in `base.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .adam import floor_of_blocks, normalised
from .agreement.step_vote import StepVote, cast_votes, present_anywhere
from .base import CommonOptions, CompressedOptimizer, codec_of_gradients
from .bucket import Bucket
from .comm import Bf16Codec, Codec, ErrorFeedback, Exchange, MomentumWeights, Variance
from .contract import check_number
from .frozen import gradient_of
from .model_parallel import local
from .schedule import LocalSteps, VarianceUpdates, variance_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

# Elements of which a local step makes some ten temporaries: 256 KiB each with blocks of 256.
BLOCKS_AT_A_TIME = 256

# The rounds. Idle: every step synchronises and the learning rate is zero, so there is nothing to say.
_VARIANCE, _SYNC, _LOCAL, _IDLE = "variance", "compressed", "local", "idle"


class ZeroOneAdam(CompressedOptimizer):
    """AdamW whose ranks talk about two bits per parameter and step, or less: whole steps go by without a word.

    Each step t on rank i, with γ = lr/(1-β1^t), D = √max(v̂, floor·blockmean) + eps, and the momentum m averaging
    moves, gradients divided by D:

    - *variance step* (`VarianceUpdates`, only while every step synchronises): the mean gradient ḡ travels in
      `variance_codec`; v ← (1-w)·v + w·ḡ² with w = `variance_weight`(β2, steps since the last one);
      m ← β1·m + (1-β1)·ḡ/D; p ← p - γ·m.
    - *other steps*: m_i ← β1·m_i + (1-β1)·g_i/D; u_i ← u_i + γ·m_i; G ← G + γ. A *local* one moves this rank's own
      parameters by γ·m_i and sends nothing, not even a vote. One that *synchronises* (`LocalSteps`) sends u_i in one
      bit with error feedback, takes the mean U back, and sets m ← U/G and p ← anchor - U, where the anchor is what p
      was after the last one: the replicas are bit-identical again.

    The paper's m averages gradients and is divided by D when it moves. While D stands still that is the same; when D
    changes, the noise of compression in m would be multiplied by the change, and a block whose variance collapses
    (units that die and wake) would blow up. A g_i far beyond an old D counts in D (`normalised`). See README,
    "Differences".

    Weight decay (decoupled) acts in every step and is no part of u. A step with lr = 0 moves nothing; while every step
    synchronises, its gradient is dropped. Between synchronisations the replicas differ: call `sync()` on all ranks
    before evaluation. Arguments as in `OnebitAdam` and `CommonOptions`, and:

    var_update_scaler, var_freeze_step: see `VarianceUpdates`. local_step_scaler, local_step_clipper: see `LocalSteps`;
    a numeric scaler counts from var_freeze_step. variance_codec: what ḡ travels in.

    State on each rank, bytes per parameter: m 4, v 4, worker error 4 (bf16: 2), server error 4/W; with
    local_step_clipper > 1 another 8 (u and the anchor). Sends per rank 2·(W-1)/W·(1 + 16/block) bits per parameter and
    synchronisation, 2·(W-1)/W·(8 + 16/block) per variance step.
    """

    kind = "0/1 Adam"
    adam_names: ClassVar = {"exp_avg_update": "exp_avg"}  # m/D by a name of its own: torch's AdamW takes m for it

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
        check_number(type(self).__name__, "variance_floor", variance_floor)
        self.updates = VarianceUpdates(var_update_scaler, var_freeze_step)
        self.local_steps = LocalSteps(local_step_scaler, local_step_clipper, var_freeze_step or 0)
        self.variance_codec = codec_of_gradients(variance_codec, common)
        self.variance_floor = variance_floor
        self.bias_correction = bias_correction
        self._round = ""  # of the step under way; decided once, as learning rates may be edited before step()
        self._step_under_way = 1
        self._weights: list[float] = []  # γ of the step under way, per group
        self._peak_lr = 0.0
        self._variance_steps = 0  # steps up to and including the last variance step
        self._variance_total: list[float] = []  # the sum of the weights in v, per group
        self._fallback = 1.0
        self._since_sync = 0
        self._seen_since_sync: set[Tensor] = set()  # parameters that this rank has had a gradient for since
        self._is_forced = False
        self._accumulated_weight: list[float] = []  # G, per group
        self._kept_share: list[float] = []  # what weight decay has left of the anchor, per group
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **common)

    def _options(self) -> list[str]:
        names = ("updates", "local_steps", "variance_codec", "variance_floor", "bias_correction")
        return [*super()._options(), *(f"option {name} = {getattr(self, name)}" for name in names)]

    # ---------------------------------------------------------------- which round this is

    def _this_round(self) -> str:
        if not self._round:
            self._weights = [self._weight(g) for g in range(len(self.param_groups))]
            self._round, self._step_under_way = self._decide(), int(self._steps[0]) + 1
        return self._round

    def _decide(self) -> str:
        if self._compresses is False:
            return _VARIANCE
        step, lr = int(self._steps[0]), float(self.param_groups[0]["lr"])
        interval = self.local_steps.interval(step, lr, max(self._peak_lr, lr))
        if interval == 1 and self._since_sync == 0 and self.updates.is_due(step):
            return _VARIANCE
        if self._since_sync + 1 < interval:
            return _LOCAL
        moves = any(w > 0.0 for w in self._weights) or any(w > 0.0 for w in self._accumulated_weight)
        return _SYNC if moves else _IDLE if interval == 1 else _LOCAL

    def _weight(self, g: int) -> float:
        """γ = lr/(1-β1^t) of the step under way."""
        return float(self.param_groups[g]["lr"]) / self._correction(g, int(self._steps[g]) + 1)

    def _codec(self, bucket: Bucket) -> Codec | None:
        dense = Bf16Codec(self.codec.block) if self._compresses is False else self.variance_codec
        return {_VARIANCE: dense, _SYNC: self.codec}.get(self._this_round())

    def _sends_gradients(self, bucket: Bucket) -> bool:
        return self._this_round() == _VARIANCE

    def _round_name(self) -> str:
        return "sync()" if self._is_forced else self._this_round()

    @property
    def _asks_before_sending(self) -> bool:
        # Where rounds follow the learning rate, ranks whose rates differ would be in different ones.
        return self.local_steps.longest > 1

    def _error_feedback(self, bucket: Bucket) -> ErrorFeedback | None:
        return None if self._this_round() == _VARIANCE else bucket.ef

    def _is_synchronised(self) -> bool:
        return self._since_sync == 0

    # ---------------------------------------------------------------- state

    def _allocate(self, bucket: Bucket, phase: str) -> None:
        n, device = bucket.layout.numel, bucket.device
        bucket.phase = phase
        bucket.ef = bucket.new_errors(self.error_dtype)
        names = ["exp_avg_update", "exp_avg_sq"]
        if self.local_steps.longest > 1:
            names += ["accumulated", "anchor"]
        bucket.flat = {name: torch.zeros(n, device=device) for name in names}
        bucket.floor_J = None
        bucket.wires.clear()
        groups = len(self.param_groups)  # some may have nothing here: a pipeline stage without norms
        self._variance_total += [0.0] * (groups - len(self._variance_total))
        self._accumulated_weight += [0.0] * (groups - len(self._accumulated_weight))
        self._kept_share += [1.0] * (groups - len(self._kept_share))

    def momentum(self, bucket: Bucket) -> Tensor:
        g = bucket.group_index
        D = self._variance(bucket, self.param_groups[g]).denominator().view(-1)
        return D.mul_(bucket.flat["exp_avg_update"]).div_(self._correction(g, int(self._steps[g])))

    def _correction(self, g: int, step: int) -> float:
        """1 - β1^step."""
        return 1.0 - self.param_groups[g]["betas"][0] ** step if self.bias_correction and step > 0 else 1.0

    def _last_average(self, bucket: Bucket) -> Tensor:
        g, lr = bucket.group_index, float(self.param_groups[bucket.group_index]["lr"])
        return bucket.flat["exp_avg_update"] * (lr / self._correction(g, int(self._steps[g])))

    # ---------------------------------------------------------------- what is sent

    def _phases(self, bucket: Bucket, group: dict, codec: Codec, scale: float) -> Exchange:
        """A synchronisation in every step: γ·(β1·m + (1-β1)·g/D) in one pass. Otherwise see `_make_payload`."""
        if self._round == _VARIANCE or self._since_sync or self._is_forced:
            yield from super()._phases(bucket, group, codec, scale)
            return
        beta1, weight = group["betas"][0], self._weights[bucket.group_index]
        own = self._weight_of_a_gradient(bucket, group) / self._hierarchy.nodes
        weights = MomentumWeights(keep=weight * beta1, add=weight * (1.0 - beta1), own=own, unscale=scale)
        m_WN = self._rows(bucket.flat["exp_avg_update"])
        yield from self._phases_of_momentum(
            bucket, self._gradients(bucket), self._variance(bucket, group), m_WN, weights
        )

    def _make_payload(self, bucket: Bucket, group: dict) -> None:
        """Variance step: the gradient. After local steps: u + γ·(β1·m + (1-β1)·g/D), or u where it is forced."""
        if self._round == _VARIANCE:
            return
        u = bucket.flat["accumulated"]
        if self._is_forced:
            bucket.x.copy_(u)
            return
        beta1 = group["betas"][0]
        self._normalise(bucket, group)
        bucket.x.mul_(1.0 - beta1).add_(bucket.flat["exp_avg_update"], alpha=beta1)
        bucket.x.mul_(self._weights[bucket.group_index]).add_(u)

    # ---------------------------------------------------------------- what is done with it

    def _commit(self, bucket: Bucket, group: dict, step: int) -> None:
        """Moments, errors, accumulators; bucket.x ← what is to be subtracted from p."""
        rounds = {_VARIANCE: self._refresh, _SYNC: self._synchronise, _LOCAL: self._go_alone, _IDLE: self._rest}
        rounds[self._round](bucket, group, step)

    def _refresh(self, bucket: Bucket, group: dict, step: int) -> None:
        m, v, g = bucket.flat["exp_avg_update"], bucket.flat["exp_avg_sq"], bucket.x
        weight = self._weight_of_variance_step(bucket.group_index)
        v.mul_(1.0 - weight).addcmul_(g, g, value=weight)
        bucket.floor_J = None
        D = self._variance(bucket, group, self._total_after(bucket.group_index, weight)).denominator().view(-1)
        m.lerp_(g.div_(D), 1.0 - group["betas"][0])
        torch.mul(m, self._weights[bucket.group_index], out=bucket.x)
        self._decay(bucket, group)
        bucket.wires.pop(self.variance_codec, None)  # ever rarer: its buffers are not kept

    def _weight_of_variance_step(self, g: int) -> float:
        return variance_weight(self.param_groups[g]["betas"][1], int(self._steps[0]) - self._variance_steps)

    def _total_after(self, g: int, weight: float) -> float:
        return (1.0 - weight) * self._variance_total[g] + weight

    def _synchronise(self, bucket: Bucket, group: dict, step: int) -> None:
        assert bucket.wire is not None
        g, frames_WB = bucket.group_index, bucket.wire.frames_WB
        assert bucket.ef is not None
        bucket.ef.commit()
        weight = self._accumulated_weight[g] + self._weights[g]
        if weight > 0.0:
            self.codec.decode(frames_WB, self._rows(bucket.flat["exp_avg_update"]), weight=1.0 / weight)
        self._mask_state(bucket)
        if not self._since_sync:
            if g in self._masks:
                self.codec.decode(frames_WB, self._rows(bucket.x))
                self._decay(bucket, group)
            return
        self.codec.decode(frames_WB, self._rows(bucket.x))
        anchor_views = bucket.layout.views(bucket.flat["anchor"])
        torch._foreach_copy_(bucket.held, anchor_views)
        lost = 1.0 - self._kept_share[g] * self._kept_this_step(group)
        torch._foreach_add_(bucket.x_views, anchor_views, alpha=lost)
        bucket.flat["accumulated"].zero_()

    def _go_alone(self, bucket: Bucket, group: dict, step: int) -> None:
        m, u, weight = bucket.flat["exp_avg_update"], bucket.flat["accumulated"], self._weights[bucket.group_index]
        if self._since_sync == 0:
            torch._foreach_copy_(bucket.layout.views(bucket.flat["anchor"]), bucket.held)
        self._normalise(bucket, group)
        m.lerp_(bucket.x, 1.0 - group["betas"][0])
        u.add_(m, alpha=weight)
        torch.mul(m, weight, out=bucket.x)
        self._decay(bucket, group)

    def _rest(self, bucket: Bucket, group: dict, step: int) -> None:
        bucket.x.zero_()

    def _variance(self, bucket: Bucket, group: dict, total: float | None = None) -> Variance:
        """What D is made of. total: the sum of the weights in v, where it has just changed."""
        v = bucket.flat["exp_avg_sq"]
        total = self._variance_total[bucket.group_index] if total is None else total
        correction = 1.0 / total if self.bias_correction and total > 0.0 else 1.0
        if bucket.floor_J is None:
            bucket.floor_J = floor_of_blocks(
                v * correction, bucket.layout, bucket.counts, floor=self.variance_floor, fallback=self._fallback
            )
        return Variance(self._rows(v), self._rows(bucket.floor_J), correction, group["eps"])

    def _normalise(self, bucket: Bucket, group: dict) -> None:
        """bucket.x: this rank's gradient in, a move out. In pieces whose temporaries stay in a cache."""
        variance = self._variance(bucket, group)
        own = self._weight_of_a_gradient(bucket, group) / self.transport.world_size
        block, pieces = self.codec.block, BLOCKS_AT_A_TIME
        parts = (bucket.x.split(pieces * block), variance.v_KN.view(-1).split(pieces * block))
        for x, v, floor in zip(*parts, variance.floor_KJ.view(-1).split(pieces), strict=True):
            part = Variance(v.unsqueeze(0), floor.unsqueeze(0), variance.correction, variance.eps)
            x.copy_(normalised(x, part.denominator()[0], own))

    def _weight_of_a_gradient(self, bucket: Bucket, group: dict) -> float:
        """What a gradient would weigh in a variance step now. Divided among those who send one: see `normalised`."""
        weight = variance_weight(group["betas"][1], self._step_under_way - self._variance_steps)
        return weight / self._total_after(bucket.group_index, weight)

    def _kept_this_step(self, group: dict) -> float:
        return 1.0 if self._is_forced else 1.0 - float(group["lr"]) * group["weight_decay"]

    def _decay(self, bucket: Bucket, group: dict) -> None:
        lost = 1.0 - self._kept_this_step(group)
        if lost != 0.0:
            torch._foreach_add_(bucket.x_views, bucket.held, alpha=lost)

    def _move(self, bucket: Bucket, seen: Sequence[bool]) -> None:
        if self._round != _SYNC or self._since_sync or bucket.group_index in self._masks:
            super()._move(bucket, seen)
            return
        assert bucket.wire is not None
        kept = self._kept_this_step(self.param_groups[bucket.group_index])
        weight, keep = (torch.full((len(bucket.params),), number, device=bucket.device) for number in (-1.0, kept))
        self._apply(bucket, seen, bucket.wire.frames_WB, weight, keep)

    def _after_step(self, votes: Sequence[StepVote], step: int) -> None:
        self.stats.phase = self._round
        self._peak_lr = max(self._peak_lr, float(self.param_groups[0]["lr"]))
        if self._round == _VARIANCE:
            for g in range(len(self._variance_total)):
                self._variance_total[g] = self._total_after(g, self._weight_of_variance_step(g))
            self._variance_steps = step
            self._fallback = self._mean_of_live_blocks(self._buckets, [b.flat["exp_avg_sq"] for b in self._buckets])
            for bucket in self._buckets:
                bucket.floor_J = None
            if not self.updates.is_due(step):  # the next step would be the first in one bit
                self._should_compress()
        if self._round == _LOCAL:
            self._since_sync += 1
            self._seen_since_sync.update(p for p in self._slots if gradient_of(p) is not None)
            for g, group in enumerate(self.param_groups):
                self._accumulated_weight[g] += self._weights[g]
                self._kept_share[g] *= self._kept_this_step(group)
        elif self._since_sync:
            self._since_sync = 0
            self._seen_since_sync.clear()
            self._accumulated_weight = [0.0] * len(self.param_groups)
            self._kept_share = [1.0] * len(self.param_groups)

    def _present(self, p: Tensor) -> bool:
        """Whether this rank has a gradient for p, or has had one since the last synchronisation."""
        return p in self._seen_since_sync or (super()._present(p) and not self._is_forced)

    def _start_over(self) -> None:
        super()._start_over()
        self._round = ""

    @torch.no_grad()
    def sync(self) -> None:
        """Make the replicas bit-identical now, if they are not: before evaluation, or before saving the model alone.

        All ranks. Sends a one-bit round if local steps were taken since the last one, else nothing.
        """
        if self._since_sync == 0:
            return
        self._give_up_step()
        self._round, self._is_forced = _SYNC, True
        self._weights = [0.0] * len(self.param_groups)
        try:
            for bucket in self._buckets:
                self._launch(bucket)
            header = self._header(self._round_name())
            mine = StepVote(header.summary(), [self._present(p) for p in self._slots])
            seen = present_anywhere(cast_votes(self.transport, header, mine, self._buckets[0].device))
            self._wait_all()
            for bucket in self._buckets:
                group = self.param_groups[bucket.group_index]
                self._commit(bucket, group, int(self._steps[bucket.group_index]))
                self._move(bucket, seen)
            self._after_step([], int(self._steps[0]))
        finally:
            self._is_forced = False
            self._start_over()

    # ---------------------------------------------------------------- checkpoints

    def _extra_state(self) -> dict:
        return super()._extra_state() | {
            "peak_lr": self._peak_lr,
            "variance_steps": self._variance_steps,
            "variance_total": list(self._variance_total),
            "fallback": self._fallback,
            "since_sync": self._since_sync,
            "accumulated_weight": list(self._accumulated_weight),
            "kept_share": list(self._kept_share),
            # Between synchronisations this rank's parameters are its own, and no other file holds them.
            "waiting": [p in self._seen_since_sync for p in self._slots] if self._since_sync else [],
            "parameters": [local(p).detach().clone() for p in self._slots] if self._since_sync else [],
        }

    def _load_extra_state(self, record: dict) -> None:
        super()._load_extra_state(record)
        self._peak_lr = record["peak_lr"]
        self._variance_steps = record["variance_steps"]
        self._variance_total = list(record["variance_total"])
        self._fallback = record["fallback"]
        self._since_sync = record["since_sync"]
        self._accumulated_weight = list(record["accumulated_weight"])
        self._kept_share = list(record["kept_share"])
        waiting = record.get("waiting") or [self._since_sync > 0] * len(self._slots)  # not in the first files
        self._seen_since_sync = {p for p, waits in zip(self._slots, waiting, strict=True) if waits}
        with torch.no_grad():
            for p, saved in zip(self._slots, record["parameters"], strict=False):
                local(p).copy_(saved)

    def _adopt_dense_state(self) -> None:
        self._variance_steps = int(self._steps[0]) if self._steps else 0
        for g, group in enumerate(self.param_groups[: len(self._variance_total)]):
            self._variance_total[g] = 1.0 - group["betas"][1] ** int(self._steps[g])
        for bucket in self._buckets:
            bucket.floor_J = None
            D = self._variance(bucket, self.param_groups[bucket.group_index]).denominator()
            bucket.flat["exp_avg_update"].div_(D.view(-1))
