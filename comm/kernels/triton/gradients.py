"""Kernels: gradients plus the residual carried over, encoded in one pass, in Triton.

Rule 10 of `reference.py`. Gradients are read in place. Here c is computed; `encode.py` makes the frames and the new
residual. `backend.py` offers this function with the others.

Shape legend: K rows, N elements, J blocks, B bytes, S segments. In the kernel: P blocks per program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..arguments import SIGN, check_scale
from ..gpu_tables import Table, readable
from ..operands import EncodeOutput, GradientSum
from .codes import Blocks, Outputs
from .encode import Source, launch_encode
from .lanes import EDGE
from .tensors import Pieces, Tensors, load_where_they_lie, pieces_of, tensors_of


class Gradients(NamedTuple):
    """`GradientSum` for the kernel, without the parts in its `Destination`."""

    grads: Tensors
    add: float
    unscale: float


def encode_gradients(step: GradientSum, *, block: int, scale: str) -> None:
    """frames ← frames of c = add·g + owed, the residual; owed becomes the new residual, or stays (rule 10).

    One pass. A gradient of another type than float32, bfloat16 and float16, or not contiguous, is copied first.
    """
    check_scale(scale)
    K, J = EDGE.check_encode_gradients(SIGN, step, block=block)
    if K * J == 0:
        return
    table = Table(readable(step.grads), step.segments, K * J, step.owed_KN.device)
    source = Source(locate_gradients, gradient_rows, Gradients(tensors_of(table), step.add, step.unscale))
    out = EncodeOutput(step.owed_KN, step.frames_KB, step.counts_KJ, step.owed_KN)
    launch_encode(
        source,
        out,
        K,
        J,
        inputs=len(step.grads),
        frame=SIGN,
        block=block,
        scale=scale,
        is_left=step.returned is not None,
        returned=step.returned,
    )


@triton.jit
def locate_gradients(gradients: Gradients, blocks: Blocks, BLOCK: tl.constexpr) -> Pieces:
    places: Pieces = pieces_of(gradients.grads, blocks.b, 0, blocks.inside, blocks.inputs, BLOCK)
    return places


@triton.jit
def gradient_rows(
    gradients: Gradients,
    places: Pieces,
    out: Outputs,
    blocks: Blocks,
    at: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """(g·unscale)·add of four rows."""
    rows = ()
    for q in tl.static_range(ROWS):
        g = load_where_they_lie(gradients.grads, places, at + 16 * q, blocks.lane, BLOCK)
        rows += (g * gradients.unscale * gradients.add,)  # type: ignore[assignment]
    return rows
