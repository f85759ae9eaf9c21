"""One bucket's way up to the owners and down again, after a good verdict: steps 2 to 4 of `ShardedOnebitAdam`.

`send_up` and `send_down` are generators that yield the launched Work, so that several buckets share the wire. What they
write: the first this rank's momentum before its Work, the own chunk's variance after it; the second what this rank owns
before, the parameters after.

Shape legend: W ranks, N elements of a chunk, J blocks of a chunk, B bytes of its frame.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm import Codec, Exchange, Int8Codec, SignCodec, Transport, Work
from . import arithmetic
from .bucket import ShardedBucket


@dataclass(frozen=True)
class ShardedConfig:
    """What is the same for all buckets. keeps_frames: the clipping needs the last m̂.

    codec: up. warmup_codec: up, in a bucket's first warmup_steps steps. codec_down: down.
    """

    stage: int
    codec: SignCodec
    warmup_codec: Int8Codec
    warmup_steps: int
    codec_down: Codec
    variance_floor: float
    update_limit: float
    keeps_frames: bool

    def warms_up(self, bucket: ShardedBucket, ahead: int = 0) -> bool:
        """Whether the step that this bucket has begun, or the one so many ahead, is one of its warm-up.

        Once a bucket has sent one bit, its warm-up is over, whatever the count: it needs the last step's mean.
        """
        return bucket.is_warm and max(int(count) for count in bucket.steps) + ahead <= self.warmup_steps


@dataclass(frozen=True)
class Step:
    """The numbers of one group for one step. decay: lr·weight_decay. share: of this gradient in what is sent of it."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float
    share: float = 1.0

    @classmethod
    def of(cls, group: dict) -> Step:
        """As they are in a param group now."""
        lr = float(group["lr"])
        return cls(lr, lr * group["weight_decay"], group["betas"], group["eps"])


class NotFiniteError(RuntimeError):
    """What an owner has made of its chunk is not finite. Raised by all ranks, before parameters of that bucket move."""


class Arrived(NamedTuple):
    """What an owner has of its chunk. update: m̂/D, float32 [N]. D: float32 [J, n]. g: its own gradient, float32 [N]."""

    update: Tensor
    D: Tensor
    g: Tensor


def send_up(
    bucket: ShardedBucket, step: Step, config: ShardedConfig, transport: Transport, seen: Sequence[bool], scale: float
) -> Generator[Work, None, Arrived]:
    """What becomes of everybody's gradients in the own chunk. Yields one Work; sends (W-1)·B up per rank. All ranks.

    seen: by parameter, whether any rank has a gradient for it; the others stay as they are. scale: what gradients are
    to be multiplied by. At stage 2 gradients are freed before the Work.
    """
    W, N, block = transport.world_size, bucket.layout.chunk, config.codec.block
    for count, is_seen in zip(bucket.steps, seen, strict=True):
        count += is_seen
    bucket.is_warm = config.warms_up(bucket)
    codec: Codec = config.warmup_codec if bucket.is_warm else config.codec

    x_WN = bucket.gather_gradients(scale).view(W, N)
    g = x_WN[transport.rank].clone()
    sent_WB = torch.empty(W, codec.frame_bytes(N), dtype=torch.uint8, device=bucket.device)
    momentum_WN, seen_WJ = bucket.momentum.view(W, N), bucket.blocks_of(seen)
    arithmetic.advance_momentum_(
        x_WN, momentum_WN, codec, block, sent_WB, bucket.counts, seen_WJ, step.betas[0], step.share
    )
    del x_WN
    if config.stage == 2:
        for p in bucket.params:
            p.grad = None
    received_WB = torch.empty_like(sent_WB)
    yield transport.all_to_all(received_WB, sent_WB)

    q, mean = _means(bucket, codec, received_WB)
    own_seen_J = None if seen_WJ is None else seen_WJ[transport.rank]
    arrived = _update(bucket, step, config, Received(g, q, mean, received_WB, own_seen_J))
    bucket.received = received_WB if config.keeps_frames and not bucket.is_warm else None
    bucket.mean = _kept_mean(bucket, mean, own_seen_J, block) if bucket.is_warm else None
    return arrived


def keep(bucket: ShardedBucket, step: Step, world_size: int, scale: float) -> None:
    """A gradient whose step sends nothing: its share into the momentum, of its square into the own chunk's variance.

    The variance takes it divided by β2, with which `send_up` multiplies. scale: as there. Sends nothing.
    """
    (beta1, beta2), grads = step.betas, bucket.gradients()
    for view, g in zip(bucket.layout.views(bucket.momentum), grads, strict=True):
        if g is not None:
            view.add_(g.to(torch.float32), alpha=(1.0 - beta1) * step.share * scale)
    weight = (1.0 - beta2) / beta2 * step.share / world_size * scale * scale
    for k, start, stop, at in bucket.pieces:
        if (grad := grads[k]) is not None:
            part = grad.reshape(-1)[start:stop].to(torch.float32)
            bucket.variance[at : at + stop - start].addcmul_(part, part, value=weight)


def send_down(
    bucket: ShardedBucket, step: Step, config: ShardedConfig, transport: Transport, seen: Sequence[bool], update: Tensor
) -> Exchange:
    """Take the update into what this rank owns, and tell all. Yields one Work. Sends (W-1)·B down per rank.

    update: of the own chunk, float32 [N]; garbage afterwards. seen: as in `send_up`.
    """
    frame_B = _own(bucket, step, config, update, bucket.own_blocks_of(seen))
    down_WB = torch.empty(transport.world_size, len(frame_B), dtype=torch.uint8, device=bucket.device)
    yield transport.all_gather(down_WB, frame_B)
    if not bool(config.codec_down.is_finite(down_WB, bucket.layout.chunk)):
        raise NotFiniteError(
            f"rank {transport.rank}: the update of {bucket.names[0]} and its bucket is not finite: a frame was spoilt "
            "on the way, or a gradient was too large for a variance; resume from a checkpoint"
        )
    _apply(bucket, step, config, down_WB, seen)


class Received(NamedTuple):
    """What an owner has of its chunk when all frames are there. g: its own gradient, float32 [N].

    q: what its own frame says, mean: what all say on average, float32 [N]. frames: uint8 [W, B]. seen: bool [J], blocks
    that some rank has a gradient for; None: all.
    """

    g: Tensor
    q: Tensor
    mean: Tensor
    frames_WB: Tensor
    seen_J: Tensor | None


def _means(bucket: ShardedBucket, codec: Codec, received_WB: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's q of its own chunk, and the mean of everybody's; zeros in the padding."""
    q, mean = (torch.empty(bucket.layout.chunk, device=bucket.device) for _ in range(2))
    codec.decode_mean(received_WB, mean)
    codec.decode(received_WB[bucket.rank : bucket.rank + 1], q.view(1, -1))
    ragged, padding = bucket.padding_of_ragged
    for x in (q, mean):
        x_Jn = x.view(-1, bucket.layout.block)
        x_Jn[ragged] = x_Jn[ragged].masked_fill_(padding, 0.0)
    return q, mean


def _kept_mean(bucket: ShardedBucket, mean: Tensor, seen_J: Tensor | None, block: int) -> Tensor:
    """The mean for the next step of the warm-up: what a block that was not seen had sent last stays."""
    if bucket.mean is not None:
        arithmetic.keep_unseen_(bucket.mean, mean, seen_J, block)
        return bucket.mean
    return mean


def _update(bucket: ShardedBucket, step: Step, config: ShardedConfig, got: Received) -> Arrived:
    """What becomes of what has come up. Advances the variance."""
    block, W, (beta1, beta2) = config.codec.block, len(got.frames_WB), step.betas
    correction_J1 = bucket.correction(beta1)
    mean_hat, q_hat = ((x.view(-1, block) * correction_J1).view(-1) for x in (got.mean, got.q))
    bucket.grad_stats = arithmetic.grad_stats(got.g, got.q, q_hat, mean_hat)

    if bucket.is_warm:
        target = arithmetic.mean_gradient(got.mean, bucket.mean, beta1).square_()
        scale_hat_J = arithmetic.mean_magnitudes(mean_hat, bucket.own_counts, block)
    else:
        target = arithmetic.square_of_mean(got.g, mean_hat, W, step.share)
        scale_hat_J = arithmetic.mean_scales(got.frames_WB, len(got.g), block).mul_(correction_J1.view(-1))
    arithmetic.advance_variance_(bucket.variance, target, beta2=beta2, block=block, seen_J=got.seen_J)
    D = arithmetic.direction_(
        mean_hat,
        scale_hat_J,
        bucket.variance,
        bucket.correction(beta2),
        bucket.own_counts,
        eps=step.eps,
        floor=config.variance_floor,
        limit=config.update_limit,
        block=block,
    )
    return Arrived(mean_hat, D, got.g)


def _own(bucket: ShardedBucket, step: Step, config: ShardedConfig, update: Tensor, seen_J: Tensor | None) -> Tensor:
    """Take the update into what this rank owns; the frame of what all ranks are to hear of it. update: garbage."""
    codec, block, N = config.codec_down, config.codec.block, len(update)
    frame_1B = torch.empty(1, codec.frame_bytes(N), dtype=torch.uint8, device=bucket.device)
    counts_1J = (bucket.own_counts if seen_J is None else bucket.own_counts * seen_J).view(1, -1)
    if config.stage == 0:
        codec.encode(update.view(1, N), bucket.owned.view(1, N), frame_1B, counts_1J)
        arithmetic.keep_unseen_(bucket.owned, update, seen_J, block)
    else:
        stepped = update.mul_(-step.lr).add_(bucket.owned, alpha=1.0 - step.decay)
        arithmetic.keep_unseen_(bucket.owned, stepped, seen_J, block)
        difference = stepped.copy_(bucket.owned).sub_(bucket.gather_replica())
        codec.encode(difference.view(1, N), None, frame_1B, counts_1J)
    return frame_1B[0]


def _apply(bucket: ShardedBucket, step: Step, config: ShardedConfig, down_WB: Tensor, seen: Sequence[bool]) -> None:
    """Move the parameters by what has come down: the same operations on the same bits on every rank."""
    x = torch.empty(bucket.layout.numel, device=bucket.device)
    config.codec_down.decode(down_WB, x.view(len(down_WB), -1))
    for p, view, is_seen in zip(bucket.params, bucket.layout.views(x), seen, strict=True):
        if is_seen and config.stage == 0:
            p.copy_(view.mul_(-step.lr).add_(p, alpha=1.0 - step.decay))
        elif is_seen:
            p.add_(view)
