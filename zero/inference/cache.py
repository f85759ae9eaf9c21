"""Keys and values of the tokens so far, at fixed addresses, as a compiled step and a CUDA graph need them.

Shape legend: B rows, H heads, T new tokens, S slots, d features of a head, E positions of an encoder's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Source:
    """What the rows of a cache attend to besides their own tokens.

    Attributes:
        outputs: The encoder's outputs, as transformers returns them.
        mask_BE: int64, 0 for padding of the inputs; None if there is none.
        cross: transformers' cache of the keys and values of the outputs, which the first pass fills.
    """

    outputs: Any
    mask_BE: Tensor | None
    cross: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the encoder's outputs and of their keys and values."""
        kept = [x for layer in self.cross.layers for x in (layer.keys, layer.values) if x is not None]
        return int(sum(x.nbytes for x in (self.outputs[0], *kept)))


class StaticCache:
    """The cache of all layers, with `slots` tokens per row. The first `update` of each layer allocates its memory.

    source: What an encoder-decoder has encoded for these rows; None for a decoder.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.rows = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.source: Source | None = None

    def fit(self, rows: int, source: Source | None = None) -> None:
        """Make the cache fit this many rows: a cache with another number is dropped."""
        self.source = source
        if rows != self.rows:
            self.rows, self.keys, self.values = rows, {}, {}

    def at(self, slots: Tensor, width: int, rows: slice = slice(None)) -> CacheView:
        """The view for a forward pass of these rows that reads the first `width` slots.

        It writes its T tokens to the slots [T]; or the one token of each row to the row's own slot, [B, 1].
        """
        return CacheView(self, slots, width, rows)

    def copy(self, row: int, to: int, filled: int) -> None:
        """Copy the first `filled` slots of a row to another."""
        for kept in (*self.keys.values(), *self.values.values()):
            kept[to, :, :filled] = kept[row, :, :filled]

    def swap(self, row: int, to: int, filled: int) -> None:
        """Exchange the first `filled` slots of two rows."""
        for kept in (*self.keys.values(), *self.values.values()):
            before = kept[row, :, :filled].clone()  # indexing both rows at once takes three times as long
            kept[row, :, :filled] = kept[to, :, :filled]
            kept[to, :, :filled] = before

    def clear(self, row: int, start: int, end: int) -> None:
        """Forget slots of a row that may not be finite: also if masked they would spoil it, as 0 × NaN is NaN."""
        for kept in (*self.keys.values(), *self.values.values()):
            kept[row, :, start:end].zero_()

    @property
    def nbytes(self) -> int:
        own = sum(x.nbytes for x in (*self.keys.values(), *self.values.values()))
        return own + (0 if self.source is None else self.source.nbytes)


class CacheView:
    """What a model gets as `past_key_values` or `cache`: of transformers' caches: `update`, `get_seq_length`.

    source: As the cache's.
    """

    is_compileable = True
    is_sliding = is_linear = is_dummy = ()  # by layer, asked of the pair with a cross-attention's cache: none is

    def __init__(self, cache: StaticCache, slots: Tensor, width: int, rows: slice):
        self._cache, self._slots, self._width, self._rows = cache, slots, width, rows
        self.source = cache.source

    def update(
        self, keys_BHTd: Tensor, values_BHTd: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return all so far, [B, H, width, d]."""
        return self._kept(self._cache.keys, keys_BHTd, layer), self._kept(self._cache.values, values_BHTd, layer)

    def get_seq_length(self, layer: int = 0) -> int | Tensor:
        """The slots before the new tokens. Models derive positions from it if they are given none, as OPT may.

        Encoder-decoders are given none: they get each row's own number [B, 1], if rows write to their own slots.
        """
        is_by_row = self.source is not None and self._slots.dim() == 2
        return self._slots if is_by_row else self._width - self._slots.shape[-1]

    def _kept(self, layers: dict[int, Tensor], x_BHTd: Tensor, layer: int) -> Tensor:
        B, H, _, d = x_BHTd.shape
        if layer not in layers:
            layers[layer] = x_BHTd.new_zeros(self._cache.rows, H, self._cache.slots, d)
        kept_BHSd = layers[layer][self._rows]
        if self._slots.dim() == 1:
            kept_BHSd.index_copy_(2, self._slots, x_BHTd)
        else:
            kept_BHSd[torch.arange(B, device=x_BHTd.device), :, self._slots[:, 0]] = x_BHTd[:, :, 0]
        return kept_BHSd[:, :, : self._width]
