"""Where gradients wait for the step: with the parameters, or in a store as soon as they are ready; and their norm."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...arithmetic.squares import LARGEST_GRADIENT
from ...comm import Transport
from ...comm.messages import gather_bytes
from ...model_parallel import local
from ...usage.gradients import refuse_sparse
from ...usage.graphs import outside_graphs
from .layout import UNIT, Chunk, Layout, Piece
from .places import Place, Stores
from .staged import padded
from .store import Lease, Lender, Store
from .streams import Moment

GRAD = "grad"


def row_norms(grad: Tensor) -> Tensor:
    """The norms of each UNIT elements, in order: float32, on the gradient's device.

    Chunks end at multiples of UNIT, so the way a parameter is cut changes no bit of the result.
    """
    flat = grad.reshape(-1)
    whole = flat.numel() // UNIT * UNIT
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, UNIT).float(), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:].float()).view(1)
    return torch.cat([rows, rest]) if flat.numel() > whole else rows


def global_norm(norms: Sequence[float], *, is_clipped: bool) -> float | None:
    """The norm of all gradients; None if one is not finite, or is too large for a variance and not clipped."""
    limit = float("inf") if is_clipped else LARGEST_GRADIENT
    if not all(norm < limit for norm in norms):
        return None
    return math.sqrt(math.fsum(norm * norm for norm in norms))


class ResidentGradients:
    """Gradients stay in `p.grad` until `zero_grad`.

    If they are on a device and the step runs on the host, a chunk's gradients are copied during the step before it.
    """

    def __init__(self, params: Sequence[Tensor], places: Sequence[Place], stores: Stores):
        self.params = params
        self._scratch: dict[torch.device, Tensor] = {}
        self._places = {chunk: place for place in places for chunk in place.layout.chunks}
        self._came: dict[Chunk, _Coming] = {}
        needs = [self._bytes_of(chunk) for chunk, place in self._places.items() if place.streams is not None]
        self._buffers = stores.host_buffers(max(needs)) if needs else None

    def _bytes_of(self, chunk: Chunk) -> int:
        widths = [local(self.params[piece.param]).element_size() for piece in chunk.pieces]
        sizes = [(piece.stop - piece.start) * width for piece, width in zip(chunk.pieces, widths, strict=True)]
        return sum(padded(nbytes) for nbytes in sizes)

    def collect(self) -> None:
        """Nothing to do: gradients are in `p.grad`."""

    def has(self, param: int) -> bool:
        return self.params[param].grad is not None

    def norms(self, chunks: Sequence[Chunk]) -> list[float]:
        rows = [row_norms(local(p.grad)) for p in self.params if p.grad is not None]
        devices = dict.fromkeys(x.device for x in rows)  # one wait of the host for each device
        return [norm for d in devices for norm in torch.cat([x for x in rows if x.device == d]).tolist()]

    def ahead(self, chunk: Chunk) -> None:
        """Begin to copy the gradients of the chunk that `of` will be asked for next."""
        streams = self._places[chunk].streams
        if streams is None or self._buffers is None or chunk in self._came:
            return
        self._buffers.begin()
        moment = computed = streams.mark()
        sources, held = [self._elements(piece) for piece in chunk.pieces], []
        for source in sources:
            held.append(self._buffers.take(source.numel(), source.dtype))
            moment = streams.copy(source, held[-1], [computed])
        self._buffers.used_until(moment)
        self._came[chunk] = _Coming(moment, held, sources)

    def of(self, chunk: Chunk) -> Iterator[Tensor]:
        """Yield each piece's gradient, float32 [stop - start], on the stepping device; valid until the next chunk."""
        place = self._places[chunk]
        self.ahead(chunk)
        coming = self._came.pop(chunk, None)
        if coming is not None:
            coming.moment.wait()
        for k, piece in enumerate(chunk.pieces):
            flat = self._elements(piece) if coming is None else coming.held[k]
            if flat.dtype == torch.float32 and flat.device == place.device:
                yield flat
                continue
            yield self._scratch_of(place)[piece.at : piece.at + flat.numel()].copy_(flat)

    def _elements(self, piece: Piece) -> Tensor:
        """The piece's elements of the gradient, in its dtype and place; empty without a gradient."""
        grad = self.params[piece.param].grad
        if grad is None:
            return torch.empty(0, device=local(self.params[piece.param]).device, dtype=torch.float32)
        return refuse_sparse("offload", local(grad)).reshape(-1)[piece.start : piece.stop]

    def _scratch_of(self, place: Place) -> Tensor:
        if place.device not in self._scratch:
            largest = max(chunk.size for chunk, its in self._places.items() if its.device == place.device)
            self._scratch[place.device] = torch.empty(largest, device=place.device, dtype=torch.float32)
        return self._scratch[place.device]

    def drop(self) -> None:
        """The caller's zero_grad() does it."""

    def close(self) -> None:
        """Nothing was changed."""


class _Coming(NamedTuple):
    """A chunk's gradients on their way to the host. `sources` keeps their memory until the copies are over."""

    moment: Moment
    held: list[Tensor]
    sources: list[Tensor]


class StoredGradients:
    """Each gradient moves to a store as soon as backward has finished it, and `p.grad` is freed.

    Gradients of micro-batches add up in the store, through leases of `lender`, in the dtype `summed` (None: their own,
    as in autograd). The chunk used last stays borrowed, because backward usually goes to a neighbouring parameter next.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layout: Layout,
        store: Store,
        lender: Lender,
        summed: torch.dtype | None = None,
    ):
        self.params, self.layout, self.store, self._lender, self._summed = params, layout, store, lender, summed
        self.dtype = layout.fields[GRAD].dtype
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        self._counts = [0] * len(params)
        self._touched: set[Chunk] = set()
        self._places: dict[int, list[Chunk]] = {}
        for chunk in layout.chunks:
            for piece in chunk.pieces:
                self._places.setdefault(piece.param, []).append(chunk)
        self._current: tuple[Chunk, Lease] | None = None
        self._ahead: dict[Chunk, Lease] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._take, k)) for k, p in enumerate(params)]

    @outside_graphs
    @torch.no_grad()
    def _take(self, param: int, p: Tensor) -> None:
        grad = p.grad
        if grad is None:
            return
        flat = refuse_sparse("offload", local(grad)).reshape(-1)
        for chunk in reversed(self._places[param]):  # as backward goes
            (held,) = self._borrow(chunk).wait()
            into = held.view(self.dtype)
            for piece in chunk.pieces:
                if piece.param == param:
                    place = into[piece.at : piece.at + piece.stop - piece.start]
                    part = flat[piece.start : piece.stop]
                    if self._counts[param]:  # rounded as autograd rounds where it adds to p.grad
                        dtype = self._summed or part.dtype
                        part = part.to(place.device, dtype) + place.to(dtype)
                    place.copy_(part)
        self._counts[param] += 1
        p.grad = None

    def _borrow(self, chunk: Chunk) -> Lease:
        if self._current is not None and self._current[0] is chunk:
            return self._current[1]
        self._give_back()
        lease = self._lender.read(self.layout.extents(chunk), fresh=chunk not in self._touched)
        self._touched.add(chunk)
        self._current = chunk, lease
        return lease

    def _give_back(self) -> None:
        if self._current is not None:
            self._lender.write(self._current[1])
            self._current = None

    def _settle(self) -> None:
        """Wait until the store has all gradients."""
        self._give_back()
        self._lender.settle()

    @torch.no_grad()
    def average(self, transport: Transport) -> float:
        """Replace each gradient by its mean over all ranks, summed in float32; return the seconds waited for ranks.

        All ranks call it before a step, with the same parameters. A parameter with a gradient on any rank then has one
        on all; a missing one counts as zero. While a chunk travels, the next is read and the one before is written.
        Sends about 2·(W-1)/W·4 bytes per element.
        """
        self._settle()
        mine = [self.has(k) for k in range(len(self.params))]
        anywhere = [any(flags) for flags in zip(*gather_bytes(transport, bytes(mine)), strict=True)]
        chunks = [c for c in self.layout.chunks if any(anywhere[piece.param] for piece in c.pieces)]
        waited_s = 0.0
        for k, chunk in enumerate(chunks):
            self.ahead(chunk)
            lease = self._ahead.pop(chunk)
            held = lease.wait()[0].view(self.dtype)
            for piece in chunk.pieces:
                if not mine[piece.param]:
                    held[piece.at : piece.at + piece.stop - piece.start].zero_()
            travels = self._in_float32(held)
            work = transport.all_reduce(travels)
            if k + 1 < len(chunks):
                self.ahead(chunks[k + 1])
            begin = time.perf_counter()
            work.wait()
            waited_s += time.perf_counter() - begin
            travels.div_(transport.world_size)
            if travels is not held:
                held.copy_(travels)
            self.store.write(lease)
        self._touched.update(chunks)
        self._counts = [max(count, is_there) for count, is_there in zip(self._counts, anywhere, strict=True)]
        return waited_s

    def _in_float32(self, held: Tensor) -> Tensor:
        """A chunk's gradients in float32: in place, or a copy in the scratch memory."""
        if held.dtype == torch.float32:
            return held
        if self._scratch.numel() < held.numel():
            self._scratch = torch.empty(max(c.size for c in self.layout.chunks), dtype=torch.float32, device="cpu")
        return self._scratch[: held.numel()].copy_(held)

    def collect(self) -> None:
        """Take gradients that were written to `p.grad` without a backward pass."""
        for k, p in enumerate(self.params):
            self._take(k, p)

    def has(self, param: int) -> bool:
        return self._counts[param] > 0

    def norms(self, chunks: Sequence[Chunk]) -> list[float]:
        self._settle()
        found: list[float] = []
        for k, chunk in enumerate(chunks):
            pieces = self.of(chunk)
            if k + 1 < len(chunks):
                self.ahead(chunks[k + 1])
            found += [norm for grad in pieces if grad.numel() for norm in row_norms(grad).tolist()]
        return found

    def ahead(self, chunk: Chunk) -> None:
        """Begin to fetch the gradients of the chunk that `of` will be asked for next."""
        self._settle()
        if chunk not in self._ahead:
            self._ahead[chunk] = self.store.read(self.layout.extents(chunk))

    def of(self, chunk: Chunk) -> Iterator[Tensor]:
        """Yield each piece's gradient, float32 [stop - start], on the host. Its end frees the buffer."""
        self.ahead(chunk)
        lease = self._ahead.pop(chunk)
        try:
            grads = self._in_float32(lease.wait()[0].view(self.dtype))
            for piece in chunk.pieces:
                numel = piece.stop - piece.start if self.has(piece.param) else 0
                yield grads[piece.at : piece.at + numel]
        finally:
            self.store.drop(lease)

    def drop(self) -> None:
        """Drop all gradients."""
        if self._current is not None:
            self._lender.drop(self._current[1])
            self._current = None
        self._counts = [0] * len(self.params)
        self._touched.clear()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self.drop()
        self._lender.settle()
        for hook in self._hooks:
            hook.remove()
