"""Kernels: decode and update of parameters in one pass, in Triton.

Rule 7 of `reference.py`. Parameters are updated in place. Rests on `decode.py` and `tensors.py`; `backend.py` offers
this function with the others.

Shape legend: K rows, J blocks, B bytes, S segments. In the kernel: U units per program, as in `decode.py`.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import INT4, SIGN, Frame
from ..gpu_tables import Table, readable, write_back
from ..operands import ParamUpdate
from .decode import ELEMENTS, UNITS, units_of, values_at
from .lanes import EDGE, OPTIONS, Frames, frames_of, launching_on
from .tensors import Tensors, load_where_they_lie, pieces_of, store_where_they_lie, tensors_of


def _apply(frame: Frame, frames_KB: Tensor, n: int, update: ParamUpdate, *, block: int) -> None:
    """p ← keep·p + weight·value, parameters in place, with the values of frames of rows of n elements (rule 7).

    One pass over each. A parameter of another type than float32, bfloat16 and float16, or not contiguous, goes through
    a copy.
    """
    K, J = EDGE.check_apply(frame, frames_KB, n, update, block=block)
    if K * J == 0 or all(p is None for p in update.params):
        return
    written, U = readable(update.params), UNITS[frame.name]
    table = Table(written, update.segments, K * J, frames_KB.device)
    units_per_row = J * block // ELEMENTS[frame.name]
    with launching_on(frames_KB.device):
        apply_units[(triton.cdiv(K * units_per_row, U),)](
            frames_of(frame, frames_KB),
            tensors_of(table),
            update.weight_S,
            update.keep_S,
            K,
            units_per_row,
            len(written),
            BLOCK=block,
            U=U,
            BITS=frame.element_bits,
            **OPTIONS,
        )
    write_back(update.params, written)


apply, int4_apply = (functools.partial(_apply, frame) for frame in (SIGN, INT4))


@triton.jit(do_not_specialize=["K", "units_per_row", "S"])
def apply_units(
    frames: Frames,
    tensors: Tensors,
    weight: tl.tensor,
    keep: tl.tensor,
    K: tl.tensor,
    units_per_row: tl.tensor,
    S: tl.tensor,
    BLOCK: tl.constexpr,
    U: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """A program of U units. weight, keep: float32 [S]."""
    UNIT: tl.constexpr = 64 if BITS == 1 else 16
    g = tl.program_id(0) * U + tl.arange(0, U)
    inside = g < K * units_per_row
    k = (g // units_per_row).to(tl.int64)
    units = units_of(frames, k, (g % units_per_row).to(tl.int64), units_per_row, BLOCK, BITS)
    values = values_at(units.codes_at, units.scale_at, inside, BITS, False)

    UNITS_OF_BLOCK: tl.constexpr = BLOCK // UNIT
    pieces = pieces_of(tensors, g // UNITS_OF_BLOCK, g % UNITS_OF_BLOCK * UNIT, inside, S, BLOCK)
    element = tl.arange(0, UNIT)[None, :]
    owned = pieces.s >= 0
    p = load_where_they_lie(tensors, pieces, 0, element, UNIT)
    p = p * tl.load(keep + pieces.s, mask=owned, other=0.0)[:, None]
    p += values * tl.load(weight + pieces.s, mask=owned, other=0.0)[:, None]
    store_where_they_lie(tensors, pieces, element, p, UNIT)
