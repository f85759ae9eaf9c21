"""1-bit Muon: Muon (Jordan et al., 2024) whose averaged momentum is built from one bit per parameter and step.

There is no paper about it. `MuonRule` is the step of one bucket from top to bottom; parameters that are not hidden
matrices take 1-bit Adam's step (`onebit_adam.py`). The arithmetic is in `arithmetic/muon.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .arithmetic.muon import adjustment, check_rule, check_use_muon, orthogonalise_
from .arithmetic.schedule import DenseSteps, long_warmup
from .comm import Codec
from .layout.bucket import Bucket
from .onebit_adam import AdamRule
from .optimizer import CommonOptions, CompressedOptimizer
from .rule import Factored, codec_of_gradients
from .step.bucket_step import Answer, BucketStep, Decision, Meeting
from .usage.contract import Group, State
from .usage.signature import shows_all_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Matrices(Meeting):
    """The buffer holds the matrices to orthogonalise. The answer: None, when it is done."""


class MuonRule(AdamRule):
    """1-bit Muon's step for groups with use_muon, 1-bit Adam's for the others."""

    kind = "1-bit Muon"
    can_be_delayed: ClassVar[bool] = False  # its gradients are in the buffer, which no state contains

    def __init__(
        self,
        schedule: DenseSteps,
        warmup_codec: Codec,
        *,
        bias_correction: bool,
        variance_floor: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr: str,
    ):
        super().__init__(schedule, warmup_codec, bias_correction=bias_correction, variance_floor=variance_floor)
        check_rule(momentum, ns_steps, adjust_lr)
        self.beta, self.nesterov, self.ns_steps, self.adjust_lr = momentum, nesterov, ns_steps, adjust_lr

    def options(self) -> dict[str, object]:
        own = {"momentum": self.beta, "nesterov": self.nesterov, "ns_steps": self.ns_steps, "adjust_lr": self.adjust_lr}
        return super().options() | own

    # ---------------------------------------------------------------- a step of one bucket

    def step(self, bucket: Bucket, scale: float) -> BucketStep:
        return self.muon_step(bucket, scale) if self._is_muon(bucket) else super().step(bucket, scale)

    def muon_step(self, bucket: Bucket, scale: float) -> BucketStep:
        m, beta = bucket.flat["momentum_buffer"], self.beta
        if self.averages_gradients(bucket):
            g, decision = yield from self.placement.mean_gradient(bucket, self._codec_of_gradients(), scale)
            increment = g.mul_(1.0 - beta)
        else:
            increment = bucket.gather(bucket.masked_gradients(), scale * (1.0 - beta))
            decision = yield from self.placement.average(bucket)  # in one bit, with error feedback
            assert bucket.ef is not None
            if decision.clip_factor != 1.0:
                lacks = float(decision.clip_factor) - 1.0
                yield from self.placement.add_to_error(bucket, scale * (1.0 - beta) * lacks)
            bucket.ef.commit()
            increment = bucket.buffer  # the exchange may have replaced it
            self.codec.decode(self.placement.frames(bucket), bucket.rows(increment))
        if (may_move := bucket.may_move()) is not None:
            increment.mul_(may_move)  # a frame of signs holds no zeros
        m.mul_(beta).add_(increment)
        self.mask_state(bucket)
        if self.nesterov:
            increment.add_(m, alpha=beta)  # (1-β)·ḡ + β·m
        else:
            increment.copy_(m)
        yield Matrices()
        self.descend(bucket, decision)

    def descend(self, bucket: Bucket, decision: Decision) -> None:
        """p ← p - lr·(a·O + wd·p), with O in the buffer."""
        group = bucket.group
        lr, decay = float(group["lr"]), float(group["lr"]) * group["weight_decay"]
        for update, p, held in zip(bucket.views, bucket.params, bucket.local_values, strict=True):
            update.mul_(lr * adjustment(p.shape, self.adjust_lr)).add_(held.float(), alpha=decay)
        self.placement.move(bucket, decision)

    def meet(self, buckets: Sequence[Bucket], meetings: Sequence[Meeting]) -> Sequence[Answer]:
        """Orthogonalise all matrices. Every replica does so itself; ranks that hold shards of one share the work."""
        pairs = [(u, p) for bucket in buckets for u, p in zip(bucket.views, bucket.params, strict=True)]
        orthogonalise_([u for u, _ in pairs], [p for _, p in pairs], self.ns_steps)
        return [None] * len(buckets)

    # ---------------------------------------------------------------- which kind of step

    def _is_muon(self, bucket: Bucket) -> bool:
        return bool(bucket.group["use_muon"])

    def keeps_variance(self, bucket: Bucket) -> bool:
        return not self._is_muon(bucket)

    def freeze(self, bucket: Bucket) -> None:
        if not self._is_muon(bucket):
            super().freeze(bucket)
            return
        bucket.phase = "compressed"
        bucket.wires.clear()
        bucket.release_buffer()
        bucket.ef = self.placement.new_errors(bucket)
        self.buckets.publish(bucket)

    # ---------------------------------------------------------------- state

    def check_state(self, where: str, state: State) -> None:
        """Check that use_muon agrees group by group: a state of the other kind would be lost or misread."""
        for g, (saved, group) in enumerate(zip(state["param_groups"], self.buckets.groups, strict=True)):
            there, here = saved.get("use_muon"), group["use_muon"]
            if there is not here:
                has = "has no use_muon" if there is None else f"has use_muon={there}"
                raise ValueError(
                    f"{where}its group {g} {has}, here it is {here}; load the state of an OnebitMuon with these "
                    "groups, or none"
                )
        if "onebit" not in state:
            raise ValueError(f"{where}it is no state of OnebitMuon; load a state of OnebitMuon, or none")

    def allocate(self, bucket: Bucket, phase: str) -> None:
        if not self._is_muon(bucket):
            super().allocate(bucket, phase)
            return
        bucket.phase, bucket.ef = phase, None if phase == "warmup" else self.placement.new_errors(bucket)
        bucket.flat = {"momentum_buffer": torch.zeros(bucket.layout.numel, device=bucket.device, dtype=torch.float32)}
        bucket.wires.clear()
        bucket.release_buffer()

    def momentum(self, bucket: Bucket) -> Tensor:
        if not self._is_muon(bucket):
            return super().momentum(bucket)
        return bucket.flat["momentum_buffer"] * (1.0 / (1.0 - self.beta**bucket.step) if bucket.step else 1.0)

    def factored_momentum(self, bucket: Bucket) -> Factored | None:
        return None if self._is_muon(bucket) else super().factored_momentum(bucket)

    def last_average(self, bucket: Bucket) -> Tensor:
        if not self._is_muon(bucket):
            return super().last_average(bucket)
        return bucket.flat["momentum_buffer"] * (1.0 - self.beta)


@shows_all_options(CommonOptions)
class OnebitMuon(CompressedOptimizer):
    """Muon whose data-parallel traffic is about two bits per parameter and step, after a short warm-up.

        optimizer = onebit.OnebitMuon(onebit.muon_groups(model, head=model.head), lr=1e-3)

    Groups with use_muon hold matrices. Between warm-up and the end of the run, per step and bucket of theirs:

    1. c_i = (1-β)·g_i + e_i on each rank; its signs and scales go to the chunks' owners; e_i keeps the rest.
    2. The owner averages, adds its own error, compresses again and sends the result, d, to all.
    3. m ← β·m + d;  u = β·m + d (nesterov) or m;  O = `newton_schulz`(u), on each matrix;
       p ← p - lr·(a·O + wd·p), a = `adjustment`.

    The momentum's increment travels, not the momentum. Both take one bit. But orthogonalisation gives every direction
    of its input the same weight. Signs of a momentum bring fresh noise of compression into all directions in every
    step; an error in an increment is corrected in the next step, and averages out over 1/(1-β) steps
    (`docs/differences.md` has both). In the warm-up, and with "auto" in occasional refreshes, d is (1-β)·ḡ, the mean
    gradient in `warmup_codec`: with one bit from the first step on, the loss never makes up for the start.

    Groups without use_muon (embeddings, head, vectors) take 1-bit Adam's step.

    Every replica orthogonalises for itself. On different processors matrices may get different bits, which
    `check_replicas_every` finds and ends with ReplicaError.

    State on each rank, bytes per parameter of a matrix: m 4, worker error 4 (bf16: 2), server error 4/W (2/W). Sends
    per rank 2·(W-1)/W·(1 + 16/block) bits per parameter.

    Args:
        params: Groups with `use_muon`, e.g. from `onebit.muon_groups`; the same on all ranks.
        lr: Learning rate of all groups. Default 1e-3.
        betas: Decay of momentum and variance in groups without use_muon. Default (.9, .999).
        eps: Added to D in groups without use_muon. Default 1e-8.
        weight_decay: Decoupled weight decay. Default 1e-2.
        momentum: Decay β of the momentum of matrices. Default .95.
        nesterov: Whether u looks ahead by one step, as in torch.optim.Muon. Default True.
        ns_steps: Iterations of `newton_schulz`. Default 5.
        adjust_lr: Factor a of the learning rate: "match_rms_adamw", with which one rate suits matrices and the rest, or
            "original". See `adjustment`. Default "match_rms_adamw".
        freeze_step: Warm-up steps. "auto" (default): 100, and then refreshes as in `long_warmup`.
        warmup_codec: Format of gradients, as in `OnebitAdam`. Default None: `Int8Codec`.
        bias_correction: Whether moments are corrected for their start from zero. Default True.
        variance_floor: Least variance in groups without use_muon, as in `OnebitAdam`. Default .01.
        **common: See `CommonOptions`.

    Raises:
        ValueError: As `OnebitAdam`; a group has no use_muon, or a group with use_muon contains a vector.
        TypeError: As `OnebitAdam`.
    """

    rule_type: ClassVar[type[MuonRule]] = MuonRule

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        freeze_step: int | str = "auto",
        warmup_codec: Codec | None = None,
        bias_correction: bool = True,
        variance_floor: float = 0.01,
        **common: Unpack[CommonOptions],
    ):
        rule = self.rule_type(
            long_warmup(freeze_step),
            codec_of_gradients(warmup_codec, common.get("codec")),
            bias_correction=bias_correction,
            variance_floor=variance_floor,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr=adjust_lr,
        )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, rule, **common)

    def _check_group(self, where: str, group: Group) -> None:
        """As every optimizer of the family; and check that the group has use_muon, and fits its parameters."""
        super()._check_group(where, group)
        check_use_muon(where, group)
