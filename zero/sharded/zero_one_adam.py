"""ShardedZeroOneAdam: sharded one-bit Adam (`adam.py`) with skipped steps, in which nothing is sent.

The policy is that of 0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009, section 4.2; `onebit/arithmetic/schedule.py`).
The arithmetic of a skipped step is our own: see the class.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...arithmetic.schedule import Synchronisations
from ...step.bucket_step import Answer, Decision, Meeting
from ...usage.contract import Group, State
from ...usage.gradients import gradient_of
from ...usage.signature import shows_all_options
from .adam import ShardedAdamRule
from .bucket import ShardedBucket
from .exchange import StepNumbers
from .optimizer import ShardedOnebitOptimizer, ShardedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...comm import Work


class ShardedZeroOneRule(ShardedAdamRule):
    """The steps of `ShardedZeroOneAdam`, some of which are skipped.

    Args:
        synchronisations: Which steps synchronise.
    """

    kind = "sharded 0/1"

    def __init__(self, synchronisations: Synchronisations):
        self.synchronisations = synchronisations
        self._is_skipping = self._has_sent = False  # of the step under way
        self._interval = 1  # H of the steps since the last synchronisation, decided in the first of them
        self._since_sync = self._steps = 0
        self._peak_lr = 0.0
        self._owed: list[tuple[float, float]] = []  # by group: Σ lr_h and Σ lr_h·wd of the skipped steps
        self._waiting: set[Tensor] = set()  # parameters with gradients of skipped steps, on this rank

    def options(self) -> Mapping[str, object]:
        return {"synchronisations": self.synchronisations}

    def begin_group(self) -> None:
        self._owed.append((0.0, 0.0))

    # ---------------------------------------------------------------- a step of one bucket

    def take(
        self, bucket: ShardedBucket, decision: Decision, scale: float, early_WB: Tensor | None
    ) -> Generator[Work | Meeting, Answer, None]:
        if self._is_skipping:
            self.keep(bucket, scale * float(decision.clip_factor))
            return
        bucket.is_idle = not any(decision.of(bucket))
        if not bucket.is_idle and (yield from self.exchange(bucket, decision, scale, early_WB)):
            self._has_sent = True
            self._waiting.difference_update(bucket.params)

    def keep(self, bucket: ShardedBucket, scale: float) -> None:
        """Take a skipped step: add the gradient's share to the momentum, and its square's to this rank's variance.

        The square is divided by β2, because the next synchronisation multiplies the variance by β2. A bucket in its
        warm-up, which had no gradients in the last synchronisation, has its variance from the mean gradient alone.
        """
        self._waiting.update(p for p in bucket.params if gradient_of(p) is not None)
        numbers, grads = self.numbers(bucket), bucket.gradients()
        (beta1, beta2), world_size = numbers.betas, self.placement.transport.world_size
        for view, g in zip(bucket.layout.views(bucket.momentum), grads, strict=True):
            if g is not None:
                view.add_(g.to(torch.float32), alpha=(1.0 - beta1) * numbers.share * scale)
        weight = (1.0 - beta2) / beta2 * numbers.share / world_size * scale * scale
        warms_up = self.placement.config.warms_up(bucket, ahead=1)
        for k, start, stop, at in bucket.pieces:
            if (grad := grads[k]) is not None and not warms_up:
                part = grad.reshape(-1)[start:stop].to(torch.float32)
                bucket.variance[at : at + stop - start].addcmul_(part, part, value=weight)
        if self.placement.config.stage == 2:
            bucket.free_gradients()

    def numbers(self, bucket: ShardedBucket) -> StepNumbers:
        numbers = super().numbers(bucket)
        lr, decay = self._owed[bucket.group_index]
        return replace(numbers, lr=lr + numbers.lr, decay=decay + numbers.decay, share=1.0 / self._interval)

    def present(self, params: Sequence[Tensor]) -> list[bool]:
        pairs = zip(params, super().present(params), strict=True)
        return [is_present or (p in self._waiting and p.requires_grad) for p, is_present in pairs]

    # ---------------------------------------------------------------- which step this is

    def begin_step(self) -> None:
        lr = float(self.buckets.groups[0]["lr"])
        if self._since_sync == 0:
            self._interval = self.synchronisations.interval(self._steps, lr, max(self._peak_lr, lr))
            if any(self.placement.config.holds_warmup(bucket) for bucket in self.buckets):
                self._interval = 1  # nothing is skipped in the warm-up
        self._is_skipping, self._has_sent = self._since_sync + 1 < self._interval, False

    def is_silent(self) -> bool:
        return self._is_skipping

    def is_synchronised(self) -> bool:
        return not self._is_skipping

    def after_step(self) -> str:
        groups = self.buckets.groups
        if self._is_skipping:
            numbers = [StepNumbers.of(group) for group in groups]
            self._owed = [(lr + n.lr, decay + n.decay) for (lr, decay), n in zip(self._owed, numbers, strict=True)]
            self._since_sync += 1
        elif self._has_sent:
            self._owed = [(0.0, 0.0)] * len(groups)
            self._since_sync = 0
        if self._is_skipping or self._has_sent:
            self._steps += 1
            self._peak_lr = max(self._peak_lr, float(groups[0]["lr"]))
        return "local" if self._is_skipping else super().after_step()

    def steps_taken(self) -> int:
        return self._steps

    # ---------------------------------------------------------------- state

    def record(self) -> State:
        return {
            "interval": self._interval,
            "since_sync": self._since_sync,
            "steps": self._steps,
            "peak_lr": self._peak_lr,
            "owed": [list(pair) for pair in self._owed],
            "waiting": [p in self._waiting for p in self.buckets.params],
        }

    def load_record(self, record: State) -> None:
        self._interval, self._since_sync = record["interval"], record["since_sync"]
        self._steps, self._peak_lr = record["steps"], record["peak_lr"]
        self._owed = [(lr, decay) for lr, decay in record["owed"]]
        self._waiting = {p for p, waits in zip(self.buckets.params, record["waiting"], strict=True) if waits}


@shows_all_options(ShardedOptions)
class ShardedZeroOneAdam(ShardedOnebitOptimizer):
    """`ShardedOnebitAdam` with steps that send nothing at all, more of them as the learning rate falls.

    `Synchronisations` determines the number of steps H until the next synchronisation. In the H - 1 *skipped* ones
    nothing is sent, not even a vote, and no parameter moves: they stay the same bits on every rank. Gradients of
    skipped steps are added to momentum and variance, so that skipping costs no memory. Step h of H, with lr_h:

    - skipped, rank i:      c_i += (1-β1)/H·g_i;  its own chunk:  v += (1-β2)/(β2·W·H)·g²
    - the last one: steps 1 to 4 of `ShardedOnebitAdam`, with
      up, rank i:           c_i += (1-β1)·(g_i/H - q_i_prev)
      owner of j:           v = β2·v + (1-β2)·g·(g/(W·H) + (1-1/W)·m̂)
                            master = (1 - Σ_h lr_h·wd)·master - Σ_h lr_h·m̂/D

    So m̂ averages the gradients of all H steps, v their squares, k counts synchronisations, and the masters move as far
    as in H steps. When the learning rate falls and the interval grows, the batch grows here and the move stays as
    large. The paper's local steps would need D on every rank, an anchor and float32 parameters, another 10 bytes per
    parameter that cannot be sharded; bfloat16 replicas would lose most of the local moves to rounding.

    With H = 1 throughout, the default, it is `ShardedOnebitAdam` to the bit. If a gradient of a skipped step is not
    finite, only its rank leaves it out, and warns; in a synchronisation all ranks skip, and the next step synchronises
    instead. (At stage 2 this holds for the buckets in question; the gradients of their skipped steps go up with the
    next synchronisation.) max_grad_norm clips skipped steps by each rank's own estimate of the global norm, and the
    bound of step 1 is there four times the usual norm alone. No step is skipped in the warm-up. Layers without a
    gradient on any rank in the last synchronisation do not count there: unused and frozen ones do not hold it.

    Measured (byte LM, 4 ranks, 600 steps, seed 0), loss:

    | steps | this | AdamW |
    | --- | --- | --- |
    | H = 1 | 1.711 | 1.783 |
    | "auto", up to H = 8 | 1.735 | 1.783 |
    | H = 4 at the full rate, from 3/8 of the run on, without warm-up | 2.092 | 1.789 |

    So do not skip at the full rate, as a number for local_step_scaler may. State is that of `ShardedOnebitAdam`,
    traffic 1/H of its traffic.

    Args:
        params: Parameters or groups, the same on all ranks.
        lr: Learning rate, read from param_groups in every step, as are the next three. Default 1e-3.
        betas: Decay of momentum and variance; betas[1] is above 0 if steps are skipped. Default (.9, .999).
        eps: Added to D. Default 1e-8.
        weight_decay: Decoupled weight decay, as in torch.optim.AdamW. Default 1e-2.
        local_step_scaler: Steps until the interval between synchronisations doubles, counted from local_step_start; or
            "auto" (default), which follows the first group's learning rate. See `Synchronisations`.
        local_step_clipper: Longest interval between synchronisations, in steps, or "auto"; see `Synchronisations`.
            Default 1: every step synchronises.
        local_step_start: Steps before a numeric local_step_scaler begins to count. Default 0.
        **common: See `ShardedOptions`; stage is 1 or 2.

    Raises:
        ValueError: An option is out of its range, or parameters differ between ranks; the error names them.
        TypeError: An option has the wrong type, or a parameter an unsupported dtype.
    """

    rule: ShardedZeroOneRule

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        local_step_scaler: int | str = "auto",
        local_step_clipper: int | str = 1,
        local_step_start: int = 0,
        **common: Unpack[ShardedOptions],
    ):
        rule = ShardedZeroOneRule(Synchronisations(local_step_scaler, local_step_clipper, local_step_start))
        defaults: dict[str, object] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, rule, **common)

    def _check_group(self, where: str, group: Group) -> None:
        super()._check_group(where, group)
        if self.rule.synchronisations.longest > 1 and group["betas"][1] <= 0.0:
            raise ValueError("betas[1] must be above 0 where steps are skipped; set it, or local_step_clipper to 1")
