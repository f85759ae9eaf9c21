"""Votes on the gradients of buckets: cast, and read at once or by the host at the end of the step.

The latter on GPUs that the transport reaches. Where any rank has a gradient that is not finite, all ranks skip the
buckets of the vote: all of them, at stage 2 one. Where the host would have to wait for that, a flag on the device takes
its place. Blocks of a bucket that is not good then count as blocks without a gradient, whose values nobody reads, so
that no tensor of it changes. What the host has counted is given back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...agreement.step_vote import Ballot, Header, StepVote, are_finite, present_anywhere
from ...agreement.wrappers import WrapperWatch
from ...comm import Work
from ...step.bucket_step import Decision
from ...step.clip import Clipper, read_numbers, sums_in_turn
from ...step.stats import Stats
from ...step.verdict import reads_late
from ...usage.frozen import refuse_unfrozen
from .bucket import ShardedBucket
from .exchange import Sharded
from .health import GradStats, Health
from .rule import ShardedRule

log = logging.getLogger(__name__)


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

    def bad(self) -> list[str]:
        """The parameters whose gradients are not finite, or whose squares are beyond float32. Waits for the device."""
        norms = zip(self.names, read_numbers(self.norms), strict=True)
        return [name for name, norm in norms if not math.isfinite(norm)]


@dataclass
class LateVote:
    """A vote on some buckets under way, its gate, and what the host counts in their step, as it was before."""

    buckets: Sequence[ShardedBucket]
    ballot: Ballot
    gradients: OwnGradients
    gate: Tensor = field(init=False)
    _counted: Sequence[tuple[list[float], bool, Tensor | None, Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._counted = [
            ([float(step) for step in bucket.steps], bucket.is_warm, bucket.received, bucket.mean)
            for bucket in self.buckets
        ]
        self.gate = self.ballot.gate()
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
    whose gradients have changed since they were sent, by the vote that was read last.
    """

    def __init__(self, rule: ShardedRule, clipper: Clipper, stats: Stats, health: Health, watch: WrapperWatch):
        self._rule, self._buckets, self._placement = rule, rule.buckets, rule.placement
        self._transport, self._clipper = rule.placement.transport, clipper
        self._stats, self._health, self._watch = stats, health, watch
        self.late: list[LateVote] = []
        self.left_out = LeftOut()
        self.resending: Sequence[int] = ()

    def decide(
        self, buckets: Sequence[ShardedBucket], scale: float, header: Header, mine: StepVote, *, at_once: bool
    ) -> Generator[Work, None, Decision | None]:
        """Ask all ranks about the gradients of these buckets. None, on all ranks, where any is not finite.

        In a step that sends nothing, this rank alone. Of a vote that is read late gates say whether the step counts;
        a rank without some gradient waits for it, to know whether another rank has it. mine: this rank's, without the
        sums of its gradients; where it says that what was sent is no longer true the step counts on no rank, as if
        gradients were not finite. at_once: the vote is not to be read late.
        """
        is_silent, gradients = self._rule.is_silent(), self._own(buckets, scale)
        if mine.summary.resends:
            gradients.sums.fill_(math.nan)
        if is_silent:
            votes: Sequence[StepVote] = [mine.with_sums(gradients.sums)]
        else:
            ballot = Ballot.cast(self._transport, header, mine, buckets[0].device, gradients.sums)
            yield ballot.messages.work
            if not at_once and reads_late(self._transport, buckets[0].device):
                self.late.append(LateVote(buckets, ballot, gradients))
                clips = self._clipper.max_norm > 0
                factor = self._clipper.late_factor(ballot.sums(), self._transport.world_size) if clips else 1.0
                return Decision(self._seen(ballot, buckets), factor, first=buckets[0].first)
            ballot.read()
            votes = ballot.votes
            self._take_in(votes, buckets)
        if self.resending:
            return None
        if not are_finite(votes):
            self._leave_out(gradients.bad(), by_all=not is_silent)
            return None
        self._clip_by(votes)
        return Decision(present_anywhere(votes), self._stats.clip_factor, first=buckets[0].first)

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
            vote.ballot.check()
            self._take_in(vote.ballot.votes, vote.buckets)
            if vote not in closed:
                self._clip_by(vote.ballot.votes)
        for vote in closed:
            assert not are_finite(vote.ballot.votes)
            if not self.resending:
                self._leave_out(vote.gradients.bad(), by_all=True)
        return {bucket.index for vote in closed for bucket in vote.buckets}

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

    def _take_in(self, votes: Sequence[StepVote], buckets: Sequence[ShardedBucket]) -> None:
        """What votes say beside the decision. Raises RuntimeError where a rank trains what it has no state of."""
        trained = sum(len(bucket.params) for bucket in buckets)
        if buckets[-1] is self._buckets[-1]:
            unfrozen = [vote.present[trained:] for vote in votes]
            refuse_unfrozen(self._transport.rank, list(self._buckets.frozen.values()), unfrozen)
        self._watch.note([vote.summary.gradients for vote in votes])
        self.resending = [rank for rank, vote in enumerate(votes) if vote.summary.resends]
        if buckets[0].index == 0 and not self.resending:
            self._health.observe([GradStats.from_bytes(vote.note) for vote in votes], self._transport.rank)

    def _clip_by(self, votes: Sequence[StepVote]) -> None:
        if self._clipper.max_norm > 0:
            self._stats.clip_factor = self._clipper.estimated_factor(votes, self._transport.world_size)

    def _leave_out(self, bad: Sequence[str], *, by_all: bool) -> None:
        """Count it, and say whose gradients are not finite: on that rank, or on rank 0 that it is another's."""
        self._clipper.norm = None
        left_out = self.left_out
        self.left_out = LeftOut([*left_out.names, *bad], is_any=True, by_all=left_out.by_all or by_all)
        what = "these parameters" if self._placement.config.stage == 2 else "the step"
        consequence = f"all ranks skip {what}" if by_all else "this rank leaves its gradients of this step out"
        if bad:
            log.warning("rank %d: gradient not finite in %s; %s", self._transport.rank, ", ".join(bad[:5]), consequence)
        elif self._transport.rank == 0:
            log.warning("a gradient is not finite on another rank; %s", consequence)
