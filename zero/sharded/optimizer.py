"""ShardedOnebitOptimizer: a step, as every optimizer that is sharded across the slow network takes it.

A leaf (`adam.py`, `lamb.py`, `zero_one_adam.py`) says what its owners make of what comes up, and in which steps
anything does. Here is the sequence; one bucket's part in it is in `exchange.py`, the arithmetic in `arithmetic.py`,
where things lie in `bucket.py`, what the ranks agree on in `vote.py`, construction and checkpoints in `base.py` and
`state.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ... import comm
from ...agreement.join import Join
from ...agreement.replicas import ReplicaCheck
from ...agreement.skips import MOST_SKIPS, SkipLimit
from ...agreement.step_vote import Header, StepVote, check_headers, gather_headers, present_anywhere
from ...agreement.wrappers import (
    COMPARED_STEPS,
    NOT_COMPARED,
    are_alike,
    gradient_digest,
    refuse_wrapper,
    warn_of_averaging,
)
from ...comm import Codec, Exchange, ExchangeTask, Int4Codec, Int8Codec, SignCodec, Transport, Work
from ...usage.contract import TorchOptions, check_arguments, check_number
from ...usage.frozen import gradient_of, refuse_unfrozen
from ...usage.marks import GradientMark, are_used_again
from . import vote as shard_vote
from .base import ShardedOptimizer
from .bucket import ShardedBucket
from .exchange import ShardedConfig, Step, send_down, send_up

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

WARMUP_STEPS = 64

T = TypeVar("T")


@dataclass
class ShardStats:
    """What the last step did. Bytes: payload this rank sent to others, without headers; bits: of it, across nodes.

    phase: "warmup", "compressed", or "local" where a step sends nothing. is_skipped: whether any bucket was
    skipped; below stage 2, all of them. grad_norm: see `onebit.step.stats.Stats`. skipped_steps: how often, so far.
    shadow_steps: see `join`. health, agreement, offset: see `shard_vote.Health`; of the last step that sent
    something but one.
    """

    phase: str = "warmup"
    sent_bytes: int = 0
    sent_bytes_inter_node: int = 0
    bits_per_parameter: float = 0.0
    comm_ms: float = 0.0
    skipped_steps: int = 0
    shadow_steps: int = 0
    is_skipped: bool = False
    clip_factor: float = 1.0
    grad_norm: float | None = None
    health: float = 0.0
    agreement: float = 0.0
    offset: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What the vote says of some buckets. seen: by parameter of each bucket, whether any rank has a gradient for it."""

    seen: list[list[bool]]
    clip_factor: float


class ShardedOptions(TorchOptions, total=False):
    """Keyword arguments that every optimizer of the sharded family takes, beside those of `TorchOptions`.

    stage: 1: masters and variance sharded. 2: also, gradients are freed during backward, bucket by bucket, as soon as
    they have gone into the momentum. Then the vote is one per bucket: a bucket in which a gradient is not finite is
    skipped by all ranks, the others are not. Accumulate in `no_sync()`, where gradients stay whole. Stage 2 refuses
    max_grad_norm: no global norm is known when the first bucket leaves. 0 (ShardedOnebitAdam alone): parameters whole
    on every rank, no masters.
    differences: what comes down at stages 1 and 2, "int4" or "sign". max_grad_norm: clip by an estimate of the global
    norm (0: off). transport: the transport; default `onebit.comm.init()`. momentum_dtype: of c. block: elements per
    scale. variance_floor, update_limit: see D in `ShardedOnebitAdam`. warmup_steps: how many steps at the beginning
    send eight bits up; one bit then is too coarse for a variance that is still young, and some runs never make it up
    (scripts/records/sharded_2026-11.md). 0: none. bucket_cap_mb: float32 MiB of a bucket. check_replicas_every: steps,
    taken or skipped, between votes on the replicas' bits (0: never). max_consecutive_skips: so many steps in a row of
    which anything was skipped are an error (0: never).
    """

    stage: int
    differences: str
    max_grad_norm: float
    transport: Transport | None
    block: int
    momentum_dtype: torch.dtype
    variance_floor: float
    update_limit: float
    warmup_steps: int
    bucket_cap_mb: float
    check_replicas_every: int
    max_consecutive_skips: int


@dataclass
class LeftOut:
    """What of the step under way was left out, as not finite: by all ranks, or by this one alone; names: of its own."""

    names: list[str] = field(default_factory=list)
    is_any: bool = False
    by_all: bool = False


class ShardedOnebitOptimizer(ShardedOptimizer):
    """Base of the family; arguments: see `ShardedOptions`. All ranks construct, step, load and add groups together.

    updates: what comes down at stage 0; None: there is no such stage.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: object,
        defaults: dict[str, object],
        *,
        updates: str | None = None,
        stage: int = 1,
        differences: str = "int4",
        max_grad_norm: float = 0.0,
        transport: Transport | None = None,
        block: int = 256,
        momentum_dtype: torch.dtype = torch.bfloat16,
        variance_floor: float = 0.01,
        update_limit: float = 5.0,
        warmup_steps: int = WARMUP_STEPS,
        bucket_cap_mb: float = 16.0,
        check_replicas_every: int = 100,
        max_consecutive_skips: int = MOST_SKIPS,
        **torchs: Unpack[TorchOptions],
    ):
        check_arguments(type(self).__name__, torchs)
        check_number(type(self).__name__, "variance_floor", variance_floor)
        if not update_limit > 0:
            raise ValueError(f"update_limit must be above 0, got {update_limit}")
        if check_replicas_every < 0 or warmup_steps < 0:
            raise ValueError(
                "check_replicas_every and warmup_steps must be at least 0 (0: off, none), got "
                f"{check_replicas_every}, {warmup_steps}"
            )
        stages = (1, 2) if updates is None else (0, 1, 2)
        if stage not in stages:
            raise ValueError(
                f"stage must be one of {stages} for {type(self).__name__}, got {stage}; stage 3 needs a fast axis "
                "inside the node"
            )
        if stage == 2 and max_grad_norm > 0:
            raise ValueError(
                "stage 2 frees gradients before their global norm is known; use stage=1 with max_grad_norm, or clip "
                "nothing (no element moves more than update_limit·lr in a step)"
            )
        self.replica_check = ReplicaCheck(check_replicas_every)
        self.stats = ShardStats()
        self._is_alike = self._is_warned_of_averaging = False
        self._left_out, self._skips = LeftOut(), SkipLimit(max_consecutive_skips)
        self._is_paused = False
        self._join = Join()
        self._used: list[GradientMark] = []  # the gradients of the last step
        self._launched, self._launched_scale = 0, 1.0
        self._waited_s = 0.0
        codec = SignCodec(block=block, scale="mean_abs")
        codec_down = _codec_down("differences", differences, block)
        if updates is not None and stage == 0:
            codec_down = _codec_down("updates", updates, block)
        super().__init__(
            params,
            defaults,
            config=ShardedConfig(
                stage=stage,
                codec=codec,
                warmup_codec=Int8Codec(block),
                warmup_steps=warmup_steps,
                codec_down=codec_down,
                variance_floor=variance_floor,
                update_limit=update_limit,
                keeps_frames=max_grad_norm > 0,
            ),
            max_grad_norm=max_grad_norm,
            transport=transport,
            momentum_dtype=momentum_dtype,
            bucket_cap_mb=bucket_cap_mb,
        )

    def option_lines(self) -> list[str]:
        limits = {"check_replicas_every": self.replica_check.every, "max_consecutive_skips": self._skips.most}
        return [*super().option_lines(), *(f"option {name} = {value}" for name, value in limits.items())]

    # ---------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update from this rank's gradients; all ranks. See the class for the sequence.

        Raises PeerError if a peer is lost, DesyncError if the ranks are not in the same step with the same options,
        SkippedStepsError if too many steps in a row were skipped, and ReplicaError if the replicas are no longer
        identical; state and parameters are then to be taken from a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.buckets:
            self._join.is_finished = False  # no rank has any
            present = [[gradient_of(p) is not None for p in self.buckets.frozen]]
            refuse_unfrozen(self.transport.rank, list(self.buckets.frozen.values()), present)
            return loss
        self._waited_s, self.stats.clip_factor, self._clip.norm = 0.0, 1.0, None
        if self._join.is_on and not self._anybody_goes_on():
            return loss
        self._check_masters()
        if self._config.stage == 2:
            self._finish_launched()
        else:
            self._step_whole()
        self._after_step()
        self._remember_parameters()
        self._used = [GradientMark.of(p) for p in self.buckets.params]
        left_out, self._left_out = self._left_out, LeftOut()
        self.stats.is_skipped = left_out.is_any
        self._skipped_steps += left_out.is_any
        self._fill_stats()
        if self.replica_check.is_due(are_synchronised=self._is_sending()):
            self.check_replicas()
        self._skips.observe(left_out.by_all, left_out.names, self.transport)
        return loss

    def _is_sending(self) -> bool:
        """Whether the ranks hear of each other in this step."""
        return True

    def _step_whole(self) -> None:
        """Stages 0 and 1: one vote on all gradients, then every bucket's exchange, a few on the wire at a time."""
        scale = self._unscale()
        verdict = _finish(self._timed(self._vote(self.buckets, scale)))
        self._look_for_averaging()
        if verdict is None:
            self._grad_stats = shard_vote.GradStats()
            return
        self.stats.clip_factor = verdict.clip_factor
        self._clip.remember(verdict.clip_factor, self.param_groups[0]["betas"][0])
        pairs = zip(self.buckets, verdict.seen, strict=True)
        comm.interleave(
            self._timed(self._exchange(bucket, seen, scale * verdict.clip_factor))
            for bucket, seen in pairs
            if any(seen)
        )
        self._take_grad_stats()

    def _look_for_averaging(self) -> None:
        """Refuse a wrapper that averages gradients as well, warn of what looks like one. All ranks, behind a vote.

        At stage 2 gradients leave before a wrapper averages them, so that it is looked for in any case, in the first
        step.
        """
        if self._is_alike or (self._config.stage == 2 and self._steps_here == 0 and self.transport.world_size > 1):
            refuse_wrapper(self.transport, self.buckets.params)
        if self._is_alike and not self._is_warned_of_averaging:
            self._is_warned_of_averaging = True
            warn_of_averaging(self.transport)
        self._is_alike = False

    def _unscale(self) -> float:
        """What gradients are to be multiplied by: GradScaler sets grad_scale."""
        return 1.0 / float(getattr(self, "grad_scale", None) or 1.0)

    def _vote(self, buckets: Sequence[ShardedBucket], scale: float) -> Generator[Work, None, Verdict | None]:
        """Ask all ranks about the gradients of these buckets. None, on all ranks, where any is not finite."""
        vote = self._my_vote(buckets, scale)
        votes, tallies = yield from shard_vote.gather_votes(
            self.transport, self._header(), vote, self._grad_stats, buckets[0].device
        )
        trained = sum(len(bucket.params) for bucket in buckets)
        if buckets[-1] is self.buckets[-1]:
            unfrozen = [each.present[trained:] for each in votes]
            refuse_unfrozen(self.transport.rank, list(self.buckets.frozen.values()), unfrozen)
        self._is_alike |= are_alike([each.summary.gradients for each in votes])
        if buckets[0].index == 0:
            self._health.observe(tallies, self.transport.rank)
        if not shard_vote.is_finite(votes):
            what = "these parameters" if self._config.stage == 2 else "the step"
            self._report_skip(buckets, f"all ranks skip {what}")
            self._left_out.by_all = True
            return None
        factor = self._clip.estimated_factor(votes, self.transport.world_size) if self._clip.max_norm > 0 else 1.0
        everywhere = iter(present_anywhere(votes))
        return Verdict([[next(everywhere) for _ in bucket.params] for bucket in buckets], factor)

    def _my_vote(self, buckets: Sequence[ShardedBucket], scale: float) -> StepVote:
        norm_squared = product = 0.0
        for bucket in buckets:
            grads = bucket.gradients()
            norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads if g is not None]
            if norms:
                norm_squared += scale * scale * float(torch.stack(norms).square().sum(dtype=torch.float64))
            if self._clip.max_norm > 0:
                product += scale * self._product(bucket, grads)
        # The estimate takes the mean over ranks of products; here each rank has its chunks' part of one product.
        present = [self._present(p) for bucket in buckets for p in bucket.params]
        if buckets[-1] is self.buckets[-1]:
            present += [gradient_of(p) is not None for p in self.buckets.frozen]
        repeats = are_used_again(self.buckets.params, self._used)
        is_compared = self._steps_here < COMPARED_STEPS and self.transport.world_size > 1
        gradients = gradient_digest(bucket.gradients() for bucket in buckets) if is_compared else NOT_COMPARED
        summary = self._header().summary(repeats=repeats, gradients=gradients)
        return StepVote(summary, present, norm_squared, self.transport.world_size * product)

    def _header(self, kind: str = "step()") -> Header:
        """What this rank is about to do."""
        kind = f"{type(self).__name__}, {kind}"
        return Header.of(self.param_groups, self._step_number(), kind, is_finished=self._join.is_finished)

    def _step_number(self) -> int:
        """Of the step under way, from 1."""
        return self.steps_taken() + 1

    def _present(self, p: Tensor) -> bool:
        """Whether this rank has a gradient for p."""
        return gradient_of(p) is not None

    def _product(self, bucket: ShardedBucket, grads: Sequence[Tensor | None]) -> float:
        """<g, m̂> on the own chunk, with m̂ as the last step left it."""
        mean_hat = bucket.mean_momentum(self._config.codec, self.param_groups[bucket.group_index]["betas"][0])
        if mean_hat is None:
            return 0.0
        products = []
        for k, start, stop, at in bucket.pieces:
            if (g := grads[k]) is not None:
                products.append(torch.dot(g.reshape(-1)[start:stop].float(), mean_hat[at : at + stop - start]))
        return float(torch.stack(products).sum(dtype=torch.float64)) if products else 0.0

    def _exchange(self, bucket: ShardedBucket, seen: Sequence[bool], scale: float) -> Exchange:
        """A bucket's way up and down again."""
        step, config = self._step_of(bucket), self._config
        update = (yield from send_up(bucket, step, config, self.transport, seen, scale)).update
        yield from send_down(bucket, step, config, self.transport, seen, update)

    def _step_of(self, bucket: ShardedBucket) -> Step:
        return Step.of(self.param_groups[bucket.group_index])

    def _after_step(self) -> None:
        """Called when a step is over, taken or skipped."""
        self.stats.phase = "warmup" if any(bucket.is_warm for bucket in self.buckets) else "compressed"

    # ---------------------------------------------------------------- telemetry

    def _report_skip(self, buckets: Sequence[ShardedBucket], what_follows: str) -> None:
        """Count it, and say whose gradients are not finite: on that rank, or on rank 0 that it is another's."""
        self._clip.norm = None
        bad = [
            name
            for bucket in buckets
            for grad, name in zip(bucket.gradients(), bucket.names, strict=True)
            if grad is not None and not bool(torch.linalg.vector_norm(grad, dtype=torch.float32).isfinite())
        ]
        self._left_out.is_any = True
        self._left_out.names += bad
        if bad:
            log.warning("rank %d: gradient not finite in %s; %s", self.transport.rank, ", ".join(bad[:5]), what_follows)
        elif self.transport.rank == 0:
            log.warning("a gradient is not finite on another rank; %s", what_follows)

    def _take_grad_stats(self) -> None:
        """This rank's sums over the buckets that took a step, for the next vote."""
        sums = [0.0] * 4
        for bucket in self.buckets:
            if bucket.grad_stats is not None:
                sums = [a + b for a, b in zip(sums, bucket.grad_stats.tolist(), strict=True)]
            bucket.grad_stats = None
        self._grad_stats = shard_vote.GradStats(*sums)

    def _fill_stats(self) -> None:
        stats, health = self.stats, self._health
        stats.grad_norm = self._clip.norm
        stats.sent_bytes, stats.sent_bytes_inter_node = self._traffic.take()
        stats.bits_per_parameter = 8.0 * stats.sent_bytes_inter_node / sum(p.numel() for p in self.buckets.params)
        stats.comm_ms, stats.skipped_steps = 1e3 * self._waited_s, self._skipped_steps
        stats.health, stats.agreement, stats.offset = health.ratio, health.agreement, health.offset

    def _timed(self, exchange: Generator[Work, None, T]) -> Generator[Work, None, T]:
        """The same exchange, with the time spent waiting for it on the clock."""
        try:
            while True:
                yield _TimedWork(next(exchange), self)
        except StopIteration as end:
            return end.value

    # ---------------------------------------------------------------- stage 2: gradients leave during backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; gradients leave in the one pass outside. Needed at stage 2 alone."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    # ---------------------------------------------------------------- ranks with different numbers of batches

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop over batches of which ranks may have different numbers: as `onebit.OnebitAdam.join`.

        At stage 2 gradients then leave in step(), not during backward.
        """
        self._check_at_rest()
        with self._join.loop(self._shadow_step):
            yield

    def _shadow_step(self) -> None:
        self.zero_grad()
        self.step()

    def _anybody_goes_on(self) -> bool:
        headers = gather_headers(self.transport, self._header("in join()"), self.buckets[0].device)
        check_headers(self.transport.rank, headers)
        goes_on = self._join.goes_on(headers, self.param_groups)
        self.stats.shadow_steps = self._join.shadow_steps
        return goes_on

    @torch.no_grad()
    def on_gradient(self, p: Tensor) -> None:
        if self._is_paused or self._join.is_on:
            return
        bucket = self.buckets.of(p)
        if p in bucket.ready:
            raise RuntimeError(
                f"rank {self.transport.rank}: a second backward pass before step(); at stage 2 gradients leave in the "
                "first one: run all passes of a step but the last in optimizer.no_sync(), and those that no step "
                "follows (another network's loss, a batch given up), or use stage=1"
            )
        bucket.ready.add(p)
        while self._launched < len(self.buckets) and self._is_complete(self.buckets[self._launched]):
            if self._launched == len(self.buckets) - 1 and any(q.requires_grad for q in self.buckets.frozen):
                return  # the last vote is on these too, whose gradients may be still to come
            self._launch(self.buckets[self._launched])

    @staticmethod
    def _is_complete(bucket: ShardedBucket) -> bool:
        return len(bucket.ready) == len(bucket.params)

    def _launch(self, bucket: ShardedBucket) -> None:
        """Vote on a bucket's gradients, and send those of the bucket before it. In bucket order on every rank."""
        if bucket.index == 0:
            self._launched_scale = self._unscale()
        bucket.task = ExchangeTask(self._timed(self._vote_and_exchange(bucket, self._launched_scale)))
        self._launched += 1
        if bucket.index > 0 and (task := self.buckets[bucket.index - 1].task):
            task.advance()

    def _vote_and_exchange(self, bucket: ShardedBucket, scale: float) -> Exchange:
        verdict = yield from self._vote([bucket], scale)
        if verdict is None:
            for p in bucket.params:
                p.grad = None
        elif any(verdict.seen[0]):
            yield from self._exchange(bucket, verdict.seen[0], scale)

    def _finish_launched(self) -> None:
        """Send what backward has not sent, bring all of it home, and move the parameters."""
        if self._launched and self._unscale() != self._launched_scale:
            raise RuntimeError("at stage 2 gradients leave during backward: GradScaler's scale is known too late")
        for bucket in self.buckets[self._launched :]:
            self._launch(bucket)
        comm.wait_all([bucket.task for bucket in self.buckets if bucket.task is not None])
        self._launched = 0
        for bucket in self.buckets:
            bucket.task = None
            bucket.ready.clear()
        self._look_for_averaging()
        self._take_grad_stats()

    def _check_at_rest(self) -> None:
        if self._launched:
            raise RuntimeError(
                f"rank {self.transport.rank}: gradients of this backward pass have gone into the momentum; call "
                "step() first"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Raises RuntimeError between a backward pass at stage 2 and its step: gradients have left."""
        self._check_at_rest()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict:
        """See `ShardedOptimizer.state_dict`. Raises RuntimeError between a backward pass at stage 2 and its step."""
        self._check_at_rest()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """See `ShardedOptimizer.load_state_dict`. Raises RuntimeError as `state_dict`."""
        self._check_at_rest()
        super().load_state_dict(state_dict)
        self.replica_check.restart(self.steps_taken())
        self._skips.in_a_row = 0


class _TimedWork:
    """A Work whose waiting time is added to its optimizer's."""

    def __init__(self, work: Work, optimizer: ShardedOnebitOptimizer):
        self._work, self._optimizer = work, optimizer

    def wait(self) -> None:
        began = time.perf_counter()
        self._work.wait()
        self._optimizer._waited_s += time.perf_counter() - began


def _finish(exchange: Generator[Work, None, T]) -> T:
    """Run an exchange to its end, alone, and give what it returns."""
    try:
        while True:
            next(exchange).wait()
    except StopIteration as end:
        return end.value


def _codec_down(what: str, name: str, block: int) -> Codec:
    if name not in ("int4", "sign"):
        raise ValueError(f'{what} must be "int4" or "sign", got {name!r}')
    return Int4Codec(block) if name == "int4" else SignCodec(block=block, scale="mean_abs")
