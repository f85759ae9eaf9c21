"""One-bit state in files: the state of an optimizer's buckets is in mapped files, which the kernel pages in and out.

A one-bit step keeps the next errors of all buckets until all ranks agree, so no chunk can end before the others and
`FileStore`, which works chunk by chunk, cannot be used. Mapped tensors are ordinary tensors: results do not change.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ...layout.bucket import Bucket
from ...optimizer import CompressedOptimizer
from .files import make_file
from .store import rounded

log = logging.getLogger(__name__)


def map_state(optimizer: CompressedOptimizer, folder: str | os.PathLike[str], rank: int) -> None:
    """Move the moments, denominators and errors of all buckets from host memory into files of `folder`.

    State that a later phase or a checkpoint adds goes there too. Each tensor has a file without a name, which
    disappears with it. If a disk fails later below mapped pages, SIGBUS ends the process, and Python's fault handler
    prints the stacks to stderr.

    Raises:
        StoreError: The folder is not writable or has no room: here, and when a phase begins.
    """
    _name_faults()
    if rank == 0:
        log.info("one-bit state is in mapped files of %s; a bus error means that its disk has failed", folder)
    publish = optimizer.publish

    def publish_mapped(bucket: Bucket) -> None:
        _map(bucket, Path(folder), rank)
        publish(bucket)

    optimizer.publish = publish_mapped  # type: ignore[method-assign]
    for bucket in optimizer.buckets:
        optimizer.publish(bucket)


def _name_faults() -> None:
    """Let a bus error print every thread's stack before it ends the process."""
    if not faulthandler.is_enabled():
        with suppress(AttributeError, OSError, ValueError):  # there is no stderr, or it is no file
            faulthandler.enable()


def _map(bucket: Bucket, folder: Path, rank: int) -> None:
    """Map what is not mapped yet. Only between steps, when buffers are empty; wires into the old errors are remade."""
    bucket.flat = {name: _mapped(x, folder, rank) for name, x in bucket.flat.items()}
    if bucket.ef is not None:
        ef = bucket.ef
        ef.worker, ef.worker_next = _mapped(ef.worker, folder, rank), _mapped(ef.worker_next, folder, rank)
        ef.server, ef.server_next = _mapped(ef.server, folder, rank), _mapped(ef.server_next, folder, rank)
    bucket.wires.clear()
    bucket.release_buffer()


def _mapped(x: Tensor, folder: Path, rank: int) -> Tensor:
    if x.nbytes == 0 or not x.untyped_storage().resizable():  # mapped already: memory that is not torch's
        return x
    fd, _ = make_file(folder, rounded(x.nbytes), rank)
    try:
        pages = mmap.mmap(fd, rounded(x.nbytes))
    finally:
        os.close(fd)
    return torch.frombuffer(pages, dtype=x.dtype, count=x.numel()).view(x.shape).copy_(x)
