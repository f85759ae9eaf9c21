"""InnerState: checks the inner optimizer's state once a round for damage that its own steps cannot repair.

A gradient whose square is beyond float32 leaves Adam's variance infinite, and one of 1e15 leaves it so large that the
rank stops moving: it then takes part in every round and contributes nothing. Such state is reset.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .fragment import LocalBucket, Pace
from .stats import LocalStats
from .wrapped import are_finite

_STANDS_STILL = 0.01  # share of a parameter's earlier pace, i.e. move per step and learning rate
_MEMORY = 0.9  # decay of the remembered pace from one round to the next
# A number that goes to and fro is back, to a hundredth of its move, after one round in a hundred: no standstill.
# So a scalar has to stand still for eight rounds in a row, and a parameter of eight numbers or more for one.
_STILL_NUMBERS = 8

log = logging.getLogger(__name__)


class InnerState:
    """The inner optimizer's state. stats: counts the parameters whose state was dropped."""

    def __init__(self, inner: torch.optim.Optimizer, rank: int, stats: LocalStats):
        self._inner, self._rank, self._stats = inner, rank, stats

    def drop(self, p: Tensor) -> None:
        """Reset the state of p: its next step is like its first."""
        if self._inner.state.pop(p, None) is not None:
            self._stats.dropped_states += 1
        if isinstance(self._inner, torch.optim.Adagrad):  # it makes its state only at construction
            fresh = type(self._inner)([p], initial_accumulator_value=self._inner.defaults["initial_accumulator_value"])
            self._inner.state[p] = fresh.state[p]

    def drop_not_finite(self, bucket: LocalBucket, step: int) -> None:
        """Reset the state of the bucket's parameters if it is not finite. One pass over the state."""
        if not self._are_finite(bucket.params):
            spoilt = [k for k, p in enumerate(bucket.params) if not self._are_finite([p])]
            self._drop(bucket, spoilt, step, "is not finite: a gradient was too large to be squared in float32")

    def drop_still(self, bucket: LocalBucket, step: int, steps: int, keep: float) -> None:
        """Reset the state of parameters whose pace has fallen to a hundredth, also relative to the gradient.

        Both conditions are needed: a run that converges moves less because its gradients shrink, and one whose
        gradients grow moves less per gradient. steps: length of the round. keep: factor of the anchor by weight decay.
        """
        lr, K = float(self._inner.param_groups[bucket.group_index]["lr"]), len(bucket.params)
        grads = [(k, g._values() if g.is_sparse else g) for k, g in enumerate(bucket.gradients()) if g is not None]
        if lr <= 0.0 or not grads:
            return
        differences, still = bucket.layout.views(bucket.difference([keep] * K)), []
        norms = torch._foreach_norm([differences[k] for k, _ in grads])
        moves, sizes = torch.stack([*norms, *(g.float().norm() for _, g in grads)]).view(2, -1).tolist()
        bucket.paces = bucket.paces or [Pace()] * K
        for (k, _), move, size in zip(grads, moves, sizes, strict=True):
            if size > 0.0 and math.isfinite(size):
                now, before = Pace(move / (lr * steps), move / (lr * steps * size)), bucket.paces[k]
                has_moved = now.move >= _STANDS_STILL * before.move or now.relative >= _STANDS_STILL * before.relative
                numbers = 0 if has_moved else before.still + differences[k].numel()
                move, relative = max(now.move, _MEMORY * before.move), max(now.relative, _MEMORY * before.relative)
                bucket.paces[k] = Pace(move, relative, numbers)
                if numbers >= _STILL_NUMBERS:
                    bucket.paces[k] = Pace()
                    still.append(k)
        self._drop(bucket, still, step, "stops it from moving: a gradient was far larger than all others")

    def _drop(self, bucket: LocalBucket, which: Sequence[int], step: int, why: str) -> None:
        dropped = [k for k in which if bucket.params[k] in self._inner.state]
        for k in dropped:
            self.drop(bucket.params[k])
        if dropped:
            names = ", ".join(bucket.names[k] for k in dropped[:5])
            log.warning(
                "rank %d: after step %d the inner optimizer's state of %s%s %s; it is reset; look at the data and "
                "the loss here, or clip gradients",
                self._rank,
                step,
                names,
                f" and {len(dropped) - 5} more" if len(dropped) > 5 else "",
                why,
            )

    def _are_finite(self, params: Sequence[Tensor]) -> bool:
        found = (value for p in params for value in self._inner.state.get(p, {}).values())
        return are_finite(x for x in found if isinstance(x, Tensor) and x.is_floating_point())
