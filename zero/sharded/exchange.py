"""`Sharded`, the placement: one bucket's way up to the owners of its chunks, and down again.

Both are generators that yield the launched Work, so that several buckets share the wire. What they write: `send_up`
this rank's momentum before its Work; `send_down` what this rank owns before, the parameters after all buckets have met.
What owners make of what has come up is a rule's (`adam.py`).

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk, B bytes of its frame.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ...comm import Codec, Int4Codec, Int8Codec, SignCodec, Transport, Work
from ...comm.codecs import all_finite
from ...comm.kernels.operands import GradientSum, ParamUpdate
from ...comm.messages import sum_in_order
from ...step.bucket_step import Answer, Meeting, OwnersReplied
from ...usage.contract import Group, check_is_number, check_number, eps_of
from . import arithmetic
from .bucket import ShardedBucket


@dataclass(frozen=True)
class ShardedConfig:
    """What is the same for all buckets. keeps_frames: the clipping needs the last m̂.

    codec: up. warmup_codec: what gradients travel up in, in a bucket's first warmup_steps steps; None: momentum does,
    in eight bits. codec_down: down.
    """

    stage: int
    codec: SignCodec
    warmup_codec: Codec | None
    warmup_steps: int
    codec_down: Codec
    variance_floor: float
    update_limit: float
    keeps_frames: bool

    def check(self, name: str, stages: Sequence[int]) -> None:
        """Raise TypeError or ValueError where it is not for optimizer `name`, which has these stages."""
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

    def warms_up(self, bucket: ShardedBucket, ahead: int = 0) -> bool:
        """Whether the step that this bucket has begun, or the one this many ahead, is one of its warm-up.

        Once a bucket has sent one bit, its warm-up is over, whatever the count: it needs the last step's mean.
        """
        return bucket.is_warm and max(int(count) for count in bucket.steps) + ahead <= self.warmup_steps


def codec_down(what: str, name: str, block: int) -> Codec:
    """What comes down, by the name that option `what` gives it."""
    if name not in ("int4", "sign"):
        raise ValueError(f'{what} must be "int4" or "sign", got {name!r}')
    return Int4Codec(block) if name == "int4" else SignCodec(block=block, scale="mean_abs")


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one group for one step. decay: lr·weight_decay. share: of this gradient in what is sent of it."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float
    share: float = 1.0

    @classmethod
    def of(cls, group: Group) -> StepNumbers:
        """As they are in a param group now."""
        lr = float(group["lr"])
        return cls(lr, lr * group["weight_decay"], group["betas"], eps_of(group))


class NotFiniteError(RuntimeError):
    """What an owner has made of its chunk is not finite. Raised by all ranks, before any parameter moves."""


class OwnBlocks(NamedTuple):
    """The own blocks in a step. seen: bool [J], whether some rank has a gradient for them; None: for all of them.

    counts: int32 [J], their real elements; 0 where they are not seen.
    """

    seen_J: Tensor | None
    counts_J: Tensor


class Heard(NamedTuple):
    """What frames of the warm-up say of the own chunk, float32 [N]: q the own one of the momentum, mean all of them.

    mean_gradient: where gradients came up.
    """

    q: Tensor
    mean: Tensor
    mean_gradient: Tensor | None


class Received(NamedTuple):
    """What an owner has of its chunk when all frames are there. g: its own gradient, float32 [N]. frames: [W, B].

    heard: what they say; None after the warm-up, where they are read in one pass with what is made of them.
    """

    g: Tensor
    frames_WB: Tensor
    blocks: OwnBlocks
    heard: Heard | None


@dataclass(frozen=True)
class Sharded:
    """State of each chunk on one rank alone, its owner. All ranks, same order of buckets."""

    transport: Transport
    config: ShardedConfig

    def send_early(self, bucket: ShardedBucket, numbers: StepNumbers, scale: float) -> Generator[Work, None, Tensor]:
        """The frames of `send_up` after the warm-up, to the owners; uint8 [W, B], all ranks'. Writes nothing.

        Once it is known that the step counts, `send_up` makes them once more: the gradients are there still, and so no
        state has to be kept that a step given up would need. Sends (W-1)·B per rank.
        """
        transport, codec = self.transport, self.config.codec
        W, N = transport.world_size, bucket.layout.chunk
        sent_WB = torch.empty(W, codec.frame_bytes(N), dtype=torch.uint8, device=bucket.device)
        codec.encode_gradients(_sum(bucket, numbers, scale, sent_WB, bucket.counts, returned=None))
        received_WB = torch.empty_like(sent_WB)
        yield transport.all_to_all(received_WB, sent_WB)
        return received_WB

    def send_up(
        self,
        bucket: ShardedBucket,
        numbers: StepNumbers,
        seen: Sequence[bool],
        scale: float | Tensor,
        early_WB: Tensor | None,
    ) -> Generator[Work, None, Received]:
        """All ranks' gradients into the momentum, and frames of that to the owners. Sends (W-1)·B per rank.

        seen: by parameter, whether any rank has a gradient for it; the others stay as they are. scale: what gradients
        are to be multiplied by. early: the frames, where `send_early` has sent them. At stage 2 gradients are freed
        before the Work.
        """
        transport, config = self.transport, self.config
        W, N, block = transport.world_size, bucket.layout.chunk, config.codec.block
        for count, is_seen in zip(bucket.steps, seen, strict=True):
            count += is_seen
        bucket.is_warm = config.warms_up(bucket)
        sends_gradients = bucket.is_warm and config.warmup_codec is not None
        codec = self._codec_up(bucket)

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
            yield transport.all_to_all(received_WB, sent_WB)
        else:
            received_WB = early_WB

        blocks = OwnBlocks(None if seen_WJ is None else seen_WJ[transport.rank], counts_WJ[transport.rank])
        if not bucket.is_warm:
            return Received(g, received_WB, blocks, None)
        q, mean = self._means(bucket, codec, received_WB)
        heard = Heard(q, mean, None)
        if q_own is not None:
            last = torch.zeros_like(mean) if bucket.mean is None else bucket.mean
            heard = Heard(q_own, torch.lerp(last, mean, 1.0 - numbers.betas[0]), mean)
        return Received(g, received_WB, blocks, heard)

    def _codec_up(self, bucket: ShardedBucket) -> Codec:
        """What goes up in the step that this bucket has begun."""
        if not bucket.is_warm:
            return self.config.codec
        return Int8Codec(self.config.codec.block) if self.config.warmup_codec is None else self.config.warmup_codec

    @staticmethod
    def _means(bucket: ShardedBucket, codec: Codec, received_WB: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's q of its own chunk, and the mean of all ranks'; zeros in the padding."""
        q, mean = (torch.empty(bucket.layout.chunk, device=bucket.device, dtype=torch.float32) for _ in range(2))
        codec.decode_mean(received_WB, mean)
        codec.decode(received_WB[bucket.rank : bucket.rank + 1], q.view(1, -1))
        ragged, padding = bucket.padding_of_ragged
        for x in (q, mean) if len(ragged) else ():
            x_Jn = x.view(-1, bucket.layout.block)
            x_Jn[ragged] = x_Jn[ragged].masked_fill_(padding, 0.0)
        return q, mean

    def keep_mean(self, bucket: ShardedBucket, arrived: Received) -> None:
        """What the next step asks of this one: the mean in the warm-up, later the frames where it clips.

        In the warm-up a block that was not seen keeps the mean that it had.
        """
        heard = arrived.heard
        bucket.received = arrived.frames_WB if self.config.keeps_frames and heard is None else None
        if heard is not None and bucket.mean is not None:
            arithmetic.keep_unseen_(bucket.mean, heard.mean, arrived.blocks.seen_J, self.config.codec.block)
        else:
            bucket.mean = None if heard is None else heard.mean

    def total(self, mine: Tensor) -> Generator[Work, None, Tensor]:
        """The sum over ranks of a tensor, in rank order: the same bits everywhere. Sends (W-1)·nbytes per rank."""
        rows = torch.empty(self.transport.world_size, mine.nbytes, dtype=torch.uint8, device=mine.device)
        yield self.transport.all_gather(rows, mine.view(-1).view(torch.uint8))
        return sum_in_order(rows.view(mine.dtype).view(-1, *mine.shape))

    def step_own(self, bucket: ShardedBucket, blocks: OwnBlocks, update: Tensor, *, lr: float, decay: float) -> Tensor:
        """Take the update into what this rank owns. The frame of what all are to hear of it, uint8 [B].

        Masters ← (1 - decay)·masters - lr·update. update: of the own chunk, float32 [N]; garbage afterwards.
        """
        codec, block, N = self.config.codec_down, self.config.codec.block, len(update)
        frame_1B = torch.empty(1, codec.frame_bytes(N), dtype=torch.uint8, device=bucket.device)
        counts_1J = blocks.counts_J.view(1, -1)
        if self.config.stage == 0:
            codec.encode(update.view(1, N), bucket.owned.view(1, N), frame_1B, counts_1J)
            arithmetic.keep_unseen_(bucket.owned, update, blocks.seen_J, block)
        else:
            stepped = update.mul_(-lr).add_(bucket.owned, alpha=1.0 - decay)
            arithmetic.keep_unseen_(bucket.owned, stepped, blocks.seen_J, block)
            difference = torch.sub(bucket.owned, bucket.gather_replica(), out=update)
            codec.encode(difference.view(1, N), None, frame_1B, counts_1J)
        return frame_1B[0]

    def send_down(
        self, bucket: ShardedBucket, seen: Sequence[bool], frame_B: Tensor, *, lr: float, decay: float
    ) -> Generator[Work | Meeting, Answer, bool]:
        """Tell all what owners have made, and move; whether it has. Yields one Work, then `OwnersReplied`. All ranks.

        Sends (W-1)·B per rank. frame: of `step_own`, with the same numbers.
        """
        transport, codec = self.transport, self.config.codec_down
        down_WB = torch.empty(transport.world_size, len(frame_B), dtype=torch.uint8, device=bucket.device)
        yield transport.all_gather(down_WB, frame_B)
        is_good = yield OwnersReplied(codec.witness(down_WB, bucket.layout.chunk))
        if is_good:
            self._apply(bucket, down_WB, seen, lr, decay)
        return bool(is_good)

    def refuse_not_finite(self, buckets: Sequence[ShardedBucket], came_down: Sequence[OwnersReplied]) -> NoReturn:
        """Raise NotFiniteError, of the first of these buckets that is not: some has not come down finite."""
        pairs = zip(buckets, came_down, strict=True)
        name = next(bucket.names[0] for bucket, said in pairs if not bool(all_finite([said.witness])))
        raise NotFiniteError(
            f"rank {self.transport.rank}: the update of {name} and its bucket is not finite: a frame was "
            "spoilt on the way, or a gradient was too large for a variance; resume from a checkpoint"
        )

    def _apply(self, bucket: ShardedBucket, down_WB: Tensor, seen: Sequence[bool], lr: float, decay: float) -> None:
        """Move the parameters by what has come down: the same operations on the same bits on every rank."""
        codec = self.config.codec_down
        if isinstance(codec, SignCodec) and self.config.stage > 0:
            moving = [p if is_seen else None for p, is_seen in zip(bucket.params, seen, strict=True)]
            ones = torch.ones(len(moving), device=bucket.device, dtype=torch.float32)
            codec.apply(down_WB, bucket.layout.chunk, ParamUpdate(moving, bucket.layout.segments, ones, ones))
            return bucket.masters.write_back(seen)
        x = torch.empty(bucket.layout.numel, device=bucket.device, dtype=torch.float32)
        codec.decode(down_WB, x.view(len(down_WB), -1))
        held = bucket.masters.local_values if self.config.stage == 0 else bucket.params
        pairs = [(p, view) for p, view, is_seen in zip(held, bucket.layout.views(x), seen, strict=True) if is_seen]
        if pairs:
            params, views = map(list, zip(*pairs, strict=True))
            if self.config.stage == 0:
                x.mul_(-lr)
                torch._foreach_add_(views, params, alpha=1.0 - decay)
                torch._foreach_copy_(params, views)
            else:
                torch._foreach_add_(params, views)
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
    """c = momentum + (1-β1)·share·g. With `returned` β1 momentum ← c - (1-β1)·q, rounded once to its own type.

    So c_k = c_{k-1} + (1-β1)·(g_k - q_{k-1}): momentum and error are one. Blocks that are not seen have a count of 0,
    and keep their momentum.
    """
    grads, unscale = bucket.scaled_gradients(scale)
    owed_WN, add = bucket.momentum.view(len(frames_WB), -1), (1.0 - numbers.betas[0]) * numbers.share
    return GradientSum(grads, bucket.layout.segments, owed_WN, frames_WB, counts_WJ, add, unscale, returned)
