"""1-bit Muon: Muon (Jordan et al., 2024) whose orthogonal moves travel in one bit per parameter and step.

There is no paper about it. `MuonRule` is the step of one bucket from top to bottom; parameters that are not hidden
matrices take 1-bit Adam's step (`onebit_adam.py`). The arithmetic is in `arithmetic/muon.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .arithmetic.muon import adjustment, check_rule, check_use_muon, orthogonalise_
from .arithmetic.schedule import DenseSteps
from .comm import Codec, Log4Codec
from .layout.bucket import Bucket
from .onebit_adam import AdamRule, as_float32
from .optimizer import CommonOptions, CompressedOptimizer
from .rule import Factored, codec_of_gradients
from .step.bucket_step import Answer, BucketStep, Decision, Meeting
from .usage.contract import Group, State
from .usage.signature import shows_all_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


class Matrices(Meeting):
    """The buffer holds matrices to be orthogonalised. The answer: None, when they are moves."""


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
        self._gathers = False

    def options(self) -> dict[str, object]:
        own = {"momentum": self.beta, "nesterov": self.nesterov, "ns_steps": self.ns_steps, "adjust_lr": self.adjust_lr}
        return super().options() | own

    # ---------------------------------------------------------------- a step of one bucket

    def step(self, bucket: Bucket, scale: float) -> BucketStep:
        if not self._is_muon(bucket):
            return super().step(bucket, scale)
        return self.averaged_step(bucket, scale) if self.averages_gradients(bucket) else self.muon_step(bucket, scale)

    def averaged_step(self, bucket: Bucket, scale: float) -> BucketStep:
        """A warm-up step of matrices: the mean gradient enters the momentum, which is the same on all ranks."""
        m, beta = bucket.flat["momentum_buffer"], self.beta
        g, decision = yield from self.placement.mean_gradient(bucket, self._codec_of_gradients(), scale)
        m.mul_(beta).add_(g.mul_(1.0 - beta))
        self.mask_state(bucket)
        if self.nesterov:
            g.add_(m, alpha=beta)  # (1-β)·ḡ + β·m
        else:
            g.copy_(m)
        yield Matrices()
        self._descend(bucket, decision)

    def muon_step(self, bucket: Bucket, scale: float) -> BucketStep:
        """A step of matrices after it: each node's own momentum makes its moves, and their mean travels in one bit."""
        m, beta = bucket.flat["momentum_buffer"], self.beta
        grads, scale = yield from self.placement.node_gradients(bucket, scale)
        u = bucket.gather(grads, scale * (1.0 - beta))
        if self.nesterov:
            u.mul_(1.0 + beta).add_(m, alpha=beta * beta)  # (1-β)·g + β·(β·m + (1-β)·g)
        else:
            u.add_(m, alpha=beta)
        self._make_moves(bucket)
        for move, g in zip(bucket.views, grads, strict=True):
            # Without a gradient there is no move: a momentum that fades would move as far as any other.
            if g is None:
                move.zero_()
            elif self.placement.hierarchy.local_size > 1:
                move.mul_(g.any())
        if (may_move := bucket.may_move()) is not None:
            u.mul_(may_move)
        decision = yield from self.placement.average(bucket, is_of_node=True)

        m.mul_(beta)
        added = [(view, g) for view, g in zip(bucket.layout.views(m), grads, strict=True) if g is not None]
        if added:
            views, gs = zip(*added, strict=True)
            torch._foreach_add_(views, gs, alpha=scale * float(decision.clip_factor) * (1.0 - beta))
        assert bucket.ef is not None
        bucket.ef.commit()
        self.mask_state(bucket)
        frames = self.placement.frames(bucket)
        if bucket.masks is None:
            weight, keep = -as_float32(float(bucket.group["lr"])), as_float32(1.0 - self._decay(bucket))
            numbers = (self.placement.constant(bucket, number) for number in (weight, keep))
            self.placement.apply(bucket, decision, frames, *numbers)
        else:
            self.codec.decode(frames, bucket.rows(bucket.buffer))
            self._descend(bucket, decision)

    def _make_moves(self, bucket: Bucket) -> None:
        """The buffer's matrices ← a·O. All ranks that hold their shards."""
        orthogonalise_(bucket.views, bucket.params, self.ns_steps, first=bucket.first)
        torch._foreach_mul_(bucket.views, [adjustment(p.shape, self.adjust_lr) for p in bucket.params])

    def _descend(self, bucket: Bucket, decision: Decision) -> None:
        """p ← p - lr·(a·O + wd·p), with a·O in the buffer."""
        bucket.buffer.mul_(float(bucket.group["lr"]))
        torch._foreach_add_(bucket.views, [p.float() for p in bucket.local_values], alpha=self._decay(bucket))
        self.placement.move(bucket, decision)

    @staticmethod
    def _decay(bucket: Bucket) -> float:
        return float(bucket.group["lr"]) * float(bucket.group["weight_decay"])

    def meet(self, buckets: Sequence[Bucket], meetings: Sequence[Meeting]) -> Sequence[Answer]:
        """Make the moves of all buckets in a warm-up step. Every replica does so itself."""
        for bucket in buckets:
            self._make_moves(bucket)
        return [None] * len(buckets)

    # ---------------------------------------------------------------- which kind of step

    def begin_step(self) -> None:
        super().begin_step()
        compressed = (bucket for bucket in self.buckets if self._is_muon(bucket) and bucket.phase == "compressed")
        self._gathers = any(hasattr(p, "to_local") for bucket in compressed for p in bucket.params)

    @property
    def waits_for_backward(self) -> bool:
        return self._gathers  # the model's own collectives run there, in an order that no hook knows

    def averages_gradients(self, bucket: Bucket) -> bool:
        if self._is_muon(bucket):
            return bucket.phase == "warmup"  # refreshes would measure a variance, and a matrix has none
        return super().averages_gradients(bucket)

    def _is_muon(self, bucket: Bucket) -> bool:
        return bool(bucket.group["use_muon"])

    def keeps_variance(self, bucket: Bucket) -> bool:
        return not self._is_muon(bucket)

    def freeze(self, bucket: Bucket) -> None:
        if not self._is_muon(bucket):
            super().freeze(bucket)
            return
        self._enter_phase(bucket, "compressed")
        self.buckets.publish(bucket)

    def _enter_phase(self, bucket: Bucket, phase: str) -> None:
        """Begin a phase of matrices; their momentum stays."""
        is_compressed = phase == "compressed"
        bucket.phase, bucket.ef = phase, self.placement.new_errors(bucket) if is_compressed else None
        bucket.of_this_rank = ("momentum_buffer",) if is_compressed else ()
        bucket.wires.clear()
        bucket.release_buffer()

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
        bucket.flat = {"momentum_buffer": torch.zeros(bucket.layout.numel, device=bucket.device, dtype=torch.float32)}
        self._enter_phase(bucket, phase)

    def momentum(self, bucket: Bucket) -> Tensor:
        if not self._is_muon(bucket):
            return super().momentum(bucket)
        return bucket.flat["momentum_buffer"] * (1.0 / (1.0 - self.beta**bucket.step) if bucket.step else 1.0)

    def factored_momentum(self, bucket: Bucket) -> Factored | None:
        return None if self._is_muon(bucket) else super().factored_momentum(bucket)

    def last_average(self, bucket: Bucket) -> Tensor:
        if not self._is_muon(bucket):
            return super().last_average(bucket)
        if self.codec not in bucket.wires:
            return torch.zeros(bucket.layout.numel, device=bucket.device, dtype=torch.float32)
        return self.placement.unpacked(bucket, self.placement.frames(bucket))

    def record(self) -> State:
        return {**super().record(), "residuals": "moves"}

    def load_record(self, record: State) -> None:
        super().load_record(record)
        if record.get("residuals") == "moves":
            return
        compressed = [bucket for bucket in self.buckets if self._is_muon(bucket) and bucket.ef is not None]
        for bucket in compressed:
            bucket.ef = self.placement.new_errors(bucket)
        if compressed and self.placement.transport.rank == 0:
            log.warning(
                "this state of OnebitMuon is of version 0.2 or older, which compressed gradients: residuals of these "
                "cannot be added to moves, and begin at zero"
            )


@shows_all_options(CommonOptions)
class OnebitMuon(CompressedOptimizer):
    """Muon whose data-parallel traffic is about two bits per parameter and step, after a short warm-up.

        optimizer = onebit.OnebitMuon(onebit.muon_groups(model, head=model.head), lr=1e-3)

    Groups with use_muon hold matrices. After the warm-up, per step and bucket of theirs:

    1. m_i ← β·m_i + (1-β)·g_i on each node i (rank, if nodes have one), with its mean gradient;
       u_i = β·m_i + (1-β)·g_i (nesterov) or m_i;  O_i = a·`newton_schulz`(u_i), on each matrix, a = `adjustment`.
    2. c_i = O_i + e_i; its signs and scales go to the chunks' owners; e_i keeps the rest.
    3. The owner averages, adds its own error, compresses again and sends the result, d, to all.
       p ← p - lr·(d + wd·p).

    So what is compressed is added to parameters, where the errors of two steps cancel each other. If a momentum built
    from compressed gradients is orthogonalised, as in version 0.2, their errors get the same weight as all directions
    of the momentum, and a byte LM ends 7 instead of 1 % above Muon (`docs/differences.md`). The mean of orthogonal
    matrices takes the place of the orthogonalised mean. It is shorter: try up to twice Muon's learning rate. The larger
    the batch of one node, the smaller the difference.

    A matrix without a gradient on a node counts as a move of zero there. In the warm-up the mean gradient is exchanged
    in `warmup_codec`, and every replica orthogonalises the same momentum for itself; on different processors that may
    give different bits, which `check_replicas_every` finds and ends with ReplicaError. Later steps apply the same
    frames everywhere.

    Groups without use_muon (embeddings, head, vectors) take 1-bit Adam's step.

    State on each rank, bytes per parameter of a matrix: m 4, worker error 4 (bf16: 2), server error 4/W (2/W). Sends
    per rank 2·(W-1)/W·(1 + 16/block) bits per parameter. Ranks of a node also exchange their gradients in float32, and
    keep the node's mean until the step ends, 4 bytes per parameter. If a model is sharded inside a node, its ranks
    gather each matrix in every step, and buckets are sent in step().

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
        freeze_step: Warm-up steps, as in `OnebitAdam`. "auto" (default): 5, until the first step that is not dense in
            the other groups; only these have refreshes.
        warmup_codec: Format of gradients, as in `OnebitAdam`. Default None: `Log4Codec`.
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
            DenseSteps(freeze_step),
            codec_of_gradients(warmup_codec, common.get("codec"), Log4Codec),
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
