"""Kernels: the momentum with this rank's gradient, encoded in one pass, and its sums, in Triton.

Rules 6 and 12 of `reference.py`. Gradients are read in place. Here c is computed; `encode.py` makes the frames.
`backend.py` offers these functions with the others.

Shape legend: K rows, N elements, J blocks, B bytes, S segments. In the kernel: P blocks per program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SIGN, check_scale
from ..gpu_tables import Table, readable
from ..operands import EncodeOutput, MomentumInputs
from .codes import Blocks, Outputs
from .encode import Source, blocks_of, launch_encode, row_at
from .lanes import EDGE, OPTIONS, Frames, Rows, frames_of, launching_on, rows_of, signed_row, sum_in_halves
from .tensors import Pieces, Tensors, load_where_they_lie, pieces_of, tensors_of

SUMMED_PER_PROGRAM = 32
"""P, of `sum_blocks`."""


class Divisor(NamedTuple):
    """D; or, with a floor for each block, the variance from which D is computed."""

    D: Rows
    floor: tl.tensor | None
    correction: float
    eps: float


class Weights(NamedTuple):
    """As `MomentumWeights`."""

    keep: float
    add: float
    own: float
    unscale: float


class Momentum(NamedTuple):
    """`MomentumInputs` for the kernel. The old momentum is in frames, or float32."""

    grads: Tensors
    divisor: Divisor
    frames: Frames | None
    old: Rows | None
    weights: Weights


class Places(NamedTuple):
    """Operands of a program's blocks: their gradients, D [P, 16], floors [P] (() without), and the old momentum.

    old: float32 [P, 16], or words of frames.
    """

    grads: Pieces
    D_at: tl.tensor
    floor: tl.tensor
    old: tl.tensor


class Words(NamedTuple):
    """Addresses of the first words of blocks in frames, and the bits of their scales, [P]."""

    at: tl.tensor
    scale: tl.tensor


def encode_momentum(momentum: MomentumInputs, out: EncodeOutput, *, block: int, scale: str) -> None:
    """frames ← frames of c, the new momentum plus the residual (rule 6); residual ← c - decode(frames).

    One pass: reads gradients in place, D, the old momentum and the error; writes frames and residual. A gradient
    of another type than float32, bfloat16 and float16, or not contiguous, is copied first.
    """
    check_scale(scale)
    K, J = EDGE.check_encode_momentum(SIGN, momentum, out, block=block)
    if K * J == 0:
        return
    table = Table(readable(momentum.grads), momentum.segments, K * J, out.residual_KN.device)  # keeps copies alive
    source = Source(locate_momentum, momentum_rows, operands_of(momentum, table))
    launch_encode(source, out, K, J, inputs=len(momentum.grads), frame=SIGN, block=block, scale=scale)
    if out.sums_KJ2 is not None:
        momentum_sums(momentum, out.sums_KJ2, block=block)


def momentum_sums(momentum: MomentumInputs, sums_KJ2: Tensor, *, block: int) -> None:
    """Sums ← those of g² and g·(m·D) of each block (rule 12). One pass."""
    K, J = EDGE.check_momentum_sums(SIGN, momentum, sums_KJ2, block=block)
    if K * J == 0:
        return
    table = Table(readable(momentum.grads), momentum.segments, K * J, sums_KJ2.device)
    with launching_on(sums_KJ2.device):
        sum_blocks[(triton.cdiv(K * J, SUMMED_PER_PROGRAM),)](
            operands_of(momentum, table),
            sums_KJ2,
            K,
            J,
            len(momentum.grads),
            BLOCK=block,
            P=SUMMED_PER_PROGRAM,
            **OPTIONS,
        )


def operands_of(momentum: MomentumInputs, grads: Table) -> Momentum:
    """For kernels. grads: the gradients, which the caller keeps until the launch."""
    D, floor, correction, eps = momentum.divisor
    weights, old = momentum.weights, momentum.old
    return Momentum(
        grads=tensors_of(grads),
        divisor=Divisor(rows_of(D), floor, correction, eps),
        frames=frames_of(SIGN, old) if momentum.is_packed else None,
        old=None if momentum.is_packed else rows_of(old),
        weights=Weights(weights.keep, weights.add, weights.own, weights.unscale),
    )


@triton.jit
def locate_momentum(momentum: Momentum, blocks: Blocks, BLOCK: tl.constexpr) -> Places:
    floor = momentum.divisor.floor
    return Places(
        grads=pieces_of(momentum.grads, blocks.b, 0, blocks.inside, blocks.inputs, BLOCK),
        D_at=row_at(momentum.divisor.D, blocks, BLOCK),
        floor=() if floor is None else tl.load(floor + blocks.b, mask=blocks.inside, other=1.0),
        old=row_at(momentum.old, blocks, BLOCK) if momentum.frames is None else _words(momentum.frames, blocks, BLOCK),
    )


@triton.jit
def _words(frames: Frames, blocks: Blocks, BLOCK: tl.constexpr) -> Words:
    scale_at = frames.halves + blocks.k * frames.halves_stride + blocks.J * (BLOCK // 16) + blocks.j
    return Words(
        at=frames.codes + blocks.k * frames.codes_stride + blocks.j * (BLOCK // 64),
        scale=tl.load(scale_at, mask=blocks.inside, other=0),
    )


@triton.jit
def momentum_rows(
    momentum: Momentum,
    places: Places,
    out: Outputs,
    blocks: Blocks,
    at: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """y·add + m·keep of four rows, those of one word."""
    word = None
    if momentum.frames is not None:
        word = tl.load(places.old.at + at // 64, mask=blocks.inside, other=0)
    rows = ()
    for q in tl.static_range(ROWS):
        rows += (_momentum_row(momentum, places, blocks, word, at + 16 * q, q, BLOCK),)  # type: ignore[assignment]
    return rows


@triton.jit
def _momentum_row(
    momentum: Momentum,
    places: Places,
    blocks: Blocks,
    word: tl.tensor,
    at: tl.tensor,
    q: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Row q of the word, from element `at` of each block on."""
    weights = momentum.weights
    d, m = divisor_row(momentum, places, blocks, at), old_row(places, blocks, word, at, q)
    g = load_where_they_lie(momentum.grads, places.grads, at, blocks.lane, BLOCK) * weights.unscale
    return tl.div_rn(g, tl.sqrt_rn(d * d + (g * g) * weights.own)) * weights.add + m * weights.keep


@triton.jit
def divisor_row(momentum: Momentum, places: Places, blocks: Blocks, at: tl.tensor) -> tl.tensor:
    """D of the row from element `at` of each block on."""
    divisor = momentum.divisor
    d = tl.load(places.D_at + at, mask=blocks.mask, other=1.0)
    if divisor.floor is not None:
        d = tl.sqrt_rn(tl.maximum(d * divisor.correction, places.floor[:, None])) + divisor.eps
    return d


@triton.jit
def old_row(places: Places, blocks: Blocks, word: tl.tensor, at: tl.tensor, q: tl.constexpr) -> tl.tensor:
    """m of the row from element `at` of each block on, which is row q of the word."""
    if word is None:
        m = tl.load(places.old + at, mask=blocks.mask, other=0.0)
    else:
        m = signed_row(word, places.old.scale, blocks.lane, q)
    return m


@triton.jit(do_not_specialize=["K", "J", "S"])
def sum_blocks(
    momentum: Momentum,
    sums: tl.tensor,
    K: tl.tensor,
    J: tl.tensor,
    S: tl.tensor,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
) -> None:
    """A program of P blocks, a word of 64 elements of each at a time."""
    blocks = blocks_of(K, J, S, P)
    places = locate_momentum(momentum, blocks, BLOCK)
    squares = tl.zeros([P, 16], tl.float32)
    products = tl.zeros([P, 16], tl.float32)
    for w in range(BLOCK // 64):
        word = None
        if momentum.frames is not None:
            word = tl.load(places.old.at + w, mask=blocks.inside, other=0)
        for q in tl.static_range(4):
            at = 64 * w + 16 * q
            g = load_where_they_lie(momentum.grads, places.grads, at, blocks.lane, BLOCK)
            squares = squares + g * g
            m = old_row(places, blocks, word, at, q)
            products = products + g * (m * divisor_row(momentum, places, blocks, at))
    tl.store(sums + 2 * blocks.b, sum_in_halves(squares, P), mask=blocks.inside)
    tl.store(sums + 2 * blocks.b + 1, sum_in_halves(products, P), mask=blocks.inside)
