"""Marks of gradients: whether one has changed since it was sent, or is still that of the step before."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..agreement.replicas import fingerprints
from ..model_parallel import local
from .gradients import gradient_of

# torch counts writes to a tensor, but not those through its `.data`. So the bits are compared as well in the first 3 of
# every 100 steps, or of every 100 times that a bucket leaves during backward: 2 ns per element and comparison.
INSPECTED, _EVERY = 3, 100


def is_inspected(count: int) -> bool:
    """Whether bits are compared after so many steps or sendings before this one."""
    return count % _EVERY < INSPECTED


def gradient_bits(grads: Sequence[Tensor | None]) -> Tensor:
    """A hash of the bits of each gradient that exists and has elements, int64."""
    return fingerprints([grad for grad in grads if grad is not None and grad.numel() > 0])


class GradientMark(NamedTuple):
    """Identifies a parameter's gradient and how often it had been written.

    Attributes:
        grad: Reference to the gradient's local elements. None: there was no gradient, or p was frozen.
        version: torch's count of writes. Default 0.
    """

    # A reference, because after a gradient is dropped the next one may have the same address. To the local elements,
    # because those of a DTensor begin to count anew with every backward pass (`detach_version_`).
    grad: weakref.ref[Tensor] | None
    version: int = 0

    @classmethod
    def of(cls, p: Tensor) -> GradientMark:
        """The mark of p's gradient as it is now."""
        grad = _own_gradient(p)
        return cls(None) if grad is None else cls(weakref.ref(grad), grad._version)

    def is_still(self, p: Tensor) -> bool:
        """Whether p's gradient is still the marked one, unchanged."""
        grad = _own_gradient(p)
        if grad is None or self.grad is None:
            return grad is None and self.grad is None
        return self.grad() is grad and grad._version == self.version


def _own_gradient(p: Tensor) -> Tensor | None:
    """The local elements of p's gradient, if it has one: the same object as long as it is the same gradient."""
    grad = gradient_of(p)
    if grad is None or type(grad) is Tensor:
        return grad
    with torch.no_grad():  # with autograd a DTensor gives a new view at each call
        return local(grad)


def marks_of(params: Sequence[Tensor]) -> list[GradientMark]:
    """The marks of the parameters' gradients as they are now."""
    return [GradientMark.of(p) for p in params]


def changed_since(params: Sequence[Tensor], marks: Sequence[GradientMark]) -> list[int]:
    """The indices of the parameters with gradients that differ from their marks."""
    return [k for k, (p, mark) in enumerate(zip(params, marks, strict=True)) if not mark.is_still(p)]


def are_used_again(params: Sequence[Tensor], marks: Sequence[GradientMark]) -> bool:
    """Whether there are gradients, and all of them are those of the step in which the marks were made."""
    if len(params) != len(marks) or all(gradient_of(p) is None for p in params):
        return False
    return all(mark.is_still(p) for p, mark in zip(params, marks, strict=True))
