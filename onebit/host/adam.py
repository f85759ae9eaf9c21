"""One step of Adam or AdamW on a flat chunk of parameters in host memory, and the direction of such a step alone."""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from . import native, reference
from .operands import AdamChunk, AdamConstants, check_tensors
from .variance import EightBitVariance

_constants_of = functools.lru_cache(maxsize=64)(AdamConstants.of)  # the same for many tensors of a step


def adam_(
    master: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor | EightBitVariance,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int,
    is_decoupled: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    out: Tensor | None = None,
    offset: int = 0,
) -> None:
    """Advance master, m and v in place by the gradient, and write the new parameter into `out`.

    g ← grad·grad_scale;  is_decoupled: p ← (1 - lr·wd)·p (AdamW), else g ← g + wd·p (Adam with an L2 term)
    m ← m + (1-β1)·(g - m);  v ← β2·v + (1-β2)·g²;  p ← p - lr·m̂/(√v̂ + eps), v̂ = v/(1-β2^step), m̂ = m/(1-β1^step)

    All tensors are contiguous, [n], in host memory, and do not overlap. One pass over memory in C++, without an
    allocation and without the GIL; if the library is not built, the pure-torch reference gives the same bits.

    Args:
        master: Parameters, float32. Modified.
        grad: Gradients, float32 or bfloat16. Read only.
        m: Momentum, float32 or bfloat16. Modified.
        v: Variance, float32, or an `EightBitVariance`. Modified.
        lr: Learning rate.
        betas: Decay of m and v. Default (.9, .999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: wd above. Default 0.
        step: Number of this step, from 1.
        is_decoupled: Whether to use AdamW's weight decay instead of an L2 term. Default True.
        bias_correction: Whether to divide m and v by 1 - β^step. Default True.
        grad_scale: Factor of the gradients: 1/(loss scale), times that of clipping. Default 1.
        out: Receives the master, rounded to nearest; float32, bfloat16 or float16. Default None.
        offset: First element of this chunk within its parameter; with v in 8 bits a multiple of 256 (`BLOCK`). Chunks
            give the same bits as one step over all. Default 0.

    Raises:
        TypeError: A tensor has another dtype. Nothing is written.
        ValueError: A tensor has another size or place. Nothing is written.
    """
    chunk = AdamChunk(master, grad, m, v, out)
    chunk.check(offset)
    constants = _constants_of(
        lr,
        tuple(betas),
        eps,
        weight_decay,
        step,
        grad_scale,
        is_decoupled=is_decoupled,
        bias_correction=bias_correction,
    )
    _run(chunk, constants, offset)


def direction_(
    g: Tensor, m: Tensor, v: Tensor, *, betas: tuple[float, float], eps: float, step: int, bias_correction: bool
) -> None:
    """Advance m and v by the gradient, and replace the gradient by the direction: g ← m̂/(√v̂ + eps).

    The same as the step that `adam_` with lr = 1 subtracts from a parameter of 0. One pass over memory.

    Args:
        g: Gradient, float32 [n], in host memory. Becomes the direction.
        m: Momentum, float32 [n]. Modified.
        v: Variance, float32 [n]. Modified.
        betas: Decay of m and v.
        eps: Added to the denominator.
        step: Number of this step, from 1.
        bias_correction: Whether to divide m and v by 1 - β^step.

    Raises:
        TypeError: A tensor has another dtype. Nothing is written.
        ValueError: A tensor has another size or place. Nothing is written.
    """
    check_tensors([("g", g), ("m", m), ("v", v)], g.numel())
    _run(AdamChunk(g, g, m, v, None), _constants_of_direction(tuple(betas), eps, step, bias_correction), 0)


@functools.lru_cache(maxsize=64)
def _constants_of_direction(betas: tuple[float, float], eps: float, step: int, bias_correction: bool) -> AdamConstants:
    of_a_move = AdamConstants.of(1.0, betas, eps, 0.0, step, 1.0, is_decoupled=True, bias_correction=bias_correction)
    return replace(of_a_move, keep=0.0, move=-of_a_move.move)


def _run(chunk: AdamChunk, constants: AdamConstants, offset: int) -> None:
    (native if native.is_built() else reference).adam_(chunk, constants, offset)
