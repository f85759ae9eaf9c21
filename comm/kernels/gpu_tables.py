"""Kernels for GPUs: the addresses of many tensors, in small tables on the device.

A kernel then reads and writes gradients and parameters in place. Rests on torch alone; `cupy.py` and the Triton kernels
read such tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .operands import Segments

KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""As in csrc/lanes.cu; 0 if there is no tensor."""


class Table:
    """One tensor (or None) per segment of `blocks` blocks.

    owners: int32, the segment of each block, -1 for none. pointers: int64 [2, S], addresses and kinds. layout: int64
    [2, S], as `Segments.table`. Addresses that occurred before are cached on the device: parameters stay in place, and
    gradients are mostly allocated at the same addresses again. The rest is made once per device. Keep the table until
    the launch: it holds the tensors it points to, which may be copies without another owner. After the launch, torch's
    allocator keeps the order.
    """

    def __init__(self, tensors: Sequence[Tensor | None], segments: Segments, blocks: int, device: torch.device) -> None:
        addresses, kinds = tuple(map(address, tensors)), tuple(map(kind, tensors))
        self.tensors = tuple(tensors)
        self.owners = segments.of_blocks(blocks, device)
        self.pointers = _pointers(addresses, kinds, device, current_stream(device))
        self.layout = _layout(segments, device)


@functools.lru_cache(maxsize=4096)
def _pointers(addresses: tuple[int, ...], kinds: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Copied without waiting for the device, from pinned memory, which torch keeps until it has been read.

    stream: the current one. It is part of the cache's key: the copy is ordered on it, and so must be its readers.
    """
    pointers = torch.tensor([addresses, kinds], dtype=torch.int64, device="cpu").view(2, len(addresses))
    return pointers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and addresses else pointers


def current_stream(device: torch.device) -> int:
    """The address of torch's current stream; 0 on the host. Private, as in Triton: torch's public call is slower."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


@functools.lru_cache(maxsize=1024)
def _layout(segments: Segments, device: torch.device) -> Tensor:
    return segments.table.to(device)


def readable(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors that a kernel reads instead: copies of those of another type than `KINDS` or not contiguous."""
    return [None if x is None else (x if x.dtype in KINDS else x.to(torch.float32)).contiguous() for x in tensors]


def write_back(tensors: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> None:
    """Copy back the tensors that `readable` had to copy."""
    for x, copy in zip(tensors, written, strict=True):
        if x is not None and copy is not None and copy is not x:
            x.copy_(copy)


def kind(x: Tensor | None) -> int:
    return KINDS[None if x is None else x.dtype]


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
