"""Replica: this rank's parameters in buckets, their float32 masters, and the anchors, on which all ranks agree.

Between rounds replicas differ and anchors do not. A bucket is in `fragment.py`, masters are in `layout/masters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ..agreement import replicas
from ..comm import ErrorFeedback, Hierarchy, Transport
from ..layout.buckets import Buckets
from ..layout.flat import lay_out
from ..layout.masters import Masters
from ..model_parallel import ModelParallelGroup, local
from ..usage.contract import Group
from .fragment import LocalBucket
from .options import LocalOptions
from .wrapped import Wrapped


class Replica:
    """The parameters of an optimizer, as its steps and rounds see them. Owns the buckets: `Buckets` calls it."""

    def __init__(self, optimizer: Wrapped, options: LocalOptions, transport: Transport, parts: ModelParallelGroup):
        self._optimizer, self._options, self._transport = optimizer, options, transport
        self.hierarchy = Hierarchy.of(transport)
        self.buckets: Buckets[LocalBucket] = Buckets(self, transport, parts, options.bucket_elements, hooks=False)

    # ---------------------------------------------------------------- the interface that `Buckets` calls

    @property
    def param_groups(self) -> list[Group]:
        """The optimizer's."""
        return self._optimizer.param_groups

    def option_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as text."""
        return self._options.lines(self._optimizer.inner)

    def begin_group(self, g: int) -> None:
        """Does nothing: a group has no state before its buckets."""

    def new_bucket(self, g: int, members: Sequence[tuple[Tensor, str]], device: torch.device) -> LocalBucket:
        """A bucket of these parameters of group g; their current values are its anchor."""
        params = [p for p, _ in members]
        layout = lay_out([local(p).shape for p in params], self._options.codec.block, self._transport.world_size)
        worker, server = (
            torch.zeros(n, dtype=self._options.error_dtype, device=device)
            for n in (layout.numel // self.hierarchy.local_size, layout.chunk)
        )
        anchor = torch.zeros(layout.numel, device=device, dtype=torch.float32)
        bucket = LocalBucket(
            index=len(self.buckets),
            first=len(self.buckets.params),
            rank=self._transport.rank,
            hierarchy=self.hierarchy,
            group_index=g,
            group=self.param_groups[g],
            device=device,
            params=params,
            names=[name for _, name in members],
            masters=Masters(params),
            layout=layout,
            counts=layout.counts(device),
            anchor=anchor,
            ef=ErrorFeedback(worker, server, worker.new_empty(0), torch.zeros_like(server)),
            velocity=torch.zeros_like(anchor) if self._options.outer.momentum > 0.0 else None,
            correction=torch.zeros_like(anchor) if self._options.correction_steps > 0 else None,
            may_retry=self._transport.ranks_change,
        )
        bucket.anchor.copy_(bucket.flatten())
        return bucket

    def publish(self, bucket: LocalBucket) -> None:
        """Does nothing: optimizer.state is the inner optimizer's, and does not show ours."""

    def gradient_is_ready(self, p: Tensor) -> None:
        """Does nothing: there are no hooks to call it."""

    # ---------------------------------------------------------------- masters

    def settle(self) -> None:
        """Copy values that other code wrote into parameters to masters. RuntimeError if a parameter's dtype changed."""
        for bucket in self.buckets:
            bucket.masters.check(self._transport.rank, bucket.names)
            bucket.masters.settle()

    def show(self) -> None:
        """Parameters follow their masters."""
        for bucket in self.buckets:
            bucket.masters.write_back()

    @contextmanager
    def on_masters(self) -> Iterator[None]:
        """In this block parameters are their masters, for an optimizer without masters."""
        with ExitStack() as stack:
            for bucket in self.buckets:
                stack.enter_context(bucket.masters.standing_in())
            yield

    # ---------------------------------------------------------------- anchors

    def check_parameters(self) -> None:
        """Compare the parameters' bits. All ranks; raises ReplicaError on all if they differ."""
        self.settle()
        values = [pair for bucket in self.buckets for pair in zip(bucket.names, bucket.local_values, strict=True)]
        if ranks := replicas.differing(self._transport, [value for _, value in values]):
            name = values[min(min(indices) for indices in ranks.values())][0]
            raise replicas.ReplicaError(
                f"rank {self._transport.rank}: parameters that become the anchors must be the same on all ranks, and "
                f"rank {sorted(ranks)} holds another {name} than rank 0: call sync() first, or write the same to all"
            )

    def adopt_parameters(self) -> None:
        """Make the current parameters the anchors, and reset all residuals."""
        self.settle()
        for bucket in self.buckets:
            bucket.anchor.copy_(bucket.flatten())
            bucket.ef.worker.zero_()
            bucket.ef.server.zero_()
            for kept in (bucket.velocity, bucket.correction):
                if kept is not None:
                    kept.zero_()

    @contextmanager
    def at_anchors(self) -> Iterator[None]:
        """In this block the parameters are the anchors."""
        with torch.no_grad():
            self.settle()
            kept = [[w.clone() for w in bucket.local_values] for bucket in self.buckets]
            for bucket in self.buckets:
                bucket.return_to_anchor()
            self.show()
        try:
            yield
        finally:
            with torch.no_grad():
                for bucket, weights in zip(self.buckets, kept, strict=True):
                    torch._foreach_copy_(bucket.local_values, weights)
                self.show()

    def check_anchors(self, step: int) -> None:
        """Compare the anchors' bits. All ranks; raises ReplicaError on all if they differ."""
        anchors = [bucket.anchor for bucket in self.buckets]
        names = [f"the anchor of {bucket.names[0]} and its bucket" for bucket in self.buckets]
        replicas.check_replicas(self._transport, anchors, names, step)
