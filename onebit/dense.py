"""The dense baseline: plain data parallelism, every gradient averaged in float32 over the transport's own all-reduce.

With `torch.optim.AdamW` it is the baseline of the one-bit optimizers, on the same transport and the same network.
`DenseAverager` sends during the backward pass, in buckets, as DistributedDataParallel does; `average_gradients` does
the same without hooks, after the backward pass. `scripts/train.py` shows it in use.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .comm.transports.base import Channel, Transport, Work, check_transport
from .model_parallel import detach_version_, local
from .usage.gradients import check_place, gradient_of, refuse_sparse
from .usage.graphs import outside_graphs
from .usage.marks import GradientMark, gradient_bits, is_inspected, marks_of

log = logging.getLogger(__name__)

_FIRST_BUCKET_MB = 1.0  # as in DDP: the wire has work soon after the backward pass begins
_CAP_MB = 25.0


@dataclass
class Bucket:
    """Some parameters, and the float32 buffer in which their gradients travel."""

    params: list[Tensor]
    flat: Tensor
    views: Sequence[Tensor]
    work: Work | None = None
    complete: int = 0
    sent: list[GradientMark] = field(default_factory=list)
    sent_bits: Tensor | None = None
    early: int = 0  # how often it has left during backward
    absent: Sequence[bool] = ()  # which gradients no rank has in this step

    def launch(
        self, transport: Transport, channel: Channel = nullcontext, *, in_backward: bool = False, scale: float = 1.0
    ) -> None:
        """Send the gradients, times scale; a missing one counts as zero.

        in_backward: at times, their bits are noted, too.
        """
        self._fill(transport)
        if scale != 1.0:
            self.flat.mul_(scale)
        self.sent = marks_of(self.params)
        looks = in_backward and transport.world_size > 1 and is_inspected(self.early)
        self.sent_bits = gradient_bits(self._gradients()) if looks else None
        self.early += in_backward
        with channel():
            self.work = self._send(transport)

    def _fill(self, transport: Transport) -> None:
        """Copy the gradients to where they are sent from."""
        for parameter, view in zip(self.params, self.views, strict=True):
            grad = gradient_of(parameter)
            if grad is None:
                view.zero_()
            else:
                shape = view.shape[:-1] if parameter.is_complex() else view.shape
                check_place(transport.rank, parameter, "a parameter", shape, view.device)
                view.copy_(real(local(refuse_sparse(f"the mean over {transport.world_size} ranks", grad))))

    def _send(self, transport: Transport) -> Work:
        return transport.all_reduce(self.flat)

    def present(self) -> list[bool]:
        """Which gradients this rank has."""
        return [gradient_of(p) is not None for p in self.params]

    def is_stale(self) -> bool:
        """Whether a gradient has changed since it was sent."""
        return any(not mark.is_still(p) for p, mark in zip(self.params, self.sent, strict=True))

    def _gradients(self) -> list[Tensor | None]:
        grads = map(gradient_of, self.params)
        return [None if grad is None else local(grad) for grad in grads]

    def is_edited_unseen(self) -> bool:
        """Whether gradients have other bits than those sent, although torch has counted no edit."""
        if self.sent_bits is None or self.is_stale():
            return False
        return not torch.equal(self.sent_bits, gradient_bits(self._gradients()))

    def progress(self, world_size: int) -> None:
        """Called now and then while it is under way."""
        assert self.work is not None
        self.work.is_ready()  # asking also starts the second phase of a sum that is ready for it

    def recall(self, world_size: int) -> float:
        """Let what was sent arrive, before it is sent again; return the milliseconds spent waiting."""
        return _wait(self.work)

    def finish(self, world_size: int) -> float:
        """Wait, and write the means into the gradients that any rank has; return the milliseconds of waiting."""
        waited_ms = _wait(self.work)
        self.flat.div_(world_size)
        absent = self.absent or [False] * len(self.params)
        for parameter, view, is_absent in zip(self.params, self.views, absent, strict=True):
            if is_absent:
                parameter.grad = None  # if it was frozen since: torch's optimizers would step with this rank's own
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            real(local(parameter.grad)).copy_(view)
        self.work, self.complete = None, 0
        return waited_ms


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], transport: Transport, bucket_cap_mb: float | None = None) -> float:
    """Replace each gradient by its mean over all ranks.

    Gradients travel in flat float32 buckets (the first of 1 MiB, a larger parameter by itself), last parameter first,
    all under way at once: buckets are filled and emptied while others are on the wire. A missing gradient counts as
    zero and is created. All ranks, after the backward pass. Sends about 2·(W-1)/W·4 bytes per element and rank.

    Args:
        parameters: The same on all ranks, in the same order. Frozen ones are skipped.
        transport: Connection to the other ranks.
        bucket_cap_mb: Largest bucket, in MiB. Default None: 25.

    Returns:
        Milliseconds that this rank waited for the network.
    """
    check_transport(transport)
    buckets = [new_bucket(group) for group in in_buckets((p for p in parameters if p.requires_grad), bucket_cap_mb)]
    for bucket in buckets:
        bucket.launch(transport)
    return sum(bucket.finish(transport.world_size) for bucket in buckets)


@torch.no_grad()
def broadcast_parameters(parameters: Iterable[Tensor], transport: Transport, src: int = 0) -> None:
    """Copy the values of rank `src` to every rank. All ranks, same parameters in the same order."""
    check_transport(transport)
    held = [local(parameter).detach() for parameter in parameters]
    pairs = [(tensor, tensor.contiguous()) for tensor in held if tensor.numel() > 0]
    for work in [transport.broadcast(whole, src) for _, whole in pairs]:
        work.wait()
    for tensor, whole in pairs:
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


class DenseAverager:
    """Averages gradients over ranks during the backward pass; the gradients are the means once `finish` returns.

    1. Each parameter's gradient hook counts; a bucket is sent once all its gradients exist, in bucket order.
    2. `finish` sends the remaining buckets (parameters that took no part), and a flag for each bucket: whether its
       gradients have changed here since it was sent, by another backward pass, by zero_grad(), by an edit in place. All
       ranks send such a bucket again. Edits of `grad.data`, which torch does not count, are looked for in some steps;
       once found, this rank sends only in `finish`.
    3. It waits, and writes the means into the gradients. A gradient that no rank has stays None, so that no optimizer
       decays what nothing uses.

    Parameters that are frozen at construction join with their first gradient on any rank; those frozen later have none,
    even if backward has made one. Buckets and bytes as in `average_gradients`, and 4 bytes for each bucket and
    parameter. A bucket that is sent twice costs twice: if there are several backward passes before one finish(), run
    all but the last in `no_sync`. All ranks, same parameters in the same order, the same number of calls of finish();
    backward passes may differ.

    Args:
        parameters: Parameters to average.
        transport: Connection to the other ranks.
        bucket_cap_mb: Largest bucket, in MiB. Default None: 25.

    Raises:
        RuntimeError: A parameter was moved or resized.
    """

    def __init__(self, parameters: Iterable[Tensor], transport: Transport, bucket_cap_mb: float | None = None):
        check_transport(transport)
        self._transport, self._bucket_cap_mb = transport, bucket_cap_mb
        self._channel = transport.new_channel()  # ranks launch buckets in backward or in finish()
        given = list(parameters)
        self._frozen = [p for p in given if not p.requires_grad and local(p).numel() > 0]
        self._buckets: list[Bucket] = []
        self._launched = 0
        self._is_paused = self._sends_late = False
        self._add([p for p in given if p.requires_grad])

    def _make_buckets(self, params: Sequence[Tensor], bucket_cap_mb: float | None) -> Sequence[Bucket]:
        return [new_bucket(group) for group in in_buckets(params, bucket_cap_mb)]

    def _add(self, params: Sequence[Tensor]) -> None:
        for bucket in self._make_buckets(params, self._bucket_cap_mb):
            self._buckets.append(bucket)
            for parameter in bucket.params:
                if parameter.requires_grad:
                    self._hook(parameter, bucket)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block only accumulate; the first one outside sends the sums. As in DDP."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    @torch.no_grad()
    def finish(self) -> float:
        """Complete the averages; return the milliseconds spent waiting for the network."""
        edited = [bucket.is_edited_unseen() for bucket in self._buckets[: self._launched]]
        if any(edited):
            self._sends_late = True
            log.warning(
                "rank %d: gradients were edited after backward had sent them, in a way that torch does not count "
                "(.data, or clip_grad_norm_() on sharded ones) and only some steps look for: from here on they are "
                "sent after the backward pass. Edit the gradients themselves (p.grad.clamp_()); in an engine, set "
                '"gradient_clipping"',
                self._transport.rank,
            )
        edited += [False] * (len(self._buckets) - self._launched)
        self._launch_rest()
        self._launched = 0
        waited_ms = self._send_stale_again(edited)
        return waited_ms + sum(bucket.finish(self._transport.world_size) for bucket in self._buckets)

    @torch.no_grad()
    def _launch_rest(self) -> None:
        """Send the buckets that have not left."""
        for bucket in self._buckets[self._launched :]:
            bucket.launch(self._transport, self._channel)
        self._launched = len(self._buckets)

    def _send_stale_again(self, edited: Sequence[bool]) -> float:
        everything = [p for bucket in self._buckets for p in bucket.params[:1]] + self._frozen
        if not everything:
            return 0.0
        flags = [float(bucket.is_stale() or is_edited) for bucket, is_edited in zip(self._buckets, edited, strict=True)]
        flags += [float(gradient_of(p) is not None) for p in self._frozen]
        flags += [float(is_there) for bucket in self._buckets for is_there in bucket.present()]
        stale = torch.tensor(flags, device=everything[0].device, dtype=torch.float32)
        waited_ms = _wait(self._transport.all_reduce(stale))
        ranks_by_flag = stale.tolist()
        known = len(self._buckets)
        for bucket, ranks in zip(self._buckets, ranks_by_flag[:known], strict=True):
            if ranks > 0:
                waited_ms += bucket.recall(self._transport.world_size)
                bucket.launch(self._transport, self._channel)
        frozen_to = known + len(self._frozen)
        holders = iter(ranks_by_flag[frozen_to:])
        for bucket in self._buckets:
            bucket.absent = [next(holders) == 0 for _ in bucket.params]
        unfrozen = [p for p, ranks in zip(self._frozen, ranks_by_flag[known:frozen_to], strict=True) if ranks > 0]
        if unfrozen:
            taken = set(unfrozen)
            self._frozen = [p for p in self._frozen if p not in taken]
            self._add(unfrozen)
            for bucket in self._buckets[known:]:
                bucket.launch(self._transport, self._channel)
        return waited_ms

    def _hook(self, parameter: Tensor, bucket: Bucket) -> None:
        myself = weakref.ref(self)

        @outside_graphs
        def gradient_is_ready(p: Tensor) -> None:
            detach_version_(p.grad)
            averager = myself()
            if averager is not None and not averager._is_paused:
                bucket.complete += 1
                averager._launch_complete()

        parameter.register_post_accumulate_grad_hook(gradient_is_ready)

    @torch.no_grad()
    def _launch_complete(self) -> None:
        for bucket in self._buckets[: self._launched]:
            bucket.progress(self._transport.world_size)
        for bucket in self._buckets[self._launched :]:
            if bucket.complete < len(bucket.params) or self._sends_late:
                return
            bucket.launch(self._transport, self._channel, in_backward=True)
            self._launched += 1


def _wait(work: Work | None) -> float:
    assert work is not None
    began = time.perf_counter()
    work.wait()
    return 1e3 * (time.perf_counter() - began)


def in_buckets(
    parameters: Iterable[Tensor], bucket_cap_mb: float | None, kind: Callable[[Tensor], object] = lambda p: p.device
) -> list[list[Tensor]]:
    """The parameters with elements, last first, in buckets of one kind each that do not exceed the cap (None: 25)."""
    bucket_cap_mb = _CAP_MB if bucket_cap_mb is None else bucket_cap_mb
    trainable = [p for p in parameters if local(p).numel() > 0]
    groups: list[list[Tensor]] = []
    room = 0
    for parameter in reversed(trainable):
        size = 4 * local(parameter).numel()
        if size > room or kind(parameter) != kind(groups[-1][0]):
            cap_mb = bucket_cap_mb if groups else min(bucket_cap_mb, _FIRST_BUCKET_MB)
            groups.append([])
            room = int(cap_mb * 2**20)
        groups[-1].append(parameter)
        room -= size
    return groups


def new_bucket(params: list[Tensor]) -> Bucket:
    """A bucket of these parameters, with its buffer."""
    held = [real(local(p)) for p in params]
    flat = torch.empty(sum(p.numel() for p in held), device=params[0].device, dtype=torch.float32)
    pieces = flat.split([p.numel() for p in held])
    return Bucket(params, flat, [piece.view(p.shape) for piece, p in zip(pieces, held, strict=True)])


def real(x: Tensor) -> Tensor:
    """The tensor, or the real and imaginary parts of a complex one, as a last dim of 2."""
    return torch.view_as_real(x) if x.is_complex() else x
