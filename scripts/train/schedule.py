"""The learning rates of `train.py` and of the studies, and the loop that follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_FINAL = 0.1


def lr_fraction(step: int, steps: int, warmup: int) -> float:
    """Of the peak: linear over `warmup` steps, then a cosine down to a tenth: a pure function of the step."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _FINAL + (1 - _FINAL) * 0.5 * (1 + math.cos(math.pi * progress))


def train_steps(
    optimizer: Any, steps: int, loss_of: Callable[[int], Tensor], lr: float, part: int = 10
) -> Iterator[tuple[int, Tensor]]:
    """Take steps; yields each that was taken, from 0, with its loss. Replicas that differ meet after the last one.

    loss_of(step): computes it. lr: the peak of all groups' rates. part: they rise over the first 1/part of the steps.
    """
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_fraction(step, steps, max(1, steps // part))
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step, loss.detach()
    if hasattr(optimizer, "sync"):  # not before: it would change the run
        optimizer.sync()
