"""CompressedOptimizer: a torch optimizer that does all data-parallel traffic itself, in every phase.

It receives each rank's own gradients; the model is not wrapped. A rule (`rule.py`) defines the step of one bucket; here
the steps of all buckets are begun, decided and committed. One step, top to bottom:

    backward    a bucket whose gradients are complete begins its step while earlier layers still compute
                (`step/overlap.py`)
    step()      the other buckets begin theirs; a vote: whether all ranks are in the same step with the same options,
                which parameters have a gradient anywhere, the global norm; all buckets come to their meeting
                the vote and whether the frames that arrived are finite, read in one wait for the device
                if a gradient has changed since it was sent, on any rank, all buckets begin once more
                a value that is not finite on any rank shows in all ranks' frames: all skip, nothing was written
                all buckets receive the decision, and commit: errors, momentum, variance, parameters

Nothing is written before the decision, so a skipped step leaves no trace. The frame of a step is in
`bucket_optimizer.py`, buckets in `layout/buckets.py`, states and checkpoints in `checkpoint/optimizer_state.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .agreement import replicas
from .agreement.replicas import ReplicaError
from .agreement.step_vote import (
    Ballot,
    HeadersUnderWay,
    StepVote,
    are_beyond_range,
    cast_votes,
    check_headers,
    present_anywhere,
)
from .arithmetic.squares import dot
from .bucket_optimizer import BucketOptimizer
from .checkpoint import new_world, optimizer_state
from .comm import FusedCodec, PeerError, SignCodec, Transport, check_fused
from .comm.transports.notes import calling
from .layout.bucket import Bucket
from .layout.flat import lay_out
from .layout.masks import read_masks
from .membership.change import change
from .membership.members import Members
from .model_parallel import ModelParallelGroup, detach_version_, local
from .rule import Rule
from .step.bucket_step import Arrived, Decision
from .step.clip import MOST_TOO_LARGE, GradientNorm
from .step.delayed import DelayedSteps
from .step.driver import Driver, StepState
from .step.link_probe import CompressionPolicy
from .step.overlap import Overlap
from .step.replicated import Journal, Replicated
from .step.under_way import Lookahead, StepUnderWay, check_delay
from .step.verdict import all_parts_agree, is_good_alone, reads_late, verdicts
from .usage.contract import Group, SharedOptions, State, check_is_switch
from .usage.gradients import gradient_of
from .usage.marks import is_inspected

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)


class CommonOptions(SharedOptions, total=False):
    """Keyword arguments that every optimizer of the family takes, beside those of `SharedOptions`.

    Parameters in bfloat16 or float16 have float32 masters in the state (`layout/masters.py`), 4 bytes per element: the
    steps are those of float32 parameters with the same gradients, to the bit. One rank alone sends nothing and takes
    the same steps: its momentum is rounded to one bit, and its worker and server errors carry over the residuals; so
    the script and its checkpoints are those of several ranks.

    max_grad_norm: exact while gradients are exchanged; otherwise the norm is estimated from each rank's norm and its
        product with the momentum. Buckets leave before it is known, with the average factor of earlier steps; the next
        step makes up for the difference. If the factor was more than twice too large, all are sent once more.
    model_parallel_group: if the parameters are DTensors and each rank of the transport holds the same shard of another
        replica (`onebit.zero.grid`), the transport between the shards of one replica; if others hold other layers, the
        grid's `ModelParallelGroup`. It carries messages about the whole model: 8 to 32 bytes a step to each peer, and
        LAMB's norms.
    codec: format of momentum: its block size and kind of scale.
    error_dtype: torch.bfloat16 halves the worker and server errors.
    compression: "auto" measures the network once, before the first one-bit step; if one bit would gain nothing,
        gradients are sent in bfloat16 from then on, which rank 0 logs. "always" does not measure.
    overlap: send buckets during backward. If gradients change before step() all the same, they are sent once more;
        after three such steps in a row nothing is sent during backward any more.
    delay: of `OnebitAdam` alone. 1: the one-bit exchange of a step runs while the next one computes, at the end of
        which parameters move by it, with the learning rate with which it was sent. A step takes the longer of compute
        and traffic, not their sum, and gradients are those of parameters one step older. Meanwhile parameters look
        ahead, as for Nesterov's gradient: p - lr·β1·m̂/D with the last step's numbers, taken back when the step lands.
        Buckets are sent in step(), whatever `overlap` is. Warm-up and refreshes land the step under way and have no
        delay, nor has any step with freeze_step="auto" while a group has taken fewer than 256. `sync()` lands it before
        an evaluation or an export.
    """

    model_parallel_group: ModelParallelGroup | Transport | None
    codec: FusedCodec | None
    error_dtype: torch.dtype
    compression: str
    overlap: bool
    delay: int


class CompressedOptimizer(BucketOptimizer[Bucket]):
    """Base of the family. All ranks construct, step, load and add groups together.

    Args:
        params: Parameters or groups, the same on all ranks.
        defaults: Defaults of the groups' options.
        rule: The algorithm.
        model_parallel_group: As in `CommonOptions`, like the following. Default None: the model is whole.
        codec: Format of momentum. Default None: `SignCodec()`.
        error_dtype: Dtype of the worker and server errors. Default torch.float32.
        compression: "auto" (default) or "always".
        overlap: Whether to send buckets during backward. Default True.
        delay: 0 (default) or 1.
        **shared: See `SharedOptions`.
    """

    rule: Rule

    def __init__(
        self,
        params: object,
        defaults: dict[str, object],
        rule: Rule,
        *,
        model_parallel_group: ModelParallelGroup | Transport | None = None,
        codec: FusedCodec | None = None,
        error_dtype: torch.dtype = torch.float32,
        compression: str = "auto",
        overlap: bool = True,
        delay: int = 0,
        **shared: Unpack[SharedOptions],
    ):
        rule.check(type(self).__name__)
        check_is_switch(type(self).__name__, "overlap", overlap)
        check_delay(type(self).__name__, rule, delay)
        if error_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"error_dtype must be torch.float32 or torch.bfloat16, got {error_dtype!r}")
        self.rule, self.policy = rule, CompressionPolicy(compression)
        self.codec = SignCodec() if codec is None else check_fused(codec)
        super().__init__(model_parallel_group, True, **shared)
        self.placement = Replicated(self.transport, self.codec, error_dtype)
        self.steps: list[Tensor] = []  # by group
        self._masks: list[dict[Tensor, Tensor] | None] = []  # by group
        self.rule.bind(self.placement, self.buckets, self.policy, self.model_parallel_group, self.steps)
        self.overlap = Overlap(self.transport.rank, overlap)
        self._norm = GradientNorm(self.transport, self.model_parallel_group, self.buckets, self.rule)
        self.policy.bind(
            self.transport, self.codec, self.buckets, self.model_parallel_group, self._traffic, self.computing
        )
        self._may_leave_early = False  # whether the step that has begun lets buckets leave during backward
        self._sent_factor = 1.0  # the clip factor with which buckets leave that do not wait for the norm
        self._driver: Driver[Bucket] = Driver(self.transport, self.placement.hierarchy.phases, self._waited)
        self._roll: HeadersUnderWay | None = None  # headers that were sent and not read
        self.delay = delay
        self.ahead: Lookahead | None = None  # how far parameters may look while a step is under way
        self._delayed = DelayedSteps(self._driver, self.buckets, self.rule, self.placement, self.computing)
        self._construct(params, defaults)

    @property
    def max_grad_norm(self) -> float:
        """The norm to which mean gradients are clipped; 0: off. All ranks set it, at the same step.

        A new value takes effect in the step under way.

        Raises:
            RuntimeError: It is set for the first time after backward has sent gradients that should have waited for the
                norm, as those of 0/1 Adam do after local steps.
            ValueError: It is negative, or not a number.
        """
        return self.clipper.max_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float) -> None:
        if not norm >= 0:
            raise ValueError(f"max_grad_norm must be at least 0 (0: off), got {norm}")
        before, self.clipper.max_norm = self.clipper.max_norm, norm
        if self._driver.launched and self._clips_before_sending:
            self.clipper.max_norm = before
            raise RuntimeError(
                f"rank {self.transport.rank}: max_grad_norm={norm} comes after a backward pass has sent gradients that "
                "should have waited for the norm; construct the optimizer with it, or set it between a step and the "
                "next backward pass"
            )

    # ---------------------------------------------------------------- groups and buckets

    def add_param_group(self, param_group: Group) -> None:
        """As `BucketOptimizer.add_param_group`. The group warms up for as many steps as the first groups did."""
        super().add_param_group(param_group)

    def _build(self) -> None:
        self.sync()
        self._drop_step()
        super()._build()

    def _options(self) -> dict[str, object]:
        return {
            "codec": self.codec,
            "error_dtype": self.placement.error_dtype,
            "overlap": self.overlap.is_on,
            "compression": self.policy.mode,
            "delay": self.delay,
            **self.rule.options(),
        }

    def begin_group(self, g: int) -> None:
        """Read the group's masks and make its count of steps. Called by `Buckets`."""
        self._masks.append(read_masks(self.transport.rank, g, self.param_groups[g], self.buckets.named(g)))
        self.steps.append(torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        self.rule.begin_group()

    def read_masks(self) -> None:
        """Take over the groups' current "exp_avg_mask". Raises ValueError if one does not fit."""
        rank, groups = self.transport.rank, enumerate(self.param_groups)
        self._masks = [read_masks(rank, g, group, self.buckets.named(g)) for g, group in groups]
        for bucket in self.buckets:
            bucket.masks = self._masks_of(bucket.group_index, bucket.params)

    def _masks_of(self, g: int, params: Sequence[Tensor]) -> list[Tensor] | None:
        masks = self._masks[g]
        return None if masks is None else [masks[p] for p in params]

    def new_bucket(self, g: int, members: Sequence[tuple[Tensor, str]], device: torch.device) -> Bucket:
        """Make a bucket of these parameters of group g, in warm-up. Called by `Buckets`.

        Args:
            g: Index of the group.
            members: (parameter, name) pairs.
            device: Device of the parameters.
        """
        params, names = [p for p, _ in members], [name for _, name in members]
        layout = lay_out([local(p).shape for p in params], self.codec.block, self.transport.world_size)
        bucket = Bucket(
            index=len(self.buckets),
            first=len(self.buckets.params),
            rank=self.transport.rank,
            hierarchy=self.placement.hierarchy,
            group_index=g,
            group=self.param_groups[g],
            device=device,
            params=params,
            names=names,
            layout=layout,
            counts=layout.counts(device),
            share_K=tuple(1.0 / self.model_parallel_group.copies(p) for p in params),
            steps=self.steps[g],
            masks=self._masks_of(g, params),
        )
        self.rule.allocate(bucket, "warmup")
        self.publish(bucket)
        return bucket

    def states_of(self, bucket: Bucket) -> list[State]:
        """As `BucketOptimizer.states_of`."""
        return [{"step": bucket.steps, **state} for state in bucket.states()]

    def relay(self) -> None:
        """Lay all buckets out for the transport's current ranks. The caller then allocates their flat state anew."""
        self.placement.hierarchy.count()
        for bucket in self.buckets:
            layout = lay_out(bucket.layout.shapes, self.codec.block, self.transport.world_size)
            bucket.relay(layout, self.transport.rank)

    def buffer_bytes(self) -> int:
        """Bytes of the buffers of buckets and wires on this rank, which correspond to DDP's buckets."""
        tensors = [tensor for bucket in self.buckets for tensor in bucket.buffers()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    # ---------------------------------------------------------------- backward: complete buckets begin their step

    def on_gradient(self, p: Tensor) -> None:
        """Send the buckets that are complete. Called by p's hook when its gradient has just been accumulated."""
        if type(p.grad) is not Tensor:
            detach_version_(p.grad)
        if self._driver.state is StepState.SUSPENDED:
            self._delayed.advance()
        if self._is_paused:
            return
        is_complete = self.overlap.count_pass(p, self.buckets.of[p])
        # A hook has work if a bucket is complete, or if data of other ranks may have arrived meanwhile.
        if not (is_complete or self._driver.due or self._roll is not None) or not self.overlap.is_possible:
            return
        if self._join.is_on or self._driver.state is StepState.SUSPENDED:
            return
        self._begin()
        if not self._may_leave_early or self._clips_before_sending:
            return
        with torch.no_grad(), self.computing.paused():
            while self._driver.catch_up() and (bucket := self._next_complete()) is not None:
                if not self._all_begin(is_awaited=False):
                    return
                self._launch(bucket, self._sent_factor, in_backward=True)

    def _prepare_step(self) -> None:
        self._may_leave_early = not (self._is_delayed or self.rule.is_silent() or self.rule.waits_for_backward)
        # Also without max_grad_norm, which may be set later in this step: begun in step(), it sends the same.
        is_early = self._exchanges_momentum and not (self._is_delayed or self.rule.clips_apart)
        self._sent_factor = self.clipper.expected if is_early else 1.0
        is_summed = is_early and self._estimates_norm and self.model_parallel_group.whole.world_size == 1
        self.placement.sums_gradients = is_summed
        self._forget_sums()
        self._begun_by = self._sends_by()

    def _sends_by(self) -> list[object]:
        """The values of the options on which what is sent depends."""
        values = [group[name] for group in self.buckets.groups for name in self.rule.sends_by]
        return [tuple(value) if isinstance(value, Sequence) else float(value) for value in values]

    def _begins_anew(self) -> bool:
        """Take over options that were set since the step began. Whether gradients have been sent by those before."""
        if self._driver.state is StepState.IDLE or self._sends_by() == self._begun_by:
            return False
        self.rule.begin_again()
        if self._driver.launched:
            self.overlap.warn_of_options(self.rule.sends_by)
        return self._driver.launched > 0

    @property
    def _is_delayed(self) -> bool:
        """Whether the step that has begun lands in the next one."""
        return self.delay > 0 and self.rule.is_delayed()

    def _forget_sums(self) -> None:
        for bucket in self.buckets:
            bucket.sums_WJ2 = None

    def _next_complete(self) -> Bucket | None:
        """The next bucket to send, if all of its gradients are complete."""
        rest = self.buckets[self._driver.launched :]
        return rest[0] if rest and self.overlap.is_complete(rest[0]) else None

    def _launch(self, bucket: Bucket, scale: float = 1.0, *, in_backward: bool = False) -> None:
        """Begin the step of the next bucket, with its gradients times scale, even if a gradient is missing here."""
        self.overlap.mark_sent(bucket, in_backward=in_backward)
        self._driver.launch(bucket, self.rule.step(bucket, scale), is_alone=self._is_delayed)

    def _launch_rest(self, scale: float) -> None:
        self._all_begin(is_awaited=True)
        rest = self.buckets[self._driver.launched :]
        with nullcontext() if self._is_delayed else self._driver.sending(rest):
            for bucket in rest:
                self._launch(bucket, scale)

    def _all_begin(self, *, is_awaited: bool) -> bool:
        """Whether the first bucket may be sent: if the rule asks first, after all ranks' headers have arrived.

        Args:
            is_awaited: Whether to wait for them.

        Raises:
            DesyncError: The ranks are in different steps, or use different options.
        """
        if self._driver.launched or not self.rule.asks_first or self.rule.is_silent():
            return True
        if self._roll is None:
            with self._driver.channel():
                header = self._header(self.rule.round_name())
                self._roll = HeadersUnderWay.launch(self.transport, header, self.buckets[0].device)
        if not is_awaited and not self._roll.is_ready():
            return False
        with self._waited.running():
            headers = self._roll.read()
        if not is_awaited and any(header.edit for header in headers):
            return False  # step() raises the error on all ranks
        roll, self._roll = self._roll, None
        check_headers(self.transport, roll.mine, headers, self.buckets[0].device)
        return True

    # ---------------------------------------------------------------- step

    def _take_step(self, scale: float) -> Sequence[str] | None:
        return self._take_step_once(scale) if self._members is None else self._take_step_of(self._members, scale)

    def _take_step_once(self, scale: float) -> Sequence[str] | None:
        if self._driver.is_broken and not self.delay:
            self._forget_step()  # it is sent again
        self._settle_masters()
        is_first, landed = self._delayed.step is None, self._land()
        try:
            resends = self.overlap.has_changed(scale) | self._begins_anew()
            self._begin()
            ballot = None if self.rule.is_silent() else self._send(scale, resends)
        finally:
            if self.delay:
                self._delayed.follow()  # after the launches, so that the network need not wait for it
        if self.rule.is_silent():
            decision: Decision | None = self._decide_alone(scale)
        else:
            if ballot is not None and self._is_delayed:
                if self._members is not None:
                    if is_first and not ballot.votes:
                        self._read(ballot)  # a member that is lost must leave no other one two steps ahead of the rest
                    self._members.is_due(False)  # nothing of the step is read here: the ranks of a node go on together
                self._delayed.leave(ballot, self.stats.clip_factor, self.ahead)
                self.stats.phase = self.rule.round_name()
                return landed
            decision = None if ballot is None else self._decide(ballot, scale)
        if decision is None:
            return [*(landed or ()), *self._skip()]
        self._commit(decision, self.stats.clip_factor)
        return landed

    def _send(self, scale: float, resends: bool) -> Ballot | None:
        """Launch the remaining buckets, and the vote. None, on all ranks, if a norm is not finite on any.

        The vote comes after the last launch, or before the first if that clips by it: at the same place in every
        rank's sequence of operations.

        Args:
            scale: Factor of the gradients.
            resends: Whether gradients of this rank have changed since they were sent.
        """
        ballot = None
        if self._clips_before_sending:
            ballot = self._cast(scale, resends=resends)
            self._read(ballot)
            self._sent_factor = self.stats.clip_factor = self._factor_by(ballot, scale)
            if not math.isfinite(self._sent_factor):
                return None
        self._launch_rest(scale * self._sent_factor)
        return self._cast(scale, resends=resends) if ballot is None else ballot

    def _factor_by(self, ballot: Ballot, scale: float) -> float:
        """The clip factor that the votes ask for, the same on all ranks. They vote once more beyond float32's range."""
        if are_beyond_range(ballot.votes):  # the same votes on all ranks
            ballot = self._cast(scale, in_float64=True)
            ballot.read()
        return self.clipper.estimated_factor(ballot.votes, self.transport.world_size)

    def _decide(self, ballot: Ballot, scale: float) -> Decision | None:
        """Bring all buckets to their meeting, and decide. None, on all ranks, if anything is not finite on any.

        Args:
            ballot: The vote on the step.
            scale: Factor of the gradients, apart from clipping.
        """
        arrived, is_good_here = self._wait_for_buckets(ballot)
        votes, factor = ballot.votes, self._sent_factor
        resending = [rank for rank, vote in enumerate(votes) if vote.summary.resends]
        if not self._clips_before_sending:
            factor = self._factor_by(ballot, scale) if self._estimates_norm else 1.0
            if not math.isfinite(factor):
                return None
        is_too_large = self._sent_factor > MOST_TOO_LARGE * factor
        if resending or is_too_large:
            if is_too_large:  # else with the same factor: the result is that of overlap=False
                self._sent_factor = factor
            self._driver.resend()
            self._launch_rest(scale * self._sent_factor)
            arrived, is_good_here = self._wait_for_buckets(ballot)
        self._count_resent(resending)
        if not all_parts_agree(self.model_parallel_group, ballot, is_good_here, self.buckets):
            return None
        if self.clipper.max_norm > 0 and not self._estimates_norm:
            factor = self.clipper.factor(self._norm.of_means([meeting.mean_gradient for meeting in arrived]))
        self.stats.clip_factor = factor
        return Decision(present_anywhere(votes), factor / self._sent_factor)

    def _wait_for_buckets(self, ballot: Ballot) -> tuple[Sequence[Arrived], bool]:
        """The meetings of all buckets, and whether their contents are good on this rank. Reads the ballot."""
        if not ballot.votes and not reads_late(self.transport, ballot.device):
            self._read(ballot)
        arrived = self._driver.meet()
        flags = verdicts(self.buckets, arrived, has_means=self.clipper.max_norm == 0)
        return arrived, self._read(ballot, flags)

    def _decide_alone(self, scale: float) -> Decision:
        """Decide a step without traffic, not even a vote.

        If gradients are not finite, they count as zero, in this replica alone.
        """
        if self._estimates_norm:
            vote = StepVote(self._header(self.rule.round_name()).summary(), (), *self._norm.own_sums(scale))
            self.stats.clip_factor = self.clipper.estimated_factor([vote], self.transport.world_size)
        self._launch_rest(scale * self.stats.clip_factor)
        is_finite = math.isfinite(self.stats.clip_factor) and is_good_alone(self._driver.meet())
        seen = [gradient_of(p) is not None for p in self.buckets.params]
        if self.model_parallel_group.agree(is_finite):
            return Decision(seen)
        self.clipper.norm = None
        self._report_bad_gradients(self._bad(), "it counts as zero")
        self.stats.clip_factor = 1.0
        return Decision(seen, grads_nonfinite=True)

    def _commit(self, decision: Decision, clip_factor: float) -> None:
        self.rule.prepare_commit(decision)
        self.clipper.remember(clip_factor, self.buckets.groups[0]["betas"][0])
        for count in self.steps:
            count += 1
        self._driver.commit(decision, self.rule.meet)
        if decision.moves:
            self._write_masters(decision)
        self.stats.phase = self.rule.after_step()
        if self.delay:
            self.ahead = Lookahead([self.rule.ahead(bucket) for bucket in self.buckets], decision.seen)

    # ---------------------------------------------------------------- the step under way, with delay=1

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The step that was sent and has not landed; None if there is none. See `delay`."""
        return self._delayed.step

    def sync(self) -> None:
        """Land the step under way (`delay=1`), so that parameters contain every step that was taken. All ranks.

        Call it at the same step on all ranks: before an evaluation or an export, and at the end of a run. The next step
        is as if it had no delay. Does nothing if no step is under way. Raises as `step`.
        """
        if self._delayed.step is None:
            return
        # At a change a member in sync() meets others that are in step(), which has no name.
        name = "optimizer.sync()" if self._members is None else ""
        with torch.no_grad(), calling(name), self.computing.paused():
            bad = self._land_now() if self._members is None else self._land_among(self._members)
        self.skip_limit.observe(bad is not None, bad or (), self.transport, self.model_parallel_group.whole)

    def _land_now(self) -> list[str] | None:
        """End the step under way, before another one is sent."""
        self._settle_masters()
        bad = self._land()
        self._delayed.follow()
        return bad

    def _land_among(self, members: Members) -> list[str] | None:
        """`_land_now` among members that come and go: if one is lost, the step is sent again, or taken over."""
        why, self._lost = self._lost, None
        while True:
            try:
                if why is not None:
                    self._change_is_due = False  # newcomers come in with this one
                    change(self, members, why)
                return self._land_now()
            except PeerError as error:
                why = error

    def _land(self) -> list[str] | None:
        """End the step under way, as `_take_step` would have ended it; parameters have yet to follow."""
        if self._delayed.step is None:
            return None
        spoilt = self._delayed.land(self._is_good, self._commit)
        return None if spoilt is None else self._report_bad_gradients(spoilt, "all ranks skip the step before this one")

    def _is_good(self, ballot: Ballot) -> bool:
        _, is_good_here = self._wait_for_buckets(ballot)
        return all_parts_agree(self.model_parallel_group, ballot, is_good_here, self.buckets)

    def _any_rank_has_data(self) -> bool:
        self._delayed.advance_all()  # here, in one order on all ranks: a rank that has finished runs no hooks
        return super()._any_rank_has_data()

    def send_again(self, record: State) -> None:
        """Launch a step that was under way when its state was saved. All ranks.

        The rest of the state must have been loaded.

        Args:
            record: The saved step.
        """
        with self._traffic.left_out():
            self._delayed.send_again(record, self.ahead)

    # ---------------------------------------------------------------- committed, given up

    def _settle_masters(self) -> None:
        looks = is_inspected(self._steps_here)
        for bucket in self.buckets:
            bucket.masters.check(self.transport.rank, bucket.names)
            if bucket.masters.has_any:
                bucket.masters.settle(looks=looks)

    def _write_masters(self, decision: Decision) -> None:
        for bucket in self.buckets:
            if bucket.masters.has_any:
                bucket.masters.write_back(decision.of(bucket))

    def _take_extra_step(self) -> None:
        """Take a step that the rule has begun besides the training's: it is not counted, and is never skipped."""
        self._driver.begin()
        try:
            self._settle_masters()
            self._launch_rest(1.0)
            header = self._header(self.rule.round_name())
            mine = StepVote(header.summary(), self.rule.present(self.buckets.params))
            decision = Decision(present_anywhere(cast_votes(self.transport, header, mine, self.buckets[0].device)))
            self._driver.meet()
            self.rule.prepare_commit(decision)
            self._driver.commit(decision, self.rule.meet)
            self._write_masters(decision)
            self.rule.after_step()
        finally:
            self._driver.skip()
            self._end_step()

    def _skip(self) -> list[str]:
        self._driver.skip()
        self.clipper.norm = None
        return self._report_bad_gradients(self._bad(), "all ranks skip the step")

    def _bad(self) -> list[str]:
        return [name for bucket in self.buckets for name in bucket.bad()]

    def _report_bad_gradients(self, mine: list[str], consequence: str) -> list[str]:
        """Count a skipped step, and warn of this rank's parameters with bad gradients; returns these."""
        self.stats.skipped_steps += 1
        rank, step = self.transport.rank, self.steps_taken() + 1
        self.skip_limit.tell(rank, step, mine, consequence, tells_of_others=not self.rule.is_silent())
        return mine

    def _drop_step(self) -> None:
        """As `BucketOptimizer._drop_step`; also drops the step that is suspended."""
        self._delayed.drop()
        if self._roll is not None:  # the other ranks expect the buckets that follow it
            self._launch_rest(1.0)
        super()._drop_step()

    # ---------------------------------------------------------------- what the ranks agree on

    def _cast(self, scale: float, *, resends: bool = False, in_float64: bool = False) -> Ballot:
        """Send this rank's vote. The sums for clipping are computed on the device, unless in_float64."""
        note = b"" if self._members is None else self._members.note(self.buckets)
        (header, mine), sums = self._own_vote(self.buckets, resends=resends, note=note), None
        if self._estimates_norm:
            if in_float64 or self.model_parallel_group.whole.world_size > 1:
                norm_squared, product = self._norm.own_sums(scale)
                mine = replace(mine, norm_squared=norm_squared, product=product)
            else:
                if resends:  # what was encoded has changed
                    self._forget_sums()
                sums = self._norm.own_sums_on_device(scale)
        with self._waited.running():
            return Ballot.cast(self.transport, header, mine, self.buckets[0].device, sums)

    def _read(self, ballot: Ballot, flags: Mapping[torch.device, Tensor] | None = None) -> bool:
        """As `Ballot.read`."""
        is_news = not ballot.votes
        with self._waited.running():
            are_true = ballot.read(flags)
        if is_news:
            self._change_is_due |= any(vote.summary.changes for vote in ballot.votes)
            if self._members is not None:
                self._members.hear([vote.note for vote in ballot.votes], self.buckets)
        if is_news and self._watch.is_on:
            self._watch.note([vote.summary.gradients for vote in ballot.votes])
            self._watch.look(self.buckets.params)
        return are_true

    @property
    def _estimates_norm(self) -> bool:
        # While gradients are exchanged, the mean gradient is known afterwards. If momentum is exchanged instead, each
        # rank must clip before its error is added, by an estimate of the same norm.
        return self.clipper.max_norm > 0 and self._exchanges_momentum

    @property
    def _exchanges_momentum(self) -> bool:
        return not all(map(self.rule.averages_gradients, self.buckets))

    @property
    def _clips_before_sending(self) -> bool:
        # A suspended step cannot be corrected: its gradients are gone. Ranks that clip apart expect different factors.
        return self._estimates_norm and (self._is_delayed or self.rule.clips_apart)

    def steps_taken(self) -> int:
        """Number of steps that the first group has taken."""
        return int(self.steps[0]) if self.steps else 0

    def check_replicas(self) -> None:
        """Compare the bits of parameters, moments or D, and packed momentum. All ranks. Sends 16 bytes per peer.

        Tensor ranks compare the elements that all of them hold: see `ModelParallelGroup.find_divergence`. If a member
        is lost meanwhile, nothing is compared, with a warning.

        Raises:
            ReplicaError: They differ. On all ranks.
        """
        if self._members is None:
            return self._compare_replicas()
        self._lost = self._members.attempt("check_replicas()", self.progress(), self._compare_replicas) or self._lost

    def _compare_replicas(self) -> None:
        names, step = self.buckets.names, self.steps_taken()
        diverged = self.model_parallel_group.find_divergence(self.buckets.params, names)
        state = [pair for bucket in self.buckets for pair in bucket.replicated()]
        tensors = [local(p) for p in self.buckets.params] + [tensor for _, tensor in state]
        names = names + [name for name, _ in state]

        def check() -> None:
            replicas.check_replicas(self.transport, tensors, names, step)
            if diverged:
                raise ReplicaError(
                    f"rank {self.transport.rank}: after step {step} {diverged}; resume from a checkpoint"
                )

        self.model_parallel_group.raise_on_all_ranks(ReplicaError, check)

    @torch.no_grad()
    def error_norm_ratio(self) -> float:
        """‖worker error‖ / ‖result of an exchange‖ on this rank: the relative size of the residual. Sends nothing.

        0 in warm-up. In a hierarchy, over the rows that this rank exchanges.
        """
        carried = brought = 0.0
        for bucket in self.buckets:
            if bucket.ef is not None:
                average = bucket.spread(bucket.own_rows(self.rule.last_average(bucket)))
                carried += sum(dot(e, e) for e in bucket.layout.views(bucket.spread(bucket.ef.worker.float())))
                brought += sum(dot(x, x) for x in bucket.layout.views(average))
        return math.sqrt(carried / brought) if brought > 0 else 0.0

    # ---------------------------------------------------------------- members that come and go

    def _why_members_stay(self) -> str:
        assert self._members is not None
        return self._members.why_not_parts(self.model_parallel_group) or self.rule.why_members_stay()

    def _take_step_of(self, members: Members, scale: float) -> Sequence[str] | None:
        """`_take_step_once` among members that come and go: if one is lost, the remaining ones take the step again.

        If the others have taken this step, and this rank was cut off before it could, it takes over their state.
        """
        if members.roster is None:
            raise RuntimeError(
                f"{members.rendezvous.name} is in no run yet: call onebit.membership.begin(optimizer) before step()"
            )
        skipped = self.stats.skipped_steps
        while True:
            (why, self._lost), steps = (self._lost, None), -1
            try:
                if why is None:
                    self._change_is_due = members.is_due(self._change_is_due)
                if why is not None or self._change_is_due:
                    if why is None:
                        self._land_now()  # newcomers would have no gradients in it
                    self._change_is_due = False
                    if change(self, members, why).took_step:
                        # The state that was taken over counts this step, and step() counts it again: this member
                        # would compare replicas one step before the others.
                        self.replica_check.counted -= 1
                        return None if self.stats.skipped_steps == skipped else []
                steps = self.progress()[0]
                return self._take_step_once(scale * members.gradient_factor)
            except PeerError as error:
                self._lost = error
                if 0 <= steps < self.progress()[0]:
                    # Taken and written, or skipped; the members meet before the next one.
                    return None if self.stats.skipped_steps == skipped else []

    def why_not_repeated(self) -> str:
        """See `membership.copying.Repeatable`."""
        if self.policy.compresses is False or any(bucket.ef is None for bucket in self.buckets):
            return "its steps exchange gradients"
        if any(bucket.masks is not None for bucket in self.buckets):
            return "masks fix some elements, so that steps do not apply frames as they are"
        return ""

    def keep_journal(self, journal: Journal | None) -> None:
        """See `membership.copying.Repeatable`."""
        self.placement.journal = journal

    def common(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """See `membership.copying.Repeatable`."""
        bucket = self.buckets[index]
        flats = [bucket.flat[name] for name in self.rule.common if name in bucket.flat]
        return [*bucket.local_values, *(view for flat in flats for view in bucket.layout.views(flat))], bucket.frames

    def repeat(self, index: int, tensors: Sequence[Tensor], step: State) -> None:
        """See `membership.copying.Repeatable`."""
        self.placement.repeat(self.buckets[index], tensors, step)

    def is_exchanging(self) -> bool:
        """See `membership.copying.Repeatable`."""
        return self._driver.is_exchanging()

    @property
    def forgotten(self) -> State | None:
        """The step under way if a change of members has ended it, until it is sent again. See `delay`."""
        return self._delayed.forgotten

    @forgotten.setter
    def forgotten(self, record: State | None) -> None:
        self._delayed.forgotten = record

    def progress(self) -> tuple[int, ...]:
        """See `membership.change.Changing`. A step under way counts: all gradients of this rank are in it.

        A step that all skip counts too: for the program it is over, and its schedule has moved on.
        """
        landed, is_under_way = self.steps_taken(), self._delayed.step is not None or self.forgotten is not None
        over = landed + is_under_way + self.stats.skipped_steps
        return over, landed, int(self.policy.compresses is not None)

    def end_interrupted_step(self) -> None:
        """See `membership.change.Changing`."""
        self.rule.end_interrupted_step()
        if self.forgotten is not None and self._members is not None:
            self._delayed.send_forgotten(self.forgotten, self.ahead, self._members.note(self.buckets))

    def leave_world(self) -> State:
        """See `membership.change.Changing`."""
        assert self._members is not None
        if self.delay and self._members.sampler is not None and self._members.sampler.balanced:
            raise ValueError(
                f"{self._members.rendezvous.name}: a step under way that is sent again keeps the shares with which it "
                "was sent, which may no longer be those of a balanced MemberSampler; use delay=0, or balanced=False"
            )
        has_begun = self._driver.state is not StepState.IDLE
        sent = [has_begun and not self.rule.averages_gradients(bucket) for bucket in self.buckets]
        self._forget_step()
        return new_world.leave(self, sent)

    def for_others(self, state: State) -> State:
        """See `membership.change.Changing`."""
        return new_world.for_others(self, state)

    def enter_world(self, state: State) -> None:
        """See `membership.change.Changing`."""
        new_world.enter(self, state)
        self._resume()

    def take_over(self, theirs: State, own: State | None) -> None:
        """See `membership.change.Changing`."""
        assert self._members is not None
        if own is None:
            self.zero_grad()  # gradients of parameters that the run has left behind count as none
        new_world.take_over(self, theirs, own, self._unscale() * self._members.gradient_factor)
        self._resume()

    def _forget_step(self) -> None:
        self._delayed.forget()
        super()._forget_step()
        self._roll = None

    # ---------------------------------------------------------------- states

    def state_dict(self) -> State:
        """The state as torch's, with this rank's share of the compression under "onebit". Every rank saves its own.

        Worker errors are among the entries of the parameters, as "worker_error"; in a hierarchy they are zero for
        elements that another rank of the node exchanges.

        Raises:
            RuntimeError: Parameters were replaced in the groups, or tensors in the state.
        """
        self._refuse_edits()
        return optimizer_state.save(self, super().state_dict())

    def load_state_dict(self, state_dict: State) -> None:
        """Continue exactly where `state_dict` was taken, on the same rank of a world of the same size. All ranks.

        From another rank's state (as when only rank 0 has saved), this rank takes momentum and variance, in a world of
        any size, with residuals of zero, and logs a warning. The state of a torch.optim.AdamW is taken as the state of
        a warm-up. An "exp_avg_mask" stays as it was given here.

        Args:
            state_dict: From `state_dict()`, or of a torch.optim.AdamW.

        Raises:
            ValueError: Shards of the model, levels, shapes, dtypes or options do not fit. Nothing has changed.
        """
        saved = optimizer_state.check_and_load_groups(self, state_dict)
        self._drop_step()
        optimizer_state.restore(self, saved)
        self._resume()
        if self.buckets:
            self.stats.phase = self.buckets[0].phase

    def load_state_dicts(self, states: Sequence[State]) -> None:
        """Continue from the states of all ranks of a world of any size. All ranks, with the same states.

        In a world of the same size and levels, this rank's own state is loaded exactly. If not, each rank takes the
        mean of the old ranks' residuals, which keeps their sum, and rank 0 logs that. Between synchronisations of 0/1
        Adam parameters are part of the state: they become the mean of the old ranks' as well.

        Args:
            states: The states of all ranks, in rank order. The sequence may load an item when it is asked for.

        Raises:
            ValueError: As `load_state_dict`, or the states are not those of one world.
        """
        optimizer_state.load_of_all_ranks(self, states)
