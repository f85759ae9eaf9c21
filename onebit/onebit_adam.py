"""1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888): AdamW until the variance is stable, then one-bit momentum.

The maths are the free functions at the top; the class says what travels and when. The rest is in `base.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from .ballot import Ballot
from .base import CompressedOptimizer
from .bucket import Bucket
from .comm import Codec, ErrorFeedback, IdentityCodec, SignCodec, Transport, Wire
from .flat import Layout
from .schedule import VarianceFreeze

log = logging.getLogger(__name__)


def adamw_update_(
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    bias_correction: bool,
) -> None:
    """Advance m and v by the mean gradient g, and leave the step in it: g ← lr·m̂/(√v̂ + eps). float32 [n], in place.

    m ← β1·m + (1-β1)·g,  v ← β2·v + (1-β2)·g²,  m̂ = m/(1-β1^step),  v̂ = v/(1-β2^step)   (Adam, arXiv 1412.6980, Alg. 1)
    """
    beta1, beta2 = betas
    m.lerp_(g, 1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    torch.sqrt(v, out=g)
    if bias_correction:
        g.mul_((1.0 - beta2**step) ** -0.5)
        lr = lr / (1.0 - beta1**step)
    torch.div(m, g.add_(eps), out=g).mul_(lr)


def denominator_(v: Tensor, layout: Layout, counts: Tensor, *, eps: float, floor: float, fallback: float) -> Tensor:
    """v ← D(v) = √max(v, floor·blockmean(v)) + eps, in place; float32 [W·N], bias-corrected. counts: int32 [W, J].

    A block that has never seen a gradient knows no scale of its own: it takes the mean of its parameter's other blocks,
    or `fallback` (the mean of the whole model) if there is none, so that a row which first gets a gradient later moves
    as far as its neighbours. floor = 0 is the paper's rule, without any of this.
    """
    if floor > 0.0:
        v_Jn = v.view(-1, layout.block)
        mean_J = v_Jn.sum(1) / counts.view(-1).clamp(min=1)
        least_J = floor * mean_J
        for mean, least in zip(_by_parameter(mean_J, layout), _by_parameter(least_J, layout), strict=True):
            alive = mean > 0
            least[~alive] = float(mean[alive].mean(dtype=torch.float64)) if bool(alive.any()) else fallback
        torch.maximum(v_Jn, least_J.unsqueeze(1), out=v_Jn)
    return v.sqrt_().add_(eps)


def mean_of_live_blocks(variances: Sequence[Tensor], block: int) -> float:
    """The mean of v over all blocks in which it is not zero; 1 where there is none."""
    per_block = [v.view(-1, block).sum(1) for v in variances]
    live = sum(int(torch.count_nonzero(sums)) for sums in per_block) * block
    return float(sum(sums.sum(dtype=torch.float64) for sums in per_block)) / live if live else 1.0


def _by_parameter(per_block_J: Tensor, layout: Layout) -> list[Tensor]:
    """Views of a per-block tensor, one for each parameter."""
    starts = [offset // layout.block for offset in layout.offsets]
    blocks = [-(-shape.numel() // layout.block) for shape in layout.shapes]
    return [per_block_J[start : start + n] for start, n in zip(starts, blocks, strict=True)]


def check_adam_options(
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    variance_floor: float,
    amsgrad: bool,
) -> None:
    """Raise ValueError where an option of Adam's is out of its range."""
    if not all(float(value) >= 0.0 for value in (lr, eps, weight_decay, variance_floor)):
        raise ValueError(
            "lr, eps, weight_decay and variance_floor must not be negative, got "
            f"{lr}, {eps}, {weight_decay}, {variance_floor}"
        )
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must lie in [0, 1), got {betas}")
    if amsgrad:
        raise ValueError("the one-bit optimizers have no amsgrad form; leave amsgrad=False")


class OnebitAdam(CompressedOptimizer):
    """AdamW whose data-parallel traffic is about two bits per parameter and step, once its variance is fixed.

    Give it the plain model's parameters (not wrapped in DDP) and each rank's own loss; it averages over ranks itself.
    All ranks construct it with the same arguments and parameters, and call step() together; rank 0's initial values are
    sent to all. Between warm-up and the end of the run, per step and bucket:

    1. c_i = (β1·m + (1-β1)·g_i)/D + e_i on each rank, with D = √max(v̂, floor·blockmean) + eps, fixed at the freeze; the
       signs and scales of c_i go to the chunks' owners; e_i keeps the rest.
    2. The owner averages, adds its own error, compresses again and sends the result, the new m/D, to all.
    3. p ← p - lr·(m̂/D + wd·p).

    The paper compresses m. D is the same on all ranks and fixed, so compressing m/D is the same algorithm in other
    coordinates: those in which all elements of a block are of a size. Otherwise an element with a small D takes its
    block's scale and moves by s/D; see README, "Differences".

    lr, betas, eps, weight_decay: as in torch.optim.AdamW; read anew from param_groups in every step (eps and betas[1]
    act until the freeze). bias_correction: False leaves out both corrections.
    freeze_step: dense warm-up steps, or "auto": when the variance is stable, at the latest after 15 % of total_steps.
    total_steps: optimizer steps of the whole run; needed by "auto".
    max_grad_norm: clip by the norm of the mean gradient (0: off): exact in warm-up, estimated from each rank's norm and
    its product with the momentum afterwards. It then costs the overlap with backward.
    link: the transport; default `onebit.comm.init()`. codec: block size and kind of scale of the one-bit frames.
    error_dtype: torch.bfloat16 halves the worker error. variance_floor: see `denominator_`.
    overlap: send buckets during backward; gradients must then stay as they are until step().
    check_replicas_every: steps between votes on the replicas' bits (0: never).

    State on each rank, bytes per parameter: 8 in warm-up; then D 4, worker error 4 (bf16: 2), server error 4/W (2/W),
    m/D 0.13. Sends per rank and step 8·(W-1)/W bytes per parameter in warm-up, then 2·(W-1)/W·(1 + 16/block) bits.

    Raises ValueError/TypeError at construction: bad options, unsupported dtypes, or parameters that differ between
    ranks (named).
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
        total_steps: int | None = None,
        bias_correction: bool = True,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        link: Transport | None = None,
        codec: SignCodec | None = None,
        error_dtype: torch.dtype = torch.float32,
        variance_floor: float = 0.01,
        overlap: bool = True,
        bucket_cap_mb: float = 16.0,
        check_replicas_every: int = 100,
    ):
        check_adam_options(lr, betas, eps, weight_decay, variance_floor, amsgrad)
        self.rule = VarianceFreeze(freeze_step, total_steps, betas[1])
        self.variance_floor = variance_floor
        self.bias_correction = bias_correction
        self._warmup_codec = IdentityCodec()
        self._warmup_steps: int | None = None
        self._variance_norms: dict[int, float] = {}
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
        return [
            *super()._options(),
            f"option freeze rule = {self.rule}",
            f"option variance_floor = {self.variance_floor}",
            f"option bias_correction = {self.bias_correction}",
        ]

    def _allocate(self, bucket: Bucket, phase: str) -> None:
        n, W, device = bucket.layout.numel, self.link.world_size, bucket.x.device
        bucket.phase, bucket.frames, bucket.ef = phase, None, None
        if phase == "warmup":
            bucket.flat = {name: torch.zeros(n, device=device) for name in ("exp_avg", "exp_avg_sq")}
            # The gradients travel from where the bucket lies: no second copy of them.
            as_bytes = bucket.x.view(torch.uint8).view(W, -1)
            bucket.wire = Wire.empty(self._warmup_codec, n, W, sent_WB=as_bytes, device=device)
        else:
            bucket.ef = ErrorFeedback.zeros(n, W, dtype=self.error_dtype, device=device)
            bucket.flat = {"denominator": torch.ones(n, device=device), "worker_error": bucket.ef.worker}
            bucket.wire = Wire.empty(self.codec, n, W, device=device)
            bucket.frames = torch.zeros_like(bucket.wire.frames_WB)

    def _codec(self, bucket: Bucket) -> Codec:
        return self._warmup_codec if bucket.phase == "warmup" else self.codec

    def _sends_gradients(self, bucket: Bucket) -> bool:
        return bucket.phase == "warmup"

    def _make_payload(self, bucket: Bucket, group: dict) -> None:
        """Warm-up: the gradient. Then: β1·m/D + (1-β1)·g/D, with m/D read from its frames."""
        if bucket.frames is not None:
            beta1 = group["betas"][0]
            bucket.x.div_(bucket.flat["denominator"])
            x_WN = bucket.x.view(self.link.world_size, -1)
            self.codec.decode(bucket.frames, x_WN, weight=beta1, keep=1.0 - beta1)

    def _commit(self, bucket: Bucket, group: dict, step: int) -> None:
        self._advance(bucket, group, step)
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(bucket.x_views, bucket.params, alpha=float(group["lr"]) * group["weight_decay"])

    def _advance(self, bucket: Bucket, group: dict, step: int) -> None:
        """Errors and moments; bucket.x ← lr·m̂/D."""
        lr, betas = float(group["lr"]), group["betas"]
        if bucket.phase == "warmup":
            adamw_update_(
                bucket.x,
                bucket.flat["exp_avg"],
                bucket.flat["exp_avg_sq"],
                lr=lr,
                betas=betas,
                eps=group["eps"],
                step=step,
                bias_correction=self.bias_correction,
            )
            return
        assert bucket.ef is not None and bucket.wire is not None and bucket.frames is not None
        bucket.ef.commit(bucket.x, bucket.wire)
        new = bucket.wire.frames_WB
        bucket.wire.sent_WB = bucket.wire.frames_WB = bucket.frames
        bucket.frames = new
        if self.bias_correction:
            lr = lr / (1.0 - betas[0] ** step)
        self.codec.decode(bucket.frames, bucket.x.view(self.link.world_size, -1), weight=lr)

    def momentum(self, bucket: Bucket) -> Tensor:
        beta1, step = self.param_groups[bucket.group_index]["betas"][0], int(self._steps[bucket.group_index])
        correction = 1.0 / (1.0 - beta1**step) if self.bias_correction and step > 0 else 1.0
        if bucket.frames is None:
            return bucket.flat["exp_avg"] * correction
        return self._last_average(bucket).mul_(bucket.flat["denominator"]).mul_(correction)

    def _last_average(self, bucket: Bucket) -> Tensor:
        assert bucket.frames is not None
        update = torch.empty_like(bucket.x)
        self.codec.decode(bucket.frames, update.view(self.link.world_size, -1))
        return update

    # ---------------------------------------------------------------- the freeze

    def _ballot_variance_norm(self) -> float:
        if self.rule.freeze_step != "auto" or self._warmup_steps is not None:
            return 0.0
        return sum(self._own_variance_norm(bucket) for bucket in self._buckets)

    def _own_variance_norm(self, bucket: Bucket) -> float:
        v = bucket.own_chunk(bucket.flat["exp_avg_sq"])
        step, beta2 = int(self._steps[bucket.group_index]), self.param_groups[bucket.group_index]["betas"][1]
        return float(v.sum(dtype=torch.float64)) / (1.0 - beta2**step if self.bias_correction and step else 1.0)

    def _after_step(self, ballots: Sequence[Ballot], step: int) -> None:
        if self._warmup_steps is None:
            self._variance_norms[step - 1] = sum(ballot.variance_norm for ballot in ballots)
            self._variance_norms.pop(step - 2 - self.rule.memory, None)
            why = self.rule.reason(step, self._variance_norms)
            if why is not None:
                self._warmup_steps = step
                self._variance_norms.clear()
                if self.link.rank == 0:
                    log.info("variance fixed after step %d (%s); one-bit momentum from here", step, why)
        if self._warmup_steps is not None:
            due = [b for b in self._buckets if b.phase == "warmup" and self._steps[b.group_index] >= self._warmup_steps]
            self._freeze(due)

    def _freeze(self, buckets: Sequence[Bucket]) -> None:
        """Warm-up ends for these buckets: v becomes D, m goes into frames, and what frames cannot say is owed."""
        if not buckets:
            return
        momenta = []
        for bucket in buckets:
            group, step = self.param_groups[bucket.group_index], int(self._steps[bucket.group_index])
            v, m = bucket.flat["exp_avg_sq"], bucket.flat["exp_avg"]
            if self.bias_correction:
                v.div_(1.0 - group["betas"][1] ** step)
            self._allocate(bucket, "compressed")
            bucket.flat["denominator"] = v
            momenta.append(m)
        fallback = mean_of_live_blocks([bucket.flat["denominator"] for bucket in buckets], self.codec.block)
        for bucket, m in zip(buckets, momenta, strict=True):
            group = self.param_groups[bucket.group_index]
            denominator_(
                bucket.flat["denominator"],
                bucket.layout,
                bucket.counts,
                eps=group["eps"],
                floor=self.variance_floor,
                fallback=fallback,
            )
            self._pack_momentum(bucket, m.div_(bucket.flat["denominator"]), group["betas"][0])
            self._publish(bucket)

    def _pack_momentum(self, bucket: Bucket, m: Tensor, beta1: float) -> None:
        """frames ← m (here m/D); its residual r is owed as β1·r, so that the next β1·m + e is what it would be."""
        assert bucket.frames is not None and bucket.ef is not None
        W = self.link.world_size
        self.codec.encode(m.view(W, -1), None, bucket.frames, bucket.counts)
        bucket.ef.worker.copy_(m.mul_(beta1))

    def _extra_state(self) -> dict:
        return {"warmup_steps": self._warmup_steps, "variance_norms": dict(self._variance_norms)}

    def _load_extra_state(self, record: dict) -> None:
        self._warmup_steps = record["warmup_steps"]
        self._variance_norms = dict(record["variance_norms"])
