"""Adam on a flat chunk in pure torch: the specification. The C++ kernel gives the same bits.

Rules that leave no freedom to an implementation; each operation in float32, rounded once, no fused multiply-add:

1. Gradients and moments in bfloat16 are widened first. g = grad·grad_scale. Without decoupled decay g = g + l2·p.
2. m = base + lerp·(g - m), base being m, or g if β1 ≤ ½. v = β2·v + ((1-β2)·g)·g.
3. p = p·keep, then p = p + (m·move)/(√v + eps): the new m and v, before they are rounded.
4. p, m and v are stored, m in bfloat16 rounded to nearest even. v in 8 bits: `variance.py`. `out` is p, rounded to
   nearest even.
5. The sign and the payload of a NaN are left open: machines differ.

torch.optim.AdamW(foreach=False) differs in last bits: it divides √v by √(1-β2^step), which here is part of move and
eps; its lerp is a fused multiply-add on machines that have one; its root is MKL's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operands import AdamChunk, AdamConstants
from .variance import EightBitVariance, from_eight_bits, to_eight_bits

_AT_A_TIME = 1 << 18
"""Elements per piece, which bounds the temporaries; a multiple of a block."""


@torch.no_grad()
def adam_(chunk: AdamChunk, constants: AdamConstants, offset: int) -> None:
    """One step. Arguments have been checked."""
    for begin in range(0, chunk.master.numel(), _AT_A_TIME):
        _step(chunk.piece(begin, begin + _AT_A_TIME), constants, offset + begin)


def _step(chunk: AdamChunk, c: AdamConstants, offset: int) -> None:
    p, g, m = chunk.master, chunk.grad.float() * c.grad_scale, chunk.m.float()
    v = from_eight_bits(chunk.v) if isinstance(chunk.v, EightBitVariance) else chunk.v
    if c.l2 != 0.0:
        g = g + p * c.l2
    m = (g if c.from_grad else m) + (g - m) * c.lerp
    v = v * c.beta2 + (g * (1.0 - c.beta2)) * g
    move = (m * c.move) / (_sqrt(v) + c.eps)
    p.copy_(p * c.keep + move)
    chunk.m.copy_(m)
    if isinstance(chunk.v, EightBitVariance):
        to_eight_bits(v, chunk.v, seed=c.seed, offset=offset)
    else:
        chunk.v.copy_(v)
    if chunk.out is not None:
        chunk.out.copy_(p)


def _sqrt(x: Tensor) -> Tensor:
    # Through float64: torch's own float32 sqrt is MKL's, one unit off for 17% of inputs (torch 2.13, AMD, 2026-11).
    return x.to(torch.float64).sqrt().to(torch.float32)
