"""CompressedOptimizer: what every optimizer of the family shares. Buckets, traffic, agreement, state.

The optimizer receives each rank's own gradients and does all data-parallel traffic itself, in every phase; the model is
not wrapped. One step, top to bottom:

    backward    a bucket whose gradients are complete is encoded and sent (leg 1) while earlier layers still compute
    step()      ballot: which parameters have a gradient anywhere, the global norm, the variance's norm
                the remaining buckets are sent; all of them land (leg 2)
                verdict: what is not finite on any rank shows in everybody's frames: all skip, nothing is written
                commit: errors, momentum, variance, parameters
                now and then a vote on the replicas' bits

Nothing is written before the verdict, so a skipped step leaves no trace. A leaf (`onebit_adam.py`) says what is sent in
which codec, and what is done with what comes back.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from . import comm, replicas
from .ballot import Ballot, cast_ballots, present_anywhere
from .bucket import Bucket
from .clip import GlobalNormClip, dot, exact_norm
from .comm import Codec, ErrorFeedback, Flight, IdentityCodec, SignCodec, Transport, Wire
from .elastic import gather_states, reframe, resize
from .flat import lay_out, partition

log = logging.getLogger(__name__)

_CHECKPOINT_VERSION = 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Stats:
    """What the last step did. Times in milliseconds, bytes as payload this rank sent to others, without headers."""

    phase: str = "warmup"
    sent_bytes: int = 0
    bits_per_parameter: float = 0.0
    comm_ms: float = 0.0
    skipped_steps: int = 0
    clip_factor: float = 1.0


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer of the family takes.

    max_grad_norm: clip by the norm of the mean gradient (0: off): exact while gradients travel, estimated from each
    rank's norm and its product with the momentum otherwise. It then costs the overlap with backward.
    link: the transport; default `onebit.comm.init()`. codec: block size and kind of scale of the one-bit frames.
    error_dtype: torch.bfloat16 halves the worker and server errors.
    overlap: send buckets during backward; gradients must then stay as they are until step(). bucket_cap_mb: float32
    MiB per bucket. check_replicas_every: steps between votes on the replicas' bits (0: never).
    """

    max_grad_norm: float
    link: Transport | None
    codec: SignCodec | None
    error_dtype: torch.dtype
    overlap: bool
    bucket_cap_mb: float
    check_replicas_every: int


@dataclass
class _Slot:
    """Where a parameter belongs, and how many backward passes have reached it since the last step."""

    bucket: Bucket
    passes: int = 0


class CompressedOptimizer(torch.optim.Optimizer, ABC):
    """Base of the family; arguments: see `CommonOptions`. All ranks construct, step, load and add groups together."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: object,
        defaults: dict[str, object],
        *,
        max_grad_norm: float = 0.0,
        link: Transport | None = None,
        codec: SignCodec | None = None,
        error_dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        bucket_cap_mb: float = 16.0,
        check_replicas_every: int = 100,
    ):
        if error_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"error_dtype must be torch.float32 or torch.bfloat16, got {error_dtype}")
        if max_grad_norm < 0 or bucket_cap_mb <= 0 or check_replicas_every < 0:
            raise ValueError(
                "max_grad_norm and check_replicas_every must be at least 0 (0: off) and bucket_cap_mb above 0, got "
                f"{max_grad_norm}, {check_replicas_every}, {bucket_cap_mb}"
            )
        self.link = comm.init() if link is None else link
        self.codec = codec or SignCodec()
        self._clip = GlobalNormClip(max_grad_norm)
        self.error_dtype = error_dtype
        self.check_replicas_every = check_replicas_every
        self.stats = Stats()
        self._overlap = overlap
        self._bucket_elements = max(1, int(bucket_cap_mb * 2**20 / 4))
        self._buckets: list[Bucket] = []
        self._slots: dict[Tensor, _Slot] = {}
        self._steps: list[Tensor] = []
        self._masks: dict[int, dict[Tensor, Tensor]] = {}
        self._launched = 0
        self._passes_per_step = 0
        self._paused = False
        self._sent_before = 0
        self._waited_s = 0.0
        self._checked_step = 0
        self._built_groups = 0
        super().__init__(params, defaults)  # type: ignore[arg-type]
        self._build_groups()

    # ---------------------------------------------------------------- what a leaf defines

    @abstractmethod
    def _allocate(self, bucket: Bucket, phase: str) -> None:
        """Give the bucket the zeroed state (flat, frames, ef) of a phase. "warmup" is the first."""

    @abstractmethod
    def momentum(self, bucket: Bucket) -> Tensor:
        """The momentum as the ranks share it, float32 [W·N]; bias-corrected. May be a copy."""

    @abstractmethod
    def _codec(self, bucket: Bucket) -> Codec | None:
        """What the bucket is sent in, this step; None: it stays at home. The same on all ranks."""

    @abstractmethod
    def _sends_gradients(self, bucket: Bucket) -> bool:
        """Whether it is the mean gradient that the bucket brings back, this step."""

    def _error_feedback(self, bucket: Bucket) -> ErrorFeedback | None:
        """What this step's payload is owed and will owe."""
        return bucket.ef

    @abstractmethod
    def _make_payload(self, bucket: Bucket, group: dict) -> None:
        """bucket.x: this rank's gradients in, what is to be averaged out."""

    @abstractmethod
    def _commit(self, bucket: Bucket, group: dict, step: int) -> None:
        """The step is good: take over errors and moments; bucket.x ← what is to be subtracted. step counts from 1."""

    def _before_move(self) -> None:
        """All buckets are committed, no parameter has moved: what needs the whole model."""

    @abstractmethod
    def _after_step(self, ballots: Sequence[Ballot], step: int) -> None:
        """All buckets are committed: phase changes."""

    @abstractmethod
    def _last_average(self, bucket: Bucket) -> Tensor:
        """What a compressed exchange brings, float32 [W·N], in the coordinates of the worker error. May be a copy."""

    def _is_synchronised(self) -> bool:
        """Whether all replicas are meant to be the same now."""
        return True

    def _adopt_dense_state(self) -> None:
        """The state that was just loaded is that of a torch.optim.AdamW."""

    # ---------------------------------------------------------------- construction

    def add_param_group(self, param_group: dict) -> None:
        """Add a group; all ranks, at the same step. It warms up for as many steps as the first groups did."""
        super().add_param_group(param_group)
        if self._built_groups:
            self._build_groups()

    def _build_groups(self) -> None:
        """Check, equalise and bucket the groups that have been added since the last call."""
        new = range(self._built_groups, len(self.param_groups))
        params = [(g, p, name) for g in new for p, name in self._named(g)]
        for _, p, name in params:
            if p.dtype not in _DTYPES:
                raise TypeError(
                    f"rank {self.link.rank}: {name} is {p.dtype}; onebit trains float32, bfloat16 and float16"
                )
        lines = [f"{name}: {p.dtype} {tuple(p.shape)} requires_grad={p.requires_grad}" for _, p, name in params]
        device = params[0][1].device if params else torch.device("cpu")
        replicas.check_same_lines(self.link, "the parameters", [*lines, *self._options()], device)
        replicas.make_equal(self.link, [p for _, p, _ in params])
        for g in new:
            self._steps.append(torch.tensor(0.0))
            self._read_masks(g)
            self._build_buckets(g)
        self._built_groups = len(self.param_groups)
        self._sent_before = self.link.sent_bytes

    def _options(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        names = ("codec", "_clip", "error_dtype", "check_replicas_every", "_overlap", "_bucket_elements")
        return [f"option {name.lstrip('_')} = {getattr(self, name)}" for name in names]

    def _named(self, g: int) -> Iterator[tuple[Tensor, str]]:
        group = self.param_groups[g]
        names = group.get("param_names") or [f"parameter {k} of group {g}" for k in range(len(group["params"]))]
        return zip(group["params"], names, strict=True)

    def _read_masks(self, g: int) -> None:
        """Check the group's "exp_avg_mask": a tensor for all its parameters, or one for each; 0 where none may move."""
        masks = self.param_groups[g].get("exp_avg_mask")
        if masks is None:
            self._masks.pop(g, None)
            return
        named = list(self._named(g))
        per_parameter = [masks] * len(named) if isinstance(masks, Tensor) else list(masks)
        if len(per_parameter) != len(named):
            raise ValueError(
                f"rank {self.link.rank}: exp_avg_mask of group {g} has {len(per_parameter)} masks for {len(named)} "
                "parameters; give one tensor, or one for each"
            )
        for (p, name), mask in zip(named, per_parameter, strict=True):
            try:
                fits = torch.broadcast_shapes(mask.shape, p.shape) == p.shape
            except RuntimeError:
                fits = False
            if not fits:
                raise ValueError(
                    f"rank {self.link.rank}: exp_avg_mask of {name} has shape {tuple(mask.shape)}, which does not "
                    f"broadcast to the parameter's {tuple(p.shape)}"
                )
        self._masks[g] = {p: m.to(p.device, torch.float32) for (p, _), m in zip(named, per_parameter, strict=True)}

    def _build_buckets(self, g: int) -> None:
        trained = [(p, name) for p, name in self._named(g) if p.requires_grad]
        for device in dict.fromkeys(p.device for p, _ in trained):
            here = [(p, name) for p, name in trained if p.device == device]
            for indices in partition([p.numel() for p, _ in here], self._bucket_elements):
                bucket = self._new_bucket(g, [here[i] for i in indices], device)
                self._buckets.append(bucket)
                for p in bucket.params:
                    self._slots[p] = _Slot(bucket)
                    self._hook(p)

    def _new_bucket(self, g: int, members: list[tuple[Tensor, str]], device: torch.device) -> Bucket:
        params, names = [p for p, _ in members], [name for _, name in members]
        layout = lay_out([p.shape for p in params], self.codec.block, self.link.world_size)
        x = torch.zeros(layout.numel, device=device)
        bucket = Bucket(
            index=len(self._buckets),
            first=len(self._slots),
            owner=self.link.rank,
            group_index=g,
            params=params,
            names=names,
            layout=layout,
            x=x,
            x_views=layout.views(x),
            counts=layout.counts(device),
        )
        self._allocate(bucket, "warmup")
        self._publish(bucket)
        return bucket

    def _hook(self, p: Tensor) -> None:
        myself = weakref.ref(self)

        def gradient_is_ready(param: Tensor) -> None:
            optimizer = myself()
            if optimizer is not None:
                optimizer._on_gradient(param)

        p.register_post_accumulate_grad_hook(gradient_is_ready)

    # ---------------------------------------------------------------- backward: the launch of complete buckets

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; the bucket leaves in the first pass outside. As in DDP.

        Not needed where every step has the same number of passes: the first step counts them.
        """
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def _on_gradient(self, p: Tensor) -> None:
        if self._paused:
            return
        slot = self._slots[p]
        slot.passes += 1
        if self._launches_in_backward and slot.passes == self._passes_per_step:
            slot.bucket.complete += 1
            with torch.no_grad():
                while self._launched < len(self._buckets) and self._is_complete(self._buckets[self._launched]):
                    self._gather(self._buckets[self._launched])
                    self._launch(self._buckets[self._launched])

    @property
    def _launches_in_backward(self) -> bool:
        # The first step learns how many passes there are.
        travels = all(self._codec(bucket) is not None for bucket in self._buckets)
        return self._overlap and self._passes_per_step > 0 and travels and not self._clips_before_sending

    @staticmethod
    def _is_complete(bucket: Bucket) -> bool:
        return bucket.complete == len(bucket.params)

    def _gather(self, bucket: Bucket, grad_scale: float = 1.0) -> None:
        bucket.gather(grad_scale)
        self._mask(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Send what was gathered. In bucket order: every rank launches the same sequence."""
        codec = self._codec(bucket)
        assert codec is not None and bucket.index == self._launched
        bucket.wire = self._wire(bucket, codec)
        self._make_payload(bucket, self.param_groups[bucket.group_index])
        exchange = comm.compressed_allreduce(
            bucket.x, self._error_feedback(bucket), codec, self.link, bucket.wire, bucket.counts
        )
        bucket.flight = Flight(exchange)
        self._launched += 1

    def _wire(self, bucket: Bucket, codec: Codec) -> Wire:
        """The bucket's buffers for this codec, made when first needed. In full, it travels from where it lies."""
        if codec not in bucket.wires:
            in_place = self._rows(bucket.x.view(torch.uint8)) if isinstance(codec, IdentityCodec) else None
            bucket.wires[codec] = Wire.empty(
                codec, bucket.layout.numel, self.link.world_size, sent_WB=in_place, device=bucket.x.device
            )
        return bucket.wires[codec]

    def _rows(self, flat: Tensor) -> Tensor:
        """A flat tensor of a bucket, one row for each owner."""
        return flat.view(self.link.world_size, -1)

    def _check_unchanged(self) -> None:
        """Raise if a gradient that has been sent is no longer what was sent."""
        changed = [name for bucket in self._buckets[: self._launched] for name in bucket.changed()]
        if changed:
            raise RuntimeError(
                f"rank {self.link.rank}: the gradient of {changed[0]} changed after backward had sent it. For clipping "
                "use max_grad_norm=..., for more backward passes than in the step before use optimizer.no_sync(); for "
                "GradScaler and anything else that edits gradients construct with overlap=False"
            )

    # ---------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update from this rank's gradients; all ranks. See the module docstring for the sequence.

        Under GradScaler (overlap=False) the loss scale is taken out here, and an overflow on one rank makes all skip.
        Raises PeerError if a peer is lost, ReplicaError if the replicas are no longer identical, RuntimeError if a
        gradient was edited after it had been sent.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._buckets:
            return loss
        grad_scale = float(getattr(self, "grad_scale", None) or 1.0)
        if self._launched and grad_scale != 1.0:
            raise RuntimeError(
                "with GradScaler construct the optimizer with overlap=False: its scale is known too late"
            )
        self._check_unchanged()
        for bucket in self._buckets[self._launched :]:
            self._gather(bucket, grad_scale)
        self._waited_s = 0.0
        travels = any(self._codec(bucket) is not None for bucket in self._buckets)
        ballots = self._exchange() if travels else self._stay_at_home()
        if ballots is not None:
            self._finish(ballots)
        else:
            self._skip()
        self._count_traffic()
        self._start_over()
        return loss

    def _exchange(self) -> list[Ballot] | None:
        """Send what has not left yet and bring all of it home. None, on all ranks, where anything is not finite."""
        with self._waiting():
            ballots = cast_ballots(self.link, self._my_ballot(), self._buckets[0].x.device)
        self._clip_before_sending(ballots)
        if not math.isfinite(self.stats.clip_factor):
            return None
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        with self._waiting():
            comm.land([bucket.flight for bucket in self._buckets if bucket.flight is not None])
        return ballots if all(bool(self._is_finite(bucket)) for bucket in self._buckets) else None

    def _stay_at_home(self) -> list[Ballot]:
        """A step without traffic, not even a vote. A gradient that is not finite counts as zero, on this rank alone."""
        self._clip_before_sending([self._my_ballot()])
        if not math.isfinite(self.stats.clip_factor) or not all(bool(b.x.isfinite().all()) for b in self._buckets):
            self._report_bad_gradient("it counts as zero")
            self.stats.clip_factor = 1.0
            for bucket in self._buckets:
                bucket.x.zero_()
        return [self._my_ballot()]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began

    def _is_finite(self, bucket: Bucket) -> Tensor:
        codec = self._codec(bucket)
        assert bucket.wire is not None and codec is not None
        return codec.is_finite(bucket.wire.frames_WB, bucket.layout.chunk)

    def _finish(self, ballots: Sequence[Ballot]) -> None:
        """Commit every bucket, move the parameters, then let the leaf change phase."""
        for bucket in self._buckets:
            codec = self._codec(bucket)
            if codec is not None and bucket.wire is not None and self._sends_gradients(bucket):
                codec.decode(bucket.wire.frames_WB, self._rows(bucket.x))
        self._clip_after_landing()
        self._clip.remember(self.stats.clip_factor, self.param_groups[0]["betas"][0])
        for count in self._steps:
            count += 1
        seen = present_anywhere(ballots)
        for bucket in self._buckets:
            group = self.param_groups[bucket.group_index]
            self._commit(bucket, group, int(self._steps[bucket.group_index]))
        self._before_move()
        for bucket in self._buckets:
            self._move(bucket, seen)
        step = int(self._steps[0])
        self._after_step(ballots, step)
        every = self.check_replicas_every
        if every and step // every > self._checked_step // every and self._is_synchronised():
            self._checked_step = step
            self.check_replicas()

    def _move(self, bucket: Bucket, seen: Sequence[bool]) -> None:
        """p ← p - x, for every parameter that some rank had a gradient for, where no mask forbids it."""
        self._mask(bucket)
        moved = [
            (p, view)
            for k, (p, view) in enumerate(zip(bucket.params, bucket.x_views, strict=True), bucket.first)
            if p.requires_grad and seen[k]
        ]
        if not moved:
            return
        params, views = zip(*moved, strict=True)
        torch._foreach_sub_(params, views)

    def _mask(self, bucket: Bucket) -> None:
        """x ← x · the masks of the bucket's group, one for each parameter, where it has any."""
        masks = self._masks.get(bucket.group_index)
        if masks is not None:
            for p, view in zip(bucket.params, bucket.x_views, strict=True):
                view.mul_(masks[p])

    def _skip(self) -> None:
        if not self._report_bad_gradient("all ranks skip the step") and self.link.rank == 0:
            log.warning("a gradient is not finite on another rank; all ranks skip the step")

    def _report_bad_gradient(self, consequence: str) -> bool:
        """Count it, and warn if it is one of this rank's; whether it is."""
        self.stats.skipped_steps += 1
        mine = [name for bucket in self._buckets for name in bucket.bad()]
        if mine:
            log.warning("rank %d: gradient not finite in %s; %s", self.link.rank, ", ".join(mine[:5]), consequence)
        return bool(mine)

    def _count_traffic(self) -> None:
        self.stats.sent_bytes = self.link.sent_bytes - self._sent_before
        self._sent_before = self.link.sent_bytes
        elements = sum(bucket.layout.parameter_numel for bucket in self._buckets)
        self.stats.bits_per_parameter = 8.0 * self.stats.sent_bytes / elements
        self.stats.comm_ms = 1e3 * self._waited_s

    def _start_over(self) -> None:
        """Forget this step's launches and passes."""
        self._passes_per_step = max(self._passes_per_step, *(slot.passes for slot in self._slots.values()))
        self._launched = 0
        for bucket in self._buckets:
            bucket.flight, bucket.wire, bucket.complete, bucket.gathered = None, None, 0, []
        for slot in self._slots.values():
            slot.passes = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Buckets already sent by a backward pass that no step followed are brought home and dropped."""
        if self._launched:
            comm.land([bucket.flight for bucket in self._buckets if bucket.flight is not None])
            self._start_over()
        super().zero_grad(set_to_none)

    # ---------------------------------------------------------------- clipping by the global norm

    @property
    def _clips_before_sending(self) -> bool:
        # The mean gradient is known after the exchange while it travels in full; once momentum travels instead, each
        # rank must be clipped before its error is added, by an estimate of the same norm.
        return self._clip.max_norm > 0 and not all(self._sends_gradients(bucket) for bucket in self._buckets)

    def _clip_before_sending(self, ballots: Sequence[Ballot]) -> None:
        self.stats.clip_factor = 1.0
        if self._clips_before_sending:
            self.stats.clip_factor = self._clip.estimated_factor(ballots, self.link.world_size)
            for bucket in self._buckets[self._launched :]:
                bucket.x.mul_(self.stats.clip_factor)

    def _my_ballot(self) -> Ballot:
        norm_squared = product = 0.0
        if self._clips_before_sending:
            for bucket in self._buckets:
                m_views = bucket.layout.views(self.momentum(bucket))
                norm_squared += sum(dot(g, g) for g in bucket.x_views)
                product += sum(dot(g, m) for g, m in zip(bucket.x_views, m_views, strict=True))
        present = [p.grad is not None for p in self._slots]
        return Ballot(present, norm_squared, product)

    def _clip_after_landing(self) -> None:
        if self._clip.max_norm > 0 and not self._clips_before_sending:
            chunks = [bucket.own_chunk(bucket.x) for bucket in self._buckets]
            self.stats.clip_factor = self._clip.factor(exact_norm(self.link, chunks))
            for bucket in self._buckets:
                bucket.x.mul_(self.stats.clip_factor)

    # ---------------------------------------------------------------- agreement and telemetry

    def check_replicas(self) -> None:
        """Vote on the bits of all parameters; ReplicaError on all ranks if they differ. Sends 16 bytes per peer."""
        names = [name for bucket in self._buckets for name in bucket.names]
        replicas.check_replicas(self.link, list(self._slots), names, int(self._steps[0]))

    @torch.no_grad()
    def error_norm_ratio(self) -> float:
        """‖worker error‖ / ‖what an exchange brings‖ on this rank: how much is owed. 0 in warm-up. Sends nothing."""
        owed = brought = 0.0
        for bucket in self._buckets:
            if bucket.ef is not None:
                owed += sum(dot(e, e) for e in bucket.layout.views(bucket.ef.worker.float()))
                brought += sum(dot(x, x) for x in bucket.layout.views(self._last_average(bucket)))
        return math.sqrt(owed / brought) if brought > 0 else 0.0

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank: moments, errors, packed momentum. Without bucket and wire buffers."""
        return sum(
            sum(t.nbytes for t in bucket.flat.values())
            + (0 if bucket.frames is None else bucket.frames.nbytes)
            + (0 if bucket.ef is None else bucket.ef.server.nbytes)
            for bucket in self._buckets
        )

    def buffer_bytes(self) -> int:
        """Bytes of buckets and wire buffers on this rank; what DDP calls its buckets."""
        wires = [wire for bucket in self._buckets for wire in bucket.wires.values()]
        tensors = [bucket.x for bucket in self._buckets]
        tensors += [t for wire in wires for t in (wire.sent_WB, wire.received_WB, wire.mean)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    # ---------------------------------------------------------------- checkpoints

    def _publish(self, bucket: Bucket) -> None:
        """Show the bucket's state as torch does: optimizer.state[p], views of the flat tensors."""
        views = {name: bucket.layout.views(flat) for name, flat in bucket.flat.items()}
        for k, p in enumerate(bucket.params):
            self.state[p] = {"step": self._steps[bucket.group_index], **{name: v[k] for name, v in views.items()}}

    def state_dict(self) -> dict:
        """As torch's, and this rank's share of the compression under "onebit": each rank saves and loads its own."""
        state = super().state_dict()
        state["onebit"] = {
            "version": _CHECKPOINT_VERSION,
            "rank": self.link.rank,
            "world_size": self.link.world_size,
            "block": self.codec.block,
            "skipped_steps": self.stats.skipped_steps,
            "clip_average": self._clip.average,
            "buckets": [
                {
                    "phase": bucket.phase,
                    "numel": bucket.layout.numel,
                    "frames": bucket.frames,
                    "server_error": None if bucket.ef is None else bucket.ef.server,
                }
                for bucket in self._buckets
            ],
            **self._extra_state(),
        }
        return state

    def load_state_dicts(self, states: Sequence[dict]) -> None:
        """Continue from the states of all ranks of a world of any size, in rank order. All ranks, all the states.

        In a world of the same size, this rank's own is loaded, exactly. Otherwise each rank will owe the mean of what
        the old ranks owed, which keeps its sum, and rank 0 logs that. Between synchronisations of 0/1 Adam parameters
        are part of the state: they become the mean of the old ranks' too. `states` may load an item when it is asked
        for. Raises ValueError as `load_state_dict`, and where the states are not those of one world.
        """
        if len(states) == self.link.world_size:
            self.load_state_dict(states[self.link.rank])
            return
        world = gather_states(states)
        record = dict(world.state["onebit"], rank=self.link.rank, world_size=self.link.world_size)
        if record["block"] == self.codec.block and len(record["buckets"]) == len(self._buckets):
            record["buckets"] = [
                self._adapt(*saved) for saved in zip(self._buckets, record["buckets"], world.server_errors, strict=True)
            ]
        self.load_state_dict({**world.state, "onebit": record})
        if self.link.rank == 0:
            log.info(
                "optimizer state of %d ranks taken over by %d: each owes the mean of what was owed, its sum is kept",
                world.size,
                self.link.world_size,
            )

    def _adapt(self, bucket: Bucket, saved: dict, server_error: Tensor | None) -> dict:
        """A bucket's record, for this rank of this world."""
        layout = bucket.layout
        frames = saved["frames"]
        return {
            "phase": saved["phase"],
            "numel": layout.numel,
            "frames": None if frames is None else reframe(frames, self.codec, saved["numel"], layout),
            "server_error": None if server_error is None else bucket.own_chunk(resize(server_error, layout.numel)),
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue exactly where `state_dict` was taken, on the same rank of a world of the same size. All ranks.

        The state of a torch.optim.AdamW is taken as the state of a warm-up. Raises ValueError, before anything is
        changed, where world size, rank, shapes, dtypes or options do not fit.
        """
        checked: list[dict] = []

        def check(_: torch.optim.Optimizer, state: dict) -> None:
            self._check_loadable(state)
            checked.append(state)

        last_hook = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()
        self._restore(checked[0])

    def _check_loadable(self, state: dict) -> None:
        where = f"rank {self.link.rank}: cannot load this optimizer state: "
        saved_groups = [len(g["params"]) for g in state["param_groups"]]
        groups = [len(g["params"]) for g in self.param_groups]
        if saved_groups != groups:
            raise ValueError(f"{where}it has groups of {saved_groups} parameters, this optimizer of {groups}")
        record = state.get("onebit")
        if record is not None:
            mine = {
                "version": _CHECKPOINT_VERSION,
                "rank": self.link.rank,
                "world_size": self.link.world_size,
                "block": self.codec.block,
            }
            for key, value in mine.items():
                if record[key] != value:
                    raise ValueError(
                        f"{where}{key} is {record[key]} there and {value} here; each rank loads its own, or all ranks "
                        "load those of all ranks with load_state_dicts"
                    )
            numels = [bucket.layout.numel for bucket in self._buckets]
            if [b["numel"] for b in record["buckets"]] != numels:
                raise ValueError(f"{where}the buckets differ; construct with the same groups, shapes and bucket_cap_mb")
        for name, p, entry in self._saved_entries(state):
            for key, value in entry.items():
                if key == "step":
                    continue
                if value.shape != p.shape:
                    raise ValueError(
                        f"{where}{key} of {name} has shape {tuple(value.shape)}, the parameter {tuple(p.shape)}"
                    )
                expected = self.error_dtype if key == "worker_error" else None
                if not value.is_floating_point() or expected not in (None, value.dtype):
                    raise ValueError(
                        f"{where}{key} of {name} is {value.dtype}, expected {expected or 'floating point'}"
                    )

    def _saved_entries(self, state: dict) -> Iterator[tuple[str, Tensor, dict]]:
        """(name, parameter, its saved state) for every trained parameter."""
        for g, group in enumerate(state["param_groups"]):
            for (p, name), key in zip(self._named(g), group["params"], strict=True):
                if p in self._slots:
                    yield name, p, state["state"].get(key, {})

    def _restore(self, state: dict) -> None:
        record = state.get("onebit")
        entries = {p: entry for _, p, entry in self._saved_entries(state)}
        for bucket in self._buckets:
            saved = None if record is None else record["buckets"][bucket.index]
            self._allocate(bucket, "warmup" if saved is None else saved["phase"])
            for name, flat in bucket.flat.items():
                for p, view in zip(bucket.params, bucket.layout.views(flat), strict=True):
                    if name in entries[p]:
                        view.copy_(entries[p][name])
            if saved is not None and bucket.frames is not None:
                bucket.frames.copy_(saved["frames"])
            if saved is not None and bucket.ef is not None:
                bucket.ef.server.copy_(saved["server_error"])
            step = entries[bucket.params[0]].get("step")
            if step is not None:
                self._steps[bucket.group_index].fill_(float(step))
        self.state.clear()
        for bucket in self._buckets:
            self._publish(bucket)
        if record is not None:
            self.stats.skipped_steps = record["skipped_steps"]
            self._clip.average = tuple(record["clip_average"])
            self._load_extra_state(record)
        else:
            self._adopt_dense_state()
        self._checked_step = int(self._steps[0]) if self._steps else 0
        for g in range(len(self.param_groups)):
            self._read_masks(g)
        if self._buckets:
            self.stats.phase = self._buckets[0].phase

    def _extra_state(self) -> dict:
        """What else a leaf must keep, as plain numbers and tensors."""
        return {}

    def _load_extra_state(self, record: dict) -> None:
        """Take back what `_extra_state` gave."""
