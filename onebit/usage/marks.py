"""Gradients as they once were: whether one has changed since it was sent, or is still that of the step before."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..agreement.replicas import fingerprints
from ..model_parallel import local

# torch counts how often a tensor is written, but not through its `.data`. So in these steps of a run, which are its
# first and then some in a hundred, bits are compared as well: 2 ns an element and comparison.
_INSPECTED, _EVERY = 3, 100


def is_inspected(step: int) -> bool:
    """Whether the bits of gradients are compared in this step, counted from 0."""
    return step % _EVERY < _INSPECTED


def gradient_bits(grads: Sequence[Tensor | None]) -> Tensor:
    """int64: a hash of each gradient's bits, of those that there are."""
    return fingerprints([grad for grad in grads if grad is not None and grad.numel() > 0])


class GradientMark(NamedTuple):
    """Which tensor a parameter's gradient was, and how often it had been written. None: there was no gradient."""

    # A reference: where a gradient was dropped, the next one may lie at the same address. To the local elements: a
    # DTensor's begin to count anew with every backward pass (`detach_version_`).
    grad: weakref.ref[Tensor] | None
    version: int = 0

    @classmethod
    def of(cls, p: Tensor) -> GradientMark:
        """The gradient as it is now."""
        if p.grad is None:
            return cls(None)
        grad = p.grad if type(p.grad) is Tensor else local(p.grad)
        return cls(weakref.ref(grad), grad._version)

    def is_still(self, p: Tensor) -> bool:
        """Whether p's gradient is what it was."""
        if p.grad is None or self.grad is None:
            return p.grad is None and self.grad is None
        now = p.grad if type(p.grad) is Tensor else local(p.grad)
        return self.grad() is now and now._version == self.version


def marks_of(params: Sequence[Tensor]) -> list[GradientMark]:
    """Of each parameter's gradient as it is now."""
    return [GradientMark.of(p) for p in params]


def changed_since(params: Sequence[Tensor], marks: Sequence[GradientMark]) -> list[int]:
    """The indices of the parameters whose gradients are others than when the marks were made."""
    return [k for k, (p, mark) in enumerate(zip(params, marks, strict=True)) if not mark.is_still(p)]


def are_used_again(params: Sequence[Tensor], marks: Sequence[GradientMark]) -> bool:
    """Whether there are gradients, and all of them are those of the step in which the marks were made."""
    if len(params) != len(marks) or all(p.grad is None for p in params):
        return False
    return all(mark.is_still(p) for p, mark in zip(params, marks, strict=True))
