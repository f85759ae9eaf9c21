"""InnerStep: a step of this rank alone, taken or left out.

It works on float32 masters (`replica.py`). Fragments keep the product of the weight decays since their last round, by
which the decay is taken out of the differences (`fragment.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model_parallel import ModelParallelGroup, local
from ..usage.contract import State
from ..usage.gradients import gradient_of
from .fragment import Fragment
from .replica import Replica
from .wrapped import are_finite, kept_by_decay


class InnerStep:
    """The inner optimizer's steps. parts: the ranks that hold one replica, which take or leave out a step together."""

    def __init__(self, inner: torch.optim.Optimizer, replica: Replica, parts: ModelParallelGroup):
        self._inner, self._replica, self._parts = inner, replica, parts

    def take(self, fragments: Sequence[Fragment], scale: float, *, is_frozen: bool) -> bool:
        """Step from the gradients times scale; only weight decay if one is not finite or the rank is frozen.

        Returns whether all gradients are finite, on all parts of the replica.
        """
        params = self._replica.buckets.params
        grads = {p: grad for p in params if (grad := gradient_of(p)) is not None}
        is_good = self._parts.agree(are_finite(grads.values()))
        is_taken = is_good and not is_frozen
        if is_taken:
            if scale != 1.0:
                torch._foreach_mul_([local(grad) for grad in grads.values()], scale)
            with self._replica.on_masters():
                self._inner.step()
        kept = [kept_by_decay(self._inner, group) for group in self._inner.param_groups]
        if is_taken:
            self._correct(grads)
        else:
            self._decay_alone(grads, kept)  # the others' parameters and the anchor decay, too
        for fragment in fragments:
            fragment.keeps = [before * keep for before, keep in zip(fragment.keeps, kept, strict=True)]
            decays = zip(fragment.decays, fragment.params, strict=True)
            fragment.decays = [before and p in grads for before, p in decays]
        return is_good

    def _correct(self, grads: dict[Tensor, Tensor]) -> None:
        for bucket in self._replica.buckets:
            if bucket.correction is not None:
                bucket.correct(grads, float(self._inner.param_groups[bucket.group_index]["lr"]))

    def _decay_alone(self, grads: dict[Tensor, Tensor], kept: Sequence[float]) -> None:
        for bucket in self._replica.buckets:
            for p, w in zip(bucket.params, bucket.local_values, strict=True):
                if p in grads:
                    w.mul_(kept[bucket.group_index])

    def load(self, state: State) -> None:
        """Load a state of the inner optimizer, in float32 for parameters with masters."""
        with self._replica.on_masters():
            self._inner.load_state_dict(state)
