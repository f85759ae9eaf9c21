"""Kernels for GPUs: tensors where they lie, as small tables on the device.

Rests on torch alone; `cupy.py` and the Triton kernels read such tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .operands import Segments

KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""As in csrc/lanes.cu; 0 where there is no tensor."""


class Table:
    """One tensor (or None) per segment of `blocks` blocks.

    owners: int32, the segment of each block, -1 for none. pointers: int64 [2, S], addresses and kinds. layout: int64
    [2, S], as `Segments.table`. Gradients and parameters may lie elsewhere in each step: their addresses are sent
    without waiting for the device, in one copy from pinned memory, which torch keeps until it has been read. The rest
    is made once per device. Keep the table until the launch, and with it what it points to, which may be copies that
    nobody else holds: from then on torch's allocator keeps the order.
    """

    def __init__(self, tensors: Sequence[Tensor | None], segments: Segments, blocks: int, device: torch.device) -> None:
        rows = [[address(x) for x in tensors], [kind(x) for x in tensors]]
        pointers = torch.tensor(rows, dtype=torch.int64, device="cpu").view(2, len(tensors))
        if device.type == "cuda" and tensors:
            pointers = pointers.pin_memory().to(device, non_blocking=True)
        self.tensors = tuple(tensors)
        self.owners = segments.of_blocks(blocks, device)
        self.pointers = pointers
        self.layout = _layout(segments, device)


@functools.lru_cache(maxsize=1024)
def _layout(segments: Segments, device: torch.device) -> Tensor:
    return segments.table.to(device)


def readable(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What a kernel reads in their place: a copy of what is of another type than `KINDS`, or not contiguous."""
    return [None if x is None else (x if x.dtype in KINDS else x.to(torch.float32)).contiguous() for x in tensors]


def write_back(tensors: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> None:
    """Copies what `readable` had to copy."""
    for x, copy in zip(tensors, written, strict=True):
        if x is not None and copy is not None and copy is not x:
            x.copy_(copy)


def kind(x: Tensor | None) -> int:
    return KINDS[None if x is None else x.dtype]


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
