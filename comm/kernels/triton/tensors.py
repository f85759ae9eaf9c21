"""Kernels: reading and writing tensors of several types in place, through their addresses, in Triton.

Rests on `lanes.py`; the tables are those of `gpu_tables.py`. Shape legend: in the kernel, P pieces of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..gpu_tables import Table, kind
from .lanes import from_bfloat16, nearest_bfloat16


class Tensors(NamedTuple):
    """A `Table` for the kernel.

    pointers, layout: int64 [2, S]. KINDS: bit k is set if some tensor is of kind k; code for other kinds is not
    compiled. ALIGNED: whether all start at multiples of 16 bytes.
    """

    owners: tl.tensor
    pointers: tl.tensor
    layout: tl.tensor
    KINDS: tl.constexpr
    ALIGNED: tl.constexpr


class Pieces(NamedTuple):
    """P pieces of tensors: the tensor of each [P], its kind, the address of the piece, int64, and the elements left.

    s: -1 if there is no tensor. The others: [P, 1].
    """

    s: tl.tensor
    kind: tl.tensor
    address: tl.tensor
    left: tl.tensor


def tensors_of(table: Table) -> Tensors:
    there = [x for x in table.tensors if x is not None]
    kinds = sum(1 << k for k in {kind(x) for x in there})
    is_aligned = all(x.data_ptr() % 16 == 0 for x in there)
    return Tensors(table.owners, table.pointers, table.layout, tl.constexpr(kinds), tl.constexpr(is_aligned))


@triton.jit
def pieces_of(
    tensors: Tensors,
    block: tl.tensor,
    offset: tl.tensor,
    inside: tl.tensor,
    S: tl.tensor,
    BLOCK: tl.constexpr,
) -> Pieces:
    """The pieces that start at these elements of these blocks, [P]."""
    s = tl.load(tensors.owners + block, mask=inside, other=-1)
    owned = s >= 0
    kind = tl.load(tensors.pointers + S + s, mask=owned, other=0)[:, None]
    start = (block - tl.load(tensors.layout + s, mask=owned, other=0)) * BLOCK + offset
    left = (tl.load(tensors.layout + S + s, mask=owned, other=0) - start)[:, None]
    first = tl.load(tensors.pointers + s, mask=owned, other=0)[:, None]
    return Pieces(s=s, kind=kind, address=first + start[:, None] * tl.where(kind == 1, 4, 2), left=left)


@triton.jit
def load_where_they_lie(
    tensors: Tensors, pieces: Pieces, offset: tl.tensor, element: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Elements offset + `element` of each piece, float32; 0 after the end of the tensor.

    A whole piece of SIZE elements is read 16 bytes at a time if ALIGNED. The last, shorter piece is read element by
    element, because a mask by element allows nothing else.
    """
    kind, left = pieces.kind, pieces.left
    is_whole = (left >= SIZE) & (element >= 0)
    is_rest = (left < SIZE) & (offset + element < left)
    values = tl.zeros(is_whole.shape, tl.float32)
    if tensors.KINDS & 2:
        at = _pointer(pieces, tl.float32, tensors.ALIGNED) + offset + element
        whole = tl.load(at, mask=is_whole & (kind == 1), other=0.0)
        rest = tl.load(at, mask=is_rest & (kind == 1), other=0.0)
        values = tl.where(kind == 1, tl.where(left >= SIZE, whole, rest), values)
    if tensors.KINDS & 4:
        at = _pointer(pieces, tl.int16, tensors.ALIGNED) + offset + element
        whole = tl.load(at, mask=is_whole & (kind == 2), other=0)
        rest = tl.load(at, mask=is_rest & (kind == 2), other=0)
        values = tl.where(kind == 2, from_bfloat16(tl.where(left >= SIZE, whole, rest)), values)
    if tensors.KINDS & 8:
        at = _pointer(pieces, tl.float16, tensors.ALIGNED) + offset + element
        whole = tl.load(at, mask=is_whole & (kind == 3), other=0.0)
        rest = tl.load(at, mask=is_rest & (kind == 3), other=0.0)
        values = tl.where(kind == 3, tl.where(left >= SIZE, whole, rest).to(tl.float32), values)
    return values


@triton.jit
def store_where_they_lie(
    tensors: Tensors, pieces: Pieces, element: tl.tensor, values: tl.tensor, SIZE: tl.constexpr
) -> None:
    """As `load_where_they_lie`."""
    kind, left = pieces.kind, pieces.left
    is_whole = (left >= SIZE) & (element >= 0)
    is_rest = (left < SIZE) & (element < left)
    if tensors.KINDS & 2:
        at = _pointer(pieces, tl.float32, tensors.ALIGNED) + element
        tl.store(at, values, mask=is_whole & (kind == 1))
        tl.store(at, values, mask=is_rest & (kind == 1))
    if tensors.KINDS & 4:
        at = _pointer(pieces, tl.int16, tensors.ALIGNED) + element
        bits = nearest_bfloat16(values)
        tl.store(at, bits, mask=is_whole & (kind == 2))
        tl.store(at, bits, mask=is_rest & (kind == 2))
    if tensors.KINDS & 8:
        at = _pointer(pieces, tl.float16, tensors.ALIGNED) + element
        near = values.to(tl.float16)
        tl.store(at, near, mask=is_whole & (kind == 3))
        tl.store(at, near, mask=is_rest & (kind == 3))


@triton.jit
def _pointer(pieces: Pieces, TYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    pointer = pieces.address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, (16, 16)) if ALIGNED else pointer
