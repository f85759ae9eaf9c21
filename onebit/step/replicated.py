"""The replicated placement, in which every replica has the whole state: it exchanges buckets and moves parameters.

Each function that exchanges is a generator of Works, for a rule's step to delegate to (`yield from`). Over a
hierarchical transport the ranks of a node add up first, and each exchanges its own rows between nodes. All ranks take
the same buckets through them, in the same order. Rests on `comm/allreduce.py`.

Shape legend: W ranks, N elements of a chunk, K parameters of a bucket.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from .. import comm
from ..comm import (
    Codec,
    EncodeOutput,
    ErrorFeedback,
    Exchange,
    FusedCodec,
    Hierarchy,
    MomentumInputs,
    MomentumWeights,
    ParamUpdate,
    Segments,
    Transport,
    Variance,
    Wire,
    Work,
)
from ..comm.codecs import Witness
from ..layout.bucket import Bucket
from ..layout.flat import lay_out
from ..usage.contract import State
from .bucket_step import Answer, Arrived, Decision, Meeting

MOST_CONSTANTS = 16  # a few for each group; the tensors of earlier learning rates must not pile up


class Journal(Protocol):
    """Is told of what steps do to the state."""

    def applying(self, index: int, frames_WB: Tensor, how: State) -> AbstractContextManager[None]:
        """In this block frames are applied to a bucket's state.

        Args:
            index: The bucket's.
            frames_WB: The frames, uint8 [W, B].
            how: Plain values and tensors with which the same can be done to a copy; see `copying.Repeatable.repeat`.
        """

    def spoil(self, index: int) -> None:
        """The bucket's parameters have moved by something else than frames."""


@dataclass
class Replicated:
    """Exchanges buckets between replicas that all have the whole state.

    Attributes:
        transport: Between the replicas.
        codec: Format in which momentum is sent.
        error_dtype: Dtype of the worker and server errors, torch.float32 or torch.bfloat16.
        journal: Is told of each step while a newcomer copies the state. Default None: none does.
        sums_gradients: Whether encoding this rank's own gradients also fills `Bucket.sums_WJ2`, for a norm that is
            asked for later in the step. On the host it saves a pass over memory. Default False.
    """

    transport: Transport
    codec: FusedCodec
    error_dtype: torch.dtype
    journal: Journal | None = None
    sums_gradients: bool = False
    _constants: dict[tuple[torch.device, str], Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """The two levels of the transport; flat if it does not know nodes."""
        return Hierarchy.of(self.transport)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.transport.world_size

    def new_errors(self, bucket: Bucket) -> ErrorFeedback:
        """Residuals of zero for a bucket: worker error [H·N] for this rank's own rows, and server error [N]."""
        return ErrorFeedback.zeros(
            bucket.layout.numel,
            self.world_size,
            local_size=self.hierarchy.local_size,
            dtype=self.error_dtype,
            device=bucket.device,
        )

    def wire(self, bucket: Bucket, codec: Codec) -> Wire:
        """The bucket's buffers for this codec, made when first needed.

        A codec that sends in place uses the memory of the bucket's buffer.

        Args:
            bucket: The bucket.
            codec: Format of the frames.
        """
        if codec in bucket.wires:
            return bucket.wires[codec]
        in_place = bucket.rows(bucket.buffer.view(torch.uint8)) if codec.sends_in_place else None
        wire = Wire.empty(
            codec,
            bucket.layout.numel,
            self.world_size,
            hierarchy=self.hierarchy,
            frames_WB=in_place,
            device=bucket.device,
        )
        # With a spare error the bucket's buffer is another tensor after the next commit: do not keep views of it.
        if in_place is None or not bucket.has_spare_error:
            bucket.wires[codec] = wire
        return wire

    def gradient_wire(self, bucket: Bucket, codec: Codec) -> Wire:
        """The bucket's buffers for gradients, which have no residuals: in the memory of its buffer if they fit.

        Args:
            bucket: The bucket.
            codec: Format of the gradients.
        """
        if codec in bucket.wires:
            return bucket.wires[codec]
        mean = None if bucket.ef is None else bucket.ef.server_next
        inside = None
        if not codec.sends_in_place:
            inside = Wire.inside(bucket.buffer, codec, self.world_size, hierarchy=self.hierarchy, mean=mean)
        if inside is None:
            return self.wire(bucket, codec)
        if inside.mean is None:  # a bucket without errors: no memory of the wire changes places, so keep it
            inside.mean = torch.empty(bucket.layout.chunk, device=bucket.device, dtype=torch.float32)
            bucket.wires[codec] = inside
        return inside

    # ---------------------------------------------------------------- exchanges

    def mean_gradient(
        self, bucket: Bucket, codec: Codec, scale: float
    ) -> Generator[Work | Meeting, Answer, tuple[Tensor, Decision]]:
        """The clipped mean of the ranks' gradients times scale, and the decision. Meets the other buckets.

        Sends 2·(W-1)/W frames of the bucket in this codec, per rank.

        Args:
            bucket: The bucket.
            codec: Format of the gradients.
            scale: Factor by which gradients are multiplied before they are averaged.

        Returns:
            ḡ, float32 [W·N], in the bucket's buffer, and the decision of all ranks.
        """
        g = bucket.gather(bucket.masked_gradients(), scale)
        wire = self.gradient_wire(bucket, codec)
        yield from comm.compressed_allreduce(g, None, codec, self.transport, wire, bucket.counts)
        frames_WB = wire.frames_WB.clone() if wire.is_inside else wire.frames_WB
        codec.decode(frames_WB, bucket.rows(g))
        witness = codec.witness(frames_WB, bucket.layout.chunk)
        if wire.is_inside:  # a view would keep all of the copy
            witness = Witness(witness.numbers_KM.clone(), witness.factor)
        arrived = Arrived(witness, g)
        del witness, frames_WB  # all buckets wait at this meeting: free the copy of the frames before it
        decision = yield arrived
        return (g if decision.clip_factor == 1.0 else g.mul_(decision.clip_factor)), decision

    def node_gradients(
        self, bucket: Bucket, scale: float
    ) -> Generator[Work | Meeting, Answer, tuple[Sequence[Tensor | None], float]]:
        """The mean over this rank's node of the gradients of each parameter, and the factor that it lacks.

        In a flat world this rank's own gradients, None for a parameter without one, and nothing is sent. Otherwise
        zeros stand for missing ones; yields two Works, and sends 8·(L-1)/L bytes per element inside the node.

        Args:
            bucket: The bucket. In a hierarchy its buffer is overwritten.
            scale: Factor of the gradients.
        """
        grads, L = bucket.masked_gradients(), self.hierarchy.local_size
        if L == 1:
            return grads, scale
        flat = bucket.gather(grads, scale / L)
        yield from self.hierarchy.sum_intra_node(flat)
        rows = bucket.own_rows(flat).view(torch.uint8)
        whole = yield from self.hierarchy.gather_intra_node(rows)
        return bucket.layout.views(whole.view(torch.float32).view(-1)), 1.0

    def average(self, bucket: Bucket, *, is_of_node: bool = False) -> Generator[Work | Meeting, Answer, Decision]:
        """Average the ranks' buffers, compressed, with error feedback. Meets the other buckets.

        The frames of the average are in the codec's wire. The bucket's `ef` holds the new residuals once it is
        committed.

        Args:
            bucket: The bucket, with this rank's values in its buffer.
            is_of_node: Whether all ranks of a node have the same values. Default False.
        """
        wire, ef, flat = self.wire(bucket, self.codec), bucket.ef, bucket.buffer
        if is_of_node:
            yield from comm.average_nodes(bucket.own_rows(flat), ef, self.codec, self.hierarchy, wire, bucket.counts)
        else:
            yield from comm.compressed_allreduce(flat, ef, self.codec, self.transport, wire, bucket.counts)
        decision: Decision = yield self._arrived(bucket)
        return decision

    def average_momentum(
        self,
        bucket: Bucket,
        D_WN: Tensor | Variance,
        momentum_W: Tensor,
        weights: MomentumWeights,
        *,
        added: Tensor | None = None,
        grads: Sequence[Tensor | None] | None = None,
    ) -> Generator[Work | Meeting, Answer, Decision]:
        """Average the momentum that this rank's gradients make, encoded in one pass (`FusedCodec.encode_momentum`).

        In a flat world gradients are read in their own memory. In a hierarchy the ranks of a node add them up first, in
        the bucket's buffer, and each encodes its own rows of their mean. Meets the other buckets; results are those of
        `average`. If the decision has a clip factor, `FusedCodec.correct_residual` puts the next worker error right.

        Args:
            bucket: The bucket.
            D_WN: Denominator, or the variance from which it is computed, one row for each owner.
            momentum_W: Momentum of the last step, frames [W, B] or float32 [W, N], one row for each owner.
            weights: Factors of the terms.
            added: Values to send with it, float32 [W·N]; only in a flat world. Default None.
            grads: Gradients of the bucket's parameters. Default None: those in `.grad`.
        """
        own = bucket.masked_gradients() if grads is None else grads
        bucket.sums_WJ2 = None
        has_sums = self.sums_gradients and grads is None and bucket.masks is None
        if has_sums and self.hierarchy.local_size == 1 and bucket.device.type == "cpu":
            bucket.sums_WJ2 = torch.empty(*bucket.counts.shape, 2, device=bucket.device, dtype=torch.float32)
        exchange = self._exchange_momentum(bucket, self.wire(bucket, self.codec), own, D_WN, momentum_W, weights, added)
        del own, grads  # while it is under way, nothing here keeps them alive
        yield from exchange
        decision: Decision = yield self._arrived(bucket)
        if decision.clip_factor != 1.0:
            assert bucket.ef is not None
            momentum = self._momentum_of(bucket, bucket.masked_gradients(), D_WN, momentum_W, weights)
            error_HN = bucket.ef.worker_next.view(-1, bucket.layout.chunk)
            self.codec.correct_residual(momentum, float(decision.clip_factor), error_HN)
        return decision

    def send_again(self, bucket: Bucket, sent: Tensor) -> Generator[Work | Meeting, Answer, Decision]:
        """Complete an average for which an earlier process has encoded this rank's frames. Meets the other buckets.

        Args:
            bucket: The bucket. Its next worker residual must be the one that the encoding left.
            sent: The frames, on any device.
        """
        wire = self.wire(bucket, self.codec)
        wire.sent_HB.copy_(sent)
        yield from comm.exchange(bucket.ef, self.codec, self.hierarchy, wire, bucket.layout.chunk, bucket.counts)
        decision: Decision = yield self._arrived(bucket)
        return decision

    def _exchange_momentum(
        self,
        bucket: Bucket,
        wire: Wire,
        grads: Sequence[Tensor | None],
        D_WN: Tensor | Variance,
        momentum_W: Tensor,
        weights: MomentumWeights,
        added: Tensor | None,
    ) -> Exchange:
        ef, own = bucket.ef, self.hierarchy.own
        assert ef is not None and (added is None or self.hierarchy.local_size == 1)
        if self.hierarchy.local_size > 1:
            yield from self.hierarchy.sum_intra_node(bucket.gather(grads))
        momentum = self._momentum_of(bucket, grads, D_WN, momentum_W, weights)
        n, error, counts = bucket.layout.chunk, ef.worker, bucket.counts[own]
        if added is not None:
            error = torch.add(ef.worker, added, out=ef.worker_next if bucket.has_spare_error else None)
        out = EncodeOutput(error.view(-1, n), wire.sent_HB, counts, ef.worker_next.view(-1, n), bucket.sums_WJ2)
        self.codec.encode_momentum(momentum, out)
        del momentum, grads, error, out
        yield from comm.exchange(ef, self.codec, self.hierarchy, wire, n, bucket.counts)

    def _momentum_of(
        self,
        bucket: Bucket,
        grads: Sequence[Tensor | None],
        D_WN: Tensor | Variance,
        momentum_W: Tensor,
        weights: MomentumWeights,
    ) -> MomentumInputs:
        """What the codec encodes: in a hierarchy this rank's rows of the node's sum, which is in the buffer."""
        own, segments = self.hierarchy.own, bucket.layout.segments
        if self.hierarchy.local_size > 1:
            node = bucket.own_rows(bucket.buffer).view(-1)
            grads, segments = [node], Segments((0,), (len(node),), self.codec.block)
            weights = replace(weights, unscale=weights.unscale / self.hierarchy.local_size)
        D_KN = D_WN.rows(own) if isinstance(D_WN, Variance) else D_WN[own]
        return MomentumInputs(grads, segments, D_KN, momentum_W[own], weights)

    def _arrived(self, bucket: Bucket) -> Arrived:
        return Arrived(self.codec.witness(self.frames(bucket), bucket.layout.chunk))

    # ---------------------------------------------------------------- what has arrived

    def frames(self, bucket: Bucket) -> Tensor:
        """The frames of the last average in the codec, uint8 [W, B]."""
        return bucket.wires[self.codec].frames_WB

    def bound_(self, buckets: Sequence[Bucket], largest: float) -> None:
        """Cut values of the buckets' last averages that are farther from zero than `largest` to it."""
        if buckets:
            self.codec.bound_([(self.frames(bucket), bucket.layout.chunk) for bucket in buckets], largest)

    def spoilt(self, bucket: Bucket, sent_HB: Tensor) -> list[str]:
        """The names of the parameters for which these frames contain values that are not finite.

        Args:
            bucket: The bucket.
            sent_HB: Frames that this rank has sent, uint8 [H, B].
        """
        own = torch.zeros(len(sent_HB), bucket.layout.chunk, device=bucket.device, dtype=torch.float32)
        self.codec.decode(sent_HB, own)
        values = bucket.layout.views(bucket.spread(own.view(-1)))
        return [name for x, name in zip(values, bucket.names, strict=True) if not bool(x.isfinite().all())]

    def swap_frames(self, bucket: Bucket) -> Tensor:
        """Keep the frames that have just arrived in the bucket, and return them.

        The memory of its old frames receives the next ones.
        """
        assert bucket.frames is not None
        wire = bucket.wires[self.codec]
        bucket.frames, wire.frames_WB = wire.frames_WB, bucket.frames
        return bucket.frames

    def unpacked(self, bucket: Bucket, frames_WB: Tensor | None) -> Tensor:
        """The values that these frames contain, float32 [W·N], in a new tensor.

        Args:
            bucket: The bucket.
            frames_WB: Frames of the momentum's codec, uint8 [W, B].
        """
        assert frames_WB is not None
        values = torch.empty(bucket.layout.numel, device=bucket.device, dtype=torch.float32)
        self.codec.decode(frames_WB, bucket.rows(values))
        return values

    # ---------------------------------------------------------------- parameters

    def apply(
        self, bucket: Bucket, decision: Decision, frames_WB: Tensor | None, weight_K: Tensor, keep_K: Tensor
    ) -> None:
        """p ← keep·p + weight·value for every parameter for which some rank had a gradient, in one pass.

        Args:
            bucket: The bucket. Its parameters are modified.
            decision: Shows which parameters move.
            frames_WB: Frames that contain the values, uint8 [W, B].
            weight_K: Weight of the value for each parameter, float32.
            keep_K: Factor of each parameter, float32.
        """
        assert frames_WB is not None
        moves = list(decision.of(bucket))
        params = [p if is_moving else None for p, is_moving in zip(bucket.local_values, moves, strict=True)]
        how = {"moves": moves, "weight": weight_K, "keep": keep_K}
        with self._noting(bucket, frames_WB, how):
            update = ParamUpdate(params, bucket.layout.segments, weight_K, keep_K)
            self.codec.apply(frames_WB, bucket.layout.chunk, update)

    def take(self, bucket: Bucket, frames_WB: Tensor, flat: Tensor, weight: float) -> None:
        """flat ← weight·value.

        Args:
            bucket: The bucket.
            frames_WB: Frames that contain the values, uint8 [W, B].
            flat: The state that follows the parameters in `Rule.common`, float32 [W·N]. Overwritten.
            weight: Weight of the values.
        """
        with self._noting(bucket, frames_WB, {"taken": weight}):
            self.codec.decode(frames_WB, bucket.rows(flat), weight=weight)

    def _noting(self, bucket: Bucket, frames_WB: Tensor, how: State) -> AbstractContextManager[None]:
        journal = self.journal  # another thread may set it to None
        return nullcontext() if journal is None else journal.applying(bucket.index, frames_WB, how)

    def repeat(self, bucket: Bucket, tensors: Sequence[Tensor], step: State) -> None:
        """Do to copies, on the host, what `apply` or `take` has done. See `membership.copying.Repeatable`.

        Args:
            bucket: The bucket, read for its shapes alone.
            tensors: First those of the parameters, then those that `take` overwrites, if it does.
            step: What the journal has noted.
        """
        codec, frames_WB, K = self.codec.on_host(), step["frames"], len(bucket.params)
        layout = lay_out(bucket.layout.shapes, codec.block, len(frames_WB))
        if "taken" in step:
            values_WN = torch.empty(len(frames_WB), layout.chunk, device="cpu", dtype=torch.float32)
            codec.decode(frames_WB, values_WN, weight=step["taken"])
            torch._foreach_copy_(list(tensors[K : 2 * K]), layout.views(values_WN.view(-1)))
            return
        params = [x if moves else None for x, moves in zip(tensors, step["moves"], strict=False)]
        codec.apply(frames_WB, layout.chunk, ParamUpdate(params, layout.segments, step["weight"], step["keep"]))

    def constant(self, bucket: Bucket, number: float) -> Tensor:
        """The number, once for each of the bucket's parameters, float32 [K]. Only read it: all buckets share it.

        Args:
            bucket: The bucket.
            number: The number.
        """
        key, K = (bucket.device, number.hex()), len(bucket.params)  # hex tells 0.0 from -0.0, which are equal
        if key not in self._constants or len(self._constants[key]) < K:
            if len(self._constants) >= MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = torch.full((K,), number, device=bucket.device, dtype=torch.float32)
        return self._constants[key][:K]

    def move(self, bucket: Bucket, decision: Decision) -> None:
        """p ← p - buffer for every parameter for which some rank had a gradient, except elements that a mask fixes.

        Args:
            bucket: The bucket, with the update in its buffer. Its parameters are modified.
            decision: Shows which parameters move.
        """
        if bucket.masks is not None:
            torch._foreach_mul_(bucket.views, bucket.masks)
        moved = [
            (p, view)
            for p, view, is_seen in zip(bucket.local_values, bucket.views, decision.of(bucket), strict=True)
            if is_seen
        ]
        if moved:
            params, views = zip(*moved, strict=True)
            torch._foreach_sub_(params, views)
        if (journal := self.journal) is not None:
            journal.spoil(bucket.index)
