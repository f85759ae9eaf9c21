"""Remedies for ranks with different data, as prototypes: those that the package has not. results.md says why.

Around `LocalSteps`: SCAFFOLD's correction on the gradients. Around `ShardedOnebitAdam`: EF21's
recursion for the momentum, a momentum at the owner, other estimates of the variance, and a variance from all ranks'
gradients every so many steps. For both: frames clipped to the median norm at the owner.

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk, n elements of a block, B bytes of a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import onebit
from onebit.comm import Codec, Int8Codec, Log4Codec, SignCodec, Work
from onebit.comm.kernels import reference
from onebit.comm.kernels.operands import EncodeOutput, OwnerStep
from onebit.layout.buckets import Buckets
from onebit.local.fragment import Fragment, LocalBucket
from onebit.zero.sharded import arithmetic
from onebit.zero.sharded.adam import ShardedAdamRule
from onebit.zero.sharded.bucket import ShardedBucket
from onebit.zero.sharded.exchange import Heard, OwnBlocks, Received, Sharded, StepNumbers
from onebit.zero.sharded.optimizer import ShardedOnebitOptimizer

# ---------------------------------------------------------------- local steps


class CorrectedLocalSteps(onebit.LocalSteps):
    """Local steps with SCAFFOLD's control variate (arXiv 1910.06378, option II) in gradients, which AdamW averages too.

        at a round    c ← c + share·(θ_new - w)/Σlr     θ_new - w: own less mean difference; Σlr: since the last round
        every step    g ← g - c·(√v̂ + eps)

    The product's `correction` is in moves. of_messages: the own difference is taken as the own frame says it. Nothing
    more travels. One fragment, no delay; AdamW inside, whose groups have one learning rate.
    """

    def __init__(
        self,
        inner: torch.optim.AdamW,
        every: int,
        *,
        share: float,
        of_messages: bool = False,
        **options: object,
    ):
        self._share, self._sum_of_rates = share, 0.0
        self._of_messages = of_messages
        super().__init__(inner, every, **options)  # type: ignore[arg-type]
        self._corrections = [torch.zeros_like(bucket.anchor) for bucket in self.buckets]

    def _take_inner_step(self) -> None:
        lr = float(self.param_groups[0]["lr"])
        self._sum_of_rates += lr
        for p, c in self._pairs(self._corrections):
            if p.grad is not None and p in self.state:
                p.grad.sub_(c * self._divisor(p))
        super()._take_inner_step()

    def _take_round(self, fragment: Fragment, *, is_delayed: bool) -> bool:
        before = [bucket.flatten() for bucket in fragment.buckets]
        if self._of_messages:
            before = [w - bucket.ef.worker for bucket, w in zip(fragment.buckets, before, strict=True)]
        goes_on = super()._take_round(fragment, is_delayed=is_delayed)
        gained = [bucket.anchor - w for bucket, w in zip(fragment.buckets, before, strict=True)]
        if self._of_messages:
            gained = [c - bucket.ef.worker for bucket, c in zip(fragment.buckets, gained, strict=True)]
        for c, more in zip(self._corrections, gained, strict=True):
            more.mul_(self._share / max(self._sum_of_rates, 1e-12))
            c.add_(more)
        self._sum_of_rates = 0.0
        return goes_on

    def _pairs(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its view of these flat tensors, one for each bucket."""
        buckets: Sequence[LocalBucket] = self.buckets
        return [
            pair
            for bucket, flat in zip(buckets, flats, strict=True)
            for pair in zip(bucket.params, bucket.layout.views(flat), strict=True)
        ]

    def _divisor(self, p: Tensor) -> Tensor:
        """√v̂ + eps of a parameter that has taken a step."""
        group = self.param_groups[0]
        state = self.state[p]
        correction = 1.0 - group["betas"][1] ** float(state["step"])
        return (state["exp_avg_sq"] / correction).sqrt_().add_(group["eps"])


# ---------------------------------------------------------------- frames of the median norm


@dataclass(frozen=True)
class MedianSigns(SignCodec):
    """Signs. An owner takes each frame at the median of the ranks' norms, where its own is above it.

    What is cut off is not returned: workers do not know of it. In blocks of the padding scales are 0.
    """

    def encode_mean(self, received_WB: Tensor, out: EncodeOutput) -> None:
        super().encode_mean(self.clipped(received_WB, out.residual_KN.shape[1]), out)

    def owner_step(self, step: OwnerStep) -> None:
        super().owner_step(replace(step, received_WB=self.clipped(step.received_WB, len(step.grad_N))))

    def clipped(self, received_WB: Tensor, n: int) -> Tensor:
        frames_WB = received_WB.clone()
        scales_WJ = reference.scales_in_place(frames_WB, n // 8, n // self.block)
        norms_W1 = scales_WJ.float().square().sum(1, keepdim=True).sqrt()
        median = norms_W1.quantile(0.5, dim=0, keepdim=True)
        scales_WJ.mul_(torch.where(norms_W1 > median, median / norms_W1.clamp_min(1e-30), 1.0))
        return frames_WB


# ---------------------------------------------------------------- sharded

# What v takes in, of (g, q̂, m̂, W): the own gradient, what the own frame says, the mean of all frames.
Target = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def own_gradient(g: Tensor, q_hat: Tensor, m_hat: Tensor, W: int) -> Tensor:
    """The product's. Its mean is E[ḡ²] where the ranks' gradients are samples of one thing."""
    return g * (g / W + (1.0 - 1.0 / W) * m_hat)


def own_noise(g: Tensor, q_hat: Tensor, m_hat: Tensor, W: int) -> Tensor:
    """The own noise, and the square of the mean momentum. Never below 0."""
    return (g - q_hat).square() / W + m_hat.square()


def mean_momentum(g: Tensor, q_hat: Tensor, m_hat: Tensor, W: int) -> Tensor:
    """Frames alone."""
    return m_hat.square()


class RemedyRule(ShardedAdamRule):
    """Sharded one-bit Adam over a placement of its own, with another variance behind the warm-up."""

    placement: RemedyPlacement

    def __init__(self, place: Callable[[Sharded], RemedyPlacement], target: Target = own_gradient):
        self._place, self._target = place, target

    def bind(self, placement: Sharded, buckets: Buckets[ShardedBucket]) -> None:
        super().bind(self._place(placement), buckets)

    def direction(
        self, bucket: ShardedBucket, numbers: StepNumbers, arrived: Received, D: Tensor | None = None
    ) -> Tensor:
        if bucket.is_warm:
            return super().direction(bucket, numbers, arrived, D)
        placement, (beta1, beta2) = self.placement, numbers.betas
        config, block = placement.config, placement.config.codec.block
        q, mean, scales_J = placement.read(bucket, arrived)
        correction = float(bucket.correction(beta1))
        q_hat, m_hat = q * correction, mean * correction
        bucket.grad_stats = arithmetic.grad_stats(arrived.g, q, q_hat, m_hat)
        if (every := placement.refresh_every) == 0:
            target = self._target(arrived.g, q_hat, m_hat, placement.transport.world_size)
            arithmetic.advance_variance_(bucket.variance, target, beta2=beta2, block=block, seen_J=None)
        elif (gradient := placement.refreshed.pop(bucket.index, None)) is not None:
            square = gradient.square()
            arithmetic.advance_variance_(bucket.variance, square, beta2=beta2**every, block=block, seen_J=None)
        arithmetic.direction_(
            m_hat,
            scales_J * correction,
            bucket.variance,
            bucket.correction(beta2),
            bucket.own_divisors,
            eps=numbers.eps,
            floor=config.variance_floor,
            limit=config.update_limit,
            block=block,
        )
        placement.keep_mean(bucket, arrived)
        return m_hat


@dataclass(frozen=True)
class RemedyPlacement(Sharded):
    """The product's way up, and behind the warm-up gradients, every so many steps, in refresh_codec; 0: never.

    refreshed: the mean of those, of the step under way, by bucket.
    """

    refresh_every: int = 0
    refresh_codec: Codec = field(default_factory=Log4Codec)
    refreshed: dict[int, Tensor] = field(default_factory=dict)

    def read(self, bucket: ShardedBucket, arrived: Received) -> tuple[Tensor, Tensor, Tensor]:
        """The own momentum and the mean of all, as frames say them, [N]; the mean magnitude of each block, [J]."""
        codec = self.config.codec
        q, mean = self._means(bucket, codec, arrived.frames_WB)
        return q, mean, reference.scales(arrived.frames_WB, len(mean), block=codec.block).float().mean(0)

    def send_up(
        self,
        bucket: ShardedBucket,
        numbers: StepNumbers,
        seen: Sequence[bool],
        scale: float | Tensor,
        early_WB: Tensor | None,
    ) -> Generator[Work, None, Received]:
        x_WN = bucket.gather_gradients(scale).view(self.transport.world_size, -1)
        arrived = yield from super().send_up(bucket, numbers, seen, scale, early_WB)
        if not bucket.is_warm and self.refresh_every and int(bucket.steps[0]) % self.refresh_every == 0:
            self.refreshed[bucket.index] = yield from self.exchange_up(bucket, self.refresh_codec, x_WN)
        return arrived

    def exchange_up(self, bucket: ShardedBucket, codec: Codec, x_WN: Tensor) -> Generator[Work, None, Tensor]:
        """The mean over ranks of C(x) of the own chunk, [N]; x becomes what its own frames leave out."""
        W, N = x_WN.shape
        sent_WB = torch.empty(W, codec.frame_bytes(N), dtype=torch.uint8)
        codec.encode(x_WN, None, sent_WB, bucket.counts)
        received_WB = torch.empty_like(sent_WB)
        yield self.transport.all_to_all(received_WB, sent_WB)
        return self._means(bucket, codec, received_WB)[1]


@dataclass(frozen=True)
class OwnRecursion(RemedyPlacement):
    """A way up by `owed`, `take` and `read` of a subclass; C is eight bits in the warm-up.

    debts: what is to be said and was not, [W, N], and H: what the owner has heard, [N]; by bucket.
    """

    debts: dict[int, Tensor] = field(default_factory=dict)
    H: dict[int, Tensor] = field(default_factory=dict)

    def owed(self, k: int, x_WN: Tensor, beta1: float) -> Tensor:
        """What bucket k has to say with this gradient, of which C(it) is sent and taken off, [W, N]."""
        raise NotImplementedError

    def take(self, H: Tensor, message: Tensor, beta1: float) -> Tensor:
        """H with the mean of all messages, in place."""
        raise NotImplementedError

    def own(self, bucket: ShardedBucket) -> Tensor:
        """The own momentum, [N]."""
        return self.H[bucket.index]

    def read(self, bucket: ShardedBucket, arrived: Received) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.H[bucket.index]
        magnitudes = arithmetic.mean_magnitudes(mean, bucket.own_divisors, self.config.codec.block)
        return self.own(bucket), mean, magnitudes

    def send_up(
        self,
        bucket: ShardedBucket,
        numbers: StepNumbers,
        seen: Sequence[bool],
        scale: float | Tensor,
        early_WB: Tensor | None,
    ) -> Generator[Work, None, Received]:
        k, beta1 = bucket.index, numbers.betas[0]
        for count, is_seen in zip(bucket.steps, seen, strict=True):
            count += is_seen
        bucket.is_warm = self.config.warms_up(bucket)
        codec = Int8Codec(self.config.codec.block) if bucket.is_warm else self.config.codec
        x_WN = bucket.gather_gradients(scale).view(self.transport.world_size, -1)
        g = x_WN[self.transport.rank].clone()
        message = yield from self.exchange_up(bucket, codec, self.owed(k, x_WN, beta1))
        H = self.take(self.H.setdefault(k, torch.zeros_like(g)), message, beta1)
        heard = Heard(self.own(bucket), H.clone(), None)
        return Received(g, torch.empty(0, 0), OwnBlocks(None, bucket.counts[self.transport.rank]), heard)


@dataclass(frozen=True)
class EF21(OwnRecursion):
    """EF21 with momentum (Fatkhullin et al., NeurIPS 2023) on the way up.

        rank i     v ← β1·v + (1-β1)·g;  message = C(v - h);  h ← h + message
        owner      H ← H + mean of messages

    debts: v - h. v: [W, N], by bucket.
    """

    v: dict[int, Tensor] = field(default_factory=dict)

    def owed(self, k: int, x_WN: Tensor, beta1: float) -> Tensor:
        v_WN, unsaid_WN = (kept.setdefault(k, torch.zeros_like(x_WN)) for kept in (self.v, self.debts))
        step_WN = (x_WN - v_WN) * (1.0 - beta1)
        v_WN.add_(step_WN)
        return unsaid_WN.add_(step_WN)

    def take(self, H: Tensor, message: Tensor, beta1: float) -> Tensor:
        return H.add_(message)

    def own(self, bucket: ShardedBucket) -> Tensor:
        return self.v[bucket.index][bucket.rank]


@dataclass(frozen=True)
class OwnerMomentum(OwnRecursion):
    """Gradients travel in signs with error feedback, and the owner keeps the mean momentum.

        rank i     c = e + (1-β1)·g;  message = C(c);  e ← c - message
        owner      H ← β1·H + mean of messages

    debts: e.
    """

    def owed(self, k: int, x_WN: Tensor, beta1: float) -> Tensor:
        return self.debts.setdefault(k, torch.zeros_like(x_WN)).add_(x_WN, alpha=1.0 - beta1)

    def take(self, H: Tensor, message: Tensor, beta1: float) -> Tensor:
        return H.mul_(beta1).add_(message)


class RemediedSharded(ShardedOnebitOptimizer):
    """ShardedOnebitAdam with such a rule. For parameters that have a gradient in every step; it saves no state."""

    def __init__(self, groups: list[dict], rule: ShardedAdamRule, **options: object):
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
        super().__init__(groups, defaults, rule, overlap=False, **options)  # type: ignore[arg-type]


def remedied(
    target: Target = own_gradient, kind: type[RemedyPlacement] = RemedyPlacement, **ways: object
) -> ShardedAdamRule:
    """The rule with this variance over such a placement; ways: its fields."""
    return RemedyRule(lambda plain: kind(plain.transport, plain.config, **ways), target)  # type: ignore[arg-type]


class MedianRule(ShardedAdamRule):
    """The product's rule, with frames clipped at the owner."""

    def bind(self, placement: Sharded, buckets: Buckets[ShardedBucket]) -> None:
        codec = placement.config.codec
        config = replace(placement.config, codec=MedianSigns(codec.block, codec.scale))
        super().bind(Sharded(placement.transport, config), buckets)
