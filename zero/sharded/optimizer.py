"""ShardedOnebitOptimizer: the order of a step, for every optimizer that is sharded across the slow network.

A rule (`adam.py`, `lamb.py`, `zero_one_adam.py`) is the step of one bucket: a vote, then the exchange up and down of
`exchange.py`. This file decides when each bucket votes:

    stages 0, 1   step(): one vote on all gradients, then all buckets' steps, a few on the wire at a time
                  with overlap, after the warm-up: frames go up during backward, and the vote comes after them
    stage 2       backward: a bucket with all its gradients begins its step, with a separate vote; the bucket
                  before it goes up, the one before that comes down
                  step(): the other buckets begin their steps; all are finished

A vote is read before its buckets' steps go on; on a GPU later, together with the frames that come down: `votes.py`
casts and reads it.

At every stage parameters move only after the frames of all buckets have come down, and all are finite.

The rest of a step is in `onebit/bucket_optimizer.py`, the layout in `bucket.py`, checkpoints in `state.py`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ...agreement import replicas
from ...bucket_optimizer import BucketOptimizer
from ...comm import Codec, SignCodec, Work
from ...comm.messages import read_together
from ...layout.flat import lay_out
from ...model_parallel import detach_version_
from ...rule import check_blocks
from ...step.bucket_step import BucketStep, Decision, Meeting, OwnersReplied
from ...step.driver import Driver
from ...step.verdict import replies_are_finite
from ...usage.contract import Group, SharedOptions, State, check_is_switch, load_checked
from . import state as shard_state
from .bucket import ShardedBucket
from .early import EarlyFrames
from .exchange import Sharded, ShardedConfig, codec_down
from .health import GradStats, Health
from .masters import TakenMasters
from .rule import ShardedRule
from .stats import ShardStats
from .votes import LeftOut, Votes

if TYPE_CHECKING:
    from typing_extensions import Unpack

WARMUP_STEPS = 64
PATIENCE_S, VAIN_STEPS = 1.0, 3

log = logging.getLogger(__name__)


class ShardedOptions(SharedOptions, total=False):
    """Keyword arguments that every optimizer of the sharded family takes, in addition to those of `SharedOptions`.

    stage: 1: shard masters and variance. 2: also free gradients during backward, bucket by bucket, as soon as they have
    gone into the momentum. Each bucket then has its own vote: all ranks skip a bucket in which a gradient is not
    finite, and no other. Accumulate in `no_sync()`, which keeps gradients whole. Stage 2 refuses max_grad_norm: no
    global norm is known when the first bucket leaves. 0 (only ShardedOnebitAdam): keep parameters whole on every rank,
    and masters too, of those in less than float32. Default 1.
    differences: send differences of parameters down in this format at stages 1 and 2, "int4" (default) or "sign".
    max_grad_norm: clip by an estimate of the global norm (0: off).
    momentum_dtype: keep c in this dtype, torch.bfloat16 (default) or torch.float32.
    block: share one scale among this many elements. Default 256.
    variance_floor, update_limit: bound D from below, see `ShardedOnebitAdam`. Default .01 and 5.
    warmup_steps: send eight bits up in this many steps at the beginning; one bit is then too coarse for a variance of
    few steps, and some runs never recover from it (scripts/records/sharded_2026-11.md). They are counted by bucket: a
    parameter with its first gradient later than others of its bucket has fewer of them, or none. 0: none. Default 64.
    warmup_codec: send gradients up in this format in these steps; `Log4Codec` halves their bytes. None (default):
    send momentum up, in eight bits with error feedback.
    overlap: send frames up during backward, at stages 0 and 1 after the warm-up and without max_grad_norm. They are
    encoded again when the step is known to count, so that nothing is written before. If gradients change before step()
    nevertheless, they are sent once more, and after three such steps in a row nothing is sent during backward any more.
    Default True.
    max_consecutive_skips: raise an error after this many steps in a row in which anything was skipped (0: never).
    """

    stage: int
    differences: str
    block: int
    momentum_dtype: torch.dtype
    variance_floor: float
    update_limit: float
    warmup_steps: int
    warmup_codec: Codec | None
    overlap: bool


class ShardedOnebitOptimizer(BucketOptimizer[ShardedBucket]):
    """Base of the family. All ranks construct it, step, load and add groups together.

    Args:
        params: Parameters or groups, the same on all ranks.
        defaults: Default of each key of a group, as for torch.optim.Optimizer.
        rule: The step of one bucket.
        updates: Format of the updates that come down at stage 0. Default None: there is no such stage.
        stage: See `ShardedOptions`, as for all further options.
        differences: See there.
        block: See there.
        momentum_dtype: See there.
        variance_floor: See there.
        update_limit: See there.
        warmup_steps: See there.
        warmup_codec: See there.
        overlap: See there.
        **shared: See `SharedOptions`.

    Attributes:
        rule: The step of one bucket.
        stats: Facts about the last step.
        overlap: Frames that go up during backward.
        placement: The exchange.
        masters: Whether masters were taken from the parameters.
        grad_stats: Sums of the last step, which the next vote carries.
        health: Whether the data suits the algorithm.
        bounds: The usual norms.
    """

    rule: ShardedRule
    stats: ShardStats
    overlap: EarlyFrames

    def __init__(
        self,
        params: object,
        defaults: dict[str, object],
        rule: ShardedRule,
        *,
        updates: str | None = None,
        stage: int = 1,
        differences: str = "int4",
        block: int = 256,
        momentum_dtype: torch.dtype = torch.bfloat16,
        variance_floor: float = 0.01,
        update_limit: float = 5.0,
        warmup_steps: int = WARMUP_STEPS,
        warmup_codec: Codec | None = None,
        overlap: bool = True,
        **shared: Unpack[SharedOptions],
    ):
        if momentum_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"momentum_dtype must be torch.float32 or torch.bfloat16, got {momentum_dtype!r}")
        codec, down = SignCodec(block=block, scale="mean_abs"), codec_down("differences", differences, block)
        config = ShardedConfig(
            stage=stage,
            codec=codec,
            warmup_codec=warmup_codec if warmup_codec is None else check_blocks(warmup_codec, block),
            warmup_steps=warmup_steps,
            codec_down=codec_down("updates", updates, block) if updates is not None and stage == 0 else down,
            variance_floor=variance_floor,
            update_limit=update_limit,
            keeps_frames=bool(shared.get("max_grad_norm")),
        )
        config.check(type(self).__name__, (1, 2) if updates is None else (0, 1, 2))
        rule.check(type(self).__name__)
        check_is_switch(type(self).__name__, "overlap", overlap)
        super().__init__(None, stage == 2 or overlap, **shared)
        self.rule, self.momentum_dtype, self.placement = rule, momentum_dtype, Sharded(self.transport, config)
        self.rule.bind(self.placement, self.buckets)
        self.masters = TakenMasters(self.transport.rank, self.buckets, are_kept=stage > 0)
        self.grad_stats, self.health = GradStats(), Health()
        self._next_grad_stats = GradStats()  # of the step under way
        self._votes = Votes(rule, self.clipper, self.stats, self.health, self._watch, self.skip_limit)
        self.bounds = self._votes.bounds
        more = 2 * (self.transport.hops - 1)
        phases = more + (1 + rule.works if stage == 2 else 2)
        self._driver: Driver[ShardedBucket] = Driver(self.transport, phases, self._waited, on_comm_stream=False)
        self.overlap = EarlyFrames(self.transport.rank, overlap, self.rule, self.buckets)
        self._launched_scale = 1.0  # of the step under way
        self._was_in_vain, self._vain_steps = False, 0  # waits in backward without an answer, see `_count_vain`
        self._construct(params, defaults)

    def _new_stats(self) -> ShardStats:
        return ShardStats()

    # ---------------------------------------------------------------- groups and buckets

    def _check_group(self, where: str, group: Group) -> None:
        super()._check_group(where, group)
        if group.get("exp_avg_mask") is not None:
            raise ValueError(
                f"{where} has an exp_avg_mask, which {type(self).__name__} does not have; leave it out, or shard "
                "inside the node (onebit.sharding)"
            )

    def _build(self) -> None:
        super()._build()
        self.masters.forget()
        self.overlap.look_ahead()

    def _options(self) -> dict[str, object]:
        return {
            "config": self.placement.config,
            "momentum_dtype": self.momentum_dtype,
            "overlap": self.overlap.is_on,
            **self.rule.options(),
        }

    def begin_group(self, g: int) -> None:
        self.rule.begin_group()

    def new_bucket(self, g: int, members: Sequence[tuple[Tensor, str]], device: torch.device) -> ShardedBucket:
        config, transport = self.placement.config, self.transport
        bucket = ShardedBucket.new(
            len(self.buckets),
            len(self.buckets.params),
            g,
            self.param_groups[g],
            members,
            lay_out([p.shape for p, _ in members], config.codec.block, transport.world_size),
            transport.rank,
            self.momentum_dtype,
            is_warm=config.warmup_steps > 0,
            is_whole=config.stage == 0,
        )
        if self.masters.are_taken:
            self.masters.take_of(bucket)
        self.publish(bucket)
        return bucket

    def states_of(self, bucket: ShardedBucket) -> list[State]:
        return bucket.states()

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Set the masters to the current parameters. All ranks, after the same change of parameters outside step().

        Raises:
            RuntimeError: Called between a backward pass at stage 2 and its step, which has stepped some masters.
        """
        self._check_gradients("adopt_parameters()")
        self.masters.take()

    # ---------------------------------------------------------------- during backward

    @torch.no_grad()
    def on_gradient(self, p: Tensor) -> None:
        """Launch the buckets that are complete with p's new gradient. Called by its hook."""
        if self._is_paused or self._join.is_on:
            return
        if type(p.grad) is not Tensor:
            detach_version_(p.grad)
        if self.placement.config.stage == 2:
            self._leave_freed(p)
        elif self.overlap.count_pass(p, self.buckets.of[p]) and self.overlap.is_possible and self._goes_up_early():
            while (rest := self.buckets[self._driver.launched :]) and self.overlap.is_complete(rest[0]):
                self._launch_early(rest[0], in_backward=True)

    def _goes_up_early(self) -> bool:
        """Whether frames of this step leave before its vote, equal on all ranks. If so, begins the step.

        They do not if a norm is needed first, or if gradients are compared before anything is sent.
        """
        if (
            not self.overlap.has_room
            or self.placement.config.stage == 2
            or self.clipper.max_norm > 0
            or self._reads_at_once()
        ):
            return False
        self._begin()
        return not self.rule.is_silent()

    def _reads_at_once(self) -> bool:
        """Whether votes are read before anything else is sent: in `join`, or if gradients are compared in this step."""
        return self._join.is_on or self._watch.is_on

    def _launch_early(self, bucket: ShardedBucket, *, in_backward: bool = False) -> None:
        self.overlap.note(bucket, in_backward=in_backward)
        self._driver.launch(bucket, self.rule.step_early(bucket, self._unscale()), is_alone=True)

    def _leave_freed(self, p: Tensor) -> None:
        """Stage 2: launch the step of each next bucket that has all its gradients, which frees them."""
        bucket = self.buckets.of[p]
        if p in bucket.ready:
            raise RuntimeError(
                f"rank {self.transport.rank}: a second backward pass before step(); at stage 2 gradients leave in the "
                "first one: run all passes of a step but the last in optimizer.no_sync(), and those that no step "
                "follows (another network's loss, a batch given up), or use stage=1. If another engine "
                "trains this model by now, close the first one: engine.close()"
            )
        bucket.ready.add(p)
        while self._has_caught_up() and (rest := self.buckets[self._driver.launched :]) and rest[0].is_complete:
            if len(rest) == 1 and any(q.requires_grad for q in self.buckets.frozen):
                return  # the last vote includes frozen parameters; their gradients may still come
            if self._driver.launched == 0 and (bucket.index > 0 or self.masters.are_left()):
                return  # parameters may be elsewhere in this pass alone, as in SAM: owners look at them in step()
            self._launch(rest[0], self._launched_scale if self._driver.launched else self._unscale())

    def _has_caught_up(self) -> bool:
        """As `Driver.catch_up`, but wait up to PATIENCE_S: gradients take memory until other ranks have voted on them.

        The wait is bounded, because a peer that lacks a gradient votes only in step(), and may wait for this rank
        before that, in a collective of the user's script.
        """
        patience_s = PATIENCE_S if not self._was_in_vain and self._vain_steps < VAIN_STEPS else 0.0
        has_caught_up = self._driver.catch_up(patience_s)
        self._was_in_vain |= patience_s > 0 and not has_caught_up
        return has_caught_up

    def _count_vain(self) -> None:
        """Count the steps in a row with a wait in vain in backward; from VAIN_STEPS on, no longer wait there."""
        self._vain_steps, self._was_in_vain = self._vain_steps + 1 if self._was_in_vain else 0, False
        if self._vain_steps == VAIN_STEPS:
            log.warning(
                "rank %d: another rank did not send its part within %g s of backward in %d steps in a row, as it lacks "
                "gradients or the network is slow: from here on gradients may take memory until step()",
                self.transport.rank,
                PATIENCE_S,
                VAIN_STEPS,
            )

    def _launch(self, bucket: ShardedBucket, scale: float) -> None:
        """Stage 2: begin the next bucket's step, in bucket order on every rank.

        Each bucket before it enters its next phase, until its frames have come down.
        """
        if self._driver.launched == 0:
            if not self.masters.are_taken:
                self.masters.take()  # owners step on them during backward
            self._begin()
            self._launched_scale = scale
        self._driver.launch(bucket, self._vote_alone(bucket, scale))

    def _prepare_step(self) -> None:
        self._votes.late, self._votes.standing_out = [], set()

    def _vote_alone(self, bucket: ShardedBucket, scale: float) -> BucketStep:
        """The rule's step, with a separate vote on this bucket's gradients, so that it need not wait for the others."""
        step = self.rule.step(bucket, scale)
        next(step)
        decision = yield from self._vote([bucket], scale)
        if decision is None:
            bucket.free_gradients()
            return
        try:
            yield step.send(decision)
        except StopIteration:
            return
        yield from step

    # ---------------------------------------------------------------- step

    def _take_step(self, scale: float) -> Sequence[str] | None:
        self.masters.check()
        if self.placement.config.stage == 2:
            self._step_launched(scale)
        else:
            if self._driver.is_broken:
                self._forget_step()  # it is sent again
            resends = self.overlap.has_changed(scale)
            if not self._goes_up_early() or not self._step_early(scale, resends):
                self._step_whole(scale)
            self._take_grad_stats()
        self.stats.phase = self.rule.after_step()
        self.stats.bounded_steps += self.transport.rank in self._votes.standing_out
        left_out, self._votes.left_out = self._votes.left_out, LeftOut()
        self.stats.is_skipped = left_out.is_any
        self.stats.skipped_steps += left_out.is_any
        return left_out.names if left_out.by_all else None

    def _step_whole(self, scale: float) -> None:
        """Stages 0 and 1: one vote on all buckets, before anything else is sent."""
        if self._driver.launched:
            self._forget_step()  # an exception has ended it between two launches, as Ctrl-C: nothing was written
        self._begin()
        decision = self._waited.wait_for(self._vote(self.buckets, scale))
        self._watch.look(self.buckets.params)
        if decision is None:
            self._driver.skip()
            return
        for bucket in self.buckets:
            self._driver.launch(bucket, self.rule.step(bucket, scale))
        self._commit(decision)

    def _commit(self, decision: Decision) -> None:
        self._driver.commit(decision, self._finish_down)
        self._finish_down([], [])  # a vote on buckets that have sent nothing
        if not (self._votes.left_out.by_all or self.rule.is_silent()):
            self.clipper.remember(self.stats.clip_factor, self.param_groups[0]["betas"][0])

    def _step_early(self, scale: float, resends: bool) -> bool:
        """Take the step, with frames that go up before the vote. False, on all ranks, if it must be taken once more.

        Args:
            scale: Factor of the gradients.
            resends: Whether gradients of this rank changed after they were sent.
        """
        self._votes.resending = ()
        self._launch_rest(scale)
        decision = self._waited.wait_for(self._vote(self.buckets, scale, resends=resends, have_sent=True))
        self._driver.meet()
        if decision is not None:
            self._commit(decision)
        self._count_resent(self._votes.resending)
        is_over = not (self._votes.resending or self._votes.standing_out)
        if decision is None:
            self._driver.skip()
        if not is_over:
            self._driver.begin()  # the same step: the rule has begun it
        return is_over

    def _step_launched(self, scale: float) -> None:
        """Stage 2: launch the buckets that backward has not launched, and finish all of them."""
        if self._driver.launched and scale != self._launched_scale:
            raise RuntimeError("at stage 2 gradients leave during backward: GradScaler's scale is known too late")
        for bucket in self.buckets[self._driver.launched :]:
            self._launch(bucket, scale)
        for bucket in self.buckets:
            bucket.ready.clear()
        self._driver.finish(self._finish_down)
        if self._vain_steps < VAIN_STEPS:
            self._count_vain()
        self._finish_down([], [])  # votes on buckets that have sent nothing
        # Gradients leave before a wrapper averages them: they need not be the same on all ranks.
        self._watch.look(self.buckets.params, in_any_case=self._steps_here == 0 and self.transport.world_size > 1)
        self._take_grad_stats()

    def _finish_down(self, buckets: Sequence[ShardedBucket], meetings: Sequence[Meeting]) -> Sequence[bool]:
        """Return for each bucket whether it moves.

        The same wait for the device also reads late votes and the buckets' `grad_stats`.

        Raises:
            NotFiniteError: A bucket did not come down finite. Raised before any parameter moves.
        """
        replies, late = cast("Sequence[OwnersReplied]", meetings), self._votes.late
        flags = [*replies_are_finite(buckets, replies).values(), *(vote.gate for vote in late)]
        figures = [number for bucket in buckets for number in bucket.grad_stats or ()]
        messages, numbers = read_together(
            [vote.ballot.messages for vote in late], [flag.float() for flag in flags] + figures
        )
        ends = len(flags) - len(late), len(flags)
        skipped = self._votes.take_late(messages, numbers[ends[0] : ends[1]])
        if not all(numbers[: ends[0]]):
            self.placement.refuse_not_finite(buckets, replies)
        rest = iter(numbers[ends[1] :])
        for bucket in buckets:
            if bucket.grad_stats is not None:
                found = GradStats(*itertools.islice(rest, 4))
                self._next_grad_stats += GradStats() if bucket.index in skipped else found
                bucket.grad_stats = None
        return [bucket.index not in skipped for bucket in buckets]

    def _vote(
        self, buckets: Sequence[ShardedBucket], scale: float, *, resends: bool = False, have_sent: bool = False
    ) -> Generator[Work, None, Decision | None]:
        """Vote on these buckets; see `Votes.decide`. resends: as in `_step_early`."""
        header, mine = self._own_vote(buckets, resends=resends, note=self.grad_stats.to_bytes())
        return self._votes.decide(buckets, scale, header, mine, at_once=self._reads_at_once(), have_sent=have_sent)

    def _take_grad_stats(self) -> None:
        """Keep the sums of the buckets that took a step, for the next vote."""
        if not self.rule.is_silent():
            self.grad_stats, self._next_grad_stats = self._next_grad_stats, GradStats()

    def _fill_stats(self) -> None:
        super()._fill_stats()
        stats, health = self.stats, self.health
        stats.health, stats.agreement, stats.offset = health.ratio, health.agreement, health.offset

    def _end_step(self) -> None:
        self.masters.remember(self._steps_here)
        super()._end_step()
        self.overlap.look_ahead()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as in torch.

        Args:
            set_to_none: Whether to drop the tensors, too. Default True.

        Raises:
            RuntimeError: Called between a backward pass at stage 2 and its step: gradients have been sent.
        """
        self._check_gradients("zero_grad()")
        super().zero_grad(set_to_none)

    def _check_gradients(self, what: str) -> None:
        """Raise RuntimeError if backward has begun a step, which has taken gradients: at stage 2."""
        if self.placement.config.stage == 2 and self._driver.launched:
            raise RuntimeError(
                f"rank {self.transport.rank}: {what} between a backward pass and its step: at stage 2 owners have "
                "stepped with its gradients, which are freed; call step() first. Batches that may be given up need "
                "optimizer.no_sync() around their passes until it is decided, or stage=1"
            )

    def _launch_rest(self, scale: float) -> None:
        """Below stage 2: send the frames of the remaining buckets up, before the vote."""
        for bucket in self.buckets[self._driver.launched :]:
            self._launch_early(bucket)

    # ---------------------------------------------------------------- replicas and states

    def steps_taken(self) -> int:
        """Return the largest number of steps that any parameter has taken; in 0/1 Adam with the skipped ones."""
        return self.rule.steps_taken()

    def check_replicas(self) -> None:
        """Vote on the bits of all parameters and whole masters. All ranks. Sends 16 bytes to each peer.

        Raises:
            ReplicaError: They differ between ranks. Raised on all ranks.
        """
        masters = [bucket.masters.flat for bucket in self.buckets if bucket.masters.flat.numel()]
        names = [*self.buckets.names, *(f"masters of bucket {k}" for k in range(len(masters)))]
        replicas.check_replicas(self.transport, [*self.buckets.params, *masters], names, self.steps_taken())

    def state_dict(self) -> State:
        """Return torch's state, and under "onebit" the chunks that this rank owns. Each rank saves and loads its own.

        It does not contain the parameters, which are the replicas: save the model's state as well (any rank's).

        Raises:
            RuntimeError: Called between a backward pass at stage 2 and its step.
        """
        self._check_gradients("state_dict()")
        self._refuse_edits()
        if not self.masters.are_taken:
            self.adopt_parameters()
        return shard_state.save(self, super().state_dict())

    def load_state_dict(self, state_dict: State) -> None:
        """Continue exactly from a state, on the same rank of a world of the same size. All ranks.

        Load the model's parameters as well, before or after.

        Args:
            state_dict: The result of `state_dict` on this rank.

        Raises:
            ValueError: World size, rank, shapes, dtypes or options do not fit. Raised before anything is changed.
            RuntimeError: Called between a backward pass at stage 2 and its step.
        """
        self._check_gradients("load_state_dict()")
        self._drop_step()
        state = load_checked(self, state_dict, lambda state: shard_state.check(self, state))
        shard_state.load(self, state)
        self.overlap.look_ahead()
        self._resume()

    def load_state_dicts(self, states: Sequence[State]) -> None:
        """Continue from the states of all ranks of a world of any size. All ranks.

        In a world of the same size each rank loads its own state, exactly. In another, masters and variances move with
        their elements, and each rank's momentum is the mean of the old ranks': the updates that it will still deliver,
        summed over ranks and times lr/W, do not change. Rank 0 logs that.

        Args:
            states: The states of all ranks, in rank order, the same on all ranks. Items are read one at a time, so the
                sequence may load them on demand.

        Raises:
            ValueError: As `load_state_dict`, or the states are not those of one world.
            RuntimeError: As `load_state_dict`.
        """
        shard_state.load_of_all_ranks(self, states)
