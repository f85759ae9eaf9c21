"""ShardedZeroOneAdam: sharded one-bit Adam (`adam.py`) in whose skipped rounds not a word is said.

The policy is 0/1 Adam's (Lu et al., ICLR 2023, arXiv 2202.06009, section 4.2; `onebit/arithmetic/schedule.py`). What is
done in a skipped round is not: see the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ...arithmetic.schedule import LocalSteps
from ...comm import Exchange
from ...usage.frozen import gradient_of
from ...usage.signature import shows_all_options
from . import vote as shard_vote
from .bucket import ShardedBucket
from .exchange import Step, keep
from .optimizer import ShardedOnebitOptimizer, ShardedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@shows_all_options(ShardedOptions)
class ShardedZeroOneAdam(ShardedOnebitOptimizer):
    """`ShardedOnebitAdam` of which whole steps go by without a word, more of them as the learning rate falls.

    `LocalSteps` says how many steps H there are to the next synchronisation. In the H - 1 *skipped* ones nothing is
    sent, not even a vote, and nothing moves: parameters stay the same bits on every rank. What is learnt in them waits
    where it would have gone in any case, so that skipping costs no memory. Step h of H, with lr_h:

    - skipped, rank i:      c_i += (1-β1)/H·g_i;  its own chunk:  v += (1-β2)/(β2·W·H)·g²
    - the last one: steps 1 to 4 of `ShardedOnebitAdam`, with
      up, rank i:           c_i += (1-β1)·(g_i/H - q_i_prev)
      owner of j:           v = β2·v + (1-β2)·g·(g/(W·H) + (1-1/W)·m̂)
                            master = (1 - Σ_h lr_h·wd)·master - Σ_h lr_h·m̂/D

    So m̂ averages the gradients of all H steps, v their squares, k counts synchronisations, and the masters move as far
    as in H steps: where 0/1 Adam's learning rate falls and the interval grows, here the batch grows and the move stays.
    The paper's local steps would need D on every rank, an anchor and float32 parameters, another 10 bytes per parameter
    that cannot be sharded; bfloat16 replicas would lose most of them to rounding.

    With H = 1 throughout, the default, it is `ShardedOnebitAdam` to the bit. A gradient that is not finite in a skipped
    step is left out by its rank alone, which warns; in the last, all ranks skip, and the next step takes its place. (At
    stage 2: the buckets in question; what waits in them goes up with the next synchronisation.) max_grad_norm clips
    skipped steps by each rank's own estimate of the global norm. Nothing is skipped in the warm-up.

    Measured (byte LM, 4 ranks, 600 steps, seed 0; AdamW 1.783, H = 1 1.711): "auto" up to H = 8 1.735. A number as
    local_step_scaler that skips at the full rate is far behind: 2.092, where AdamW had 1.789, with H = 4 from 3/8 of
    the run on (without warm-up).

    lr, betas (betas[1] above 0 where steps are skipped), eps (above 0), weight_decay: as in torch.optim.AdamW; read
    anew from param_groups in every step. local_step_scaler, local_step_clipper: see `LocalSteps`; a numeric scaler
    counts from local_step_start. The others: see `ShardedOptions`; stage 1 or 2.

    State as `ShardedOnebitAdam`, traffic 1/H of it. Raises ValueError/TypeError at construction as that.
    """

    kind = "sharded 0/1"

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
        self.local_steps = LocalSteps(local_step_scaler, local_step_clipper, local_step_start)
        self._is_skipping = self._has_sent = False  # of the step under way
        self._interval = 1  # H of the steps since the last synchronisation, decided in the first of them
        self._since_sync = self._steps = 0
        self._peak_lr = 0.0
        self._owed: list[tuple[float, float]] = []  # by group: Σ lr_h and Σ lr_h·wd of the skipped steps
        self._waiting: set[Tensor] = set()  # parameters with gradients of skipped steps, on this rank
        defaults: dict[str, object] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **common)

    def add_param_group(self, param_group: dict) -> None:
        """As `ShardedOptimizer.add_param_group`."""
        super().add_param_group(param_group)
        self._owed.append((0.0, 0.0))

    def _check_group(self, g: int) -> None:
        super()._check_group(g)
        if self.local_steps.longest > 1 and self.param_groups[g]["betas"][1] <= 0.0:
            raise ValueError("betas[1] must be above 0 where steps are skipped; set it, or local_step_clipper to 1")

    def option_lines(self) -> list[str]:
        return [*super().option_lines(), f"option local_steps = {self.local_steps}"]

    # ---------------------------------------------------------------- which step this is

    def _decide(self) -> None:
        """Whether the step under way is skipped; once, as learning rates may be edited before step()."""
        lr = float(self.param_groups[0]["lr"])
        if self._since_sync == 0:
            self._interval = self.local_steps.interval(self._steps, lr, max(self._peak_lr, lr))
            if any(self._config.warms_up(bucket, ahead=1) for bucket in self.buckets):
                self._interval = 1
        self._is_skipping, self._has_sent = self._since_sync + 1 < self._interval, False

    def _after_step(self) -> None:
        super()._after_step()
        if self._is_skipping:
            steps = [Step.of(group) for group in self.param_groups]
            self._owed = [(lr + s.lr, decay + s.decay) for (lr, decay), s in zip(self._owed, steps, strict=True)]
            self._since_sync += 1
        elif self._has_sent:
            self._owed = [(0.0, 0.0)] * len(self.param_groups)
            self._since_sync = 0
        if self._is_skipping or self._has_sent:
            self._steps += 1
            self._peak_lr = max(self._peak_lr, float(self.param_groups[0]["lr"]))
        if self._is_skipping:
            self.stats.phase = "local"

    def _is_sending(self) -> bool:
        return not self._is_skipping

    def _step_number(self) -> int:
        return self._steps + 1

    # ---------------------------------------------------------------- what is done in it

    def _step_whole(self) -> None:
        self._decide()
        if self._is_skipping:
            self._keep(self.buckets, self._unscale())
        else:
            super()._step_whole()

    def _launch(self, bucket: ShardedBucket) -> None:
        if bucket.index == 0:
            self._decide()
        super()._launch(bucket)

    def _vote_and_exchange(self, bucket: ShardedBucket, scale: float) -> Exchange:
        if self._is_skipping:
            self._keep([bucket], scale)
        else:
            yield from super()._vote_and_exchange(bucket, scale)

    def _exchange(self, bucket: ShardedBucket, seen: Sequence[bool], scale: float) -> Exchange:
        self._has_sent = True
        self._waiting.difference_update(bucket.params)
        yield from super()._exchange(bucket, seen, scale)

    def _keep(self, buckets: Sequence[ShardedBucket], scale: float) -> None:
        """A skipped step: into the momentum and the own variance, if everything is finite here. Sends nothing."""
        vote = self._my_vote(buckets, scale)
        if not shard_vote.is_finite([vote]):
            self._report_skip(buckets, "this rank leaves its gradients of this step out")
        else:
            if self._clip.max_norm > 0:
                self.stats.clip_factor = self._clip.estimated_factor([vote], self.transport.world_size)
            for bucket in buckets:
                self._waiting.update(p for p in bucket.params if gradient_of(p) is not None)
                keep(bucket, self._step_of(bucket), self.transport.world_size, scale * self.stats.clip_factor)
        if self._config.stage == 2:
            for p in (p for bucket in buckets for p in bucket.params):
                p.grad = None

    def _step_of(self, bucket: ShardedBucket) -> Step:
        step = super()._step_of(bucket)
        lr, decay = self._owed[bucket.group_index]
        return replace(step, lr=lr + step.lr, decay=decay + step.decay, share=1.0 / self._interval)

    def _present(self, p: Tensor) -> bool:
        return super()._present(p) or p in self._waiting

    def _take_grad_stats(self) -> None:
        if not self._is_skipping:
            super()._take_grad_stats()

    # ---------------------------------------------------------------- checkpoints

    def _extra_state(self) -> dict:
        return {
            "interval": self._interval,
            "since_sync": self._since_sync,
            "steps": self._steps,
            "peak_lr": self._peak_lr,
            "owed": [list(pair) for pair in self._owed],
            "waiting": [p in self._waiting for p in self.buckets.params],
        }

    def _load_extra_state(self, record: dict) -> None:
        self._interval, self._since_sync = record["interval"], record["since_sync"]
        self._steps, self._peak_lr = record["steps"], record["peak_lr"]
        self._owed = [(lr, decay) for lr, decay in record["owed"]]
        self._waiting = {p for p, waits in zip(self.buckets.params, record["waiting"], strict=True) if waits}
