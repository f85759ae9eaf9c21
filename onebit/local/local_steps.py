"""LocalSteps: any torch optimizer on each rank by itself, and every so many steps one round in one bit.

    optimizer = onebit.LocalSteps(torch.optim.AdamW(model.parameters(), lr=1e-3), every=32)

One step, top to bottom:

    step()   inside a node gradients are averaged, where the transport knows nodes
             the inner optimizer's step; a gradient that is not finite freezes this rank until the next round
             fragments that have arrived land: errors, anchor, parameters
             fragments that are due: a vote, and they are sent
             now and then a vote on the anchors' bits

Replicas differ between rounds on purpose: what they agree on is the anchor. The recursion of one bucket is in
`fragment.py`, when rounds are in `intervals.py`, states in `state.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from .. import comm
from ..agreement import replicas
from ..agreement.replicas import ReplicaCheck
from ..agreement.skips import MOST_SKIPS, SkipLimit
from ..agreement.wrappers import NOT_COMPARED, are_alike, gradient_digest, refuse_wrapper, warn_of_averaging
from ..comm import Codec, ErrorFeedback, ExchangeTask, Hierarchy, SignCodec, Transport
from ..dense import DenseAverager
from ..layout.buckets import Buckets, elements_of
from ..layout.flat import lay_out
from ..layout.masters import Masters
from ..model_parallel import ModelParallelGroup, local, model_parallel_group_of
from ..step.link_probe import StopWatch, measure
from ..step.stats import Traffic, WaitClock
from ..usage.buffers import persistent_buffers, sync_tensors
from ..usage.contract import State, check_number, loss_of
from ..usage.frozen import gradient_of, refuse_unfrozen
from . import state as states
from .fragment import Fragment, LocalBucket, OuterStep, Share, divide, is_lossless
from .intervals import MEASURED_STEPS, Auto, Every, interval_of
from .round_vote import RoundVote, cast_votes, weights_of
from .stats import LocalStats
from .wrapped import Wrapped, are_finite, check_group, check_inner, kept_by_decay

log = logging.getLogger(__name__)


class LocalSteps(Wrapped):
    """Wraps an optimizer; param_groups and state are that one's. All ranks construct, step, load and save together.

    inner: any torch optimizer that steps without a closure; weight decay as its groups say. It works on float32 masters
    of parameters in bfloat16 or float16, which follow each step, rounded; what others write into them is taken over.
    every: local steps between rounds: a number; {first step: number}; a `QSR`, from the learning rate; "auto" or an
    `Auto`, from the measured network. start_steps, start_every: rounds at most so far apart in the first so many steps.
    outer_lr, outer_momentum: η and μ (Nesterov's, as DiLoCo's: .7 and .9). error_decay: ρ. codec: what differences
    travel in; `IdentityCodec()`: in full. fragments: parts of the model that travel in turn, H/fragments steps apart;
    delay: land so many steps after they were sent, while training goes on. model: whose persistent buffers are averaged
    in each round; None: each rank keeps its own. transport: default `onebit.comm.init()`; of two levels: gradients are
    averaged inside a node in every step, and differences travel between nodes. An exchange under delay needs a process
    group of its own: give a transport that nobody else uses. model_parallel_group, bucket_cap_mb, error_dtype,
    check_replicas_every (steps; the anchors are compared in the first round after them): see `CommonOptions`.
    max_consecutive_skips: so many rounds in a row in which no rank had a finite difference are an error.

    Sends 2·(n-1)/n frames of the model each round, and 44 bytes to each peer: 2.125/H·(n-1)/n bits per parameter and
    step. Keeps 4 (anchor) + 4 (worker error) + 8/n (server error) bytes per parameter, 4 more with outer momentum, and
    4 with a master.
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
        model: nn.Module | None = None,
        transport: Transport | None = None,
        model_parallel_group: ModelParallelGroup | Transport | None = None,
        bucket_cap_mb: float = 16.0,
        error_dtype: torch.dtype = torch.float32,
        check_replicas_every: int = 100,
        max_consecutive_skips: int = MOST_SKIPS,
    ):
        check_inner(inner)
        self.outer = OuterStep(outer_lr, outer_momentum, error_decay)
        self.interval = interval_of(every)
        if start_steps < 0 or start_every < 1:
            raise ValueError(f"start_steps must be at least 0 and start_every 1, got {start_steps}, {start_every}")
        if fragments < 1 or delay < 0 or check_replicas_every < 0:
            raise ValueError(
                "fragments must be at least 1, delay and check_replicas_every at least 0, got "
                f"{fragments}, {delay}, {check_replicas_every}"
            )
        smallest = min(self.interval.smallest, start_every if start_steps else math.inf)
        if delay >= smallest:
            raise ValueError(
                f"a round every {smallest} steps cannot land delay={delay} steps after it was sent; lower delay, or "
                "raise every (its least interval, and start_every)"
            )
        if error_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"error_dtype must be torch.float32 or torch.bfloat16, got {error_dtype}")
        super().__init__(inner)
        self.codec: Codec = SignCodec() if codec is None else codec
        self.start_steps, self.start_every, self.delay = start_steps, start_every, delay
        self.error_dtype, self.model = error_dtype, model
        self.replica_check, self.skip_limit = ReplicaCheck(check_replicas_every), SkipLimit(max_consecutive_skips)
        self.transport = comm.init() if transport is None else transport
        comm.check_transport(self.transport)
        self.hierarchy = Hierarchy.of(self.transport)
        self.model_parallel_group = model_parallel_group_of(model_parallel_group)
        self._most_fragments = fragments
        self.buckets: Buckets[LocalBucket] = Buckets(
            self, self.transport, self.model_parallel_group, elements_of(bucket_cap_mb), hooks=False
        )
        self.fragments: list[Fragment] = []
        self.steps = 0
        self.is_away = False
        self.stats = LocalStats()
        self._traffic, self._waited, self._computing = Traffic(self.transport), WaitClock(), StopWatch()
        self.sent_in_run = self._inter_node_before = 0
        self.is_frozen = self._is_finished = self._has_looked = False
        self._first_gradients = NOT_COMPARED
        self._finite_buffers: dict[str, Tensor] = {}
        self._averager: DenseAverager | None = None
        self.build()

    # ---------------------------------------------------------------- construction

    @torch.no_grad()
    def build(self) -> None:
        """The buckets and fragments of groups that are new. All ranks."""
        for g, group in enumerate(self.param_groups):
            check_group(g, group)
        known = len(self.buckets)
        self.buckets.build()
        if known:
            self._land_all()
            self._show()
            self.fragments[-1].buckets += self.buckets[known:]
        else:
            interval = self.stats.interval = self._next_interval()
            shares = divide(self.buckets, self._most_fragments)
            P = len(shares)
            if self._most_fragments > P and self.buckets:
                raise ValueError(
                    f"rank {self.transport.rank}: fragments={self._most_fragments}, but the parameters make "
                    f"{len(self.buckets)} buckets: give fewer, or a smaller bucket_cap_mb"
                )
            self.fragments = [Fragment(k, buckets, -(-interval * (k + 1) // P)) for k, buckets in enumerate(shares)]
        for fragment in self.fragments:
            fragment.keeps += [1.0] * (len(self.param_groups) - len(fragment.keeps))
            fragment.decays += [True] * (len(fragment.params) - len(fragment.decays))
        if self.hierarchy.intra_node is not None:
            self._averager = DenseAverager(self.buckets.params, self.hierarchy.intra_node)
        if self.inner.state and any(bucket.masters for bucket in self.buckets[known:]):
            self.load_inner(self.inner.state_dict())  # what it has of these parameters becomes float32
        if not known and self.model is not None:
            self._average_buffers()
        self._traffic.begin()

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        options = {
            "inner": type(self.inner).__name__,
            "every": self.interval,
            "start": (self.start_steps, self.start_every),
            "outer": self.outer,
            "codec": self.codec,
            "fragments": self._most_fragments,
            "delay": self.delay,
            "averages buffers": self.model is not None,
            "error_dtype": self.error_dtype,
            "bucket_elements": self.buckets.elements,
            "check_replicas_every": self.replica_check.every,
            "max_consecutive_skips": self.skip_limit.most,
        }
        return [f"option {name} = {value}" for name, value in options.items()]

    def begin_group(self, g: int) -> None:
        """Called by `Buckets`. Nothing is kept of a group before its buckets."""

    def new_bucket(self, g: int, members: Sequence[tuple[Tensor, str]], device: torch.device) -> LocalBucket:
        """Called by `Buckets`: a bucket of these parameters of group g, whose anchor is what they are now."""
        params = [p for p, _ in members]
        layout = lay_out([local(p).shape for p in params], self.codec.block, self.transport.world_size)
        worker, server = (
            torch.zeros(n, dtype=self.error_dtype, device=device)
            for n in (layout.numel // self.hierarchy.local_size, layout.chunk)
        )
        anchor = torch.zeros(layout.numel, device=device)
        bucket = LocalBucket(
            index=len(self.buckets),
            first=len(self.buckets.params),
            rank=self.transport.rank,
            hierarchy=self.hierarchy,
            group_index=g,
            device=device,
            params=params,
            names=[name for _, name in members],
            masters=Masters(params),
            layout=layout,
            counts=layout.counts(device),
            anchor=anchor,
            ef=ErrorFeedback(worker, server, worker.new_empty(0), torch.zeros_like(server)),
            velocity=torch.zeros_like(anchor) if self.outer.momentum > 0.0 else None,
        )
        bucket.anchor.copy_(bucket.flatten())
        return bucket

    def publish(self, bucket: LocalBucket) -> None:
        """Called by `Buckets`' users; optimizer.state is the inner optimizer's, and shows nothing of ours."""

    def on_gradient(self, p: Tensor) -> None:
        """Called by hooks, of which there are none."""

    def state_bytes(self) -> int:
        """Bytes that are kept beside the inner optimizer's state, on this rank."""
        return sum(bucket.state_bytes() for bucket in self.buckets)

    # ---------------------------------------------------------------- step

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here only accumulate. Needed where a node averages gradients; elsewhere without effect."""
        return nullcontext() if self._averager is None else self._averager.no_sync()

    def add_tokens(self, count: float) -> None:
        """Count what this rank trains on: differences weigh by it in the next round. Any unit; all ranks, or none."""
        check_number(f"rank {self.transport.rank}: add_tokens", "count", count)
        for fragment in self.fragments:
            fragment.tokens += float(count)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The inner optimizer's step; where a round is due, all ranks' exchange. All ranks, equally often.

        A step whose gradients are not finite is left out. Under GradScaler that is all; otherwise this rank stays where
        it is until the next round, in which its difference is owed and not counted. Raises PeerError if a peer is lost,
        DesyncError if the ranks' rounds or schedules differ, ReplicaError if anchors are no longer identical.
        """
        self._computing.stop()
        loss = loss_of(closure)
        self._begin_counting()
        self.stats.phase = "local"
        names = list(self.buckets.frozen.values())
        refuse_unfrozen(self.transport.rank, names, [[gradient_of(p) is not None for p in self.buckets.frozen]])
        self._settle()
        self._note_first_gradients()
        if self._averager is not None:
            self._waited.total_s += 1e-3 * self._averager.finish()
        self._take_inner_step()
        self.steps += 1
        self._communicate()
        self._show()
        self._fill_stats()
        self._computing.start()
        return loss

    def _settle(self) -> None:
        """Masters take what others have written into parameters. RuntimeError where one has another dtype now."""
        for bucket in self.buckets:
            bucket.masters.check(self.transport.rank, bucket.names)
            bucket.masters.settle()

    def _show(self) -> None:
        """Parameters follow their masters."""
        for bucket in self.buckets:
            bucket.masters.write_back()

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        with ExitStack() as stack:
            for bucket in self.buckets:
                stack.enter_context(bucket.masters.standing_in())
            yield

    def load_inner(self, state: State) -> None:
        """The inner optimizer takes this state, in float32 where its parameters have masters."""
        with self._on_masters():
            self.inner.load_state_dict(state)

    def _note_first_gradients(self) -> None:
        """In the first step: where all ranks have the same gradients, somebody has averaged them."""
        if self._has_looked or self.steps > 0 or self.transport.world_size == 1:
            return
        dense = [[g for g in bucket.gradients() if g is not None and not g.is_sparse] for bucket in self.buckets]
        self._first_gradients = gradient_digest(dense)

    def _take_inner_step(self) -> None:
        scaler_scale = getattr(self, "grad_scale", None)
        scale = 1.0 / float(scaler_scale or 1.0)
        grads = [grad for p in self.buckets.params if (grad := gradient_of(p)) is not None]
        is_good, was_frozen = self.model_parallel_group.agree(are_finite(grads)), self.is_frozen
        if is_good and not was_frozen:
            if scale != 1.0:
                torch._foreach_mul_([local(grad) for grad in grads], scale)
            with self._on_masters():
                self.inner.step()
        else:
            self.stats.skipped_steps += 1
            if not is_good and scaler_scale is None and getattr(self, "found_inf", None) is None:
                self.is_frozen = True
        kept = [kept_by_decay(group) for group in self.param_groups]
        if not is_good or was_frozen:
            self._decay_alone(kept)  # as the others' parameters, and the anchor
        for fragment in self.fragments:
            fragment.keeps = [before * keep for before, keep in zip(fragment.keeps, kept, strict=True)]
            has_gradient = [gradient_of(p) is not None for p in fragment.params]
            fragment.decays = [before and now for before, now in zip(fragment.decays, has_gradient, strict=True)]

    def _decay_alone(self, kept: Sequence[float]) -> None:
        for bucket in self.buckets:
            for p, w in zip(bucket.params, bucket.held, strict=True):
                if gradient_of(p) is not None:
                    w.mul_(kept[bucket.group_index])

    def _communicate(self) -> None:
        for fragment in self.fragments:
            if fragment.lands_at is not None:
                self._bring_home(fragment)
        for fragment in self.fragments:
            if fragment.due == self.steps:
                self._round(fragment)

    def _bring_home(self, fragment: Fragment) -> None:
        """An exchange under way: to its second phase half-way, to its end when it is to land."""
        assert fragment.lands_at is not None
        assert fragment.sent_at is not None
        if self.steps >= fragment.lands_at:
            self._land(fragment)
        elif self.steps == fragment.sent_at + self._half_way:
            with self._waited.running():
                for task in fragment.tasks:
                    task.advance()

    @property
    def _half_way(self) -> int:
        return (self.delay + 1) // 2

    def is_past_first_phase(self, fragment: Fragment) -> bool:
        """Whether the second phase of what is under way has been launched."""
        return fragment.sent_at is not None and self.steps >= fragment.sent_at + self._half_way

    def _round(self, fragment: Fragment) -> bool:
        """A vote, and the fragment is sent; without delay it lands too. All ranks.

        False: all had finished (`join`), and this was the last round.
        """
        device = self.buckets[0].device if self.buckets else torch.device("cpu")
        spoilt = self._restore_spoilt(fragment)
        mine = self._vote(fragment, is_whole=not spoilt)
        with self._waited.running():
            votes = cast_votes(self.transport, mine, device)
        self._look_for_wrappers([vote.gradients for vote in votes])
        goes_on = not all(vote.is_finished for vote in votes)
        active = [vote for vote in votes if not vote.is_finished or not goes_on]
        shown = max(active, key=lambda vote: vote.step)  # all of them are in one step, but where all have finished
        self.steps, interval = shown.step, shown.interval
        if isinstance(self.interval, Auto) and self.interval.chosen is None and self.steps >= MEASURED_STEPS:
            self._ask_network(self.interval)
            interval = self._next_interval()
        self._send(fragment, mine, votes, shown.keeps, spoilt)
        fragment.due = self.steps + interval
        self.stats.rounds += 1
        self.stats.missed_rounds += not mine.is_present
        self.stats.shadow_rounds += mine.is_finished and goes_on
        self.stats.interval, self.is_frozen = interval, False
        self.skip_limit.observe(not any(vote.is_present for vote in votes), (), self.transport)
        if fragment.index == 0 and self.model is not None:
            self._average_buffers()
        self.replica_check.counted = self.steps - 1
        if self.replica_check.is_due(are_synchronised=fragment.index == 0):
            self.check_replicas()
        return goes_on

    def _vote(self, fragment: Fragment, *, is_whole: bool) -> RoundVote:
        parts = self.model_parallel_group
        is_present = parts.agree(is_whole and not (self.is_frozen or self.is_away))
        owes = is_lossless(self.codec) and any(bucket.owes() for bucket in fragment.buckets)
        (tokens,) = parts.total(fragment.tokens)
        return RoundVote(
            self.steps,
            self._next_interval(),
            is_present,
            self._is_finished,
            owes,
            tokens,
            self._first_gradients,
            tuple(fragment.keeps),
            tuple(fragment.decays),
        )

    def _next_interval(self) -> int:
        rates = [float(group["lr"]) for group in self.param_groups]
        interval = self.interval.steps(self.steps, max(rates, default=0.0))
        return min(interval, self.start_every) if self.steps < self.start_steps else interval

    def _restore_spoilt(self, fragment: Fragment) -> list[LocalBucket]:
        """Where parameters are not finite, return to the anchor, and begin their inner state anew. Those buckets."""
        spoilt = [bucket for bucket in fragment.buckets if not bucket.can_travel()]
        for bucket in spoilt:
            bucket.return_to_anchor()
            for p in bucket.params:
                self.inner.state.pop(p, None)
            log.warning(
                "rank %d: parameters were not finite after step %d (%s and its bucket): this rank goes on from the "
                "anchor, with a new state of the inner optimizer for them; look at the data and the loss here",
                self.transport.rank,
                self.steps,
                bucket.names[0],
            )
        return spoilt

    def _send(
        self,
        fragment: Fragment,
        mine: RoundVote,
        votes: Sequence[RoundVote],
        keeps: Sequence[float],
        spoilt: Sequence[LocalBucket],
    ) -> None:
        """keeps: those that hold for all ranks. spoilt: buckets that are at the anchor of the last round."""
        L = self.hierarchy.local_size
        nodes = [votes[first : first + L] for first in range(0, len(votes), L)]
        weights = weights_of([sum(vote.tokens for vote in node) for node in nodes])
        node = self.hierarchy.inter_node.rank
        self.stats.weight = weights[node]
        is_plain = self.outer.is_plain and is_lossless(self.codec) and set(weights) == {1.0}
        sends_weights = is_plain and all(vote.is_present and not vote.owes for vote in votes)
        is_present = all(vote.is_present for vote in nodes[node])
        decays = [all(column) for column in zip(*(vote.decays for vote in votes), strict=True)]
        fragment.shares, first = [], 0
        for bucket in fragment.buckets:
            keep, own = keeps[bucket.group_index], 1.0 if bucket in spoilt else mine.keeps[bucket.group_index]
            its, first = decays[first : first + len(bucket.params)], first + len(bucket.params)
            for w, decayed in zip(bucket.held, its, strict=True):
                if decayed and own != keep:  # of steps that this rank did not take
                    w.mul_(keep / own)
            keep_K = tuple(keep if decayed else 1.0 for decayed in its)
            fragment.shares.append(Share(keep_K, weights[node], is_present, sends_weights))
        fragment.begin(self.steps)
        self.stats.phase, is_delayed = "round", self.delay > 0
        exchanges = (
            bucket.send(self.codec, self.transport, share, keeps_weights=is_delayed)
            for bucket, share in zip(fragment.buckets, fragment.shares, strict=True)
        )
        if is_delayed:
            fragment.lands_at, fragment.tasks = self.steps + self.delay, [ExchangeTask(each) for each in exchanges]
            return
        with self._waited.running():
            comm.interleave(exchanges, lambda k: fragment.buckets[k].land(self.codec, self.outer, fragment.shares[k]))
        fragment.sent_at, fragment.synced_at = None, self.steps

    def _land(self, fragment: Fragment) -> None:
        """Bring an exchange under way to its end."""
        with self._waited.running():
            comm.wait_all(fragment.tasks)
        for bucket, share in zip(fragment.buckets, fragment.shares, strict=True):
            bucket.land(self.codec, self.outer, share)
        fragment.tasks, fragment.sent_at, fragment.lands_at = [], None, None
        self.stats.phase = "round"

    def _land_all(self) -> None:
        for fragment in self.fragments:
            if fragment.is_under_way:
                self._land(fragment)

    def _begin_counting(self) -> None:
        """What is sent between steps is somebody else's; but inside a node gradients leave during backward."""
        self._waited.total_s, self._inter_node_before = 0.0, self.transport.sent_bytes_inter_node
        if self._averager is None:
            self._traffic.begin()

    def _fill_stats(self) -> None:
        sent, _ = self._traffic.take()
        inter_node = self.transport.sent_bytes_inter_node - self._inter_node_before
        elements = max(sum(bucket.layout.parameter_numel for bucket in self.buckets), 1)
        self.sent_in_run += inter_node
        self.stats.sent_bytes, self.stats.sent_bytes_inter_node = sent, inter_node
        self.stats.bits_per_parameter = 8.0 * inter_node / elements
        self.stats.mean_bits_per_parameter = 8.0 * self.sent_in_run / elements / max(self.steps, 1)
        self.stats.comm_ms = 1e3 * self._waited.total_s

    # ---------------------------------------------------------------- what the ranks agree on

    def sync(self) -> None:
        """A round of all fragments now, whatever was due: all ranks hold the same parameters. All ranks, alike.

        Before a model is saved alone, or at the end of a run. Nothing is sent where nothing has moved since the last.
        """
        with torch.no_grad():
            self._begin_counting()
            self._settle()
            self._land_all()
            if self.is_at_anchor():
                self._show()
                return
            delay, self.delay = self.delay, 0
            try:
                for fragment in self.fragments:
                    self._round(fragment)
            finally:
                self.delay = delay
            P = len(self.fragments)
            for k, fragment in enumerate(self.fragments):
                fragment.due = self.steps - (-self.stats.interval * (k + 1) // P)
            self._show()
            self._fill_stats()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """The anchors become the parameters as they are: others' weights, alike on all ranks. Nothing is owed then.

        All ranks, between a round and the next step: behind `sync`, or before the first step.
        """
        self._settle()
        for bucket in self.buckets:
            bucket.anchor.copy_(bucket.flatten())
            bucket.ef.worker.zero_()
            bucket.ef.server.zero_()
            if bucket.velocity is not None:
                bucket.velocity.zero_()

    def is_at_anchor(self) -> bool:
        """Whether no step was taken since all parameters were the anchors. The same on all ranks."""
        return all(not fragment.is_under_way and fragment.synced_at == self.steps for fragment in self.fragments)

    @contextmanager
    def anchors(self) -> Iterator[None]:
        """In here the parameters are the anchors, which are the same on all ranks: for an evaluation. Sends nothing."""
        with torch.no_grad():
            self._settle()
            kept = [[w.clone() for w in bucket.held] for bucket in self.buckets]
            for bucket in self.buckets:
                bucket.return_to_anchor()
            self._show()
        try:
            yield
        finally:
            with torch.no_grad():
                for bucket, weights in zip(self.buckets, kept, strict=True):
                    torch._foreach_copy_(bucket.held, weights)
                self._show()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Rounds in here go without this rank's difference, which it owes: the others need not wait for its steps.

        It takes part in the traffic all the same, and goes on from each new anchor.
        """
        self.is_away, before = True, self.is_away
        try:
            yield
        finally:
            self.is_away = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop over batches of which ranks may have different numbers. All ranks. As torch's Join.

        A rank that is through takes part in the others' rounds: in the first with what it has left, then with nothing.
        The last round is when all are through: behind it all ranks hold the same parameters.
        """
        self._is_finished = False
        if len(self.fragments) > 1 or self.delay:
            raise RuntimeError(
                f"rank {self.transport.rank}: join() is for one fragment without delay; with several, give all ranks "
                "equally many batches"
            )
        try:
            yield
            self._is_finished = True
            with torch.no_grad():
                self._begin_counting()
                self._settle()
                while self._round(self.fragments[0]):
                    pass
                self._show()
                self._fill_stats()
        finally:
            self._is_finished = False

    def check_replicas(self) -> None:
        """Vote on the anchors' bits. All ranks; ReplicaError on all where they differ."""
        anchors = [bucket.anchor for bucket in self.buckets]
        names = [f"the anchor of {bucket.names[0]} and its bucket" for bucket in self.buckets]
        with self._waited.running():
            replicas.check_replicas(self.transport, anchors, names, self.steps)

    def _look_for_wrappers(self, digests: Sequence[bytes]) -> None:
        if not self._has_looked:
            self._has_looked, self._first_gradients = True, NOT_COMPARED
            if are_alike(digests):
                refuse_wrapper(self.transport, self.buckets.params)
                warn_of_averaging(self.transport)

    def _ask_network(self, auto: Auto) -> None:
        """Measure a round and choose H; the same on all ranks."""
        if not self.hierarchy.inter_node.has_network:
            auto.chosen = auto.most
            return
        numels, before = [bucket.layout.numel for bucket in self.buckets], self.transport.sent_bytes_inter_node
        with self._traffic.left_out(), self._computing.paused():
            compute_s, device = self._computing.median_s(), self.buckets[0].device
            mine = measure(self.transport, compute_s, numels, self.codec, self.codec, device)
            every = self.model_parallel_group.gather(mine.compute_s, mine.onebit_s)
        self._inter_node_before += self.transport.sent_bytes_inter_node - before
        slowest_s, exchange_s = (max(column) for column in zip(*every, strict=True))
        auto.decide(slowest_s, exchange_s)
        if self.transport.rank == 0:
            log.info(
                "a step computes %.3g s and a round takes %.3g s: a round every %s steps",
                slowest_s, exchange_s, auto.chosen,
            )  # fmt: skip

    # ---------------------------------------------------------------- buffers

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """Those of the model that rounds average."""
        return [] if self.model is None else list(persistent_buffers(self.model))

    def _average_buffers(self) -> None:
        """Those of the model become their mean over ranks. One that is not finite here counts as it last was."""
        named = self.named_buffers()
        for name, buffer in named:
            if name in self._finite_buffers and not bool(torch.isfinite(local(buffer)).all()):
                local(buffer).copy_(self._finite_buffers[name])
        with self._waited.running():
            sync_tensors(named, self.transport)
        self._finite_buffers = {name: local(buffer).detach().clone() for name, buffer in named}

    # ---------------------------------------------------------------- states

    def state_dict(self) -> State:
        """The inner optimizer's, and this rank's share of local steps under "onebit": each saves and loads its own.

        Between rounds this rank's parameters are a part of it. Tensors are the living ones, as in torch.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._settle()
        found = states.save(self, self.inner.state_dict())
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, found) or found
        return found

    def load_state_dict(self, state_dict: State) -> None:
        """Continue exactly where `state_dict` was taken, on the same rank of a world of the same size. All ranks.

        Sets the parameters, to this rank's own: load the model before. The inner optimizer's own state is taken too:
        then local steps begin here. Raises ValueError, before anything is changed, where it does not fit.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        with torch.no_grad():
            states.load(self, state_dict)
            self._show()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def resume(self, record: State) -> None:
        """Called when a state is loaded: the place in the run, and what is counted from there."""
        self.steps, self.stats.interval, self.is_frozen = record["steps"], record["interval"], record["is_frozen"]
        self.stats.rounds, self.stats.missed_rounds, self.stats.skipped_steps = record["counts"]
        self.sent_in_run = record["sent_bytes"]
        if isinstance(self.interval, Auto):
            self.interval.chosen = record["chosen"]
        self.replica_check.restart(self.steps)
        self.skip_limit.in_a_row = 0
        self._has_looked, self._first_gradients = True, NOT_COMPARED
        self._finite_buffers = {name: local(buffer).detach().clone() for name, buffer in self.named_buffers()}

    def load_state_dicts(self, state_dicts: Sequence[State]) -> None:
        """Continue from the states of all ranks of a world of any size, in rank order. All ranks, all the states.

        In a world of the same size and levels, this rank's own is loaded, exactly. Otherwise anchors stay, and each
        rank takes the mean of the others' parameters, inner states and errors, which keeps the sum of what is owed.
        """
        states.load_of_all_ranks(self, state_dicts)
