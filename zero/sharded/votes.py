"""Votes on the gradients of buckets: cast, and read at once, or by the host at the end of the step.

Votes are read late on GPUs that the transport reaches. If any rank has a gradient that is not finite, all ranks skip
the buckets of the vote: all buckets, or one at stage 2. So that the host need not wait for the result, a flag on the
device, the gate, stands for it. Under a closed gate blocks count as blocks without a gradient, so that no tensor of the
bucket changes; the host's counts are taken back when it reads the vote.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...agreement.skips import TOO_LARGE, SkipLimit
from ...agreement.step_vote import Ballot, Header, StepVote, are_finite, present_anywhere
from ...agreement.wrappers import WrapperWatch
from ...arithmetic.squares import bad_gradients, read_numbers, sums_in_turn
from ...comm import Work
from ...step.bucket_step import Decision
from ...step.clip import Clipper
from ...step.stats import Stats
from ...step.verdict import reads_late
from .bounds import Bounds
from .bucket import ShardedBucket
from .exchange import Sharded
from .health import GradStats, Health
from .rule import ShardedRule


@dataclass(frozen=True)
class OwnGradients:
    """Norms of this rank's gradients in some buckets.

    Attributes:
        names: Their parameters.
        norms: Norm of each, 0-dimensional float32.
        sums: ‖g‖² of all, finite if all gradients are; with clipping also <g, m̂>. float64 [1 or 2].
    """

    names: Sequence[str]
    norms: Sequence[Tensor]
    sums: Tensor

    @classmethod
    def of(
        cls, placement: Sharded, buckets: Sequence[ShardedBucket], scale: float, beta1s: Sequence[float] | None
    ) -> OwnGradients:
        """Launch the norms; does not synchronise with the device.

        Args:
            placement: The exchange.
            buckets: The buckets of the vote.
            scale: Factor of the gradients.
            beta1s: β1 of each bucket; None: gradients are not clipped.
        """
        device, products = buckets[0].device, []
        there: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        for k, bucket in enumerate(buckets):
            names, parts = there.setdefault(bucket.device, ([], []))
            grads = bucket.gradients()
            names += [name for name, g in zip(bucket.names, grads, strict=True) if g is not None]
            parts += [g for g in grads if g is not None]
            if beta1s is not None:
                products += bucket.products(grads, placement.config.codec, beta1s[k])
        by_device = [torch._foreach_norm(parts, dtype=torch.float32) for _, parts in there.values() if parts]
        squares = [torch.stack(norms).square().sum(dtype=torch.float64) for norms in by_device]
        sums = sums_in_turn(squares, [scale * scale] * len(squares), device)
        if beta1s is not None:
            # The estimate takes the mean over ranks of products; here each rank has its chunks' part of one product.
            product = sums_in_turn(products, [scale] * len(products), device) * placement.transport.world_size
            sums = torch.cat([sums, product])
        return cls(
            [name for names, _ in there.values() for name in names], [n for each in by_device for n in each], sums
        )

    def bad(self, buckets: Sequence[ShardedBucket]) -> list[str]:
        """Return the parameters with gradients that are not finite, or with squares beyond float32.

        Waits for the device.

        Args:
            buckets: Buckets that may still hold the gradients; if they do, the names tell the two cases apart.
        """
        norms = zip(self.names, read_numbers(self.norms), strict=True)
        bad = [name for name, norm in norms if not math.isfinite(norm)]
        pairs = [pair for b in buckets for pair in zip(b.names, b.gradients(), strict=True)]
        found = {name: grad for name, grad in pairs if grad is not None}
        named = {name: bad_gradients([(name, found[name])]) or [name + TOO_LARGE] for name in bad if name in found}
        return [named[name][0] if name in named else name for name in bad]


@dataclass
class LateVote:
    """A vote under way, its gate, and the host's counts of its buckets from before the step.

    Attributes:
        buckets: The buckets of the vote.
        ballot: The messages of the vote.
        gradients: This rank's gradients.
        stand_out: If frames were sent before the vote: whether any rank's gradients are to be scaled down, a flag on
            the device. Else None.
        gate: Whether the step counts, a flag on the device.
    """

    buckets: Sequence[ShardedBucket]
    ballot: Ballot
    gradients: OwnGradients
    stand_out: Tensor | None
    gate: Tensor = field(init=False)
    _counted: Sequence[tuple[list[float], bool, bool, Tensor | None, Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._counted = [
            ([float(step) for step in bucket.steps], bucket.is_warm, bucket.is_idle, bucket.received, bucket.mean)
            for bucket in self.buckets
        ]
        self.gate = self.ballot.gate() if self.stand_out is None else self.ballot.gate() & ~self.stand_out
        for bucket in self.buckets:
            bucket.gate = self.gate.to(bucket.device)

    def undo(self) -> None:
        """Restore the counts of buckets that take no step. Their tensors did not change, because of the gates."""
        for bucket, (steps, is_warm, is_idle, received, mean) in zip(self.buckets, self._counted, strict=True):
            for step, before in zip(bucket.steps, steps, strict=True):
                step.fill_(before)
            bucket.is_warm, bucket.is_idle = is_warm, is_idle
            bucket.received, bucket.mean = received, mean

    def take(self, messages: Sequence[bytes]) -> None:
        """Take the messages of the vote, unchecked, and remove the buckets' gates."""
        self.ballot.take(messages)
        for bucket in self.buckets:
            bucket.gate = None


@dataclass
class LeftOut:
    """Gradients of the step under way that were left out because they are not finite.

    Attributes:
        names: This rank's parameters among them. Default: none.
        is_any: Whether any rank's gradients were left out, as far as this rank knows. Default False.
        by_all: Whether all ranks left them out, not only this one. Default False.
    """

    names: list[str] = field(default_factory=list)
    is_any: bool = False
    by_all: bool = False


class Votes:
    """Casts the votes of each step, reads them at once or late, and decides what all ranks do.

    Args:
        rule: The optimizer's rule, bound to its placement and buckets.
        clipper: Clips by the estimated global norm, if max_grad_norm is set.
        stats: The optimizer's; receives clip_factor.
        health: Receives the ranks' sums of their last step.
        watch: Receives the ranks' gradient summaries, to notice wrappers that average gradients.
        skips: Logs skipped steps.

    Attributes:
        late: Votes of the step under way that were cast and not yet read.
        left_out: Gradients that this step leaves out.
        resending: Ranks with gradients that changed after they were sent, according to the last vote read.
        standing_out: Ranks with gradients that are scaled down in this step (`bounds.py`).
        bounds: The usual norms, against which the next votes are compared.
    """

    def __init__(
        self,
        rule: ShardedRule,
        clipper: Clipper,
        stats: Stats,
        health: Health,
        watch: WrapperWatch,
        skips: SkipLimit,
    ):
        self._rule, self._buckets, self._placement = rule, rule.buckets, rule.placement
        self._transport, self._clipper = rule.placement.transport, clipper
        self._stats, self._health, self._watch, self._skips = stats, health, watch, skips
        self.late: list[LateVote] = []
        self.left_out = LeftOut()
        self.resending: Sequence[int] = ()
        self.standing_out: set[int] = set()
        self.bounds = Bounds()

    def decide(
        self,
        buckets: Sequence[ShardedBucket],
        scale: float,
        header: Header,
        mine: StepVote,
        *,
        at_once: bool,
        have_sent: bool,
    ) -> Generator[Work, None, Decision | None]:
        """Vote on the gradients of these buckets. Returns None, on all ranks, if any is not finite.

        In a step that sends nothing, only this rank's gradients count. If the vote is read late, the buckets' gates
        hold the result; only a rank that lacks a gradient waits for the vote, to know whether another rank has it.

        Args:
            buckets: The buckets.
            scale: Factor of the gradients.
            header: The step that this rank takes; it is compared with the other ranks'.
            mine: This rank's vote, without the sums of its gradients. If it reports gradients that changed after they
                were sent, no rank counts the step, as if gradients were not finite.
            at_once: Whether the vote must not be read late.
            have_sent: Whether frames have gone up before the vote. If any rank's gradients are then to be scaled down,
                no rank counts the step, and it must be taken once more.
        """
        is_silent, gradients = self._rule.is_silent(), self._own(buckets, scale)
        rank = self._transport.rank
        if mine.summary.resends:  # a NaN closes the gates on all ranks
            gradients.sums.fill_(math.nan)
        if is_silent:
            votes: Sequence[StepVote] = [mine.with_sums(gradients.sums)]
            factors = self._bound(votes, buckets, [rank])
        else:
            ballot = Ballot.cast(self._transport, header, mine, buckets[0].device, gradients.sums)
            yield ballot.messages.work
            if not at_once and reads_late(self._transport, buckets[0].device):
                sums_W2 = ballot.sums()
                factors_W = self.bounds.factors(buckets[0].index, sums_W2[:, 0])
                stand_out = (factors_W < 1.0).any() if have_sent else None
                self.late.append(LateVote(buckets, ballot, gradients, stand_out))
                factor = 1.0 if have_sent else factors_W[rank]
                if self._clipper.max_norm > 0:
                    bounded_W2 = sums_W2 * torch.stack([factors_W.square(), factors_W], dim=1)
                    factor = factor * self._clipper.late_factor(bounded_W2, self._transport.world_size)
                return Decision(self._seen(ballot, buckets), factor, first=buckets[0].first)
            ballot.read()
            votes = ballot.votes
            factors = self._take_in(votes, buckets, have_sent=have_sent)
        if self.resending or (have_sent and self.standing_out):
            return None
        if not are_finite(votes):
            self._leave_out(gradients.bad(buckets), by_all=not is_silent)
            return None
        self._clip_by(votes, factors)
        factor = self._stats.clip_factor * factors[0 if is_silent else rank]
        return Decision(present_anywhere(votes), factor, first=buckets[0].first)

    def take_late(self, messages: Sequence[Sequence[bytes]], gates: Sequence[float]) -> set[int]:
        """Take in the late votes, which the gates have already applied. Returns the indices of skipped buckets.

        Args:
            messages: All ranks' messages of each late vote.
            gates: The value of each gate, 0 if it is closed.

        Raises:
            DesyncError: Ranks are not in the same step.
            RuntimeError: As `decide`.
        """
        late, self.late = self.late, []
        closed = [vote for vote, gate in zip(late, gates, strict=True) if not gate]
        for vote in closed:
            vote.undo()
        for vote, message in zip(late, messages, strict=True):
            vote.take(message)
        for vote in late:
            votes, have_sent = vote.ballot.votes, vote.stand_out is not None
            vote.ballot.check()
            factors = self._take_in(votes, vote.buckets, have_sent=have_sent)
            if vote not in closed:
                self._clip_by(votes, factors)
            elif not (self.resending or (have_sent and self.standing_out)):
                self._leave_out(vote.gradients.bad(vote.buckets), by_all=True)
        return {bucket.index for vote in closed for bucket in vote.buckets}

    def _bound(
        self, votes: Sequence[StepVote], buckets: Sequence[ShardedBucket], ranks: Sequence[int]
    ) -> Sequence[float]:
        """Return the factor of each of these ranks' gradients, and note the ranks that are scaled down."""
        if not are_finite(votes):
            return [1.0] * len(votes)
        is_alone = len(votes) < self._transport.world_size
        factors = self.bounds.factors_on_host(buckets[0].index, [vote.norm_squared for vote in votes], alone=is_alone)
        self.standing_out |= {rank for rank, factor in zip(ranks, factors, strict=True) if factor < 1.0}
        return factors

    def _own(self, buckets: Sequence[ShardedBucket], scale: float) -> OwnGradients:
        clips = self._clipper.max_norm > 0
        beta1s = [bucket.group["betas"][0] for bucket in buckets] if clips else None
        return OwnGradients.of(self._placement, buckets, scale, beta1s)

    @staticmethod
    def _seen(ballot: Ballot, buckets: Sequence[ShardedBucket]) -> Sequence[bool]:
        """Return for each parameter whether any rank has a gradient. Waits for the vote only if this rank lacks one."""
        seen = ballot.mine.present[: sum(len(bucket.params) for bucket in buckets)]
        if all(seen):
            return seen
        messages, _ = ballot.messages.read()
        ballot.take(messages)
        return present_anywhere(ballot.votes)

    def _take_in(
        self, votes: Sequence[StepVote], buckets: Sequence[ShardedBucket], *, have_sent: bool
    ) -> Sequence[float]:
        """Take in the rest of the votes, and return the factor of each rank's gradients before clipping.

        Raises:
            RuntimeError: A rank trains a parameter that has no state.
        """
        trained = sum(len(bucket.params) for bucket in buckets)
        if buckets[-1] is self._buckets[-1]:
            self._buckets.refuse_unfrozen([vote.present[trained:] for vote in votes])
        self._watch.note([vote.summary.gradients for vote in votes])
        self.resending = [rank for rank, vote in enumerate(votes) if vote.summary.resends]
        factors = self._bound(votes, buckets, range(len(votes)))
        if not (self.resending or (have_sent and self.standing_out)):  # those steps vote again
            if are_finite(votes):
                self.bounds.learn(buckets[0].index, [vote.norm_squared for vote in votes])
            if buckets[0].index == 0:
                self._health.observe([GradStats.from_bytes(vote.note) for vote in votes], self._transport.rank)
        return factors

    def _clip_by(self, votes: Sequence[StepVote], factors: Sequence[float]) -> None:
        """Compute the clip factor from votes scaled by these factors, and write it to the stats."""
        if self._clipper.max_norm > 0:
            bounded = [
                replace(vote, norm_squared=factor * factor * vote.norm_squared, product=factor * vote.product)
                for vote, factor in zip(votes, factors, strict=True)
            ]
            self._stats.clip_factor = self._clipper.estimated_factor(bounded, self._transport.world_size)

    def _leave_out(self, bad: Sequence[str], *, by_all: bool) -> None:
        """Note gradients that are not finite, and log them: their names on their rank, a hint to it on rank 0."""
        self._clipper.norm = None
        left_out = self.left_out
        self.left_out = LeftOut([*left_out.names, *bad], is_any=True, by_all=left_out.by_all or by_all)
        what = "these parameters" if self._placement.config.stage == 2 else "the step"
        consequence = f"all ranks skip {what}" if by_all else "this rank leaves its gradients of this step out"
        self._skips.tell(self._transport.rank, self._rule.steps_taken() + 1, bad, consequence)
