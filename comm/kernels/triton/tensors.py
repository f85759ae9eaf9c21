"""Kernels: how those in Triton read and write tensors where they lie, of several types, through their addresses.

Rests on `lanes.py`; the tables are those of `gpu_tables.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..gpu_tables import kind
from .lanes import from_bfloat16, nearest_bfloat16


def kinds_of(tensors: Sequence[Tensor | None]) -> int:
    """KINDS of the functions below. Bit k: some tensor is of kind k; what is not there costs the kernel nothing."""
    return sum(1 << k for k in {kind(x) for x in tensors if x is not None})


def are_aligned(tensors: Sequence[Tensor | None]) -> bool:
    """ALIGNED of the functions below."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


@triton.jit
def load_where_they_lie(
    address: tl.tensor,
    kind: tl.tensor,
    left: tl.tensor,
    offset: tl.tensor,
    element: tl.tensor,
    SIZE: tl.constexpr,
    KINDS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """`element` of each of several tensors, float32; 0 from element `left` on.

    address: of the first element [P, 1], int64; left: [P, 1]. What is there as a whole, SIZE elements, is read 16 bytes
    at a time where ALIGNED; a rest one by one, for a mask by element allows nothing else.
    """
    is_whole = (left >= SIZE) & (element >= 0)
    is_rest = (left < SIZE) & (offset + element < left)
    values = tl.zeros(is_whole.shape, tl.float32)
    if KINDS & 2:
        at = _pointer(address, tl.float32, ALIGNED) + offset + element
        whole = tl.load(at, mask=is_whole & (kind == 1), other=0.0)
        rest = tl.load(at, mask=is_rest & (kind == 1), other=0.0)
        values = tl.where(kind == 1, tl.where(left >= SIZE, whole, rest), values)
    if KINDS & 4:
        at = _pointer(address, tl.int16, ALIGNED) + offset + element
        whole = tl.load(at, mask=is_whole & (kind == 2), other=0)
        rest = tl.load(at, mask=is_rest & (kind == 2), other=0)
        values = tl.where(kind == 2, from_bfloat16(tl.where(left >= SIZE, whole, rest)), values)
    if KINDS & 8:
        at = _pointer(address, tl.float16, ALIGNED) + offset + element
        whole = tl.load(at, mask=is_whole & (kind == 3), other=0.0)
        rest = tl.load(at, mask=is_rest & (kind == 3), other=0.0)
        values = tl.where(kind == 3, tl.where(left >= SIZE, whole, rest).to(tl.float32), values)
    return values


@triton.jit
def _pointer(address: tl.tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, (16, 16)) if ALIGNED else pointer


@triton.jit
def store_where_they_lie(
    address: tl.tensor,
    kind: tl.tensor,
    left: tl.tensor,
    element: tl.tensor,
    values: tl.tensor,
    SIZE: tl.constexpr,
    KINDS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """As `load_where_they_lie`."""
    is_whole = (left >= SIZE) & (element >= 0)
    is_rest = (left < SIZE) & (element < left)
    if KINDS & 2:
        at = _pointer(address, tl.float32, ALIGNED) + element
        tl.store(at, values, mask=is_whole & (kind == 1))
        tl.store(at, values, mask=is_rest & (kind == 1))
    if KINDS & 4:
        at = _pointer(address, tl.int16, ALIGNED) + element
        bits = nearest_bfloat16(values)
        tl.store(at, bits, mask=is_whole & (kind == 2))
        tl.store(at, bits, mask=is_rest & (kind == 2))
    if KINDS & 8:
        at = _pointer(address, tl.float16, ALIGNED) + element
        near = values.to(tl.float16)
        tl.store(at, near, mask=is_whole & (kind == 3))
        tl.store(at, near, mask=is_rest & (kind == 3))
