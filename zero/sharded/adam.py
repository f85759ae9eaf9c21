"""ShardedOnebitAdam: ZeRO across the slow axis. Signs of momentum go up to the owners, differences come down.

For clusters with one rank per node, in which sharding itself must cross the network. `ShardedAdamRule` is a step of one
bucket from top to bottom. `ShardedOnebitAdam` is the optimizer; its docstring contains the algorithm in formulas.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...comm import OwnerStep, Work
from ...step.bucket_step import Answer, Decision, Meeting
from ...usage.contract import eps_of
from ...usage.signature import shows_all_options
from . import arithmetic
from .bucket import ShardedBucket
from .exchange import Received, StepNumbers
from .optimizer import ShardedOnebitOptimizer, ShardedOptions
from .rule import ShardedRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedAdamRule(ShardedRule):
    """Steps 1 to 4 of `ShardedOnebitAdam`."""

    kind = "sharded"

    def take(
        self, bucket: ShardedBucket, decision: Decision, scale: float, early_WB: Tensor | None
    ) -> Generator[Work | Meeting, Answer, None]:
        bucket.is_idle = not any(decision.of(bucket))
        if not bucket.is_idle:  # 1
            yield from self.exchange(bucket, decision, scale, early_WB)

    def exchange(
        self, bucket: ShardedBucket, decision: Decision, scale: float, early_WB: Tensor | None
    ) -> Generator[Work | Meeting, Answer, bool]:
        """Take steps 2 to 4, and return whether the bucket has moved.

        Args:
            bucket: The bucket.
            decision: The result of the vote, step 1.
            scale: Factor of the gradients, before clipping.
            early_WB: Frames of step 2 that went up before the decision; None if none did.
        """
        numbers, seen = self.numbers(bucket), decision.of(bucket)
        arrived = yield from self.placement.send_up(bucket, numbers, seen, scale * decision.clip_factor, early_WB)  # 2
        update, decay = yield from self.update(bucket, numbers, seen, arrived)  # 3
        blocks = arrived.blocks
        del arrived
        frame_B = self.placement.step_own(bucket, blocks, update, lr=numbers.lr, decay=decay)
        del update  # free it now: all buckets wait until every frame has come down
        return (yield from self.placement.send_down(bucket, seen, frame_B, lr=numbers.lr, decay=decay))  # 4

    def update(
        self, bucket: ShardedBucket, numbers: StepNumbers, seen: Sequence[bool], arrived: Received
    ) -> Generator[Work, None, tuple[Tensor, float]]:
        """Return u, float32 [N], and the decay: master ← (1 - decay)·master - lr·u."""
        return self.direction(bucket, numbers, arrived), numbers.decay
        yield  # makes this a generator, as in LAMB: its owners exchange norms here

    def direction(
        self, bucket: ShardedBucket, numbers: StepNumbers, arrived: Received, D: Tensor | None = None
    ) -> Tensor:
        """Return m̂/D of this rank's chunk, float32 [N], and advance the variance. Writes D if a tensor is given."""
        make = self._in_one_pass if arrived.heard is None else self._in_warmup
        direction = make(bucket, numbers, arrived, D)
        self.placement.keep_mean(bucket, arrived)
        return direction

    def _in_one_pass(self, bucket: ShardedBucket, numbers: StepNumbers, arrived: Received, D: Tensor | None) -> Tensor:
        config, W, (beta1, beta2) = self.placement.config, self.placement.transport.world_size, numbers.betas
        direction, sums_J4 = torch.empty_like(arrived.g), arrived.g.new_empty(len(arrived.blocks.counts_J), 4)
        config.codec.owner_step(
            OwnerStep(
                arrived.frames_WB,
                bucket.rank,
                arrived.g,
                arrived.blocks.counts_J,
                bucket.variance,
                direction,
                D,
                sums_J4,
                bucket.corrections(beta1, beta2),
                weight=1.0 - beta2,
                own=numbers.share / W,
                common=1.0 - 1.0 / W,
                eps=eps_of(bucket.group),
                floor=config.variance_floor,
                inverse_limit=1.0 / config.update_limit,
            )
        )
        bucket.grad_stats = sums_J4.sum(0).unbind()
        return direction

    def _in_warmup(self, bucket: ShardedBucket, numbers: StepNumbers, arrived: Received, D: Tensor | None) -> Tensor:
        """As `_in_one_pass`, for the frames of the warm-up: momentum in eight bits, or gradients."""
        heard, config, (beta1, beta2) = arrived.heard, self.placement.config, numbers.betas
        assert heard is not None
        block, correction = config.codec.block, bucket.correction(beta1)
        mean_hat, q_hat = ((x.view(-1, block) * correction).view(-1) for x in (heard.mean, heard.q))
        bucket.grad_stats = arithmetic.grad_stats(arrived.g, heard.q, q_hat, mean_hat)
        g_mean = heard.mean_gradient
        if g_mean is None:
            g_mean = arithmetic.mean_gradient(heard.mean, bucket.mean, beta1)
        seen_J = arrived.blocks.seen_J
        arithmetic.advance_variance_(bucket.variance, g_mean.square(), beta2=beta2, block=block, seen_J=seen_J)
        D_Jn = arithmetic.direction_(
            mean_hat,
            arithmetic.mean_magnitudes(mean_hat, bucket.own_divisors, block),
            bucket.variance,
            bucket.correction(beta2),
            bucket.own_divisors,
            eps=eps_of(bucket.group),
            floor=config.variance_floor,
            limit=config.update_limit,
            block=block,
        )
        if D is not None:
            D.copy_(D_Jn.view(-1))
        return mean_hat


@shows_all_options(ShardedOptions)
class ShardedOnebitAdam(ShardedOnebitOptimizer):
    """AdamW with its state sharded over all ranks, and about 5.1 bits (or 2.1) per parameter and step on the wire.

    The model's parameters, bfloat16 or float32 (or float16), are *replicas*: the same bits on every rank. Each rank
    owns one of W chunks of every bucket: its float32 master weights, and a variance that is updated until the end.
    Nothing freezes, and the warm-up is short and compressed. Pass the plain model's parameters, and compute each rank's
    own loss; the optimizer averages over ranks. All ranks construct it with the same arguments and call step()
    together; rank 0's initial values are sent to all. Step k of a parameter:

    1. vote: {is g_i finite?, ‖g_i‖², <g_i, m̂_prev> on the own chunks}. If any g_i is not finite, all ranks skip and no
       state changes. A g_i of more than four times the usual norm is scaled down to that (`bounds.py`).
       With max_grad_norm, g_i *= min(1, max_grad_norm/N), N² = mean‖g_i‖²/W + (1 - 1/W)·max(0, Σ <g_i, m̂_prev>/κ),
       κ the moving average of these factors, with β1 of the first group.
    2. up, rank i:     c_i += (1-β1)·(g_i - q_i_prev);  q_i = s·sgn(c_i), s = mean|c_i| per block; to the chunks' owners
    3. owner of j:     m̂ = mean_i q_i/(1-β1^k), s̄ = mean_i s_i/(1-β1^k);  v = β2·v + (1-β2)·g·(g/W + (1-1/W)·m̂)
                       D = √max(v̂, variance_floor·blockmean(v̂), (s̄/update_limit)²) + eps
                       master = (1 - lr·wd)·master - lr·m̂/D
       first steps:    q_i = c_i in eight bits;  ḡ = (q̄ - β1·q̄_prev)/(1-β1), q̄ = mean_i q_i;  v = β2·v + (1-β2)·ḡ²;
       (warmup_steps)  s̄ = the block's mean |m̂|
       the same with   g_i goes up in that codec;  ḡ = mean_i C(g_i);  q̄ = β1·q̄_prev + (1-β1)·ḡ
       warmup_codec
    4. down, to all:   Q = C(master - replica);  replica = replica + Q, rounded to the replica's type, on every rank
       stage 0:        Q = C(m̂/D + E), E = m̂/D + E - Q;  parameter = (1 - lr·wd)·parameter - lr·Q, on every rank

    A parameter without a gradient on any rank keeps its value and all its state; if only some ranks have no gradient
    for it, theirs counts as zero. Change parameters outside step() only before the first step, or call
    `adopt_parameters`.

    At lr 0 masters do not move, but replicas still receive the residuals of C from earlier steps: with "int4" at most
    0.12 of the previous lr, gone in 8 steps; with "sign" up to 6 lr, over tens of steps (measured: normal gradients, lr
    1e-3). In bfloat16 an element whose master is between two values may change from one to the other. If lr is 0 from
    the first step on, nothing moves.

    State on each rank, bytes per parameter: c 2 (float32: 4), master and variance 8/W; with max_grad_norm 0.13 more, or
    4/W after a step without some parameter's gradient; in the warm-up 4/W more. Sends per rank
    (W-1)/W·(1 + 16/block + 4 + 16/block) bits per parameter and step ("sign": 1 instead of 4; in the warm-up 8, or the
    warmup_codec's, instead of the first 1), each parameter padded to whole blocks, and a vote of 74 bytes and a bit per
    parameter tensor to each peer (at stage 2 one for every bucket).

    Accurate for data that is shuffled across ranks, which `stats.health` checks and warns about; for other data use
    `OnebitAdam`.

    Args:
        params: Parameters or groups, the same on all ranks.
        lr: Learning rate, read from param_groups in every step, as are the next three. Default 1e-3.
        betas: Decay of momentum and variance. Default (.9, .999).
        eps: Added to D. Default 1e-8.
        weight_decay: Decoupled weight decay, as in torch.optim.AdamW. Default 1e-2.
        updates: Format of the updates that come down at stage 0, "int4" or "sign" (default). Parameters are then whole
            on every rank, and so are the masters of those in less than float32.
        **common: See `ShardedOptions`.

    Raises:
        ValueError: An option is out of its range, or parameters differ between ranks; the error names them.
        TypeError: An option has the wrong type, or a parameter an unsupported dtype.
    """

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        updates: str = "sign",
        **common: Unpack[ShardedOptions],
    ):
        defaults: dict[str, object] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, ShardedAdamRule(), updates=updates, **common)
