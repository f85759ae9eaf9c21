"""Votes on the gradients of buckets: cast, and read at once or by the host at the end of the step.

The latter on GPUs that the transport reaches. Where any rank has a gradient that is not finite, all ranks skip the
buckets of the vote: all of them, at stage 2 one. Where the host would have to wait for that, a flag on the device takes
its place. Blocks of a bucket that is not good then count as blocks without a gradient, whose values nobody reads, so
that no tensor of it changes. What the host has counted is given back.
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
from ...usage.frozen import refuse_unfrozen
from .bounds import Bounds
from .bucket import ShardedBucket
from .exchange import Sharded
from .health import GradStats, Health
from .rule import ShardedRule


@dataclass(frozen=True)
class OwnGradients:
    """This rank's gradients of some buckets. names: of their parameters. norms: float32, each of no dimensions.

    sums: their ‖g‖², finite where all of g is; where it clips <g, m̂> too: float64 [1 or 2].
    """

    names: Sequence[str]
    norms: Sequence[Tensor]
    sums: Tensor

    @classmethod
    def of(
        cls, placement: Sharded, buckets: Sequence[ShardedBucket], scale: float, beta1s: Sequence[float] | None
    ) -> OwnGradients:
        """Waits for nothing. scale: of the gradients. beta1s: of each bucket; None: nothing is clipped."""
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
        """The parameters whose gradients are not finite, or whose squares are beyond float32. Waits for the device.

        buckets: which may still have them: then it is known which of both.
        """
        norms = zip(self.names, read_numbers(self.norms), strict=True)
        bad = [name for name, norm in norms if not math.isfinite(norm)]
        pairs = [pair for b in buckets for pair in zip(b.names, b.gradients(), strict=True)]
        found = {name: grad for name, grad in pairs if grad is not None}
        named = {name: bad_gradients([(name, found[name])]) or [name + TOO_LARGE] for name in bad if name in found}
        return [named[name][0] if name in named else name for name in bad]


@dataclass
class LateVote:
    """A vote on some buckets under way, its gate, and what the host counts in their step, as it was before."""

    buckets: Sequence[ShardedBucket]
    ballot: Ballot
    gradients: OwnGradients
    stand_out: Tensor | None  # of frames that have been sent: whether any rank's are to be scaled down
    gate: Tensor = field(init=False)
    _counted: Sequence[tuple[list[float], bool, Tensor | None, Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._counted = [
            ([float(step) for step in bucket.steps], bucket.is_warm, bucket.received, bucket.mean)
            for bucket in self.buckets
        ]
        self.gate = self.ballot.gate() if self.stand_out is None else self.ballot.gate() & ~self.stand_out
        for bucket in self.buckets:
            bucket.gate = self.gate.to(bucket.device)

    def undo(self) -> None:
        """The buckets take no step: counts are what they were. Tensors are, by their gates."""
        for bucket, (steps, is_warm, received, mean) in zip(self.buckets, self._counted, strict=True):
            for step, before in zip(bucket.steps, steps, strict=True):
                step.fill_(before)
            bucket.is_warm, bucket.received, bucket.mean = is_warm, received, mean

    def take(self, messages: Sequence[bytes]) -> None:
        """They are these, unchecked: from here on no bucket has a gate."""
        self.ballot.take(messages)
        for bucket in self.buckets:
            bucket.gate = None


@dataclass
class LeftOut:
    """What of the step under way was left out, as not finite: by all ranks, or by this one alone; names: of its own."""

    names: list[str] = field(default_factory=list)
    is_any: bool = False
    by_all: bool = False


class Votes:
    """Of one step after the other: casts them, reads them at once or late, and says what all ranks do.

    late: the votes of the step under way that were cast and not read. left_out: of that step. resending: the ranks
    whose gradients have changed since they were sent, by the vote that was read last. standing_out: the ranks whose
    gradients are scaled down in the step under way (`bounds.py`). bounds: what the next votes are held to.
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
        """Ask all ranks about the gradients of these buckets. None, on all ranks, where any is not finite.

        In a step that sends nothing, this rank alone. Of a vote that is read late gates say whether the step counts;
        a rank without some gradient waits for it, to know whether another rank has it. mine: this rank's, without the
        sums of its gradients; where it says that what was sent is no longer true the step counts on no rank, as if
        gradients were not finite. at_once: the vote is not to be read late. have_sent: frames have gone up before it;
        where any rank's say too much, the step counts on no rank, and is to be taken once more.
        """
        is_silent, gradients = self._rule.is_silent(), self._own(buckets, scale)
        rank = self._transport.rank
        if mine.summary.resends:
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
        """What votes that are read late say, which gates have heeded. The indices of buckets that all ranks skip.

        Raises DesyncError where ranks are not in the same step, and as `decide`.
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
        """What the gradients of these votes, which are these ranks', are multiplied by. Notes who stands out."""
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
        """For each parameter of these buckets, whether any rank has a gradient for it. Waits where one is not here."""
        seen = ballot.mine.present[: sum(len(bucket.params) for bucket in buckets)]
        if all(seen):
            return seen
        messages, _ = ballot.messages.read()
        ballot.take(messages)
        return present_anywhere(ballot.votes)

    def _take_in(
        self, votes: Sequence[StepVote], buckets: Sequence[ShardedBucket], *, have_sent: bool
    ) -> Sequence[float]:
        """What votes say beside the decision. What each rank's gradients are multiplied by, before they are clipped.

        Raises RuntimeError where a rank trains what it has no state of.
        """
        trained = sum(len(bucket.params) for bucket in buckets)
        if buckets[-1] is self._buckets[-1]:
            unfrozen = [vote.present[trained:] for vote in votes]
            refuse_unfrozen(self._transport.rank, list(self._buckets.frozen.values()), unfrozen)
        self._watch.note([vote.summary.gradients for vote in votes])
        self.resending = [rank for rank, vote in enumerate(votes) if vote.summary.resends]
        factors = self._bound(votes, buckets, range(len(votes)))
        if not (self.resending or (have_sent and self.standing_out)):  # those take the step once more, and vote again
            if are_finite(votes):
                self.bounds.learn(buckets[0].index, [vote.norm_squared for vote in votes])
            if buckets[0].index == 0:
                self._health.observe([GradStats.from_bytes(vote.note) for vote in votes], self._transport.rank)
        return factors

    def _clip_by(self, votes: Sequence[StepVote], factors: Sequence[float]) -> None:
        """factors: of each vote's gradients, before they are clipped."""
        if self._clipper.max_norm > 0:
            bounded = [
                replace(vote, norm_squared=factor * factor * vote.norm_squared, product=factor * vote.product)
                for vote, factor in zip(votes, factors, strict=True)
            ]
            self._stats.clip_factor = self._clipper.estimated_factor(bounded, self._transport.world_size)

    def _leave_out(self, bad: Sequence[str], *, by_all: bool) -> None:
        """Count it, and say whose gradients are not finite: on that rank, or on rank 0 that it is another's."""
        self._clipper.norm = None
        left_out = self.left_out
        self.left_out = LeftOut([*left_out.names, *bad], is_any=True, by_all=left_out.by_all or by_all)
        what = "these parameters" if self._placement.config.stage == 2 else "the step"
        consequence = f"all ranks skip {what}" if by_all else "this rank leaves its gradients of this step out"
        self._skips.tell(self._transport.rank, self._rule.steps_taken() + 1, bad, consequence)
