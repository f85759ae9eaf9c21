"""Master weights of the replicated parameters: copied from them once; after that, parameters follow the masters."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...agreement import replicas
from ...layout.buckets import Buckets
from ...usage.marks import is_inspected
from .bucket import ShardedBucket

log = logging.getLogger(__name__)


class TakenMasters:
    """Copies masters from the parameters, and notices later edits of the parameters. Stage 0 has no such masters.

    Args:
        rank: This rank.
        buckets: All buckets of the optimizer.
        are_kept: Whether ranks own masters: at stages 1 and 2.

    Attributes:
        are_taken: Whether masters have been taken.
    """

    def __init__(self, rank: int, buckets: Buckets[ShardedBucket], *, are_kept: bool):
        self._rank, self._buckets, self._are_kept = rank, buckets, are_kept
        self.are_taken = self._is_warned = False
        self._versions: list[int] | None = None
        self._bits: Tensor | None = None

    def take(self) -> None:
        """Masters ← the parameters as they are now."""
        for bucket in self._buckets:
            self.take_of(bucket)
        self.restored()
        self._versions, self._bits = [p._version for p in self._buckets.params], None

    def take_of(self, bucket: ShardedBucket) -> None:
        """Masters of one bucket ← its parameters as they are now."""
        if self._are_kept:
            bucket.owned.copy_(bucket.gather_replica())

    def restored(self) -> None:
        """Note that masters have been set, from a state or from the parameters."""
        self.are_taken = True
        self.forget()

    def forget(self) -> None:
        """Note that parameters have been added or loaded: a change until the next step is not an edit."""
        self._versions = None

    def check(self) -> None:
        """Take masters before the first step; later warn, once, if parameters were changed outside of step()."""
        if not self.are_taken:
            self.take()
        for bucket in self._buckets:  # not empty at stage 0: whole masters of low-precision parameters
            if bucket.masters.has_any:
                bucket.masters.check(self._rank, bucket.names)
                bucket.masters.settle()
        if self._are_kept and not self._is_warned and self.are_left():
            self._is_warned = True
            log.warning(
                "rank %d: parameters were changed outside of step(); the masters were not, and will pull them back; "
                "call adopt_parameters() on all ranks after such a change, unless you have undone it yourself",
                self._rank,
            )

    def are_left(self) -> bool:
        """Whether parameters were changed since the last step, as far as torch's counts or the noted bits tell."""
        params = self._buckets.params
        if self._versions is None:
            return False
        return self._versions != [p._version for p in params] or (
            self._bits is not None and not torch.equal(self._bits, replicas.fingerprints(params))
        )

    def remember(self, step: int) -> None:
        """Note that the parameters match the masters; in some steps (numbered from 0) note their bits too."""
        params, self._bits = self._buckets.params, None
        self._versions = [p._version for p in params]
        if self._are_kept and not self._is_warned and is_inspected(step):
            self._bits = replicas.fingerprints(params)  # finds edits that torch's versions do not count
