"""The recursion of local steps, for one bucket: differences up, their mean down, error feedback on both phases.

    w ← Inner(w, own gradient)                      in every step; nothing travels
    Δ = k·θ - w                                     at a round; k: what weight decay has left of θ since the last one
    c = e + γ·Δ;  q = C(c);  e ← ρ·(c - q)          phase 1; γ: the rank's weight, 1 unless tokens are counted
    a = mean q + E;  Q = C(a);  E ← a - Q           phase 2, on the owner of a chunk
    u ← μ·u + Q;  θ ← k·θ - η·(Q + μ·u);  w ← θ     μ = 0: θ ← k·θ - η·Q

With a correction (SCAFFOLD's control variate, arXiv 1910.06378, option II, from decoded frames and in moves per
learning rate, which suits any inner optimizer):

    w ← w + lr·v                                    after each step of the inner optimizer
    v ← v + min(.3/H, 1/τ)·(q/γ - Q)/lr             at a round; lr: the largest so far

A rank that does not take part in a round sends empty frames (scale 0), so that q = 0 and e takes all of c: the mean is
always over all ranks, and nothing is lost. w decays in its own steps; k takes that share out of Δ, so the anchor decays
exactly, and no decay travels in one bit. k = 1 for a parameter that had no gradient in some step on some rank: its
decay stays in Δ. If frames are lossless, w itself travels in place of Δ, because subtracting from θ twice would round.

Δ suits signs better than the gradient: it is dense, and its elements are of similar size. The exchange is in
`comm/allreduce.py`. Sources: DiLoCo (arXiv 2311.08105) for the outer step; 1-bit Adam (arXiv 2102.02888), Algorithm 1,
for both errors.

Shape legend: W ranks, N elements of a chunk; H ranks exchange compressed, see `comm/hierarchy.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..arithmetic.squares import LARGEST_GRADIENT
from ..comm import Codec, ErrorFeedback, Exchange, ExchangeTask, Hierarchy, IdentityCodec, Transport, Wire
from ..layout.flat import Layout, lay_out
from ..layout.masters import Masters
from ..model_parallel import local
from ..step.driver import StepState, moved
from ..usage.contract import State, check_is_number
from ..usage.gradients import check_place, gradient_of


@dataclass(frozen=True)
class OuterStep:
    """The outer step, which applies a mean difference. lr: η. momentum: μ, Nesterov's. error_decay: ρ."""

    lr: float = 1.0
    momentum: float = 0.0
    error_decay: float = 1.0

    def __post_init__(self) -> None:
        for name, value, most in (("outer_lr", self.lr, 10.0), ("error_decay", self.error_decay, 1.0)):
            if not 0.0 < check_is_number("LocalSteps", name, value) <= most:
                raise ValueError(f"{name} must be above 0 and at most {most:g}, got {value}")
        if not 0.0 <= check_is_number("LocalSteps", "outer_momentum", self.momentum) < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.momentum}")

    @property
    def is_plain(self) -> bool:
        """Whether the anchor becomes the mean of the weights."""
        return self.lr == 1.0 and self.momentum == 0.0

    def take(
        self, codec: Codec, frames_WB: Tensor, share: Share, layout: Layout, anchor: Tensor, velocity: Tensor | None
    ) -> None:
        """Move θ and u, float32 [W·N], by the frames of all ranks. share: any rank's; the same moves on all."""
        rows_WN = anchor.view(layout.world_size, -1)
        if share.sends_weights:
            codec.decode(frames_WB, rows_WN)
            return
        for theta, keep in zip(layout.views(anchor), share.keep_K, strict=True):
            if keep != 1.0:
                theta.mul_(keep)
        codec.decode(frames_WB, rows_WN, weight=-self.lr, keep=1.0)
        if velocity is not None:
            codec.decode(frames_WB, velocity.view_as(rows_WN), keep=self.momentum)
            anchor.sub_(velocity, alpha=self.lr * self.momentum)


@dataclass(frozen=True)
class Share:
    """This rank's part in a round of a bucket. keep_K: k, by parameter; the same on all ranks. weight: γ.

    is_present: if False, its difference is carried over. sends_weights: w travels in place of Δ; the same on all ranks.
    correction: factor of (q/γ - Q)/lr in v, min(.3/H, 1/τ); 0: no correction in this round.
    """

    keep_K: tuple[float, ...]
    weight: float = 1.0
    is_present: bool = True
    sends_weights: bool = False
    correction: float = 0.0


class Pace(NamedTuple):
    """How fast a parameter moves.

    Attributes:
        move: Its largest recent move in a round, per step and learning rate.
        relative: The same per norm of its gradient.
        still: Its elements, times the rounds in a row, up to the last one, in which it stood still.
    """

    move: float = 0.0
    relative: float = 0.0
    still: int = 0


@dataclass(eq=False)
class LocalBucket:
    """Some parameters of one group, and the state of local steps for them, beside the inner optimizer's.

    masters: w of parameters in bfloat16 or float16. anchor: θ, float32 [W·N], the same bits on all ranks. velocity: u,
    likewise; None if μ = 0. correction: v, float32 [W·N]; None without one. peak_lr: the largest learning rate so far,
    if there is a correction. ef: e and E. wire, at_send: frames of an exchange under way, and w as it was sent, if w
    moves on meanwhile. sent_HB: a copy of the sent frames, for a checkpoint. said_WB: frames of this node from the last
    exchange, for the correction. may_retry: a round that was sent may be sent anew, among members that come and go, for
    which e is kept while it travels. paces: by parameter; empty before the first round.
    """

    index: int
    first: int
    rank: int
    hierarchy: Hierarchy
    group_index: int
    group: State
    device: torch.device
    params: list[Tensor]
    names: list[str]
    masters: Masters
    layout: Layout
    counts: Tensor
    anchor: Tensor
    ef: ErrorFeedback
    velocity: Tensor | None = None
    correction: Tensor | None = None
    peak_lr: float = 0.0
    wire: Wire | None = None
    at_send: Tensor | None = None
    sent_HB: Tensor | None = None
    said_WB: Tensor | None = None
    may_retry: bool = False
    paces: list[Pace] = field(default_factory=list)

    def gradients(self) -> list[Tensor | None]:
        """This rank's gradients, not copied; None for parameters that are frozen now. They may be sparse."""
        grads = map(gradient_of, self.params)
        return [None if grad is None else local(grad) for grad in grads]

    def state_bytes(self) -> int:
        """Bytes of masters, anchor, errors, outer momentum and correction."""
        errors = (self.ef.worker, self.ef.server, self.ef.server_next)
        kept = (self.masters.flat, self.anchor, self.velocity, self.correction, *errors)
        return sum(t.nbytes for t in kept if t is not None)

    @property
    def local_values(self) -> list[Tensor]:
        """w, float32: this rank's part of the parameters, not copied, or their masters."""
        return self.masters.local_values

    def rows(self, flat: Tensor) -> Tensor:
        """A flat tensor as one row per owner. A view."""
        return flat.view(self.layout.world_size, -1)

    def flatten(self) -> Tensor:
        """The parameters as they are, float32 [W·N], zeros in the padding. A new tensor."""
        flat = torch.zeros(self.layout.numel, device=self.device, dtype=torch.float32)
        torch._foreach_copy_(self.layout.views(flat), self.local_values)
        return flat

    def difference(self, keep_K: Sequence[float]) -> Tensor:
        """Δ, float32 [W·N], zeros in the padding. A new tensor."""
        flat = torch.zeros(self.layout.numel, device=self.device, dtype=torch.float32)
        views, anchors = self.layout.views(flat), self.layout.views(self.anchor)
        for delta, theta, w, keep in zip(views, anchors, self.local_values, keep_K, strict=True):
            if keep == 1.0:
                torch.sub(theta, w, out=delta)
            else:
                torch.mul(theta, keep, out=delta).sub_(w)
        return flat

    def can_travel(self) -> bool:
        """Whether the parameters are finite, and small enough for frames of their differences."""
        # aminmax: NaN if there is one; 40 times as fast as a largest-norm on the CPU (6 M elements, 2026-11).
        extremes = [torch.stack(torch.aminmax(w)).abs().max() for w in self.local_values if w.numel() > 0]
        return not extremes or bool((torch.stack(extremes) <= LARGEST_GRADIENT).all())

    def return_to_anchor(self) -> None:
        """w ← θ."""
        torch._foreach_copy_(self.local_values, self.layout.views(self.anchor))

    def owes(self) -> bool:
        """Whether the worker error has an element other than 0."""
        return bool(self.ef.worker.any())

    def correct(self, moved: Collection[Tensor], lr: float) -> None:
        """w ← w + lr·v for the parameters that the inner optimizer has just moved at this rate."""
        assert self.correction is not None
        self.peak_lr = max(self.peak_lr, lr)
        views = self.layout.views(self.correction)
        pairs = [(w, v) for p, w, v in zip(self.params, self.local_values, views, strict=True) if p in moved]
        if pairs:
            ws, vs = zip(*pairs, strict=True)
            torch._foreach_add_(ws, vs, alpha=lr)

    def relay(self, layout: Layout, rank: int) -> None:
        """Lay the bucket out for another set of ranks, with residuals of zero and without a correction so far."""
        before, self.layout, self.rank, self.counts = self.layout, layout, rank, layout.counts(self.device)
        self.anchor = _laid_out(self.anchor, before, layout)
        self.velocity = None if self.velocity is None else _laid_out(self.velocity, before, layout)
        self.correction = None if self.correction is None else torch.zeros_like(self.anchor)
        self.ef = ErrorFeedback.zeros(layout.numel, layout.world_size, dtype=self.ef.worker.dtype, device=self.device)
        self.ef.worker_next = self.ef.worker.new_empty(0)
        self.at_send = None if self.at_send is None else _laid_out(self.at_send, before, layout)
        self.wire = self.sent_HB = self.said_WB = None

    # ---------------------------------------------------------------- a round

    def send(self, codec: Codec, transport: Transport, share: Share, *, keeps_weights: bool) -> Exchange:
        """Both phases, from the current parameters. Yields Works; at the end the wire has all ranks' frames.

        keeps_weights: whether w moves on while this travels; see `land`.
        """
        self._encode(codec, share, keeps_weights=keeps_weights)
        yield from self._exchange(codec, transport)

    def _encode(self, codec: Codec, share: Share, *, keeps_weights: bool) -> None:
        """Encode this rank's share into the wire's buffers; the residual becomes the worker error.

        Not a part of `send`: that generator would keep the large tensors here alive until the exchange lands.
        """
        for p, name, shape in zip(self.params, self.names, self.layout.shapes, strict=True):
            check_place(self.rank, p, name, shape, self.device)
        x = self.flatten() if share.sends_weights else self.difference(share.keep_K)
        if keeps_weights:
            self.at_send = x.clone() if share.sends_weights else self.flatten()
        if share.weight != 1.0:
            x.mul_(share.weight)
        self.wire = Wire.empty(
            codec, self.layout.numel, self.layout.world_size, hierarchy=self.hierarchy, device=self.device
        )
        counts_HJ = self.hierarchy.rows(self.counts)
        x_HN = self.hierarchy.rows(x)  # the ranks of a node average gradients, so all have the same x
        e_HN = self.ef.worker.view(x_HN.shape)
        if share.is_present:
            codec.encode(x_HN, e_HN, self.wire.sent_HB, counts_HJ)
        else:
            codec.encode(torch.zeros_like(x_HN), None, self.wire.sent_HB, counts_HJ)
            x_HN.add_(e_HN)
        # In a flat world x is the next error; in two levels each rank of a node keeps its own rows.
        residual = x if len(x_HN) == self.layout.world_size else x_HN.reshape(-1).clone()
        self.ef.worker_next = residual.to(self.ef.worker.dtype)
        if not self.may_retry:  # then the error before the round is not needed, and its memory is freed
            self.ef.worker = self.ef.worker_next
        if keeps_weights:
            self.sent_HB = self.wire.sent_HB.clone()

    def send_again(self, codec: Codec, transport: Transport, sent_HB: Tensor) -> Exchange:
        """As `send`, from the frames of a checkpoint; at_send and ef.worker have been restored."""
        self.wire = Wire.empty(
            codec, self.layout.numel, self.layout.world_size, hierarchy=self.hierarchy, device=self.device
        )
        self.wire.sent_HB.copy_(sent_HB)
        self.sent_HB = sent_HB
        yield from self._exchange(codec, transport)

    def _exchange(self, codec: Codec, transport: Transport) -> Exchange:
        """Both phases of the frames in the wire's buffers; for a correction, also gather the frames of this node."""
        assert self.wire is not None
        said_HB = None if self.correction is None else self.wire.sent_HB.clone()
        yield from comm.exchange(self.ef, codec, self.hierarchy, self.wire, self.layout.chunk, self.counts)
        if said_HB is not None:
            self.said_WB = yield from self.hierarchy.gather_intra_node(said_HB)

    def land(self, codec: Codec, outer: OuterStep, share: Share) -> None:
        """Apply an exchange that has arrived: errors, anchor, parameters.

        Raises RuntimeError, on all ranks, if frames are not finite: senders had checked their differences.
        """
        wire, self.wire = self.wire, None
        assert wire is not None
        if not bool(codec.is_finite(wire.frames_WB, self.layout.chunk)):
            raise RuntimeError(
                f"rank {self.rank}: the mean difference of {self.names[0]} and its bucket is not finite, though every "
                "rank's was: lower the learning rate, and resume from a checkpoint"
            )
        self.ef.commit()
        self.ef.worker_next = self.ef.worker.new_empty(0)
        if outer.error_decay != 1.0:
            self.ef.worker.mul_(outer.error_decay)
        outer.take(codec, wire.frames_WB, share, self.layout, self.anchor, self.velocity)
        self._learn_correction(codec, wire.frames_WB, share)
        self.follow_anchor()

    def _learn_correction(self, codec: Codec, frames_WB: Tensor, share: Share) -> None:
        """v ← v + share.correction·(q/γ - Q)/lr. If weights travel, frames give -Δ plus the anchor, which cancels.

        lr: the largest so far: a residual carried over from large steps must not count as moves at a small rate.
        """
        said_WB, self.said_WB = self.said_WB, None
        if self.correction is None or said_WB is None or share.correction == 0.0 or self.peak_lr == 0.0:
            return
        per_move = (-share.correction if share.sends_weights else share.correction) / self.peak_lr
        codec.decode(said_WB, self.rows(self.correction), weight=per_move / share.weight, keep=1.0)
        codec.decode(frames_WB, self.rows(self.correction), weight=-per_move, keep=1.0)

    def common(self) -> list[Tensor]:
        """What is the same on all ranks, by parameter: θ, then u if there is one. Views."""
        flats = [self.anchor] if self.velocity is None else [self.anchor, self.velocity]
        return [view for flat in flats for view in self.layout.views(flat)]

    def follow_anchor(self) -> None:
        """w ← θ, plus the change of w since it was sent."""
        if self.at_send is not None:
            gained = zip(
                self.local_values, self.layout.views(self.anchor), self.layout.views(self.at_send), strict=True
            )
            for w, theta, sent in gained:
                w.add_(theta - sent)
            self.at_send = self.sent_HB = None
        else:
            self.return_to_anchor()


def _laid_out(flat: Tensor, before: Layout, layout: Layout) -> Tensor:
    """The parameters' elements of a flat tensor in another layout; zeros between and after them."""
    found = torch.zeros(layout.numel, device=flat.device, dtype=flat.dtype)
    torch._foreach_copy_(layout.views(found), before.views(flat))
    return found


def repeat_round(
    bucket: LocalBucket, codec: Codec, outer: OuterStep, frames_WB: Tensor, share: Share, tensors: Sequence[Tensor]
) -> None:
    """Do to copies of `bucket.common()`, on the host, what a round has done to them. bucket: only for its shapes."""
    layout, K = lay_out(bucket.layout.shapes, codec.block, len(frames_WB)), len(bucket.layout.shapes)
    copies = [list(tensors[k : k + K]) for k in range(0, len(tensors), K)]
    flats = [torch.zeros(layout.numel, device="cpu", dtype=torch.float32) for _ in copies]
    for flat, copy in zip(flats, copies, strict=True):
        torch._foreach_copy_(layout.views(flat), copy)
    outer.take(codec, frames_WB, share, layout, flats[0], flats[1] if bucket.velocity is not None else None)
    for flat, copy in zip(flats, copies, strict=True):
        torch._foreach_copy_(copy, layout.views(flat))


def is_lossless(codec: Codec) -> bool:
    """Whether frames contain float32 unchanged."""
    return isinstance(codec, IdentityCodec)


@dataclass(eq=False)
class Fragment:
    """Buckets that travel together. due: the step after which they are sent next.

    state: state of its exchange; suspended: it lands some steps later. sent_at, lands_at: steps of that exchange; None:
    there is none. shares, tasks: its parts, by bucket. keeps: by group, k since the last round. decays: by parameter,
    whether it had a gradient in every step since. tokens: counted since then. before: these three, as it was sent.
    synced_at: the last step after which its parameters were the anchor. rounds: number of times it was sent. landed:
    which of these landed last.
    """

    index: int
    buckets: list[LocalBucket]
    due: int
    state: StepState = StepState.IDLE
    keeps: list[float] = field(default_factory=list)
    decays: list[bool] = field(default_factory=list)
    tokens: float = 0.0
    synced_at: int = 0
    before: tuple[float, list[float], list[bool]] = (0.0, [], [])
    rounds: int = 0
    landed: int = 0
    sent_at: int | None = None
    lands_at: int | None = None
    shares: list[Share] = field(default_factory=list)
    tasks: list[ExchangeTask] = field(default_factory=list)

    @property
    def is_under_way(self) -> bool:
        """Whether it has been sent and has not landed."""
        return self.state is StepState.SUSPENDED

    @property
    def params(self) -> list[Tensor]:
        """Parameters, in the order of `decays`."""
        return [p for bucket in self.buckets for p in bucket.params]

    def move(self, event: str) -> None:
        """Change the state of its exchange by an event of `TRANSITIONS`."""
        self.state = moved(self.state, event)

    def begin(self, step: int) -> None:
        """Begin the next round: its parameters are sent after this step."""
        self.move("begin")
        self.before = self.tokens, self.keeps, self.decays
        self.count_anew()
        self.sent_at = step

    def count_anew(self) -> None:
        """Nothing has been counted since the last round."""
        self.tokens, self.keeps, self.decays = 0.0, [1.0] * len(self.keeps), [True] * len(self.decays)

    def complete(self, *events: str) -> None:
        """End its exchange. events: those of `TRANSITIONS` that lead there."""
        for event in events:
            self.move(event)
        self.tasks, self.sent_at, self.lands_at, self.landed = [], None, None, self.rounds

    def since_landed(self) -> tuple[float, list[float], list[bool]]:
        """tokens, keeps and decays since the last round that has landed, the one under way included."""
        if self.sent_at is None:
            return self.tokens, self.keeps, self.decays
        tokens, keeps, decays = self.before
        return (
            tokens + self.tokens,
            [a * b for a, b in zip(keeps, self.keeps, strict=True)],
            [a and b for a, b in zip(decays, self.decays, strict=True)],
        )

    def discard(self) -> None:
        """Forget its exchange: what was sent in it goes with the next."""
        self.move("skip")
        self.tokens, self.keeps, self.decays = self.since_landed()
        self.tasks, self.sent_at, self.lands_at = [], None, None
        for bucket in self.buckets:
            bucket.at_send = None


def divide(buckets: Sequence[LocalBucket], parts: int) -> list[list[LocalBucket]]:
    """The buckets in this many runs with about the same number of elements; fewer if there are fewer buckets."""
    total, runs, before = sum(bucket.layout.numel for bucket in buckets), {}, 0  # type: ignore[var-annotated]
    for bucket in buckets:
        middle = before + bucket.layout.numel / 2
        runs.setdefault(min(int(middle * parts / total), parts - 1), []).append(bucket)
        before += bucket.layout.numel
    return [runs[k] for k in sorted(runs)] or [[]]
