"""Kernels: encoding in Triton, one loop for all frames and all inputs.

`Source` computes c: from floats in place (here), a momentum (`momentum.py`) or a mean (`mean.py`); `codes.py` makes the
codes of a frame from it. One pass over memory: c stays in registers between its scale and its residual. Blocks above
`LARGEST_KEPT` are read twice, the second time from a cache. `backend.py` offers the functions.

Shape legend: K rows, N elements, J blocks, B bytes. In the kernel: P blocks per program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..arguments import INT4, INT8, LOG4, SIGN, Frame, check_scale
from ..operands import EncodeOutput, MasterStep
from .codes import Blocks, Outputs, leave_rows, measured, nothing_measured, scale_of
from .lanes import EDGE, OPTIONS, Frames, Rows, frames_of, from_bfloat16, launching_on, rows_of

LARGEST_KEPT = 512  # elements of a block; 1024 compile for 24 s (Triton 3.7.1, 2026-11), 256 for 1 s


class Source(NamedTuple):
    """How to compute c before the residual is added: its operands, and two functions of them in the kernel.

    locate(operands, blocks, BLOCK): addresses of the operands of these blocks, called once. It must not return None,
    which Triton 3.6 refuses. rows(operands, places, out, blocks, at, ROWS, BLOCK): elements at .. at + 16·ROWS of each
    block, as ROWS rows [P, 16].
    """

    locate: triton.JITFunction | None
    rows: triton.JITFunction
    operands: tuple[object, ...] | None


class Destination(NamedTuple):
    """`EncodeOutput` for the kernel. error, residual: float32, or int16 (the bits of bfloat16).

    residual: None if the old residual stays. returned: share of the sent values that is added to the new residual.
    """

    error: Rows | None
    frames: Frames
    counts: Rows | None
    residual: Rows | None
    returned: float | None


def encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int, scale: str
) -> None:
    """frames ← frame of c = x + error; x ← c - decode(frames). x float32 in place; error float32/bfloat16, read only.

    Rows may have gaps between them (a slice of a wider tensor); elements of a row are contiguous. Rows of frames start
    at multiples of 8 bytes. Asynchronous, on the current stream of x's device.
    """
    check_scale(scale)
    _encode_floats(SIGN, EncodeOutput(error_KN, frames_KB, counts_KJ, x_KN), block=block, scale=scale)


def int8_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """`encode` for int8 frames."""
    _encode_floats(INT8, EncodeOutput(error_KN, frames_KB, counts_KJ, x_KN), block=block, scale="largest")


def int4_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """`encode` for int4 frames."""
    _encode_floats(INT4, EncodeOutput(error_KN, frames_KB, counts_KJ, x_KN), block=block, scale="largest")


def log4_encode(
    x_KN: Tensor, error_KN: Tensor | None, frames_KB: Tensor, counts_KJ: Tensor | None, *, block: int
) -> None:
    """`encode` for log4 frames."""
    _encode_floats(LOG4, EncodeOutput(error_KN, frames_KB, counts_KJ, x_KN), block=block, scale="octaves")


def step_masters(step: MasterStep, *, block: int, scale: str) -> None:
    """Masters ← those after the step, by torch's operations; frame ← frame of what their replicas lack (rule 13)."""
    lacking_1N = reference.step_masters_(step)
    encode(lacking_1N, None, step.frame_1B, step.counts_J.unsqueeze(0), block=block, scale=scale)


def int4_step_masters(step: MasterStep, *, block: int) -> None:
    """The same, with a frame of int4."""
    int4_encode(reference.step_masters_(step), None, step.frame_1B, step.counts_J.unsqueeze(0), block=block)


def _encode_floats(frame: Frame, out: EncodeOutput, *, block: int, scale: str) -> None:
    x_KN = out.residual_KN
    K, J = EDGE.check_encode(frame, x_KN, out.error_KN, out.frames_KB, out.counts_KJ, block=block)
    source = Source(None, rows_in_place, None)
    launch_encode(source, out, K, J, frame=frame, block=block, scale=scale)


def launch_encode(
    source: Source,
    out: EncodeOutput,
    K: int,
    J: int,
    inputs: int = 1,
    *,
    frame: Frame,
    block: int,
    scale: str,
    is_left: bool = True,
    returned: float | None = None,
) -> None:
    """Launch the kernel over all blocks. Arguments have been checked. scale: "rms", "mean_abs", "largest" or "octaves".

    inputs: number of tensors or frames that c is computed from. is_left: whether the residual is written. returned: see
    rule 10.
    """
    if K * J == 0:
        return
    P = _blocks_per_program(block)
    destination = Destination(
        error=None if out.error_KN is None else rows_of(out.error_KN),
        frames=frames_of(frame, out.frames_KB),
        counts=None if out.counts_KJ is None else rows_of(out.counts_KJ),
        residual=rows_of(out.residual_KN) if is_left else None,
        returned=returned,
    )
    with launching_on(out.residual_KN.device):
        encode_blocks[(triton.cdiv(K * J, P),)](
            source,
            destination,
            K,
            J,
            inputs,
            SCALE=scale,
            BITS=frame.element_bits,
            BLOCK=block,
            P=P,
            KEEP=block <= LARGEST_KEPT,
            **OPTIONS,
        )


def _blocks_per_program(block: int) -> int:
    """P: a row of lanes gives 128 threads 16 bytes each to load, or 8 where c would else not fit their registers."""
    return 16 if 256 < block <= LARGEST_KEPT else 32


# Outside of tuples, in which Triton does specialise for a 1 and for multiples of 16
@triton.jit(do_not_specialize=["K", "J", "inputs"])
def encode_blocks(
    source: Source,
    to: Destination,
    K: tl.tensor,
    J: tl.tensor,
    inputs: tl.tensor,
    SCALE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """A program of P blocks: a word of 64 elements of each at a time, or a row of 16 if codes are longer than a bit."""
    ROWS: tl.constexpr = 4 if BITS == 1 else 1
    STEP: tl.constexpr = 16 * ROWS
    SCALES: tl.constexpr = BLOCK * BITS // 16  # halves of a block's codes
    blocks = blocks_of(K, J, inputs, P)
    places = None if source.locate is None else source.locate(source.operands, blocks, BLOCK)
    counts_at = None if to.counts is None else to.counts.at + blocks.k * to.counts.stride + blocks.j
    out = Outputs(
        error_at=None if to.error is None else row_at(to.error, blocks, BLOCK),
        count=None if counts_at is None else tl.load(counts_at, mask=blocks.inside, other=0),
        codes_at=_codes_at(to.frames, blocks, BLOCK, BITS),
        residual_at=None if to.residual is None else row_at(to.residual, blocks, BLOCK),
        returned=to.returned,
    )

    # 1. Rows of c, and the measure for their scale
    acc = nothing_measured(P, SCALE)
    kept = ()
    if KEEP:
        for g in tl.static_range(BLOCK // STEP):
            rows = _rows_of_c(source, places, out, blocks, STEP * g, ROWS, BLOCK)
            kept += (rows,)  # type: ignore[assignment]
            acc = measured(acc, rows, ROWS, SCALE)
    else:
        for g in range(BLOCK // STEP):
            rows = _rows_of_c(source, places, out, blocks, STEP * g, ROWS, BLOCK)
            acc = measured(acc, rows, ROWS, SCALE)

    # 2. The scale
    scale = scale_of(acc, out.count, BLOCK, P, SCALE, BITS)
    halves_at = to.frames.halves + blocks.k * to.frames.halves_stride
    tl.store(halves_at + J * SCALES + blocks.j, scale.to(tl.int16), mask=blocks.inside)

    # 3. Codes and residuals
    if KEEP:
        for g in tl.static_range(BLOCK // STEP):
            leave_rows(kept[g], out, blocks, STEP * g, scale, P, SCALE, BITS)
    else:
        for g in range(BLOCK // STEP):
            rows = _rows_of_c(source, places, out, blocks, STEP * g, ROWS, BLOCK)
            leave_rows(rows, out, blocks, STEP * g, scale, P, SCALE, BITS)

    # 4. The zeros after the last scale of a row, less than 16 bytes
    tail = J * (SCALES + 1) + tl.arange(0, 8)[None, :]
    is_tail = (blocks.inside & (blocks.j == J - 1))[:, None] & (tail < to.frames.halves_per_row)
    tl.store(halves_at[:, None] + tail, tl.zeros([P, 8], tl.int16), mask=is_tail)


@triton.jit
def blocks_of(K: tl.tensor, J: tl.tensor, inputs: tl.tensor, P: tl.constexpr) -> Blocks:
    b = tl.program_id(0) * P + tl.arange(0, P)
    inside = b < K * J
    lane = tl.arange(0, 16)[None, :]
    mask = inside[:, None] & (lane < 16)
    return Blocks(b, (b // J).to(tl.int64), (b % J).to(tl.int64), J, inputs, inside, lane, mask)


@triton.jit
def _codes_at(frames: Frames, blocks: Blocks, BLOCK: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    at = frames.codes + blocks.k * frames.codes_stride
    if BITS == 1:
        at += blocks.j * (BLOCK // 64)
    else:
        at = (at + blocks.j * (BLOCK * BITS // 8))[:, None] + tl.arange(0, 2 * BITS)[None, :]
    return at


@triton.jit
def row_at(rows: Rows, blocks: Blocks, BLOCK: tl.constexpr) -> tl.tensor:
    """Addresses of the first 16 elements of each block, [P, 16]."""
    return rows.at + (blocks.k * rows.stride + blocks.j * BLOCK)[:, None] + blocks.lane


@triton.jit
def _rows_of_c(
    source: Source,
    places: tl.tuple,
    out: Outputs,
    blocks: Blocks,
    at: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Rows of c plus the residual. Padding is read, too, and set to +0.0: a mask by element would read one by one."""
    made = source.rows(source.operands, places, out, blocks, at, ROWS, BLOCK)
    rows = ()
    for q in tl.static_range(ROWS):
        c = made[q]
        if out.error_at is not None:
            e = tl.load(out.error_at + at + 16 * q, mask=blocks.mask, other=0)
            c += e if e.dtype == tl.float32 else from_bfloat16(e)
        if out.count is not None:
            c = tl.where(at + 16 * q + blocks.lane < out.count[:, None], c, 0.0)
        rows += (c,)  # type: ignore[assignment]
    return rows


@triton.jit
def rows_in_place(
    nothing: None,
    places: None,
    out: Outputs,
    blocks: Blocks,
    at: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Floats in the memory of the residual. With a separate pointer int8 took 153 registers, not 106 (sm_90)."""
    rows = ()
    for q in tl.static_range(ROWS):
        rows += (tl.load(out.residual_at + at + 16 * q, mask=blocks.mask, other=0.0),)  # type: ignore[assignment]
    return rows
