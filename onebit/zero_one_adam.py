"""0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009): the variance refreshed ever more rarely, momentum in one bit, and
steps in between that send nothing at all. There is no dense warm-up.

The policies are in `schedule.py`; what the family shares is in `base.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from . import comm
from .ballot import Ballot
from .base import CompressedOptimizer
from .bucket import Bucket
from .comm import Codec, ErrorFeedback, IdentityCodec, Int8Codec, SignCodec, Transport, Wire
from .onebit_adam import check_adam_options, denominator_, mean_of_live_blocks
from .schedule import LocalSteps, VarianceUpdates

log = logging.getLogger(__name__)

# The rounds. Idle: every step synchronises and the learning rate is zero, so there is nothing to say.
_VARIANCE, _SYNC, _LOCAL, _IDLE = "variance", "compressed", "local", "idle"


class ZeroOneAdam(CompressedOptimizer):
    """AdamW whose ranks talk about two bits per parameter and step, or less: whole steps go by without a word.

    Each step t on rank i, with γ = lr/(1-β1^t), D = √max(v̂, floor·blockmean) + eps:

    - *variance step* (`VarianceUpdates`, only while every step synchronises): the mean gradient ḡ travels in
      `variance_codec`; v ← β2^k·v + (1-β2^k)·ḡ², k steps since the last one; m ← β1·m + (1-β1)·ḡ; p ← p - γ·m/D.
    - *other steps*: m_i ← β1·m_i + (1-β1)·g_i; u_i ← u_i + γ·m_i; G ← G + γ. A *local* one moves this rank's own
      parameters by γ·m_i/D and sends nothing, not even a vote. One that *synchronises* (`LocalSteps`) sends u_i/D in
      one bit with error feedback, takes the mean U back, and sets m ← D·U/G and p ← anchor - U, where the anchor is
      what p was after the last one: the replicas are bit-identical again.

    Weight decay (decoupled) acts in every step and is no part of u. A step with lr = 0 moves nothing; while every step
    synchronises, its gradient is dropped. Between synchronisations the replicas differ: call `sync()` on all ranks
    before evaluation. Arguments as in `OnebitAdam`, and:

    var_update_scaler, var_freeze_step: see `VarianceUpdates`. local_step_scaler, local_step_clipper: see `LocalSteps`;
    a numeric scaler counts from var_freeze_step. variance_codec: what ḡ travels in.

    State on each rank, bytes per parameter: m 4, v 4, worker error 4 (bf16: 2), server error 4/W; with
    local_step_clipper > 1 another 8 (u and the anchor). Sends per rank 2·(W-1)/W·(1 + 16/block) bits per parameter and
    synchronisation, 2·(W-1)/W·(8 + 16/block) per variance step.
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
        local_step_clipper: int = 1,
        bias_correction: bool = True,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        link: Transport | None = None,
        codec: SignCodec | None = None,
        variance_codec: Int8Codec | IdentityCodec | None = None,
        error_dtype: torch.dtype = torch.float32,
        variance_floor: float = 0.01,
        overlap: bool = True,
        bucket_cap_mb: float = 16.0,
        check_replicas_every: int = 100,
    ):
        check_adam_options(lr, betas, eps, weight_decay, variance_floor, amsgrad)
        self.updates = VarianceUpdates(var_update_scaler, var_freeze_step)
        self.local_steps = LocalSteps(local_step_scaler, local_step_clipper, var_freeze_step or 0)
        self.variance_codec: Codec = variance_codec or Int8Codec()
        self.variance_floor = variance_floor
        self.bias_correction = bias_correction
        self._round = ""  # of the step under way; decided once, as learning rates may be edited before step()
        self._weights: list[float] = []  # γ of the step under way, per group
        self._peak_lr = 0.0
        self._variance_steps = 0  # steps up to and including the last variance step
        self._fallback = 1.0
        self._since_sync = 0
        self._is_forced = False
        self._one_bit_wires: dict[int, Wire] = {}
        self._accumulated_weight: list[float] = []  # G, per group
        self._kept_share: list[float] = []  # what weight decay has left of the anchor, per group
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            link=link,
            codec=codec or SignCodec(),
            max_grad_norm=max_grad_norm,
            error_dtype=error_dtype,
            overlap=overlap,
            bucket_cap_mb=bucket_cap_mb,
            check_replicas_every=check_replicas_every,
        )

    def _options(self) -> list[str]:
        names = ("updates", "local_steps", "variance_codec", "variance_floor", "bias_correction")
        return [*super()._options(), *(f"option {name} = {getattr(self, name)}" for name in names)]

    # ---------------------------------------------------------------- which round this is

    def _this_round(self) -> str:
        if not self._round:
            self._weights = [self._weight(g) for g in range(len(self.param_groups))]
            self._round = self._decide()
        return self._round

    def _decide(self) -> str:
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
        group, step = self.param_groups[g], int(self._steps[g]) + 1
        correction = 1.0 - group["betas"][0] ** step if self.bias_correction else 1.0
        return float(group["lr"]) / correction

    def _codec(self, bucket: Bucket) -> Codec | None:
        return {_VARIANCE: self.variance_codec, _SYNC: self.codec}.get(self._this_round())

    def _sends_gradients(self, bucket: Bucket) -> bool:
        return self._this_round() == _VARIANCE

    def _error_feedback(self, bucket: Bucket) -> ErrorFeedback | None:
        return None if self._this_round() == _VARIANCE else bucket.ef

    def _is_synchronised(self) -> bool:
        return self._since_sync == 0

    # ---------------------------------------------------------------- state

    def _allocate(self, bucket: Bucket, phase: str) -> None:
        n, W, device = bucket.layout.numel, self.link.world_size, bucket.x.device
        bucket.phase = phase
        bucket.ef = ErrorFeedback.zeros(n, W, dtype=self.error_dtype, device=device)
        names = ["exp_avg", "exp_avg_sq"]
        if self.local_steps.local_step_clipper > 1:
            names += ["accumulated", "anchor"]
        bucket.flat = {name: torch.zeros(n, device=device) for name in names}
        bucket.flat["worker_error"] = bucket.ef.worker
        bucket.wire = self._one_bit_wires[bucket.index] = Wire.empty(self.codec, n, W, device=device)
        groups = bucket.group_index + 1
        self._accumulated_weight += [0.0] * (groups - len(self._accumulated_weight))
        self._kept_share += [1.0] * (groups - len(self._kept_share))

    def momentum(self, bucket: Bucket) -> Tensor:
        beta1, step = self.param_groups[bucket.group_index]["betas"][0], int(self._steps[bucket.group_index])
        correction = 1.0 - beta1**step if self.bias_correction and step > 0 else 1.0
        return bucket.flat["exp_avg"] / correction

    def _last_average(self, bucket: Bucket) -> Tensor:
        group = self.param_groups[bucket.group_index]
        gamma_m = self.momentum(bucket) * float(group["lr"])
        return gamma_m.div_(self._denominator(bucket, group, self._variance_steps))

    # ---------------------------------------------------------------- what is sent

    def _make_payload(self, bucket: Bucket, group: dict) -> None:
        """Variance step: the gradient. Synchronisation: (u + γ·(β1·m + (1-β1)·g))/D, or u/D where it is forced."""
        codec = self._codec(bucket)
        assert codec is not None
        if self._round == _VARIANCE:  # ever rarer: its buffers are not kept
            bucket.wire = Wire.empty(codec, bucket.layout.numel, self.link.world_size, device=bucket.x.device)
            return
        bucket.wire = self._one_bit_wires[bucket.index]
        if self._is_forced:
            torch.div(bucket.flat["accumulated"], self._denominator(bucket, group, self._variance_steps), out=bucket.x)
            return
        beta1 = group["betas"][0]
        bucket.x.mul_(1.0 - beta1).add_(bucket.flat["exp_avg"], alpha=beta1).mul_(self._weights[bucket.group_index])
        if self._since_sync:
            bucket.x.add_(bucket.flat["accumulated"])
        bucket.x.div_(self._denominator(bucket, group, self._variance_steps))

    # ---------------------------------------------------------------- what is done with it

    def _commit(self, bucket: Bucket, group: dict, step: int) -> None:
        """Moments, errors, accumulators; bucket.x ← what is to be subtracted from p."""
        rounds = {_VARIANCE: self._refresh, _SYNC: self._synchronise, _LOCAL: self._go_alone, _IDLE: self._rest}
        rounds[self._round](bucket, group, step)

    def _refresh(self, bucket: Bucket, group: dict, step: int) -> None:
        bucket.wire = self._one_bit_wires[bucket.index]
        beta1, beta2 = group["betas"]
        m, v, g = bucket.flat["exp_avg"], bucket.flat["exp_avg_sq"], bucket.x
        m.lerp_(g, 1.0 - beta1)
        fresh = 1.0 - beta2 ** (step - self._variance_steps)
        v.mul_(1.0 - fresh).addcmul_(g, g, value=fresh)
        torch.mul(m, self._weights[bucket.group_index], out=bucket.x)
        bucket.x.div_(self._denominator(bucket, group, step))
        self._decay(bucket, group)

    def _synchronise(self, bucket: Bucket, group: dict, step: int) -> None:
        assert bucket.wire is not None and bucket.ef is not None
        g = bucket.group_index
        bucket.ef.commit(bucket.x, bucket.wire)
        self.codec.decode(bucket.wire.frames_WB, bucket.x.view(self.link.world_size, -1))
        weight = self._accumulated_weight[g] + self._weights[g]
        if weight > 0.0:
            D = self._denominator(bucket, group, self._variance_steps)
            torch.mul(bucket.x, D.div_(weight), out=bucket.flat["exp_avg"])
        if not self._since_sync:
            self._decay(bucket, group)
            return
        anchor_views = bucket.layout.views(bucket.flat["anchor"])
        torch._foreach_copy_(bucket.params, anchor_views)
        lost = 1.0 - self._kept_share[g] * self._kept_this_step(group)
        torch._foreach_add_(bucket.x_views, anchor_views, alpha=lost)
        bucket.flat["accumulated"].zero_()

    def _go_alone(self, bucket: Bucket, group: dict, step: int) -> None:
        m, u, weight = bucket.flat["exp_avg"], bucket.flat["accumulated"], self._weights[bucket.group_index]
        if self._since_sync == 0:
            torch._foreach_copy_(bucket.layout.views(bucket.flat["anchor"]), bucket.params)
        m.lerp_(bucket.x, 1.0 - group["betas"][0])
        u.add_(m, alpha=weight)
        torch.mul(m, weight, out=bucket.x)
        bucket.x.div_(self._denominator(bucket, group, self._variance_steps))
        self._decay(bucket, group)

    def _rest(self, bucket: Bucket, group: dict, step: int) -> None:
        bucket.x.zero_()

    def _denominator(self, bucket: Bucket, group: dict, variance_steps: int) -> Tensor:
        """D from the variance as of step `variance_steps`, in a new tensor."""
        v = bucket.flat["exp_avg_sq"].clone()
        if self.bias_correction and variance_steps > 0:
            v.div_(1.0 - group["betas"][1] ** variance_steps)
        return denominator_(
            v, bucket.layout, bucket.counts, eps=group["eps"], floor=self.variance_floor, fallback=self._fallback
        )

    def _kept_this_step(self, group: dict) -> float:
        return 1.0 if self._is_forced else 1.0 - float(group["lr"]) * group["weight_decay"]

    def _decay(self, bucket: Bucket, group: dict) -> None:
        lost = 1.0 - self._kept_this_step(group)
        if lost != 0.0:
            torch._foreach_add_(bucket.x_views, bucket.params, alpha=lost)

    def _move(self, bucket: Bucket, seen: Sequence[bool]) -> None:
        # What ranks have accumulated since the anchor is due for every parameter, with a gradient in this step or not.
        returns = self._round == _SYNC and self._since_sync > 0
        super()._move(bucket, [True] * len(self._slots) if returns else seen)

    def _after_step(self, ballots: Sequence[Ballot], step: int) -> None:
        self.stats.phase = self._round
        self._peak_lr = max(self._peak_lr, float(self.param_groups[0]["lr"]))
        if self._round == _VARIANCE:
            self._variance_steps = step
            self._fallback = mean_of_live_blocks([b.flat["exp_avg_sq"] for b in self._buckets], self.codec.block)
        if self._round == _LOCAL:
            self._since_sync += 1
            for g, group in enumerate(self.param_groups):
                self._accumulated_weight[g] += self._weights[g]
                self._kept_share[g] *= self._kept_this_step(group)
        elif self._since_sync:
            self._since_sync = 0
            self._accumulated_weight = [0.0] * len(self.param_groups)
            self._kept_share = [1.0] * len(self.param_groups)

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
        self._round, self._is_forced = _SYNC, True
        self._weights = [0.0] * len(self.param_groups)
        try:
            for bucket in self._buckets:
                self._launch(bucket)
            comm.land([bucket.flight for bucket in self._buckets if bucket.flight is not None])
            for bucket in self._buckets:
                group = self.param_groups[bucket.group_index]
                self._commit(bucket, group, int(self._steps[bucket.group_index]))
                self._move(bucket, [])
            self._after_step([], int(self._steps[0]))
        finally:
            self._is_forced = False
            self._start_over()

    # ---------------------------------------------------------------- checkpoints

    def _extra_state(self) -> dict:
        return {
            "peak_lr": self._peak_lr,
            "variance_steps": self._variance_steps,
            "fallback": self._fallback,
            "since_sync": self._since_sync,
            "accumulated_weight": list(self._accumulated_weight),
            "kept_share": list(self._kept_share),
            # Between synchronisations this rank's parameters are its own, and no other file holds them.
            "parameters": [p.detach().clone() for p in self._slots] if self._since_sync else [],
        }

    def _load_extra_state(self, record: dict) -> None:
        self._peak_lr = record["peak_lr"]
        self._variance_steps = record["variance_steps"]
        self._fallback = record["fallback"]
        self._since_sync = record["since_sync"]
        self._accumulated_weight = list(record["accumulated_weight"])
        self._kept_share = list(record["kept_share"])
        with torch.no_grad():
            for p, saved in zip(self._slots, record["parameters"], strict=False):
                p.copy_(saved)

    def _adopt_dense_state(self) -> None:
        self._variance_steps = int(self._steps[0]) if self._steps else 0
