"""CompressedOptimizer: a step, as every optimizer of the family takes it. Traffic, agreement, clipping, commit.

The optimizer receives each rank's own gradients and does all data-parallel traffic itself, in every phase; the model is
not wrapped. One step, top to bottom:

    backward    a bucket whose gradients are complete is encoded and sent (phase 1) while earlier layers still compute;
                two buckets later the owners' averages follow (phase 2); over a transport of two levels there are four
                phases, the first and the last of them inside the node
    step()      the remaining buckets are sent; vote: whether all ranks are in the same step with the same options,
                which parameters have a gradient anywhere, the global norm; all buckets land
                where a gradient has changed since it was sent, on any rank, all buckets are sent once more
                verdict: what is not finite on any rank shows in everybody's frames: all skip, nothing is written
                commit: errors, momentum, variance, parameters
                now and then a vote on the replicas' bits

Nothing is written before the verdict, so a skipped step leaves no trace. A leaf (`onebit_adam.py`) says what is sent in
which codec, and what is done with what comes back. Buckets, state and checkpoints are in `bucketed.py`.
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import comm, link_probe
from .agreement import replicas
from .agreement.join import Join
from .agreement.replicas import ReplicaError
from .agreement.skips import MOST_SKIPS, SkipLimit
from .agreement.step_vote import (
    DesyncError,
    Header,
    StepVote,
    Summary,
    cast_votes,
    check_headers,
    gather_headers,
    present_anywhere,
)
from .agreement.wrappers import (
    COMPARED_STEPS,
    NOT_COMPARED,
    are_alike,
    gradient_digest,
    refuse_wrapper,
    warn_of_averaging,
)
from .bucket import Bucket
from .bucketed import BucketedOptimizer
from .clip import GlobalNormClip, dot, exact_norm, has_squares
from .comm import (
    Bf16Codec,
    Codec,
    EncodeOutput,
    ErrorFeedback,
    Exchange,
    ExchangeTask,
    FusedCodec,
    Int8Codec,
    MomentumInputs,
    MomentumWeights,
    ParamUpdate,
    Segments,
    SignCodec,
    Transport,
    Variance,
    Wire,
    check_fused,
)
from .contract import TorchOptions, check_arguments
from .frozen import gradient_of, refuse_unfrozen
from .link_probe import LinkProbe, StopWatch
from .marks import GradientMark, are_used_again, is_inspected
from .model_parallel import ModelParallelGroup, count_edits_apart_, local

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

# A bucket's next phase is launched with phase 1 of the bucket so many behind it: until then there are as many on the
# wire.
NEXT_PHASE_BEHIND = 2

# After so many steps in a row that had to be sent twice nothing is sent during backward any more.
RESENT_STEPS = 3


@dataclass
class Stats:
    """What the last step did. Times in milliseconds, bytes as payload this rank sent to others, without headers.

    sent_bytes_inter_node: those to other nodes, which is what a slow network carries; bits_per_parameter is of these.
    The same as sent_bytes where the transport is flat. resent_steps: how many steps were sent twice, so far.
    shadow_steps: how many steps of other ranks this one has taken part in without batches of its own (`join`).
    grad_norm: of the mean gradient, before clipping; exact or the estimate, as `clip.py` has it. None without
    max_grad_norm, and when skipped.
    """

    phase: str = "warmup"
    sent_bytes: int = 0
    sent_bytes_inter_node: int = 0
    bits_per_parameter: float = 0.0
    comm_ms: float = 0.0
    skipped_steps: int = 0
    clip_factor: float = 1.0
    grad_norm: float | None = None
    resent_steps: int = 0
    shadow_steps: int = 0


class CommonOptions(TorchOptions, total=False):
    """Keyword arguments that every optimizer of the family takes, beside those of `TorchOptions`.

    max_grad_norm: clip by the norm of the mean gradient (0: off): exact while gradients travel, estimated from each
    rank's norm and its product with the momentum otherwise. It then costs the overlap with backward.
    transport: default `onebit.comm.init()`. model_parallel_group: where the parameters are DTensors, each rank of the
    transport holding the same shard of another replica (`onebit.zero.grid`), the transport between the shards of one
    replica, or the grid's `ModelParallelGroup` where others hold other layers. It carries what concerns the whole
    model: 8 to 32 bytes a step to each peer, and LAMB's norms. codec: block size and kind of scale of the one-bit
    frames. error_dtype: torch.bfloat16 halves the worker and server errors. compression: "auto" measures the network
    once, before the first one-bit step, and where one bit would gain nothing gradients travel in bfloat16 from there
    on, which rank 0 logs; "always" asks nothing. overlap: send buckets during backward. Where gradients change before
    step() all the same, they are sent once more, and after three such steps in a row nothing is sent during backward
    any more. bucket_cap_mb: float32 MiB per bucket. check_replicas_every: steps, taken or skipped, between votes on the
    bits of parameters and of the state that replicas have in common (0: never). max_consecutive_skips: so many skipped
    steps in a row are an error (0: never); see `agreement/skips.py`.
    """

    max_grad_norm: float
    transport: Transport | None
    model_parallel_group: ModelParallelGroup | Transport | None
    codec: FusedCodec | None
    error_dtype: torch.dtype
    compression: str
    overlap: bool
    bucket_cap_mb: float
    check_replicas_every: int
    max_consecutive_skips: int


def codec_of_gradients(given: Codec | None, common: CommonOptions) -> Codec:
    """What gradients travel in: eight bits, in the blocks of the one-bit codec, unless another codec was given."""
    codec = common.get("codec")
    block = (SignCodec() if codec is None else check_fused(codec)).block
    if given is None:
        return Int8Codec(block)
    if given.block != block and not given.sends_in_place:
        raise ValueError(f"{given} has blocks of {given.block}, the one-bit codec of {block}; give both the same")
    return given


class CompressedOptimizer(BucketedOptimizer):
    """Base of the family; arguments: see `CommonOptions`. All ranks construct, step, load and add groups together."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: object,
        defaults: dict[str, object],
        *,
        max_grad_norm: float = 0.0,
        transport: Transport | None = None,
        model_parallel_group: ModelParallelGroup | Transport | None = None,
        codec: FusedCodec | None = None,
        error_dtype: torch.dtype = torch.float32,
        compression: str = "auto",
        overlap: bool = True,
        bucket_cap_mb: float = 16.0,
        check_replicas_every: int = 100,
        max_consecutive_skips: int = MOST_SKIPS,
        **torchs: Unpack[TorchOptions],
    ):
        check_arguments(type(self).__name__, torchs)
        if not (max_grad_norm >= 0 and check_replicas_every >= 0):
            raise ValueError(
                "max_grad_norm and check_replicas_every must be at least 0 (0: off), got "
                f"{max_grad_norm}, {check_replicas_every}"
            )
        if compression not in ("auto", "always"):
            raise ValueError(f'compression must be "auto" or "always", got {compression!r}')
        self._clip = GlobalNormClip(max_grad_norm)
        self.compression = compression
        self._compresses: bool | None = True if compression == "always" else None  # None: not decided yet
        self._computing = StopWatch()
        self.check_replicas_every = check_replicas_every
        self.stats = Stats()
        self._overlap = overlap
        self._launched = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._passes_per_step = 0
        self._resent_in_a_row = 0
        self._paused = False
        self._join = Join()
        self._used: list[GradientMark] = []  # the gradients of the last step
        self._sent_before = (0, 0)
        self._waited_s = 0.0
        self._steps_here = 0  # of this object, whatever was loaded
        self._is_warned_of_averaging = False
        self._attempts = self._voted = 0  # steps, taken or skipped: all, and up to the last vote on replicas
        self._skips = SkipLimit(max_consecutive_skips)
        super().__init__(
            params,
            defaults,
            transport=transport,
            model_parallel_group=model_parallel_group,
            codec=codec,
            error_dtype=error_dtype,
            bucket_cap_mb=bucket_cap_mb,
        )

    # ---------------------------------------------------------------- what a leaf defines

    @abstractmethod
    def momentum(self, bucket: Bucket) -> Tensor:
        """The momentum as the ranks share it, float32 [W·N]; bias-corrected. May be a copy."""

    @abstractmethod
    def _codec(self, bucket: Bucket) -> Codec | None:
        """What the bucket is sent in, this step; None: it stays at home. The same on all ranks."""

    @abstractmethod
    def _sends_gradients(self, bucket: Bucket) -> bool:
        """Whether it is the mean gradient that the bucket brings back, this step."""

    @abstractmethod
    def _round_name(self) -> str:
        """What kind of step this is, for messages; the same on all ranks."""

    def _error_feedback(self, bucket: Bucket) -> ErrorFeedback | None:
        """What this step's payload is owed and will owe."""
        return bucket.ef

    def _make_payload(self, bucket: Bucket, group: dict) -> None:
        """bucket.x: this rank's gradients in, what is to be averaged out. As it stands: the gradients themselves."""

    @abstractmethod
    def _commit(self, bucket: Bucket, group: dict, step: int) -> None:
        """The step is good: take over errors and moments; step counts from 1. What `_move` needs, as bucket.x."""

    def _before_move(self) -> None:
        """All buckets are committed, no parameter has moved: what needs the whole model."""

    @abstractmethod
    def _after_step(self, votes: Sequence[StepVote], step: int) -> None:
        """All buckets are committed: phase changes."""

    @abstractmethod
    def _last_average(self, bucket: Bucket) -> Tensor:
        """What a compressed exchange brings, float32 [W·N], in the coordinates of the worker error. May be a copy."""

    def _is_synchronised(self) -> bool:
        """Whether all replicas are meant to be the same now."""
        return True

    def _build_groups(self) -> None:
        self._give_up_step()
        super()._build_groups()
        self._sent_before = self._sent()  # what construction sends belongs to no step

    # ---------------------------------------------------------------- whether compression pays

    def _should_compress(self) -> bool:
        """Decide, once per run, and say so. All ranks, between two steps."""
        if self._compresses is None and not self._hierarchy.inter_node.has_network:
            self._compresses = True  # there is no network to measure
        if self._compresses is None:
            numels = [bucket.layout.numel for bucket in self._buckets]
            compute_s, device = self._computing.median_s(), self._buckets[0].device
            bf16 = Bf16Codec(self.codec.block)
            before = self._sent()
            mine = link_probe.measure(self.transport, compute_s, numels, self.codec, bf16, device)
            every = self.model_parallel_group.gather(mine.compute_s, mine.onebit_s, mine.bf16_s)
            found = LinkProbe(*(max(column) for column in zip(*every, strict=True)))
            # What measuring sent belongs to no step; what this step has sent so far does.
            sent, across = (now - then for now, then in zip(self._sent(), before, strict=True))
            self._sent_before = (self._sent_before[0] + sent, self._sent_before[1] + across)
            self._compresses = found.should_compress
            if self.transport.rank == 0 and found.should_compress:
                log.info("one-bit compression pays here: %s", found)
            elif self.transport.rank == 0:
                log.warning(
                    "one-bit compression does not pay here (%s): gradients travel in bfloat16 instead; "
                    'compression="always" sends one bit all the same',
                    found,
                )
        return self._compresses

    # ---------------------------------------------------------------- backward: the launch of complete buckets

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; the bucket leaves in the first pass outside. As in DDP.

        Not needed where every step has as many passes as the one before it: those are counted. Where the count is
        wrong, gradients are sent twice.
        """
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def _on_gradient(self, p: Tensor) -> None:
        count_edits_apart_(p.grad)
        if self._paused or p.grad is None:
            return
        slot = self._slots[p]
        slot.count_pass(p.grad)
        slot.bucket.complete -= slot.is_complete
        slot.is_complete = slot.passes == self._passes_per_step
        slot.bucket.complete += slot.is_complete
        if slot.is_complete and self._launches_in_backward:
            with torch.no_grad(), self._computing.paused():
                while self._launched < len(self._buckets) and self._is_complete(self._buckets[self._launched]):
                    self._launch(self._buckets[self._launched], in_backward=True)

    @property
    def _launches_in_backward(self) -> bool:
        if not self._overlap or self._join.is_on or self._resent_in_a_row >= RESENT_STEPS:
            return False
        # The first step learns how many passes there are.
        travels = all(self._codec(bucket) is not None for bucket in self._buckets)
        return self._passes_per_step > 0 and travels and not self._clips_before_sending

    @staticmethod
    def _is_complete(bucket: Bucket) -> bool:
        return bucket.complete == len(bucket.params)

    def _launch(self, bucket: Bucket, scale: float = 1.0, *, in_backward: bool = False) -> None:
        """Send a bucket's gradients, times scale, and what goes with them; and earlier buckets' next phases.

        In bucket order, whether in backward or in step(): every rank launches the same sequence, also where a gradient
        is missing on one of them.
        """
        codec = self._codec(bucket)
        assert codec is not None and bucket.index == self._launched
        if bucket.index == 0 and self._asks_before_sending:
            self._call_roll(self._round_name())
        bucket.mark_sent(with_bits=in_backward and is_inspected(self._steps_here))
        bucket.wire = self._wire(bucket, codec)
        with self._on_comm_stream(bucket.device):
            bucket.task = ExchangeTask(self._phases(bucket, self.param_groups[bucket.group_index], codec, scale))
            self._launched += 1
            for phase in range(1, self._hierarchy.phases):
                behind = bucket.index - phase * NEXT_PHASE_BEHIND
                if behind >= 0 and (task := self._buckets[behind].task):
                    task.advance()

    def _phases(self, bucket: Bucket, group: dict, codec: Codec, scale: float) -> Exchange:
        """The exchange of this rank's payload, made in bucket.x, from its encoding on."""
        assert bucket.wire is not None
        bucket.gather(self._gradients(bucket), scale)
        self._make_payload(bucket, group)
        ef = self._error_feedback(bucket)
        yield from comm.compressed_allreduce(bucket.x, ef, codec, self.transport, bucket.wire, bucket.counts)

    def _phases_of_momentum(
        self,
        bucket: Bucket,
        grads: Sequence[Tensor | None],
        D_WN: Tensor | Variance,
        momentum_W: Tensor,
        weights: MomentumWeights,
    ) -> Exchange:
        """The exchange of the momentum that these gradients make (`SignCodec.encode_momentum`), encoded in one pass.

        D_WN and momentum_W: one row for each owner. In a flat world the gradients are read where they lie. In two
        levels the ranks of the node add them up first, in bucket.x, and each encodes its own rows of their mean.
        """
        ef, wire, segments, own = bucket.ef, bucket.wire, bucket.layout.segments, self._hierarchy.own
        assert ef is not None and wire is not None
        if self._hierarchy.local_size > 1:
            bucket.gather(grads)
            yield from self._hierarchy.sum_intra_node(bucket.x)
            node = bucket.own_rows(bucket.x).view(-1)
            grads, segments = [node], Segments((0,), (len(node),), self.codec.block)
            weights = replace(weights, unscale=weights.unscale / self._hierarchy.local_size)
        D_KN = D_WN.rows(own) if isinstance(D_WN, Variance) else D_WN[own]
        momentum = MomentumInputs(grads, segments, D_KN, momentum_W[own], weights)
        n = bucket.layout.chunk
        out = EncodeOutput(ef.worker.view(-1, n), wire.sent_HB, bucket.counts[own], ef.worker_next.view(-1, n))
        self.codec.encode_momentum(momentum, out)
        yield from comm.exchange(ef, self.codec, self.transport, wire, n, bucket.counts)

    def _wire(self, bucket: Bucket, codec: Codec) -> Wire:
        """The bucket's buffers for this codec, made when first needed. In full, it travels from where it lies."""
        if codec not in bucket.wires:
            in_place = self._rows(bucket.x.view(torch.uint8)) if codec.sends_in_place else None
            bucket.wires[codec] = Wire.empty(
                codec,
                bucket.layout.numel,
                self.transport.world_size,
                hierarchy=self._hierarchy,
                frames_WB=in_place,
                device=bucket.device,
            )
        return bucket.wires[codec]

    def _has_changed(self, grad_scale: float) -> bool:
        """Whether a gradient that has been sent is no longer what was sent; a warning says so, once."""
        early = self._buckets[: self._launched]
        changed = [name for bucket in early for name in bucket.changed()]
        is_edited_unseen = not changed and any(bucket.is_edited_unseen() for bucket in early)
        if changed and not self.stats.resent_steps:
            log.warning(
                "rank %d: the gradient of %s changed after backward had sent it, by clipping, by a backward pass more "
                "than in the step before, or because a backward pass was given up: all buckets are sent once more. For "
                "clipping use max_grad_norm=..., for passes that are not the last of their step optimizer.no_sync(), "
                "for GradScaler and anything else that edits gradients overlap=False",
                self.transport.rank,
                changed[0],
            )
        if is_edited_unseen:
            self._resent_in_a_row = RESENT_STEPS
            log.warning(
                "rank %d: gradients were edited through .data after backward had sent them, which torch does not count "
                "and only some steps look for: all buckets are sent once more, and from here on in step(), as with "
                "overlap=False. Edit the gradients themselves (p.grad.clamp_()), or construct with overlap=False",
                self.transport.rank,
            )
        is_scaled = bool(early) and grad_scale != 1.0  # the scale is known too late
        return bool(changed) or is_edited_unseen or is_scaled

    # ---------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update from this rank's gradients; all ranks. See the module docstring for the sequence.

        Under GradScaler the loss scale is taken out here, and an overflow on one rank makes all skip. Raises PeerError
        if a peer is lost, DesyncError if the ranks are not in the same step with the same options, ReplicaError if the
        replicas are no longer identical, SkippedStepsError if too many steps in a row were skipped.
        """
        self._computing.stop()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._buckets:
            self._join.is_finished = False  # no rank has any
            present = [[gradient_of(p) is not None for p in self._frozen]]
            refuse_unfrozen(self.transport.rank, list(self._frozen.values()), present)
            return loss
        self._waited_s, self.stats.clip_factor, self._clip.norm = 0.0, 1.0, None
        if self._join.is_on and not self._anybody_goes_on():
            return loss
        grad_scale = float(getattr(self, "grad_scale", None) or 1.0)
        resends = self._has_changed(grad_scale)
        travels = any(self._codec(bucket) is not None for bucket in self._buckets)
        votes = self._exchange(1.0 / grad_scale, resends) if travels else self._stay_at_home(1.0 / grad_scale)
        bad: list[str] = []
        if votes is not None:
            self._finish(votes)
        else:
            bad = self._skip()
        self._vote_where_due()
        self._count_traffic()
        self._start_over()
        self._steps_here += 1
        self._skips.observe(votes is None, bad, self.transport, self.model_parallel_group.whole)
        self._computing.start()
        return loss

    def _exchange(self, scale: float, resends: bool) -> list[StepVote] | None:
        """Send what has not left yet and bring all of it home. None, on all ranks, where anything is not finite.

        scale: what gradients are to be multiplied by. resends: what this rank has sent is no longer true. The vote
        comes after the last launch, or before the first where it clips: at the same place in every rank's sequence of
        operations.
        """
        votes = None
        if self._clips_before_sending:
            votes = self._cast(scale, resends)
            self.stats.clip_factor = self._clip.estimated_factor(votes, self.transport.world_size)
            if not math.isfinite(self.stats.clip_factor):
                return None
        self._launch_rest(scale * self.stats.clip_factor)
        if votes is None:
            votes = self._cast(scale, resends)
        with self._waiting():
            self._wait_all()
        if any(vote.summary.resends for vote in votes):
            # Nothing has been written, so what came back can be forgotten.
            self._launched = 0
            self._launch_rest(scale * self.stats.clip_factor)
            with self._waiting():
                self._wait_all()
        self._count_resent(votes)
        # One question to each device, however many buckets it has.
        verdicts: dict[torch.device, list[Tensor]] = {bucket.device: [] for bucket in self._buckets}
        for bucket in self._buckets:
            verdicts[bucket.device].append(self._is_finite(bucket))
        is_good = all(bool(torch.stack(flags).all()) for flags in verdicts.values())
        return votes if self._all_parts_agree(is_good, votes) else None

    def _launch_rest(self, scale: float) -> None:
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket, scale)

    def _count_resent(self, votes: Sequence[StepVote]) -> None:
        """Where gradients change in every step, sending them during backward is given up; on all ranks at once."""
        ranks = [rank for rank, vote in enumerate(votes) if vote.summary.resends]
        if ranks:
            if self.stats.resent_steps == 0:
                refuse_wrapper(self.transport, self._slots)
            self.stats.resent_steps += 1
            self._resent_in_a_row += 1
            if self._resent_in_a_row == RESENT_STEPS and self.transport.rank == 0:
                log.warning(
                    "gradients of rank %s changed after backward had sent them in %d steps in a row: from here on they "
                    "are sent in step(), as with overlap=False",
                    ranks,
                    RESENT_STEPS,
                )
        elif self._resent_in_a_row < RESENT_STEPS:
            self._resent_in_a_row = 0

    def _all_parts_agree(self, is_good: bool, votes: Sequence[StepVote]) -> bool:
        """Whether the step is good on all parts of the model.

        Raises DesyncError where they take another step, RuntimeError where any trains what it has no state of.
        """
        header = self._header(self._round_name())
        unfrozen = [vote.present[len(self._slots) :] for vote in votes]
        said = self.model_parallel_group.gather(
            float(is_good), float(any(map(any, unfrozen))), float(header.step), header.numbers[0]
        )
        if any(is_unfrozen for _, is_unfrozen, *_ in said):
            names = list(self._frozen.values())
            self.model_parallel_group.raise_on_all_ranks(
                RuntimeError, lambda: refuse_unfrozen(self.transport.rank, names, unfrozen)
            )
        if len({numbers[2:] for numbers in said}) > 1:
            steps = ", ".join(f"step {step:g} with lr {lr:g} on part {k}" for k, (_, _, step, lr) in enumerate(said))
            raise DesyncError(
                f"rank {self.transport.rank}: the parts of the model are not in the same step: {steps}; every rank "
                "must call step() equally often, with the same learning rate"
            )
        return all(good for good, *_ in said)

    def _header(self, kind: str) -> Header:
        """What this rank is about to do."""
        kind, step = f"{type(self).__name__}, {kind}", int(self._steps[0]) + 1
        return Header.of(self.param_groups, step, kind, is_finished=self._join.is_finished)

    @property
    def _asks_before_sending(self) -> bool:
        """Whether ranks that disagree would send different numbers of bytes, which only a vote beforehand can name."""
        return False

    def _call_roll(self, kind: str) -> list[Header]:
        """Every rank's header, before anything else of the step is sent. Raises DesyncError."""
        with self._waiting():
            headers = gather_headers(self.transport, self._header(kind), self._buckets[0].device)
        check_headers(self.transport.rank, headers)
        return headers

    def _cast(self, scale: float, resends: bool) -> list[StepVote]:
        header = self._header(self._round_name())
        repeats = are_used_again(list(self._slots), self._used)
        is_compared = self._steps_here < COMPARED_STEPS and self.transport.world_size > 1
        grads = (bucket.gradients() for bucket in self._buckets)
        gradients = gradient_digest(grads) if is_compared else NOT_COMPARED
        mine = self._my_vote(scale, header.summary(resends=resends, repeats=repeats, gradients=gradients))
        with self._waiting():
            votes = cast_votes(self.transport, header, mine, self._buckets[0].device)
        if is_compared:
            self._look_for_averaging(votes)
        return votes

    def _look_for_averaging(self, votes: Sequence[StepVote]) -> None:
        """Refuse a wrapper that averages gradients as well, warn of what looks like one. All parts of the model."""
        is_alike = are_alike([vote.summary.gradients for vote in votes])
        if any(flag for (flag,) in self.model_parallel_group.gather(float(is_alike))):
            self.model_parallel_group.raise_on_all_ranks(
                RuntimeError, lambda: refuse_wrapper(self.transport, self._slots)
            )
            if is_alike and not self._is_warned_of_averaging:
                self._is_warned_of_averaging = True
                warn_of_averaging(self.transport)

    def _wait_all(self) -> None:
        """Bring every exchange under way to its end."""
        devices = {bucket.device for bucket in self._buckets}
        with ExitStack() as beside:
            for device in devices:
                beside.enter_context(self._on_comm_stream(device))
            comm.wait_all([bucket.task for bucket in self._buckets if bucket.task is not None])
        for device in devices & self._streams.keys():
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    @contextmanager
    def _on_comm_stream(self, device: torch.device) -> Iterator[None]:
        """On CUDA, a stream of the optimizer's own, behind what was computed so far: backward does not wait for it."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def _stay_at_home(self, scale: float) -> list[StepVote]:
        """A step without traffic, not even a vote. What is not finite counts as zero, in this replica alone."""
        summary = self._header(self._round_name()).summary()
        if self._clips_before_sending:
            self.stats.clip_factor = self._clip.estimated_factor(
                [self._my_vote(scale, summary)], self.transport.world_size
            )
        is_finite = math.isfinite(self.stats.clip_factor)
        for bucket in self._buckets:
            bucket.gather(self._gradients(bucket), scale * self.stats.clip_factor)
        if not self.model_parallel_group.agree(
            is_finite and all(bool(bucket.x.isfinite().all()) for bucket in self._buckets)
        ):
            self._report_bad_gradients("it counts as zero")
            self.stats.clip_factor = 1.0
            for bucket in self._buckets:
                bucket.x.zero_()
        return [StepVote(summary, [gradient_of(p) is not None for p in self._slots])]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began

    def _is_finite(self, bucket: Bucket) -> Tensor:
        """Of a mean gradient, which is left in bucket.x: also whether a variance can hold it. Clipping sees to that."""
        codec = self._codec(bucket)
        assert bucket.wire is not None and codec is not None
        is_finite = codec.is_finite(bucket.wire.frames_WB, bucket.layout.chunk)
        if self._sends_gradients(bucket):
            codec.decode(bucket.wire.frames_WB, self._rows(bucket.x))
            if self._clip.max_norm == 0:
                is_finite = is_finite & has_squares(bucket.x)
        return is_finite

    def _finish(self, votes: Sequence[StepVote]) -> None:
        """Commit every bucket, move the parameters, then let the leaf change phase."""
        self._clip_mean_gradient()
        self._clip.remember(self.stats.clip_factor, self.param_groups[0]["betas"][0])
        for count in self._steps:
            count += 1
        seen = present_anywhere(votes)
        for bucket in self._buckets:
            group = self.param_groups[bucket.group_index]
            self._commit(bucket, group, int(self._steps[bucket.group_index]))
        self._before_move()
        for bucket in self._buckets:
            self._move(bucket, seen)
        self._after_step(votes, int(self._steps[0]))

    def _apply(
        self, bucket: Bucket, seen: Sequence[bool], frames_WB: Tensor | None, weight_K: Tensor, keep_K: Tensor
    ) -> None:
        """p ← keep·p + weight·value for every parameter that some rank had a gradient for, in one pass."""
        assert frames_WB is not None
        moving = zip(bucket.params, seen[bucket.first :][: len(bucket.params)], strict=True)
        params = [local(p) if is_seen else None for p, is_seen in moving]
        self.codec.apply(frames_WB, bucket.layout.chunk, ParamUpdate(params, bucket.layout.segments, weight_K, keep_K))

    def _move(self, bucket: Bucket, seen: Sequence[bool]) -> None:
        """p ← p - x, for every parameter that some rank had a gradient for, where no mask forbids it."""
        self._mask(bucket)
        moved = [
            (local(p), view)
            for k, (p, view) in enumerate(zip(bucket.params, bucket.x_views, strict=True), bucket.first)
            if seen[k]
        ]
        if not moved:
            return
        params, views = zip(*moved, strict=True)
        torch._foreach_sub_(params, views)

    def _skip(self) -> list[str]:
        bad = self._report_bad_gradients("all ranks skip the step")
        if not bad and self.transport.rank == 0:
            log.warning("a gradient is not finite on another rank; all ranks skip the step")
        return bad

    def _report_bad_gradients(self, consequence: str) -> list[str]:
        """Count them, and warn of those that are this rank's; the parameters they are of."""
        self.stats.skipped_steps += 1
        self._clip.norm = None
        mine = [name for bucket in self._buckets for name in bucket.bad()]
        if mine:
            log.warning("rank %d: gradient not finite in %s; %s", self.transport.rank, ", ".join(mine[:5]), consequence)
        return mine

    def _count_traffic(self) -> None:
        sent, across = (now - before for now, before in zip(self._sent(), self._sent_before, strict=True))
        self.stats.sent_bytes, self.stats.sent_bytes_inter_node = sent, across
        self._sent_before = self._sent()
        elements = sum(bucket.layout.parameter_numel for bucket in self._buckets)
        self.stats.bits_per_parameter = 8.0 * across / max(elements, 1)
        self.stats.comm_ms, self.stats.grad_norm = 1e3 * self._waited_s, self._clip.norm

    def _sent(self) -> tuple[int, int]:
        """Bytes so far: to anybody, and to other nodes."""
        return self.transport.sent_bytes, self.transport.sent_bytes_inter_node

    def _start_over(self) -> None:
        """Forget this step's launches and passes."""
        # None where every pass was in no_sync(), or none was.
        self._passes_per_step = max(slot.passes for slot in self._slots.values()) or self._passes_per_step
        self._launched = 0
        self._used = [GradientMark.of(p) for p in self._slots]
        for bucket in self._buckets:
            bucket.task, bucket.wire, bucket.complete, bucket.sent = None, None, 0, []
        for slot in self._slots.values():
            slot.passes, slot.is_complete = 0, False

    def _give_up_step(self) -> None:
        """Drop what a backward pass has sent that no step will follow. All ranks, alike."""
        if self._launched:
            self._launch_rest(1.0)
            self._wait_all()
            self._start_over()

    # ---------------------------------------------------------------- ranks with different numbers of batches

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop over batches of which ranks may have different numbers. All ranks. As torch's Join.

            with optimizer.join():
                for x, y in loader:
                    ...

        A rank that is through takes part in the steps of the others, without gradients, until all are: the mean is over
        all ranks, so that what it would have had counts as zero. Its parameters stay the others' bits, and it takes
        over their learning rates, betas and weight decays; its scheduler knows nothing of these steps:
        `stats.shadow_steps` says how many there were. Costs a header per step to each peer, and the overlap with
        backward. Raises RuntimeError between a backward pass and its step; in the loop as `step`.
        """
        if self._launched:
            raise RuntimeError(
                f"rank {self.transport.rank}: join() between a backward pass and its step; call step() first"
            )
        with self._join.loop(self._shadow_step):
            yield

    def _shadow_step(self) -> None:
        self.zero_grad()
        self.step()

    def _anybody_goes_on(self) -> bool:
        goes_on = self._join.goes_on(self._call_roll("in join()"), self.param_groups)
        self.stats.shadow_steps = self._join.shadow_steps
        return goes_on

    # ---------------------------------------------------------------- clipping by the global norm

    @property
    def _clips_before_sending(self) -> bool:
        # The mean gradient is known after the exchange while it travels in full; once momentum travels instead, each
        # rank must be clipped before its error is added, by an estimate of the same norm.
        return self._clip.max_norm > 0 and not all(self._sends_gradients(bucket) for bucket in self._buckets)

    def _my_vote(self, scale: float, summary: Summary) -> StepVote:
        norm_squared = product = 0.0
        if self._clips_before_sending:
            for bucket in self._buckets:
                m_views = bucket.layout.views(self.momentum(bucket))
                for g, m, share in zip(self._gradients(bucket), m_views, bucket.share_K, strict=True):
                    if g is not None:
                        norm_squared += share * scale * scale * dot(g, g)
                        product += share * scale * dot(g, m)
            norm_squared, product = self.model_parallel_group.total(norm_squared, product)
        present = [self._present(p) for p in self._slots] + [gradient_of(p) is not None for p in self._frozen]
        return StepVote(summary, present, norm_squared, product)

    def _present(self, p: Tensor) -> bool:
        """Whether this rank has a gradient for p."""
        return gradient_of(p) is not None

    def _clip_mean_gradient(self) -> None:
        if self._clip.max_norm > 0 and not self._clips_before_sending:
            squares = sum(bucket.own_squares() for bucket in self._buckets)
            norm = exact_norm(self.transport, self.model_parallel_group, squares, self._buckets[0].device)
            self.stats.clip_factor = self._clip.factor(norm)
            for bucket in self._buckets:
                bucket.x.mul_(self.stats.clip_factor)

    # ---------------------------------------------------------------- agreement and telemetry

    def _vote_where_due(self) -> None:
        self._attempts += 1
        every = self.check_replicas_every
        if every and self._attempts // every > self._voted // every and self._is_synchronised():
            self._voted = self._attempts
            self.check_replicas()

    def check_replicas(self) -> None:
        """Vote on the bits of all that replicas have in common; ReplicaError on all ranks where they differ.

        That is the parameters, the moments or D, and the packed momentum. Sends 16 bytes per peer. So do tensor ranks
        on what they hold alike: see `ModelParallelGroup.unlike`.
        """
        names = [name for bucket in self._buckets for name in bucket.names]
        step = int(self._steps[0])
        unlike = self.model_parallel_group.find_divergence(list(self._slots), names)
        state = [pair for bucket in self._buckets for pair in bucket.replicated()]
        tensors = [local(p) for p in self._slots] + [tensor for _, tensor in state]
        names = names + [name for name, _ in state]

        def check() -> None:
            replicas.check_replicas(self.transport, tensors, names, step)
            if unlike:
                raise ReplicaError(f"rank {self.transport.rank}: after step {step} {unlike}; resume from a checkpoint")

        self.model_parallel_group.raise_on_all_ranks(ReplicaError, check)

    @torch.no_grad()
    def error_norm_ratio(self) -> float:
        """‖worker error‖ / ‖what an exchange brings‖ on this rank: how much is owed. 0 in warm-up. Sends nothing.

        In two levels, of the rows that this rank exchanges.
        """
        owed = brought = 0.0
        for bucket in self._buckets:
            if bucket.ef is not None:
                average = bucket.spread(bucket.own_rows(self._last_average(bucket)))
                owed += sum(dot(e, e) for e in bucket.layout.views(bucket.spread(bucket.ef.worker.float())))
                brought += sum(dot(x, x) for x in bucket.layout.views(average))
        return math.sqrt(owed / brought) if brought > 0 else 0.0

    # ---------------------------------------------------------------- checkpoints

    def _options(self) -> list[str]:
        names = ("_clip", "check_replicas_every", "_overlap", "compression")
        lines = [f"option {name.lstrip('_')} = {getattr(self, name)}" for name in names]
        return [*super()._options(), *lines, f"option max_consecutive_skips = {self._skips.most}"]

    def _extra_state(self) -> dict:
        return {
            "skipped_steps": self.stats.skipped_steps,
            "clip_average": self._clip.average,
            "compresses": self._compresses,
        }

    def _load_extra_state(self, record: dict) -> None:
        self.stats.skipped_steps = record["skipped_steps"]
        self._clip.average = tuple(record["clip_average"])
        if self.compression == "auto":
            self._compresses = record.get("compresses")

    def _restore(self, state: dict) -> None:
        self._give_up_step()
        super()._restore(state)
        self._attempts = self._voted = int(self._steps[0]) if self._steps else 0
        self._skips.in_a_row = 0
        if self._buckets:
            self.stats.phase = self._buckets[0].phase
