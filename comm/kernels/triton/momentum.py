"""Kernels: the momentum with this rank's gradient, in frames, in one pass, in Triton.

Rule 6 of `reference.py`. Gradients are read where they lie. Rests on `lanes.py` and `tensors.py`;
`backend.py` offers this function with the others.

Shape legend: K rows, N elements, J blocks, B bytes, S segments. In the kernel: P blocks per program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..arguments import SIGN, check_scale
from ..gpu_tables import Table, readable
from ..operands import EncodeOutput, MomentumInputs
from .lanes import (
    EDGE,
    LARGEST_KEPT,
    OPTIONS,
    add_owed,
    bits_of,
    blocks_per_program,
    clear_tail,
    launching_on,
    leave_kept,
    leave_residual,
    scale_of,
    signed_row,
)
from .tensors import are_aligned, kinds_of, load_where_they_lie


def encode_momentum(momentum: MomentumInputs, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frames ← frames of the momentum with this rank's gradient and what it owes (rule 6); residual ← the rest.

    One pass: reads gradients where they lie, D, the old momentum and the error; writes frames and residual. A gradient
    of another type than float32, bfloat16 and float16, or not contiguous, is copied first.
    """
    check_scale(scale)
    K, J = EDGE.check_encode_momentum(SIGN, momentum, out, block=block)
    if K * J == 0:
        return
    there = readable(momentum.grads)
    D, floor, correction, eps = momentum.divisor
    old, weights, counts_KJ, device = momentum.old, momentum.weights, out.counts_KJ, out.residual_KN.device
    words, halves = out.frames_KB.view(torch.int64), out.frames_KB.view(torch.int16)
    m_words, m_halves = (old.view(torch.int64), old.view(torch.int16)) if momentum.is_packed else (None, None)
    P = blocks_per_program(block)
    table = Table(there, momentum.segments, K * J, device)
    with launching_on(device):
        encode_momentum_blocks[(triton.cdiv(K * J, P),)](
            table.owners,
            table.pointers,
            table.layout,
            len(there),
            D,
            floor,
            correction,
            eps,
            m_words,
            0 if m_words is None else m_words.stride(0),
            m_halves,
            0 if m_halves is None else m_halves.stride(0),
            None if momentum.is_packed else old,
            weights.keep,
            weights.add,
            weights.own,
            weights.unscale,
            bits_of(out.error_KN),
            words,
            words.stride(0),
            halves,
            halves.stride(0),
            halves.shape[1],
            counts_KJ,
            0 if counts_KJ is None else counts_KJ.stride(0),
            bits_of(out.residual_KN),
            K,
            J,
            BLOCK=block,
            P=P,
            MEAN_ABS=scale == "mean_abs",
            KEEP=block <= LARGEST_KEPT,
            KINDS=kinds_of(there),
            ALIGNED=are_aligned(there),
            **OPTIONS,
        )


@triton.jit
def _momentum_row(
    address: tl.tensor,
    kind: tl.tensor,
    left: tl.tensor,
    D_at: tl.tensor,
    floor: tl.tensor,
    correction: tl.tensor,
    eps: tl.tensor,
    m_at: tl.tensor,
    word: tl.tensor,
    m_scale: tl.tensor,
    keep: tl.tensor,
    add: tl.tensor,
    own: tl.tensor,
    unscale: tl.tensor,
    lane: tl.tensor,
    inside: tl.tensor,
    offset: tl.tensor,
    q: tl.constexpr,
    BLOCK: tl.constexpr,
    KINDS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """y·add + m·keep of 16 lanes [P, 16]. m: floats, or where m_at is None row q of the word."""
    d = tl.load(D_at + offset, mask=inside, other=1.0)
    m = tl.load(m_at + offset, mask=inside, other=0.0) if m_at is not None else signed_row(word, m_scale, lane, q)
    g = load_where_they_lie(address, kind, left, offset, lane, BLOCK, KINDS, ALIGNED) * unscale
    if floor is not None:
        d = tl.sqrt_rn(tl.maximum(d * correction, floor[:, None])) + eps
    return tl.div_rn(g, tl.sqrt_rn(d * d + (g * g) * own)) * add + m * keep


@triton.jit(do_not_specialize=["S", "K", "J"])
def encode_momentum_blocks(
    owners: tl.tensor,
    grads: tl.tensor,
    layout: tl.tensor,
    S: tl.tensor,
    D: tl.tensor,
    floor: tl.tensor,
    correction: tl.tensor,
    eps: tl.tensor,
    m_words: tl.tensor,
    m_words_stride: tl.tensor,
    m_halves: tl.tensor,
    m_halves_stride: tl.tensor,
    m: tl.tensor,
    keep: tl.tensor,
    add: tl.tensor,
    own: tl.tensor,
    unscale: tl.tensor,
    error: tl.tensor,
    words: tl.tensor,
    words_stride: tl.tensor,
    halves: tl.tensor,
    halves_stride: tl.tensor,
    halves_per_row: tl.tensor,
    counts: tl.tensor,
    counts_stride: tl.tensor,
    residual: tl.tensor,
    K: tl.tensor,
    J: tl.tensor,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    MEAN_ABS: tl.constexpr,
    KEEP: tl.constexpr,
    KINDS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """P blocks, a row of 16 lanes of each at a time.

    grads: int64, S addresses and then their kinds; layout: as Segments.table; owners: the segment of each block, or -1.
    D: or the variance, where there is a floor. m: float32, or m_words and m_halves of frames. error, residual: float32,
    or int16 (the bits of bfloat16).
    """
    b = tl.program_id(0) * P + tl.arange(0, P)
    inside = b < K * J
    k = (b // J).to(tl.int64)
    j = (b % J).to(tl.int64)
    flat = b.to(tl.int64) * BLOCK
    lane = tl.arange(0, 16)[None, :]
    inside_lanes = inside[:, None] & (lane < 16)
    D_at = D + flat[:, None] + lane
    m_at = None if m is None else m + flat[:, None] + lane
    error_at = None if error is None else error + flat[:, None] + lane
    residual_at = residual + flat[:, None] + lane
    floors = None if floor is None else tl.load(floor + b, mask=inside, other=1.0)
    count = None if counts is None else tl.load(counts + k * counts_stride + j, mask=inside, other=0)
    m_words_at = None if m_words is None else m_words + k * m_words_stride + j * (BLOCK // 64)
    m_scale = None
    if m_words is not None:
        m_scale = tl.load(m_halves + k * m_halves_stride + J * (BLOCK // 16) + j, mask=inside, other=0)

    # 0. Where the gradients lie
    s = tl.load(owners + b, mask=inside, other=-1)
    owned = s >= 0
    kind = tl.load(grads + S + s, mask=owned, other=0)[:, None]
    start = (b - tl.load(layout + s, mask=owned, other=0)) * BLOCK
    left = (tl.load(layout + S + s, mask=owned, other=0) - start)[:, None]
    address = (tl.load(grads + s, mask=owned, other=0))[:, None] + start[:, None] * tl.where(kind == 1, 4, 2)

    # 1. c, and its sum in 16 lanes
    acc = tl.zeros([P, 16], tl.float32)
    rows = ()
    if KEEP:
        for g in tl.static_range(BLOCK // 64):
            word = None if m_words is None else tl.load(m_words_at + g, mask=inside, other=0)  # type: ignore[operator]
            for q in tl.static_range(4):
                at = 64 * g + 16 * q
                c = _momentum_row(
                    address, kind, left, D_at, floors, correction, eps, m_at, word, m_scale, keep, add, own, unscale,
                    lane, inside_lanes, at, q, BLOCK, KINDS, ALIGNED,
                )  # fmt: skip
                c = add_owed(c, error_at, count, lane, inside_lanes, at)
                rows += (c,)  # type: ignore[assignment]
                acc += tl.abs(c) if MEAN_ABS else c * c
    else:
        for g in range(BLOCK // 64):
            word = None if m_words is None else tl.load(m_words_at + g, mask=inside, other=0)  # type: ignore[operator]
            for q in tl.static_range(4):
                at = 64 * g + 16 * q
                c = _momentum_row(
                    address, kind, left, D_at, floors, correction, eps, m_at, word, m_scale, keep, add, own, unscale,
                    lane, inside_lanes, at, q, BLOCK, KINDS, ALIGNED,
                )  # fmt: skip
                c = add_owed(c, error_at, count, lane, inside_lanes, at)
                acc += tl.abs(c) if MEAN_ABS else c * c

    # 2. The scale
    scale = scale_of(acc, count, BLOCK, P, MEAN_ABS)
    tl.store(halves + k * halves_stride + J * (BLOCK // 16) + j, scale.to(tl.int16), mask=inside)

    # 3. Bits, a word of 64 at a time, and residuals
    words_at = words + k * words_stride + j * (BLOCK // 64)
    if KEEP:
        leave_kept(rows, words_at, residual_at, count, lane, inside_lanes, inside, scale, BLOCK, P)
    else:
        for g in range(BLOCK // 64):
            word = None if m_words is None else tl.load(m_words_at + g, mask=inside, other=0)  # type: ignore[operator]
            sent = tl.zeros([P], tl.int64)
            for q in tl.static_range(4):
                at = 64 * g + 16 * q
                c = _momentum_row(
                    address, kind, left, D_at, floors, correction, eps, m_at, word, m_scale, keep, add, own, unscale,
                    lane, inside_lanes, at, q, BLOCK, KINDS, ALIGNED,
                )  # fmt: skip
                c = add_owed(c, error_at, count, lane, inside_lanes, at)
                sent |= leave_residual(c, residual_at, count, lane, inside_lanes, at, scale) << (16 * q)
            tl.store(words_at + g, sent, mask=inside)

    # 4. The end of a row
    clear_tail(halves, halves_stride, halves_per_row, J * (BLOCK // 16 + 1), k, inside & (j == J - 1), P)
