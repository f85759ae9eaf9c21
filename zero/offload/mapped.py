"""One-bit state in files: what an optimizer's buckets keep lies in mapped files, which the kernel pages in and out.

A step of one bit holds the next errors of all buckets until all ranks agree: no chunk of it is over before the others,
so `FileStore`, which steps chunk by chunk, is not for it. Mapped tensors are ordinary ones: not a bit changes.
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
    """Moments, denominators and errors of all buckets, in host memory until now, lie in files of `folder` from here on.

    Those that come with another phase or a checkpoint, too. A file has one tensor, no name, and goes with the tensor.
    Raises StoreError where the folder cannot be written or has not the room: here, and where a phase begins. A disk
    that fails later, below mapped pages, ends the process by SIGBUS; Python's fault handler says where, on stderr.
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
    """A bus error prints every thread's stack before it ends the process."""
    if not faulthandler.is_enabled():
        with suppress(AttributeError, OSError, ValueError):  # no stderr, or one that is no file
            faulthandler.enable()


def _map(bucket: Bucket, folder: Path, rank: int) -> None:
    """What is not mapped. Between steps: buffers hold nothing then, and are made anew where they were in an error."""
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
