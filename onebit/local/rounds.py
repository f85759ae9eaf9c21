"""Rounds: the joint part of local steps, every N steps, for one fragment at a time.

    vote        buckets that are not finite return to the anchor; ranks exchange their step, and whether they count
    send        encodes this rank's share of each bucket and begins both phases; without delay it also lands them
    bring_home  with delay: begins the second phase half-way, and lands the fragment when it is due

Votes are in `round_vote.py`, the recursion of one bucket in `fragment.py`; `local_steps.py` decides when rounds are due
and acts on them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from .. import comm
from ..agreement.wrappers import NOT_COMPARED, are_alike, gradient_digest, refuse_wrapper, warn_of_averaging
from ..comm import Exchange, ExchangeTask, Transport
from ..membership.residuals import residual_norm
from ..model_parallel import ModelParallelGroup
from ..step.replicated import Journal
from ..step.stats import WaitClock
from .balance import Balance, divide_steps
from .fragment import Fragment, LocalBucket, Share, is_lossless
from .inner_state import InnerState
from .options import LocalOptions
from .replica import Replica
from .round_vote import Ballot, RoundVote, cast_votes
from .stats import LocalStats

_MOST_OF_A_ROUND = (
    0.3  # κ: at H = 128 the byte LM ends 11 % higher with 1 than without a correction (2,000 steps, 2026-11)
)

log = logging.getLogger(__name__)


class Rounds:
    """The votes and exchanges of fragments. All ranks vote, send and land in the same order.

    inner: its state is reset for parameters that are not finite. parts: the ranks that hold one replica. waited: runs
    while rounds wait for others. stats: gets the phase and this rank's weight. balance: None, if all ranks take as many
    steps. Attribute journal: is told of each round while a newcomer copies the state; None: none does.
    """

    journal: Journal | None = None

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        replica: Replica,
        options: LocalOptions,
        transport: Transport,
        parts: ModelParallelGroup,
        waited: WaitClock,
        stats: LocalStats,
        balance: Balance | None,
    ):
        self._inner_state = InnerState(inner, transport.rank, stats)
        self._buckets, self._hierarchy = replica.buckets, replica.hierarchy
        self._codec, self._outer, self._delay = options.codec, options.outer, options.delay
        self._correction_steps = options.correction_steps
        self._is_lossless = is_lossless(options.codec)
        self._transport, self._parts, self._waited, self._stats = transport, parts, waited, stats
        self._balance = balance
        self._gradients, self._has_looked = NOT_COMPARED, False

    # ---------------------------------------------------------------- the vote

    def note_gradients(self) -> None:
        """Digest the gradients of the first step: if all ranks have the same, other code has averaged them."""
        if not self._has_looked and self._transport.world_size > 1:
            dense = [[g for g in bucket.gradients() if g is not None and not g.is_sparse] for bucket in self._buckets]
            self._gradients = gradient_digest(dense)

    def stop_looking(self) -> None:
        """Compare no more gradients: that is done, here or before a resume."""
        self._has_looked, self._gradients = True, NOT_COMPARED

    def vote(
        self,
        fragment: Fragment,
        step: int,
        interval: int,
        *,
        is_present: bool,
        is_finished: bool,
        edit: str,
        changes: bool,
    ) -> tuple[Ballot, list[LocalBucket]]:
        """Exchange votes. Returns the ballot, and the buckets that were not finite here and are at the anchor now.

        step, interval, is_finished, edit, changes: this rank's, as in `RoundVote`. is_present: whether its difference
        counts if it is finite.
        """
        spoilt, step_s, steps = self._restore_spoilt(fragment, step), 0.0, self._stats.interval
        if self._balance is not None:
            self._balance.end()
            step_s, steps = self._balance.step_s, self._balance.share
        for bucket in (bucket for bucket in fragment.buckets if bucket not in spoilt):
            self._inner_state.drop_not_finite(bucket, step)
            if is_present and not is_finished and step == fragment.due:
                self._inner_state.drop_still(bucket, step, steps, fragment.keeps[bucket.group_index])
        is_present = self._parts.agree(is_present and not spoilt)
        owes = self._is_lossless and any(bucket.owes() for bucket in fragment.buckets)
        tokens, edited = self._parts.total(fragment.tokens, float(bool(edit)))
        if edited and not edit:  # else only the ranks at its place would learn of it
            edit = f"rank {self._transport.rank}: another rank of this replica has a replaced parameter in its groups"
        mine = RoundVote(
            step,
            interval,
            is_present,
            is_finished,
            owes,
            tokens,
            step_s,
            self._gradients,
            tuple(fragment.keeps),
            tuple(fragment.decays),
            edit,
            changes,
            fragment.synced_at,
            residual_norm(self._buckets) if self._transport.ranks_change else 0.0,
        )
        device = self._buckets[0].device if self._buckets else torch.device("cpu")
        with self._waited.running():
            ballot = cast_votes(
                self._transport, mine, device, self._hierarchy.local_size, is_balanced=self._balance is not None
            )
        self._look_for_wrappers([vote.gradients for vote in ballot.votes])
        return ballot, spoilt

    def _restore_spoilt(self, fragment: Fragment, step: int) -> list[LocalBucket]:
        """Return buckets that are not finite to the anchor, and reset their inner state. Returns these buckets."""
        spoilt = [bucket for bucket in fragment.buckets if not bucket.can_travel()]
        for bucket in spoilt:
            bucket.return_to_anchor()
            if bucket.correction is not None:
                bucket.correction.zero_()
            for p in bucket.params:
                self._inner_state.drop(p)
            log.warning(
                "rank %d: parameters were not finite after step %d (%s and its bucket): this rank continues from the "
                "anchor, with a new state of the inner optimizer for them; look at the data and the loss here",
                self._transport.rank,
                step,
                bucket.names[0],
            )
        return spoilt

    def _look_for_wrappers(self, digests: Sequence[bytes]) -> None:
        if not self._has_looked:
            self.stop_looking()
            if are_alike(digests):
                refuse_wrapper(self._transport, self._buckets.params)
                warn_of_averaging(self._transport)

    # ---------------------------------------------------------------- the exchange

    def send(self, fragment: Fragment, ballot: Ballot, spoilt: Sequence[LocalBucket], *, is_delayed: bool) -> None:
        """Send this fragment's differences. It lands now, or with is_delayed `delay` steps later."""
        step = ballot.agreed.step
        fragment.shares = self._shares(fragment, ballot, spoilt)
        fragment.begin(step)
        self._stats.phase = "round"
        lands_apart = not (is_delayed or self._transport.ranks_change)  # if a member is lost, no bucket may have landed

        def exchange(bucket: LocalBucket, share: Share) -> Exchange:
            yield from bucket.send(self._codec, self._transport, share, keeps_weights=is_delayed)
            if lands_apart:
                bucket.land(self._codec, self._outer, share)

        exchanges = (exchange(*each) for each in zip(fragment.buckets, fragment.shares, strict=True))
        fragment.move("launch")
        try:
            if lands_apart:
                with self._waited.running():
                    comm.interleave(exchanges)
            else:
                fragment.tasks = [ExchangeTask(each) for each in exchanges]
                if not is_delayed:
                    self._land(fragment)
                elif self._transport.ranks_change:
                    self._parts.agree(True)  # all ranks of a member have it under way, or none
        except BaseException:
            fragment.discard()  # a further step() raises this error again
            raise
        fragment.rounds += 1
        if is_delayed:
            fragment.move("suspend")
            fragment.lands_at = step + self._delay
        else:
            fragment.complete("commit")
            fragment.synced_at = step

    def balance(self, ballot: Ballot, interval: int) -> None:
        """Begin the next round, if ranks take as many of its steps as their speeds allow. interval: its length."""
        if self._balance is not None:
            shares = divide_steps(interval, ballot.seconds)
            self._balance.begin(interval, shares[self._hierarchy.inter_node.rank])

    def _shares(self, fragment: Fragment, ballot: Ballot, spoilt: Sequence[LocalBucket]) -> list[Share]:
        """This rank's part in the round of each bucket.

        Parameters that have not decayed as all ranks agree are decayed here: those that returned to the anchor, and
        those of a rank that had no batches left.
        """
        keeps, decays, node = ballot.agreed.keeps, ballot.decays, self._hierarchy.inter_node.rank
        self._stats.weight = weight = ballot.weights[node]
        is_plain = self._outer.is_plain and self._is_lossless and set(ballot.weights) == {1.0}
        sends_weights = is_plain and ballot.owes_nothing
        correction = self._correction() if ballot.presents[node] and weight > 0.0 else 0.0
        shares, first = [], 0
        for bucket in fragment.buckets:
            keep, own = keeps[bucket.group_index], 1.0 if bucket in spoilt else ballot.mine.keeps[bucket.group_index]
            its, first = decays[first : first + len(bucket.params)], first + len(bucket.params)
            if own != keep:
                for w, decayed in zip(bucket.local_values, its, strict=True):
                    if decayed:
                        w.mul_(keep / own)
            keep_K = tuple(keep if decayed else 1.0 for decayed in its)
            shares.append(Share(keep_K, weight, ballot.presents[node], sends_weights, correction))
        return shares

    def _correction(self) -> float:
        """Share of a round in the correction, for each of its steps: min(.3/H, 1/τ)."""
        if self._correction_steps == 0:
            return 0.0
        return min(_MOST_OF_A_ROUND / self._stats.interval, 1.0 / self._correction_steps)

    # ---------------------------------------------------------------- exchanges under way

    def bring_home(self, fragment: Fragment, step: int) -> bool:
        """After this step: begin the second phase of an exchange that is half-way, and land one that is due.

        Returns whether it was either: whether this rank has exchanged something.
        """
        if fragment.lands_at is None or fragment.sent_at is None:
            return False
        if step >= fragment.lands_at:
            self.land(fragment)
            return True
        if is_half_way := step == fragment.sent_at + self._half_way:
            with self._waited.running():
                for task in fragment.tasks:
                    task.advance()
        return is_half_way

    def is_past_first_phase(self, fragment: Fragment, step: int) -> bool:
        """Whether the second phase of the exchange under way has been launched, after this step."""
        return fragment.sent_at is not None and step >= fragment.sent_at + self._half_way

    @property
    def _half_way(self) -> int:
        return (self._delay + 1) // 2

    def land(self, fragment: Fragment) -> None:
        """Complete the exchange under way, if there is one."""
        if not fragment.is_under_way:
            return
        self._land(fragment)
        fragment.complete("resume", "commit")
        self._stats.phase = "round"

    def _land(self, fragment: Fragment) -> None:
        with self._waited.running():
            comm.wait_all(fragment.tasks)
            if self._transport.ranks_change:
                self._parts.agree(True)  # all ranks of a member land it, or none
        for bucket, share in zip(fragment.buckets, fragment.shares, strict=True):
            assert bucket.wire is not None
            journal, how = self.journal, {"keep": share.keep_K, "sends_weights": share.sends_weights}
            with nullcontext() if journal is None else journal.applying(bucket.index, bucket.wire.frames_WB, how):
                bucket.land(self._codec, self._outer, share)
