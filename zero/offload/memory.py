"""A store in memory: of the host, page-locked where the parameters are on a GPU, or of the device itself.

Nothing is copied: a lease's tensors are the store's own bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .store import Extent, Lease


class MemoryStore:
    """nbytes of memory of a device; is_pinned: page-locked, for copies that overlap with computing. See `Store`."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu", *, is_pinned: bool = False):
        self.nbytes, self.device = nbytes, torch.device(device)
        self.wait_s, self.read_bytes, self.written_bytes = 0.0, 0, 0
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.is_pinned = is_pinned and nbytes > 0
        if self.is_pinned:
            lock(self._bytes)

    def read(self, extents: Sequence[Extent], *, fresh: bool = False) -> Lease:
        parts = [self._bytes.narrow(0, extent.offset, extent.nbytes) for extent in extents]
        return Lease(extents, lambda: parts)

    def write(self, lease: Lease) -> None:
        pass

    def drop(self, lease: Lease) -> None:
        pass

    def flush(self) -> None:
        pass

    def view(self, offset: int, nbytes: int) -> Tensor:
        return self._bytes.narrow(0, offset, nbytes)

    def close(self) -> None:
        if self.is_pinned:
            unlock(self._bytes)
        self._bytes, self.is_pinned = torch.empty(0, dtype=torch.uint8), False

    def describe(self) -> str:
        where = f"{self.device.type} memory" if self.device.type != "cpu" else "host memory"
        return f"{self.nbytes / 1e9:.3g} GB of {'page-locked ' if self.is_pinned else ''}{where}"


def lock(memory: Tensor) -> None:
    """Page-lock memory where it lies. torch's pin_memory() would round the size up to a power of two.

    Raises MemoryError where the driver refuses.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code != 0:
        raise MemoryError(
            f"CUDA could not page-lock {memory.numel()} bytes of host memory (error {code}); "
            "raise `ulimit -l`, or pass pin_memory=False"
        )


def unlock(memory: Tensor) -> None:
    """Undo `lock`, once no copy of it is under way."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
