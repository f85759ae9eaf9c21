"""Kernels: the step of a chunk's owner, from the frames of all ranks, in Triton.

Rule 9 of `reference.py`. Rests on `mean.py`; `backend.py` offers this function with the others.

Shape legend: W rows, N elements, J blocks, B bytes. In the kernel: P blocks per program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..arguments import SIGN
from ..operands import OwnerStep
from .codes import Blocks
from .lanes import EDGE, OPTIONS, frames_of, from_bfloat16, launching_on, signed_row, sum_in_halves
from .mean import Received, locate_words, mean_rows

BLOCKS_PER_PROGRAM = 32
"""P: a row of lanes gives 128 threads 16 bytes each to load."""


class Chunk(NamedTuple):
    """The tensors of the step, contiguous."""

    grad: tl.tensor
    counts: tl.tensor
    variance: tl.tensor
    direction: tl.tensor
    D: tl.tensor | None
    sums: tl.tensor
    corrections: tl.tensor | None


class Numbers(NamedTuple):
    """The numbers of `OwnerStep`. The corrections are the same for all blocks, or one per block, [P, 1]."""

    correction1: tl.tensor
    correction2: tl.tensor
    weight: tl.tensor
    own: tl.tensor
    common: tl.tensor
    eps: tl.tensor
    floor: tl.tensor
    inverse_limit: tl.tensor


class Own(NamedTuple):
    """The owner's own frame in a program's blocks: words, scales, and numbers of real elements: [P]."""

    words_at: tl.tensor
    scale: tl.tensor
    count: tl.tensor


class Row(NamedTuple):
    """16 elements of each block, [P, 16]. after: the new variance; there: their addresses."""

    g: tl.tensor
    q: tl.tensor
    m_hat: tl.tensor
    after: tl.tensor
    v_hat: tl.tensor
    real: tl.tensor
    there: tl.tensor


def owner_step(step: OwnerStep, *, block: int) -> None:
    """Update v and compute m̂/D of the owner's chunk from all ranks' frames and its gradient (rule 9). One pass."""
    W, J = EDGE.check_owner_step(step, block=block)
    if J == 0:
        return
    P, (corrections, *correcting) = BLOCKS_PER_PROGRAM, step.correcting
    chunk = (step.grad_N, step.counts_J, step.variance_N, step.direction_N, step.D_N, step.sums_J4, corrections)
    numbers = (step.weight, step.own, step.common, step.eps, step.floor, step.inverse_limit)
    with launching_on(step.grad_N.device):
        owner_blocks[(triton.cdiv(J, P),)](
            Received(frames_of(SIGN, step.received_WB), 1.0 / W),
            Chunk(*chunk),
            Numbers(*correcting, *numbers),  # type: ignore[call-arg]
            W,
            J,
            step.row,
            BLOCK=block,
            P=P,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=["W", "J", "row"])
def owner_blocks(
    received: Received,
    chunk: Chunk,
    numbers: Numbers,
    W: tl.tensor,
    J: tl.tensor,
    row: tl.tensor,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """A program of P blocks, in two passes: one for their sums, one for the values that need them, which writes."""
    b = tl.program_id(0) * P + tl.arange(0, P)
    inside = b < J
    lane = tl.arange(0, 16)[None, :]
    j = b.to(tl.int64)
    blocks = Blocks(b, j * 0, j, J, W, inside, lane, inside[:, None] & (lane < 16))
    words = locate_words(received, blocks, BLOCK)
    frames = received.frames
    count = tl.load(chunk.counts + j, mask=inside, other=0)
    own = Own(
        words_at=words.words_at + row * frames.codes_stride,
        scale=tl.load(words.scales_at + row * frames.halves_stride, mask=inside, other=0),
        count=count,
    )
    c1, c2 = numbers.correction1, numbers.correction2
    if chunk.corrections is not None:
        c1 = tl.load(chunk.corrections + j, mask=inside, other=0.0)[:, None]
        c2 = tl.load(chunk.corrections + J + j, mask=inside, other=0.0)[:, None]
    n = Numbers(c1, c2, numbers.weight, numbers.own, numbers.common, numbers.eps, numbers.floor, numbers.inverse_limit)

    # 1. Sums; they start at -0.0, because -0.0 + value is value, even for -0.0
    v_hats = tl.full([P, 16], -0.0, tl.float32)
    gg, qq, gq, gm = v_hats, v_hats, v_hats, v_hats
    for word in range(BLOCK // 64):
        means = mean_rows(received, words, None, blocks, 64 * word, 4, BLOCK)
        for k in tl.static_range(4):
            r = _row(means[k], own, chunk, n, blocks, word, k, BLOCK)
            v_hats += r.v_hat
            gg += r.g * r.g
            qq += r.q * r.q
            gq += r.g * (r.q * c1)
            gm += r.g * r.m_hat
    sums_at = chunk.sums + 4 * j
    tl.store(sums_at, sum_in_halves(gg, P), mask=inside)
    tl.store(sums_at + 1, sum_in_halves(qq, P), mask=inside)
    tl.store(sums_at + 2, sum_in_halves(gq, P), mask=inside)
    tl.store(sums_at + 3, sum_in_halves(gm, P), mask=inside)

    # 2. The least value of D²
    scale_at = words.scales_at
    scale = from_bfloat16(tl.load(scale_at, mask=inside, other=0))
    for _ in range(1, W):
        scale_at += frames.halves_stride
        scale += from_bfloat16(tl.load(scale_at, mask=inside, other=0))
    s = ((scale * received.share)[:, None] * c1) * n.inverse_limit
    real = tl.maximum(count, 1).to(tl.float32)
    floor = tl.div_rn(sum_in_halves(v_hats, P) * n.floor, real)[:, None]
    least = tl.where(s * s > floor, s * s, floor)

    # 3. Variance, D and direction
    for word in range(BLOCK // 64):
        means = mean_rows(received, words, None, blocks, 64 * word, 4, BLOCK)
        for k in tl.static_range(4):
            r = _row(means[k], own, chunk, n, blocks, word, k, BLOCK)
            D = tl.where(r.real, tl.sqrt_rn(tl.where(r.v_hat > least, r.v_hat, least)) + n.eps, 1.0)
            tl.store(chunk.variance + r.there, r.after, mask=blocks.mask)
            tl.store(chunk.direction + r.there, tl.div_rn(r.m_hat, D), mask=blocks.mask)
            if chunk.D is not None:
                tl.store(chunk.D + r.there, D, mask=blocks.mask)


@triton.jit
def _row(
    mean: tl.tensor,
    own: Own,
    chunk: Chunk,
    numbers: Numbers,
    blocks: Blocks,
    word: tl.tensor,
    k: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Row:
    """Row k of word `word` of each block."""
    at = 64 * word + 16 * k + blocks.lane
    there = (blocks.j * BLOCK)[:, None] + at
    real = at < own.count[:, None]
    bits = tl.load(own.words_at + word, mask=blocks.inside, other=0)
    q = tl.where(real, signed_row(bits, own.scale, blocks.lane, k), 0.0)
    g = tl.where(real, tl.load(chunk.grad + there, mask=blocks.mask, other=0.0), 0.0)
    v = tl.load(chunk.variance + there, mask=blocks.mask, other=0.0)
    m_hat = tl.where(real, mean * numbers.correction1, 0.0)
    after = v + ((m_hat * numbers.common + g * numbers.own) * g - v) * numbers.weight
    v_hat = tl.where(real, tl.where(after < 0.0, 0.0, after) * numbers.correction2, 0.0)
    return Row(g, q, m_hat, tl.where(real, after, v), v_hat, real, there)
