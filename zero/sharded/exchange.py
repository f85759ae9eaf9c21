"""`Sharded`, the placement: sends a bucket up to the owners of its chunks, and down again.

`send_up` and `send_down` are generators that yield the launched Work, so that several buckets share the wire. `send_up`
writes this rank's momentum before its Work; `send_down` writes the parameters after all buckets have met; `step_own`,
between them, writes the owned chunk. A rule (`adam.py`) computes the update between the two.

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk, B bytes of its frame.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ...comm import Codec, Int4Codec, Int8Codec, MasterStep, SignCodec, Transport, Work
from ...comm.codecs import all_finite
from ...comm.kernels.operands import GradientSum, ParamUpdate
from ...comm.messages import sum_in_order
from ...step.bucket_step import Answer, Meeting, OwnersReplied
from ...usage.contract import Group, check_is_number, check_number
from . import arithmetic
from .bucket import ShardedBucket


@dataclass(frozen=True)
class ShardedConfig:
    """Options that are the same for all buckets.

    Attributes:
        stage: 0, 1 or 2; see `ShardedOptions`.
        codec: Format of the momentum that goes up.
        warmup_codec: Format of the gradients that go up in a bucket's first warmup_steps steps. None: momentum goes up,
            in eight bits.
        warmup_steps: Number of steps of the warm-up; 0 for none.
        codec_down: Format of the differences or updates that come down.
        variance_floor: Least variance, as a share of its block's mean.
        update_limit: Bound of |m̂|/D, in learning rates per step.
        keeps_frames: Whether the last frames are kept, because clipping needs the last m̂.
    """

    stage: int
    codec: SignCodec
    warmup_codec: Codec | None
    warmup_steps: int
    codec_down: SignCodec | Int4Codec
    variance_floor: float
    update_limit: float
    keeps_frames: bool

    def check(self, name: str, stages: Sequence[int]) -> None:
        """Raise an error unless the options are valid.

        Args:
            name: Class of the optimizer, for messages.
            stages: The stages that it has.

        Raises:
            ValueError: A number is out of range, or the optimizer does not have the stage.
            TypeError: An option is not a number.
        """
        check_number(name, "variance_floor", self.variance_floor)
        check_is_number(name, "update_limit", self.update_limit)
        check_is_number(name, "warmup_steps", self.warmup_steps)
        if not self.update_limit > 0:
            raise ValueError(f"update_limit must be above 0, got {self.update_limit}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0 (0: none), got {self.warmup_steps}")
        if self.stage not in stages:
            raise ValueError(
                f"stage must be one of {stages} for {name}, got {self.stage!r}; stage 3 needs a fast axis inside the "
                "node"
            )
        if self.stage == 2 and self.keeps_frames:
            raise ValueError(
                "stage 2 frees gradients before their global norm is known; use stage=1 with max_grad_norm, or clip "
                "nothing (no element moves more than update_limit·lr in a step)"
            )

    def holds_warmup(self, bucket: ShardedBucket) -> bool:
        """Whether this bucket makes the next step one of the warm-up, as far as the last step tells.

        One without gradients, such as a frozen layer's, does not: its count stands still.
        """
        return not bucket.is_idle and self.warms_up(bucket, ahead=1)

    def warms_up(self, bucket: ShardedBucket, ahead: int = 0) -> bool:
        """Whether the step that this bucket has begun is in its warm-up.

        Once a bucket has sent one bit, its warm-up is over, whatever the count: a warm-up step needs the last mean.

        Args:
            bucket: The bucket.
            ahead: Check the step this many later. Default 0.
        """
        return bucket.is_warm and max(int(count) for count in bucket.steps) + ahead <= self.warmup_steps


def codec_down(what: str, name: str, block: int) -> SignCodec | Int4Codec:
    """Return the codec of the frames that come down.

    Args:
        what: Name of the option, for messages.
        name: "int4" or "sign".
        block: Elements per scale.

    Raises:
        ValueError: There is no such codec.
    """
    if name not in ("int4", "sign"):
        raise ValueError(f'{what} must be "int4" or "sign", got {name!r}')
    return Int4Codec(block) if name == "int4" else SignCodec(block=block, scale="mean_abs")


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one group for one step.

    Attributes:
        lr: Learning rate.
        decay: lr·weight_decay.
        betas: Decay of momentum and variance.
        share: Weight of this step's gradient in the next frame. Default 1; 1/H in `ShardedZeroOneAdam`.
    """

    lr: float
    decay: float
    betas: tuple[float, float]
    share: float = 1.0

    @classmethod
    def of(cls, group: Group) -> StepNumbers:
        """Read the current numbers of a parameter group."""
        lr = float(group["lr"])
        return cls(lr, lr * group["weight_decay"], group["betas"])


class NotFiniteError(RuntimeError):
    """An owner's update of its chunk is not finite. Raised on all ranks, before any parameter moves."""


class OwnBlocks(NamedTuple):
    """This rank's blocks in a step.

    Attributes:
        seen_J: Whether any rank has a gradient for them, bool [J]; None: for all of them.
        counts_J: Their real elements, int32 [J]; 0 for blocks that are not seen.
        are_all_seen: Whether each parameter of the bucket has a gradient on any rank, as the host knows.
    """

    seen_J: Tensor | None
    counts_J: Tensor
    are_all_seen: bool


class Heard(NamedTuple):
    """The decoded frames of the warm-up, for this rank's chunk; each float32 [N].

    Attributes:
        q: This rank's momentum.
        mean: Mean momentum of all ranks.
        mean_gradient: Mean gradient, if gradients came up; else None.
    """

    q: Tensor
    mean: Tensor
    mean_gradient: Tensor | None


class Received(NamedTuple):
    """An owner's inputs for the update of its chunk.

    Attributes:
        g: Its own gradient, float32 [N].
        frames_WB: All ranks' frames of the chunk, uint8 [W, B].
        blocks: Its blocks in this step.
        heard: The decoded frames. None after the warm-up: a fused pass then decodes them and computes the update.
    """

    g: Tensor
    frames_WB: Tensor
    blocks: OwnBlocks
    heard: Heard | None


@dataclass(frozen=True)
class Sharded:
    """Places the state of each chunk on one rank, its owner. All ranks call the same methods, in order of the buckets.

    Attributes:
        transport: Connection to the other ranks.
        config: Options that are the same for all buckets.
    """

    transport: Transport
    config: ShardedConfig

    def send_early(self, bucket: ShardedBucket, numbers: StepNumbers, scale: float) -> Generator[Work, None, Tensor]:
        """Send the frames of `send_up` to the owners before the vote, after the warm-up. Writes no state.

        When the step is known to count, `send_up` encodes them again, from the same gradients, and only then writes the
        momentum: so a step that is given up needs no copy of the state. Sends (W-1)·B bytes per rank. All ranks.

        Args:
            bucket: The bucket.
            numbers: Its numbers in this step.
            scale: Factor of the gradients.

        Returns:
            All ranks' frames of this rank's chunk, uint8 [W, B].
        """
        transport, codec = self.transport, self.config.codec
        W, N = transport.world_size, bucket.layout.chunk
        sent_WB = torch.empty(W, codec.frame_bytes(N), dtype=torch.uint8, device=bucket.device)
        codec.encode_gradients(_sum(bucket, numbers, scale, sent_WB, bucket.counts, returned=None))
        received_WB = torch.empty_like(sent_WB)
        yield from transport.all_to_all_in_hops(received_WB, sent_WB)
        return received_WB

    def send_up(
        self,
        bucket: ShardedBucket,
        numbers: StepNumbers,
        seen: Sequence[bool],
        scale: float | Tensor,
        early_WB: Tensor | None,
    ) -> Generator[Work, None, Received]:
        """Add this rank's gradients to its momentum, and send frames of it to the owners.

        Sends (W-1)·B bytes per rank, unless it uses the frames of `send_early`. At stage 2 gradients are freed before
        the Work. All ranks.

        Args:
            bucket: The bucket.
            numbers: Its numbers in this step.
            seen: For each parameter, whether any rank has a gradient for it; the others keep their state.
            scale: Factor of the gradients, a number or a 0-dimensional tensor.
            early_WB: The frames that `send_early` received; None if it was not called.
        """
        transport, config = self.transport, self.config
        W, N, block = transport.world_size, bucket.layout.chunk, config.codec.block
        for count, is_seen in zip(bucket.steps, seen, strict=True):
            count += is_seen
        bucket.is_warm = config.warms_up(bucket)
        # Gradients of skipped steps are in the momentum alone: if there may be any, it goes up.
        sends_gradients = bucket.is_warm and config.warmup_codec is not None and numbers.share == 1.0
        codec = self._codec_up(bucket, sends_gradients)

        sent_WB = torch.empty(W, codec.frame_bytes(N), dtype=torch.uint8, device=bucket.device)
        seen_WJ, q_own = bucket.blocks_of(seen), None
        counts_WJ = bucket.counts if seen_WJ is None else bucket.counts * seen_WJ
        if bucket.is_warm:
            x_WN, momentum_WN = bucket.gather_gradients(scale).view(W, N), bucket.momentum.view(W, N)
            g = x_WN[transport.rank].clone()
            advance_ = arithmetic.advance_in_full_ if sends_gradients else arithmetic.advance_momentum_
            advance_(x_WN, momentum_WN, codec, block, sent_WB, counts_WJ, seen_WJ, numbers.betas[0], numbers.share)
            q_own = x_WN[transport.rank].clone() if sends_gradients else None
            del x_WN
        else:
            g, beta1 = bucket.own_gradients(scale), numbers.betas[0]
            config.codec.encode_gradients(_sum(bucket, numbers, scale, sent_WB, counts_WJ, returned=beta1))
        if config.stage == 2:
            bucket.free_gradients()
        if early_WB is None or bucket.is_warm:  # a bucket of which only younger parameters were seen may warm up still
            received_WB = torch.empty_like(sent_WB)
            yield from transport.all_to_all_in_hops(received_WB, sent_WB)
        else:
            received_WB = early_WB

        seen_J = None if seen_WJ is None else seen_WJ[transport.rank]
        blocks = OwnBlocks(seen_J, counts_WJ[transport.rank], all(seen))
        if not bucket.is_warm:
            return Received(g, received_WB, blocks, None)
        q, mean = self._means(bucket, codec, received_WB)
        heard = Heard(q, mean, None)
        if q_own is not None:
            last = torch.zeros_like(mean) if bucket.mean is None else bucket.mean
            heard = Heard(q_own, torch.lerp(last, mean, 1.0 - numbers.betas[0]), mean)
        return Received(g, received_WB, blocks, heard)

    def _codec_up(self, bucket: ShardedBucket, sends_gradients: bool) -> Codec:
        """Return the codec of the frames that go up in the step that this bucket has begun."""
        if sends_gradients:
            assert self.config.warmup_codec is not None
            return self.config.warmup_codec
        return Int8Codec(self.config.codec.block) if bucket.is_warm else self.config.codec

    @staticmethod
    def _means(bucket: ShardedBucket, codec: Codec, received_WB: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's q of its chunk, and the mean over all ranks, each float32 [N]; zeros in the padding."""
        q, mean = (torch.empty(bucket.layout.chunk, device=bucket.device, dtype=torch.float32) for _ in range(2))
        codec.decode_mean(received_WB, mean)
        codec.decode(received_WB[bucket.rank : bucket.rank + 1], q.view(1, -1))
        ragged, padding = bucket.padding_of_ragged
        for x in (q, mean) if len(ragged) else ():
            x_Jn = x.view(-1, bucket.layout.block)
            x_Jn[ragged] = x_Jn[ragged].masked_fill_(padding, 0.0)
        return q, mean

    def keep_mean(self, bucket: ShardedBucket, arrived: Received) -> None:
        """Keep the inputs of the next step: in the warm-up the mean, later the frames if gradients are clipped.

        A block that was not seen keeps its last mean. Frames cannot hold it, so the mean is then kept in their place.
        """
        heard, blocks, codec = arrived.heard, arrived.blocks, self.config.codec
        if heard is None and (blocks.are_all_seen or not self.config.keeps_frames):
            bucket.received, bucket.mean = arrived.frames_WB if self.config.keeps_frames else None, None
            return
        mean = bucket.mean_of(arrived.frames_WB, codec) if heard is None else heard.mean
        if blocks.seen_J is not None:
            last = bucket.last_mean(codec)
            arithmetic.keep_unseen_(last, mean, blocks.seen_J, codec.block)
            mean = last
        bucket.received, bucket.mean = None, mean

    def total(self, mine: Tensor) -> Generator[Work, None, Tensor]:
        """Return the sum of a tensor over ranks, in rank order: equal bits on all. Sends (W-1)·nbytes per rank."""
        rows = torch.empty(self.transport.world_size, mine.nbytes, dtype=torch.uint8, device=mine.device)
        yield self.transport.all_gather(rows, mine.view(-1).view(torch.uint8))
        return sum_in_order(rows.view(mine.dtype).view(-1, *mine.shape))

    def step_own(self, bucket: ShardedBucket, blocks: OwnBlocks, update: Tensor, *, lr: float, decay: float) -> Tensor:
        """Step this rank's chunk, and encode the frame that comes down. Local: sends nothing.

        masters ← (1 - decay)·masters - lr·update, and the frame is of masters - replica. At stage 0 the frame is of
        update + residual, and the new residual is kept.

        Args:
            bucket: The bucket.
            blocks: This rank's blocks; those that are not seen stay.
            update: float32 [N], of this rank's chunk. At stage 0 garbage afterwards.
            lr: Learning rate.
            decay: lr·weight_decay, or 0 if the update contains it.

        Returns:
            The frame, uint8 [B].
        """
        codec, block, N = self.config.codec_down, self.config.codec.block, len(update)
        frame_1B = torch.empty(1, codec.frame_bytes(N), dtype=torch.uint8, device=bucket.device)
        if self.config.stage == 0:
            # update ← update + residual - its decoded frame, the new residual
            codec.encode(update.view(1, N), bucket.owned.view(1, N), frame_1B, blocks.counts_J.view(1, -1))
            arithmetic.keep_unseen_(bucket.owned, update, blocks.seen_J, block)
        else:
            replicas, segments = bucket.own_replicas(), bucket.own_segments
            codec.step_masters(
                MasterStep(
                    update, bucket.owned, replicas, segments, blocks.counts_J, frame_1B, weight=-lr, keep=1.0 - decay
                )
            )
        return frame_1B[0]

    def send_down(
        self, bucket: ShardedBucket, seen: Sequence[bool], frame_B: Tensor, *, lr: float, decay: float
    ) -> Generator[Work | Meeting, Answer, bool]:
        """Send this rank's frame to all ranks, and move the parameters by all frames, if all are finite.

        Yields one Work, then `OwnersReplied`. Sends (W-1)·B bytes per rank. All ranks.

        Args:
            bucket: The bucket.
            seen: For each parameter, whether any rank has a gradient for it; the others do not move.
            frame_B: The frame that `step_own` made, uint8 [B].
            lr: The same as for `step_own`.
            decay: The same as for `step_own`.

        Returns:
            Whether the parameters moved.
        """
        transport, codec = self.transport, self.config.codec_down
        down_WB = torch.empty(transport.world_size, len(frame_B), dtype=torch.uint8, device=bucket.device)
        yield from transport.all_gather_in_hops(down_WB, frame_B)
        is_good = yield OwnersReplied(codec.witness(down_WB, bucket.layout.chunk))
        if is_good:
            self._apply(bucket, down_WB, seen, lr, decay)
        return bool(is_good)

    def refuse_not_finite(self, buckets: Sequence[ShardedBucket], replies: Sequence[OwnersReplied]) -> NoReturn:
        """Raise NotFiniteError for the first bucket that has not come down finite; there is at least one."""
        pairs = zip(buckets, replies, strict=True)
        name = next(bucket.names[0] for bucket, reply in pairs if not bool(all_finite([reply.witness])))
        raise NotFiniteError(
            f"rank {self.transport.rank}: the update of {name} and its bucket is not finite: a frame was "
            "spoilt on the way, or a gradient was too large for a variance; resume from a checkpoint"
        )

    def _apply(self, bucket: ShardedBucket, down_WB: Tensor, seen: Sequence[bool], lr: float, decay: float) -> None:
        """Move the parameters by the frames: the same operations on the same bits on every rank."""
        held, weight, keep = bucket.params, 1.0, 1.0
        if self.config.stage == 0:
            held, weight, keep = bucket.masters.local_values, -lr, 1.0 - decay
        moving = [p if is_seen else None for p, is_seen in zip(held, seen, strict=True)]
        numbers = (torch.full((len(moving),), x, device=bucket.device, dtype=torch.float32) for x in (weight, keep))
        update = ParamUpdate(moving, bucket.layout.segments, *numbers)
        self.config.codec_down.apply(down_WB, bucket.layout.chunk, update)
        bucket.masters.write_back(seen)


def _sum(
    bucket: ShardedBucket,
    numbers: StepNumbers,
    scale: float | Tensor,
    frames_WB: Tensor,
    counts_WJ: Tensor,
    *,
    returned: float | None,
) -> GradientSum:
    """Operands of a fused encode of c = momentum + (1-β1)·share·g.

    With `returned` β1 it also does momentum ← c - (1-β1)·q, rounded once to its own dtype; with None it leaves the
    momentum. So c_k = c_{k-1} + (1-β1)·(g_k - q_{k-1}): momentum and residual are one tensor. Blocks that are not seen
    have a count of 0, and keep their momentum.
    """
    grads, unscale = bucket.scaled_gradients(scale)
    owed_WN, add = bucket.momentum.view(len(frames_WB), -1), (1.0 - numbers.betas[0]) * numbers.share
    return GradientSum(grads, bucket.layout.segments, owed_WN, frames_WB, counts_WJ, add, unscale, returned)
