"""LocalSteps: any torch optimizer on each rank separately, and every N steps one exchange in one bit.

    optimizer = onebit.LocalSteps(torch.optim.AdamW(model.parameters(), lr=1e-3), every=32)

One step, top to bottom:

    step()   average gradients inside a node, if the transport knows nodes
             take the inner optimizer's step; a gradient that is not finite freezes this rank until the next round
             land fragments that have arrived: errors, anchor, parameters
             vote on fragments that are due, and send them
             every `check_replicas_every` steps, vote on the anchors' bits

Replicas differ between rounds on purpose; they agree on the anchor. A step of one rank is in `inner_step.py`, a round
in `rounds.py`, the recursion of one bucket in `fragment.py`, states in `state.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from .. import comm
from ..agreement.join import alone_in_join
from ..agreement.replicas import ReplicaCheck, ReplicaError
from ..agreement.skips import MOST_SKIPS, SkipLimit
from ..comm import Codec, PeerError, SignCodec, Transport
from ..comm.transports.notes import calling
from ..dense import DenseAverager
from ..layout.buckets import elements_of
from ..membership.change import change
from ..membership.members import Members
from ..model_parallel import ModelParallelGroup, model_parallel_group_of
from ..rule import check_codec
from ..step.replicated import Journal
from ..usage.contract import State, check_number, loss_of
from ..usage.graphs import outside_graphs
from . import new_world
from . import state as states
from .balance import Balance
from .buffers import BufferMean
from .fragment import Fragment, OuterStep, Share, divide, repeat_round
from .inner_step import InnerStep
from .interval_policy import IntervalPolicy
from .intervals import Auto, Every, Started, interval_of
from .options import LocalOptions
from .replica import Replica
from .rounds import Rounds
from .stats import LocalStats, LocalTraffic
from .wrapped import Wrapped, check_group, check_inner

log = logging.getLogger(__name__)


class LocalSteps(Wrapped):
    """Lets each rank step with its own optimizer, and brings the ranks together every N steps in one bit.

    It shows param_groups and state of the wrapped optimizer. All ranks construct, step, load and save together.
    Sources: DiLoCo (arXiv 2311.08105), 1-bit Adam's error feedback (arXiv 2102.02888).

    Sends 2·(n-1)/n frames of the model each round, and 60 bytes to each peer: 2.125/H·(n-1)/n bits per parameter and
    step. A correction sends (L-1)/L frames more inside a node of L ranks. Keeps 4 (anchor) + 4 (worker error) + 8/n
    (server error) bytes per parameter, 4 more with outer momentum, 4 with a correction, and 4 with a master.

    Args:
        inner: Any torch optimizer that steps without a closure. It works on float32 masters of parameters in bfloat16
            or float16; the parameters follow each step, rounded, and values that other code writes are taken over.
        every: Local steps between rounds: a number; {first step: number}; a `QSR`, from the learning rate; "auto" or
            an `Auto`, from the measured network. Default 32.
        start_steps: Steps at the beginning in which rounds are at most start_every steps apart. Default 0.
        start_every: See start_steps. Default 4.
        outer_lr: Outer learning rate, η. Default 1.0; DiLoCo has .7.
        outer_momentum: Outer momentum in Nesterov's form, μ. Default 0.0; DiLoCo has .9.
        error_decay: Factor of the residual from round to round, ρ. Default 1.0.
        codec: Format of differences. Default `SignCodec()`; `IdentityCodec()` sends them in full.
        fragments: Parts of the model that travel in turn, every/fragments steps apart. Default 1.
        delay: Steps between sending a fragment and applying it, while training goes on. Default 0.
        correction_steps: Steps over which a rank learns how the mean moves differently from it (SCAFFOLD's control
            variate, τ), e.g. 80; each step then adds the difference. Default 0: no correction.
        balanced: Whether each rank takes as many steps between rounds as its measured speed allows, so that none waits
            for the slowest. Differences are weighted by steps, if not by `add_tokens`. `every` and `steps_taken()`
            count steps of the mean rank. Default False: all ranks take as many steps.
        model: Model whose buffers start as rank 0's and become equal in each round, as by `sync_buffers`. Default None:
            each rank keeps its own.
        transport: Connection to the other ranks. Default `onebit.comm.init()`. In two levels gradients are averaged
            inside a node in every step, and differences travel between nodes. With delay it must have its own process
            group: pass a transport that no other code uses.
        model_parallel_group: See `CommonOptions`. Default None.
        bucket_cap_mb: Largest bucket, in MiB of float32. Default None: 16 in host memory, 64 on a GPU.
        error_dtype: dtype of the residuals: torch.float32 (default) or torch.bfloat16.
        check_replicas_every: Steps between comparisons of the anchors, in the first round after them. Default 100.
        max_consecutive_skips: Number of consecutive rounds without a finite difference on any rank that raises
            SkippedStepsError. Default 50.

    Raises:
        ValueError: An option is out of its range, or parameters or options differ between ranks.
        TypeError: An option has the wrong type; or inner is not a torch optimizer, exchanges gradients itself, or needs
            a closure.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        every: Every = 32,
        *,
        start_steps: int = 0,
        start_every: int = 4,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        error_decay: float = 1.0,
        codec: Codec | None = None,
        fragments: int = 1,
        delay: int = 0,
        correction_steps: int = 0,
        balanced: bool = False,
        model: nn.Module | None = None,
        transport: Transport | None = None,
        model_parallel_group: ModelParallelGroup | Transport | None = None,
        bucket_cap_mb: float | None = None,
        error_dtype: torch.dtype = torch.float32,
        check_replicas_every: int = 100,
        max_consecutive_skips: int = MOST_SKIPS,
    ):
        check_inner(inner)
        self.interval = interval_of(every)
        self.options = LocalOptions(
            schedule=Started(self.interval, start_steps, start_every),
            outer=OuterStep(outer_lr, outer_momentum, error_decay),
            codec=SignCodec() if codec is None else check_codec("differences", codec),
            fragments=fragments,
            delay=delay,
            correction_steps=correction_steps,
            balanced=balanced,
            averages_buffers=model is not None,
            error_dtype=error_dtype,
            bucket_elements=elements_of(bucket_cap_mb),
            check_replicas_every=check_replicas_every,
            max_consecutive_skips=max_consecutive_skips,
        )
        super().__init__(inner)
        self.codec = self.options.codec
        self.replica_check, self.skip_limit = ReplicaCheck(check_replicas_every), SkipLimit(max_consecutive_skips)
        self.transport = comm.init() if transport is None else transport
        comm.check_transport(self.transport, may_change=True)
        self.model_parallel_group = parts = model_parallel_group_of(model_parallel_group)
        self._members = self.transport if isinstance(self.transport, Members) else None
        if self._members is not None and (why := self._why_members_stay()):
            raise ValueError(f"LocalSteps cannot go on as its members come and go (onebit.membership): {why}")
        self.stats, self.traffic = LocalStats(), LocalTraffic(self.transport)
        self.replica = Replica(self, self.options, self.transport, parts)
        self.hierarchy, self.buckets = self.replica.hierarchy, self.replica.buckets
        self.inner_step = InnerStep(inner, self.replica, parts)
        self.buffers = BufferMean(model, self.transport, self.traffic.waited)
        self.policy = IntervalPolicy(
            inner, self.options.schedule, self.buckets, self.codec, self.transport, parts, self.traffic
        )
        self.balance = Balance(self.policy.next(0)) if balanced else None
        if self.balance is not None and parts.whole.world_size > 1:
            raise ValueError("balanced=True needs a whole model on each rank, and this one is divided among several")
        self.rounds = Rounds(
            inner, self.replica, self.options, self.transport, parts, self.traffic.waited, self.stats, self.balance
        )
        self.fragments: list[Fragment] = []
        self.steps = 0
        self.is_away = self.is_frozen = self._is_finished = False
        # In place of tokens: newcomers, who weigh less in their first round, and balanced ranks take unlike numbers.
        self.counts_steps = balanced or self._members is not None
        self._lost: PeerError | None = None  # a lost member, until the next step can continue without it
        self._change_is_due = False  # all members have agreed to let newcomers in before the next step
        self.rounds_due: list[Fragment] = []  # of this step; they have not been sent yet
        self.is_syncing = False  # these are of all fragments, and land at once
        self._edit = ""  # description of a replaced parameter in the groups: this rank then takes no more steps
        self._averager: DenseAverager | None = None
        self.build()

    # ---------------------------------------------------------------- construction

    @torch.no_grad()
    def build(self) -> None:
        """Make buckets and fragments of new groups. All ranks."""
        for g, group in enumerate(self.param_groups):
            check_group(f"group {g}", group)
        known = len(self.buckets)
        self.buckets.build()
        if known:
            for fragment in self.fragments:
                self.rounds.land(fragment)
            self.replica.show()
            self.fragments[-1].buckets += self.buckets[known:]
        else:
            interval = self.stats.interval = self.policy.next(self.steps)
            shares = divide(self.buckets, self.options.fragments)
            P = len(shares)
            if self.options.fragments > P and self.buckets:
                raise ValueError(
                    f"rank {self.transport.rank}: fragments={self.options.fragments}, but the parameters make "
                    f"{len(self.buckets)} buckets: give fewer, or a smaller bucket_cap_mb"
                )
            self.fragments = [Fragment(k, buckets, -(-interval * (k + 1) // P)) for k, buckets in enumerate(shares)]
        for fragment in self.fragments:
            fragment.keeps += [1.0] * (len(self.param_groups) - len(fragment.keeps))
            fragment.decays += [True] * (len(fragment.params) - len(fragment.decays))
        if self.hierarchy.intra_node is not None:
            self._averager = DenseAverager(self.buckets.params, self.hierarchy.intra_node)
        if self.inner.state and any(bucket.masters.has_any for bucket in self.buckets[known:]):
            self.inner_step.load(self.inner.state_dict())  # its state of these parameters becomes float32
        if not known:
            self.buffers.begin()
        self.traffic.elements = max(sum(bucket.layout.parameter_numel for bucket in self.buckets), 1)
        self.traffic.begin(in_backward=False)

    def state_bytes(self) -> int:
        """Bytes of this rank's state, without the inner optimizer's."""
        return sum(bucket.state_bytes() for bucket in self.buckets)

    # ---------------------------------------------------------------- step

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block only accumulate. Needed if nodes average gradients; else without effect."""
        return nullcontext() if self._averager is None else self._averager.no_sync()

    def add_tokens(self, count: float) -> None:
        """Count training data of this rank: differences are weighted by it in the next round. All ranks, or none.

        Args:
            count: Number of tokens, or of another unit that all ranks use; added to earlier counts of the round.
        """
        check_number(f"rank {self.transport.rank}: add_tokens", "count", count)
        if self.counts_steps:
            self.counts_steps = False
            for fragment in self.fragments:
                fragment.tokens = 0.0
        for fragment in self.fragments:
            fragment.tokens += float(count)

    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the inner optimizer's step, and a round if one is due. All ranks call it the same number of times.

        A step whose gradients are not finite is left out. Without GradScaler, this rank then also stops moving until
        the next round, in which its difference does not count and is carried over.

        Args:
            closure: Evaluates the model again and returns the loss. Default None.

        Returns:
            The closure's loss, or None.

        Raises:
            PeerError: A peer is lost.
            DesyncError: The ranks' rounds or schedules differ.
            ReplicaError: Anchors are no longer identical.
            SkippedStepsError: Too many rounds in a row had no finite difference on any rank.
        """
        self.policy.computing.stop()
        loss = loss_of(closure)
        self.traffic.begin(in_backward=self._averager is not None)
        self.stats.phase = "local"
        self._change_if_due()
        self._look_for_edits()
        self.buckets.refuse_unfrozen([self.buckets.have_frozen_gradients()])
        self.replica.settle()
        if self.steps == 0:
            self.rounds.note_gradients()
        if self._averager is not None:
            self.traffic.waited.total_s += 1e-3 * self._averager.finish()
        if not self._edit:
            self._take_inner_step()
        else:
            self.model_parallel_group.agree(False)  # the other ranks of this replica ask in theirs: none moves
        self.steps += 1 if self.balance is None else self.balance.count_step()
        for fragment in self.fragments if self.counts_steps else ():
            fragment.tokens += 1.0
        # Before anything that may end in a change: a newcomer in it takes part in the rounds that are due.
        self.rounds_due = [fragment for fragment in self.fragments if fragment.due == self.steps]
        with self._survives_losses():
            moved = [self.rounds.bring_home(fragment, self.steps) for fragment in self.fragments]
            if any(moved):
                self._stay_together()
        self._take_rounds_due()
        self._end_step()
        self.policy.computing.start()
        return loss

    def _look_for_edits(self) -> None:
        edit = self.buckets.find_edit(check_group)
        if edit and not self._edit:
            self._edit = f"rank {self.transport.rank}: {edit}"
            log.warning("%s. This rank takes no more steps, and the next round is an error on all ranks", self._edit)

    def _take_inner_step(self) -> None:
        scaler_scale = getattr(self, "grad_scale", None)
        scale = 1.0 / float(scaler_scale or 1.0)
        is_good = self.inner_step.take(self.fragments, scale, is_frozen=self.is_frozen)
        self.stats.skipped_steps += self.is_frozen or not is_good
        is_scaled = scaler_scale is not None or getattr(self, "found_inf", None) is not None
        self.is_frozen |= not is_good and not is_scaled  # under a scaler, overflows are expected

    def _take_rounds_due(self) -> None:
        if self.rounds_due:
            with self._survives_losses():
                self.end_interrupted_step()
                self._stay_together()

    def _take_round(self, fragment: Fragment) -> bool:
        """Vote, and send the fragment; without delay, or in `sync`, land it too. All ranks.

        Returns False if all ranks have finished (`join`): this was the last round.
        """
        is_here, P = not (self.is_frozen or self.is_away), len(self.fragments)
        interval = self.policy.next(self.steps)
        ballot, spoilt = self.rounds.vote(
            fragment,
            self.steps,
            interval,
            is_present=is_here,
            is_finished=self._is_finished,
            edit=self._edit,
            changes=self._members is not None and self._members.is_awaited(),
        )
        self._change_is_due = any(vote.changes for vote in ballot.votes)
        if self._members is not None:
            self._members.hear_residuals([vote.residual_norm for vote in ballot.votes], self.buckets)
        self.steps, interval = ballot.agreed.step, self.policy.decide(ballot.agreed)
        self.rounds.send(fragment, ballot, spoilt, is_delayed=self.options.delay > 0 and not self.is_syncing)
        self.rounds_due = self.rounds_due[1:]
        # After a round of all, fragments take turns again.
        fragment.due = self.steps - (-interval * (fragment.index + 1 if self.is_syncing else P) // P)
        self.stats.count_round(ballot, interval)
        self.rounds.balance(ballot, interval)
        self.is_frozen = False
        self.skip_limit.observe(not ballot.is_counted, (), self.transport)
        if fragment.index == 0:
            self.buffers.average()
        self.replica_check.counted = self.steps - 1
        if self.replica_check.is_due(are_synchronised=fragment.index == 0):
            self.check_replicas()
        return ballot.goes_on

    def _end_step(self) -> None:
        """Copy masters into parameters, and update stats."""
        self.replica.show()
        self.traffic.end(self.stats, self.steps)

    # ---------------------------------------------------------------- agreement of the ranks

    def sync(self) -> None:
        """Take a round of all fragments now: afterwards all ranks have the same parameters. All ranks, same step.

        Call it before a model is saved alone, and at the end of a run. Sends nothing if nothing has moved since the
        last round.
        """
        # Balanced ranks jump over steps: for one of them this may be a round of step(), which has no name. So has a
        # change, in which another rank of this member may be.
        has_name = self.balance is None and self._members is None
        with torch.no_grad(), calling("optimizer.sync()" if has_name else ""):
            self._begin_round()
            if self.is_at_anchor():
                self.replica.show()
                return
            self.is_syncing, self.rounds_due = True, self.fragments
            try:
                self._land_all()
                self._take_rounds_due()
            finally:
                self.is_syncing = False
            self._end_step()

    def _land_all(self) -> None:
        with self._survives_losses():
            for fragment in self.fragments:
                self.rounds.land(fragment)

    def _begin_round(self) -> None:
        """Begin a round between two steps."""
        self.traffic.begin(in_backward=self._averager is not None)
        self.replica.settle()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Make the current parameters the anchors, and reset all residuals: for weights from elsewhere.

        All ranks. Nothing is taken from a round under way. Sends 16 bytes to each peer. If a member is lost meanwhile,
        nothing is compared, with a warning.

        Raises:
            ReplicaError: Parameters differ between ranks, as they do between rounds. On all ranks.
        """

        def check() -> None:
            self.replica.check_parameters()
            for fragment in self.fragments:
                comm.wait_all(fragment.tasks)

        self._compare("adopt_parameters()", check)
        for fragment in self.fragments:
            if fragment.is_under_way:
                fragment.discard()
            fragment.count_anew()
        self.replica.adopt_parameters()

    def is_at_anchor(self) -> bool:
        """Whether all parameters are the anchors: no step was taken since. The same on all ranks."""
        if self.balance is not None and self.balance.taken > 0:
            return False
        return all(not fragment.is_under_way and fragment.synced_at == self.steps for fragment in self.fragments)

    def anchors(self) -> AbstractContextManager[None]:
        """In this block the parameters are the anchors, the same on all ranks, for an evaluation. Sends nothing."""
        return self.replica.at_anchors()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Rounds in this block do not count this rank's difference, which is carried over.

        The rank still takes part in the traffic, and continues from each new anchor.
        """
        self.is_away, before = True, self.is_away
        try:
            yield
        finally:
            self.is_away = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Wrap a loop over batches whose number may differ between ranks, as torch's Join. All ranks.

        A rank that has finished takes part in the others' rounds: in the first with its last difference, then with
        none. The last round is when all have finished; after it all ranks have the same parameters. Over two levels the
        ranks of one node need the same number of batches: they average gradients in every step.

        Raises:
            PeerError: Ranks of one node have different numbers of batches; after the transport's timeout.
            RuntimeError: There are several fragments, or a delay, or it is inside another optimizer's.
        """
        self._is_finished = False
        if self._members is not None:
            raise RuntimeError(
                f"{self._members.rendezvous.name}: join() is not for members that come and go; let each train as many "
                "steps, or leave"
            )
        if len(self.fragments) > 1 or self.options.delay:
            raise RuntimeError(
                f"rank {self.transport.rank}: join() needs fragments=1 and delay=0; otherwise give all ranks the same "
                "number of batches"
            )
        with alone_in_join(self.transport.rank):
            try:
                yield
                self._is_finished = True
                with torch.no_grad():
                    self._begin_round()
                    while self._take_round(self.fragments[0]):
                        pass
                    self._end_step()
            finally:
                self._is_finished = False

    def check_replicas(self) -> None:
        """Compare the anchors' bits. All ranks; raises ReplicaError on all if they differ.

        If a member is lost meanwhile, nothing is compared, with a warning.
        """
        self._compare("check_replicas()", partial(self.replica.check_anchors, self.steps))

    def _compare(self, call: str, check: Callable[[], None]) -> None:
        def together() -> None:
            with self.traffic.waited.running():
                self.model_parallel_group.raise_on_all_ranks(ReplicaError, check)

        if self._members is None:
            return together()
        self._lost = self._members.attempt(call, self.progress(), together) or self._lost

    # ---------------------------------------------------------------- members that come and go

    def _why_members_stay(self) -> str:
        if isinstance(self.interval, Auto):
            return 'every="auto" measures the network within a round; give a number of steps'
        assert self._members is not None
        return self._members.why_not_parts(self.model_parallel_group)

    def _change_if_due(self) -> None:
        """Change the members before a step, when schedules and counts of steps agree."""
        if self._members is None:
            return
        if self._members.roster is None:
            raise RuntimeError(
                f"{self._members.rendezvous.name} is in no run yet: call onebit.membership.begin(optimizer) before "
                "step()"
            )
        if self._lost is not None:
            return self._change(self._lost)
        roster, are_few = self._members.roster, self._members.world_size < self._members.rendezvous.min_members
        try:
            # Others have lost a member in the last round, and wait.
            if self._members.is_over() and not (self._change_is_due or are_few):
                raise PeerError("another member has ended the epoch")
            self._change_is_due = self._members.is_due(self._change_is_due)
        except PeerError as error:
            return self._change(error)
        if self._change_is_due or are_few:
            self._land_all()  # or what is under way would be forgotten
            if self._members.roster is roster:  # else a loss in it has ended in a change
                self._change(None)

    def _stay_together(self) -> None:
        """Raise PeerError if another rank of this member has lost the epoch: none of them goes on to compute alone."""
        if self._members is not None:
            self.model_parallel_group.agree(True)

    @contextmanager
    def _survives_losses(self) -> Iterator[None]:
        """Members change if one of them is lost in this block. The rest of it is left out."""
        try:
            yield
        except PeerError as error:
            if self._members is None:
                raise
            self._change(error)

    def _change(self, why: PeerError | None) -> None:
        assert self._members is not None
        is_agreed, self._change_is_due, self._lost = self._change_is_due, False, None
        # After a loss, what members call next differs: some are in sync(), say. A newcomer calls step(), so it comes in
        # before the next one, also if it is needed.
        found = change(self, self._members, why, lets_in=why is None, meets=is_agreed)
        if found.is_back:  # its gradients are of parameters that are gone
            self.zero_grad()

    def steps_taken(self) -> int:
        """Number of local steps that were taken; with `balanced`, by the mean rank."""
        return self.steps

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        return self.replica.option_lines()

    def progress(self) -> tuple[int, ...]:
        """See `membership.change.Changing`: the step of the last round, and how many have landed and were sent."""
        landed, sent = zip(*((fragment.landed, fragment.rounds) for fragment in self.fragments), strict=True)
        return max(fragment.synced_at for fragment in self.fragments), sum(landed), sum(sent)

    def end_interrupted_step(self) -> None:
        """See `membership.change.Changing`: take the rounds that are due."""
        while self.rounds_due:
            self._take_round(self.rounds_due[0])
        self.is_syncing = False  # a newcomer's, if it came in amid the others' sync()

    def leave_world(self) -> State:
        """See `membership.change.Changing`."""
        assert self._members is not None
        sampler = self._members.sampler
        if sampler is not None and (sampler.balanced or self.balance is not None):
            raise ValueError(
                f"{self._members.rendezvous.name}: a MemberSampler gives each member as many batches in a round, and "
                "with balanced=True members take unlike numbers; let each draw its own, or use balanced=False for both"
            )
        return new_world.leave(self)

    def for_others(self, state: State) -> State:
        """See `membership.change.Changing`."""
        return new_world.for_others(self)

    def enter_world(self, state: State) -> None:
        """See `membership.change.Changing`."""
        new_world.enter(self, state)

    def take_over(self, theirs: State, own: State | None) -> None:
        """See `membership.change.Changing`."""
        new_world.take_over(self, theirs, own)

    def why_not_repeated(self) -> str:
        """See `membership.copying.Repeatable`: anchors and outer momentum move by the frames of rounds alone."""
        return ""

    def keep_journal(self, journal: Journal | None) -> None:
        """See `membership.copying.Repeatable`."""
        self.rounds.journal = journal

    def common(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """See `membership.copying.Repeatable`."""
        return self.buckets[index].common(), None

    def repeat(self, index: int, tensors: Sequence[Tensor], step: State) -> None:
        """See `membership.copying.Repeatable`."""
        share = Share(step["keep"], sends_weights=step["sends_weights"])
        repeat_round(self.buckets[index], self.codec.on_host(), self.options.outer, step["frames"], share, tensors)

    def is_exchanging(self) -> bool:
        """See `membership.copying.Repeatable`."""
        return not all(task.is_ready() for fragment in self.fragments for task in tuple(fragment.tasks))

    # ---------------------------------------------------------------- states

    def state_dict(self) -> State:
        """The inner optimizer's state, and this rank's part of local steps under "onebit". Every rank saves its own.

        Between rounds it contains this rank's parameters. Tensors are not copied, as in torch.

        Raises:
            RuntimeError: A parameter of a group was replaced.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._look_for_edits()
        if self._edit:
            raise RuntimeError(self._edit)
        self.replica.settle()
        found = states.save(self, self.inner.state_dict())
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: State) -> None:
        """Continue exactly where `state_dict` was taken, on the same rank of a world of the same size. All ranks.

        It also sets the parameters to this rank's: load the model before. If the state is another rank's (only rank 0
        has saved), this rank takes its parameters and inner state, with residuals of zero, and logs a warning. A plain
        state of the inner optimizer loads, too: local steps then begin here.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It does not fit. Nothing has changed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        with torch.no_grad():
            states.load(self, state_dict)
            self.replica.show()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def resume(self, record: State) -> None:
        """Restore the position in the run and the counts. Called when a state is loaded.

        Args:
            record: The part of the state under "onebit".
        """
        self._edit = ""
        self.steps, self.stats.interval, self.is_frozen = record["steps"], record["interval"], record["is_frozen"]
        self.stats.rounds, self.stats.missed_rounds, self.stats.skipped_steps = record["counts"]
        self.stats.dropped_states = record.get("dropped_states", 0)  # older states have no such count
        self.traffic.sent_in_run = record["sent_bytes"]
        self.counts_steps = record.get("counts_steps", self.counts_steps)  # older states have no such entries
        if self.balance is not None and "balance" in record:
            self.balance.load_state_dict(record["balance"])
        if isinstance(self.interval, Auto):
            self.interval.chosen = record["chosen"]
        self.replica_check.restart(self.steps)
        self.skip_limit.in_a_row = 0
        self.rounds.stop_looking()
        self.buffers.remember()

    def load_state_dicts(self, state_dicts: Sequence[State]) -> None:
        """Continue from the states of all ranks of a world of any size. All ranks, with the same states.

        In a world of the same size and levels, this rank's own state is loaded exactly. If not, anchors stay, and each
        rank takes the mean of the old ranks' parameters, inner states and residuals.

        Args:
            state_dicts: The states of all ranks, in rank order.
        """
        states.load_of_all_ranks(self, state_dicts)
