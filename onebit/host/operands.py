"""Operands of a step of Adam on the host: tensors, checked once, and the scalars of the step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .variance import BLOCK, EightBitVariance, seed_of

_NARROW = (torch.float32, torch.bfloat16)
DTYPES = {
    "master": (torch.float32,),
    "grad": _NARROW,
    "m": _NARROW,
    "v": (torch.float32,),
    "v.codes": (torch.uint8,),
    "v.scales": (torch.float32,),
    "out": (torch.float32, torch.bfloat16, torch.float16),
    "g": (torch.float32,),
}


@dataclass(frozen=True)
class AdamConstants:
    """The scalars of a step, as the kernels need them; each is rounded to float32 there.

    lerp: m ← base + lerp·(g - m); base is m, or g if from_grad. keep: factor of the parameter, from decoupled decay.
    l2: times the parameter, added to the gradient. move, eps: p ← p + move·m/(√v + eps), which is -lr·m̂/(√v̂ + eps)
    with both sides of the fraction times √(1-β2^step).
    """

    grad_scale: float
    keep: float
    l2: float
    lerp: float
    from_grad: bool
    beta2: float
    eps: float
    move: float
    seed: int

    @classmethod
    def of(
        cls,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        *,
        is_decoupled: bool,
        bias_correction: bool,
    ) -> AdamConstants:
        """The constants of these hyper-parameters. Raises ValueError if one is out of its range."""
        beta1, beta2 = betas
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
            raise ValueError(f"expected betas in [0, 1), got {betas}")
        if step < 1:
            raise ValueError(f"expected a step that counts from 1, got {step}")
        if math.isnan(grad_scale):
            raise ValueError("grad_scale is nan; skip this step")
        corrections = (1.0 - beta1**step, 1.0 - beta2**step) if bias_correction else (1.0, 1.0)
        root = corrections[1] ** 0.5
        weight = 1.0 - beta1
        from_grad = weight >= 0.5  # as in torch.lerp: exact at beta1 = 0
        return cls(
            grad_scale=grad_scale,
            keep=1.0 - lr * weight_decay if is_decoupled else 1.0,
            l2=0.0 if is_decoupled else weight_decay,
            lerp=weight - 1.0 if from_grad else weight,
            from_grad=from_grad,
            beta2=beta2,
            eps=eps * root,
            move=-(lr / corrections[0]) * root,
            seed=seed_of(step),
        )


@dataclass(frozen=True)
class AdamChunk:
    """The tensors of a step, flat. See `adam_`."""

    master: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor | EightBitVariance
    out: Tensor | None

    def check(self, offset: int) -> None:
        """Raise TypeError or ValueError, naming the tensor, if one is not accepted."""
        check_tensors(list(self._named()), self.master.numel())
        if offset < 0 or (isinstance(self.v, EightBitVariance) and offset % BLOCK):
            raise ValueError(
                f"offset must be a multiple of {BLOCK} with a variance in 8 bits, and never < 0; got {offset}"
            )

    def piece(self, begin: int, end: int) -> AdamChunk:
        """Elements [begin, end), or up to the last. begin: a multiple of a block."""
        v = self.v
        if isinstance(v, EightBitVariance):
            v = EightBitVariance(v.codes[begin:end], v.scales[begin // BLOCK : -(-end // BLOCK)])
        else:
            v = v[begin:end]
        return AdamChunk(
            self.master[begin:end],
            self.grad[begin:end],
            self.m[begin:end],
            v,
            None if self.out is None else self.out[begin:end],
        )

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("master", self.master), ("grad", self.grad), ("m", self.m))
        if isinstance(self.v, EightBitVariance):
            yield from (("v.codes", self.v.codes), ("v.scales", self.v.scales))
        else:
            yield "v", self.v
        if self.out is not None:
            yield "out", self.out


def check_tensors(named: list[tuple[str, Tensor]], n: int) -> None:
    """Raise TypeError or ValueError, naming the tensor, if one is not accepted. n: elements of each except scales."""
    for name, x in named:
        if x.dtype not in DTYPES[name]:
            allowed = " or ".join(str(dtype) for dtype in DTYPES[name])
            raise TypeError(f"{name} must be {allowed}, got {x.dtype}")
        if x.device.type != "cpu":
            raise ValueError(f"{name} must be in host memory, it is on {x.device}")
        expected = -(-n // BLOCK) if name == "v.scales" else n
        if x.shape != (expected,) or not x.is_contiguous():
            is_flat = "contiguous" if x.is_contiguous() else "not contiguous"
            raise ValueError(f"{name} must be contiguous, of shape ({expected},); it is {tuple(x.shape)}, {is_flat}")
    _check_apart(named)


def _check_apart(named: list[tuple[str, Tensor]]) -> None:
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, name) for name, x in named if x.numel())
    for (_, end, one), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise ValueError(f"{one} and {other} overlap in memory; give each its own")


def _check_numbers(**named: float) -> None:
    for name, value in named.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must not be negative, infinite or nan, got {value}")
