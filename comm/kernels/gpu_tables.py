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
    [2, S], as `Segments.table`. Addresses that were there before are on the device already: parameters stay, and
    gradients mostly come back to where they were. The rest is made once per device. Keep the table until the launch,
    and with it what it points to, which may be copies that nobody else holds: from then on torch's allocator keeps the
    order.
    """

    def __init__(self, tensors: Sequence[Tensor | None], segments: Segments, blocks: int, device: torch.device) -> None:
        addresses, kinds = tuple(map(address, tensors)), tuple(map(kind, tensors))
        self.tensors = tuple(tensors)
        self.owners = segments.of_blocks(blocks, device)
        self.pointers = _pointers(addresses, kinds, device, current_stream(device))
        self.layout = _layout(segments, device)


@functools.lru_cache(maxsize=4096)
def _pointers(addresses: tuple[int, ...], kinds: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Sent without waiting for the device, in one copy from pinned memory, which torch keeps until it has been read.

    stream: the current one, on which it is sent, and read by whoever gets this tensor.
    """
    pointers = torch.tensor([addresses, kinds], dtype=torch.int64, device="cpu").view(2, len(addresses))
    return pointers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and addresses else pointers


def current_stream(device: torch.device) -> int:
    """The address of torch's current stream, asked for as Triton does; torch's public way is slower. 0 on the host."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


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
