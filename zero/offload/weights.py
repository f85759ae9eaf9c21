"""Where a step finds the parameters' values and puts the new ones: in the parameters, or in a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...layout.masters import NAME as MASTER
from ...model_parallel import local
from .layout import Chunk, Piece
from .places import Place, Stores
from .staged import padded
from .store import Lease
from .stored_params import StoredParams
from .streams import Moment, Streams


class ResidentWeights:
    """Parameters keep their values.

    If they are on a device and the step runs on the host, new values are copied there during the next chunk's step.
    """

    def __init__(self, params: Sequence[Tensor], places: Sequence[Place], stores: Stores):
        self.params = params
        self._versions = [p._version for p in params]
        self._streams = {chunk: place.streams for place in places for chunk in place.layout.chunks}
        needs = [self._bytes_of(chunk) for chunk, streams in self._streams.items() if streams is not None]
        self._buffers = stores.host_buffers(max(needs)) if needs else None
        self._read: dict[Streams, Moment] = {}
        self._written: dict[Streams, Moment] = {}

    def _bytes_of(self, chunk: Chunk) -> int:
        held = [elements(self.params[piece.param], piece) for piece in chunk.pieces]
        return sum(padded(x.numel() * x.element_size()) for x in held)

    def begin(self) -> None:
        """Mark the work queued on the device, which still reads the old values."""
        self._read = {streams: streams.mark() for streams in self._streams.values() if streams is not None}

    def ahead(self, chunk: Chunk) -> None:
        """Nothing to fetch: values are in the parameters."""

    def of(self, chunk: Chunk) -> Mapping[Piece, Tensor]:
        """Each piece's elements, in place; a whole parameter keeps its shape."""
        return {piece: elements(self.params[piece.param], piece) for piece in chunk.pieces}

    def done(self, chunk: Chunk, masters: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the new values of a chunk. masters: pairs of elements from `of` and their new values.

        Parameters without a master were changed in place.
        """
        streams = self._streams[chunk]
        if streams is None or self._buffers is None:
            return round_into(masters)
        self._buffers.begin()
        for weight, master in masters:
            rounded = self._buffers.take(weight.numel(), weight.dtype).view(weight.shape).copy_(master)
            self._written[streams] = streams.copy(rounded, weight, [self._read[streams]])
            self._buffers.used_until(self._written[streams])

    def end(self, stepped: Sequence[int]) -> None:
        """End a step that has changed these parameters."""
        for moment in self._written.values():
            moment.hold()
        for k in stepped:
            self._versions[k] = self.params[k]._version

    def is_changed(self, param: int) -> bool:
        """Whether other code has written into the parameter since its last step."""
        return self.params[param]._version != self._versions[param]

    def values(self, param: int) -> Tensor:
        """The values of a whole parameter, between steps."""
        return self.params[param].detach()

    def close(self, *, bring_back: bool) -> None:
        """They are there."""


class StoredWeights:
    """Parameters are in a store, and a step changes them there.

    `has` tells whether a parameter has a gradient. `is_master` tells whether the step works on the values themselves,
    which must be read then; if it works on masters, values are only written.
    """

    def __init__(self, params: StoredParams, has: Callable[[int], bool], is_master: Sequence[bool]):
        self.params, self._has, self._is_master = params, has, is_master
        self._ahead: dict[Chunk, tuple[list[Piece], Lease]] = {}
        self._now: Lease | None = None

    def begin(self) -> None:
        self.params.sync()

    def ahead(self, chunk: Chunk) -> None:
        """Begin to fetch what `of` will be asked for next."""
        if chunk not in self._ahead:
            pieces = [piece for piece in chunk.pieces if self._has(piece.param)]
            fresh = not any(self._is_master[piece.param] or self.is_changed(piece.param) for piece in pieces)
            self._ahead[chunk] = pieces, self.params.store.read(self.params.extents(pieces), fresh=fresh)

    def of(self, chunk: Chunk) -> Mapping[Piece, Tensor]:
        """As `ResidentWeights.of`, for parameters with a gradient; valid until `done`."""
        self.ahead(chunk)
        pieces, self._now = self._ahead.pop(chunk)
        return {piece: self._shaped(piece, held) for piece, held in zip(pieces, self._now.wait(), strict=True)}

    def _shaped(self, piece: Piece, held: Tensor) -> Tensor:
        p = self.params.all[piece.param].param
        numel = piece.stop - piece.start
        flat = held[: numel * p.element_size()].view(p.dtype)
        return torch.as_strided(flat, p.shape, p.stride()) if numel == p.numel() else flat

    def done(self, chunk: Chunk, masters: Sequence[tuple[Tensor, Tensor]]) -> None:
        round_into(masters)
        assert self._now is not None
        self.params.store.write(self._now)
        self._now = None

    def end(self, stepped: Sequence[int]) -> None:
        self.params.stepped(stepped)

    def is_changed(self, param: int) -> bool:
        return self.params.all[param].was_written

    def values(self, param: int) -> Tensor:
        self.params.sync()
        return self.params.shown(self.params.all[param])

    def close(self, *, bring_back: bool) -> None:
        """Bring the parameters back for good, or make them unusable."""
        self.params.close(bring_back=bring_back)


def round_into(masters: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Round masters into elements: pairs of elements and new values."""
    for weight, master in masters:
        weight.copy_(master)


def elements(p: Tensor, piece: Piece) -> Tensor:
    """A piece's elements where they lie; a whole parameter keeps its shape."""
    held = local(p.detach())
    return held if piece.stop - piece.start == held.numel() else held.view(-1)[piece.start : piece.stop]


@torch.no_grad()
def take_masters(params: Sequence[Tensor], places: Sequence[Place]) -> None:
    """Copy the parameters' values into their masters, if they have any."""
    for place in (place for place in places if MASTER in place.layout.fields):
        for chunk in place.layout.chunks:
            lease = place.store.read(place.layout.extents(chunk, [MASTER]), fresh=True)
            master = lease.wait()[0].view(torch.float32)
            for piece in chunk.pieces:
                held = local(params[piece.param]).reshape(-1)[piece.start : piece.stop]
                master[piece.at : piece.at + held.numel()].copy_(held)
            place.store.write(lease)
