"""Keys and values of the tokens so far, at fixed addresses, as a compiled step and a CUDA graph need them.

Shape legend: B rows, H heads, T new tokens, S slots, d features of a head.
"""

from __future__ import annotations

from torch import Tensor


class StaticCache:
    """The cache of all layers, with `slots` tokens per row. The first `update` of each layer allocates its memory."""

    def __init__(self, slots: int):
        self.slots = slots
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def fit(self, rows: int) -> None:
        """Make the cache fit this many rows: a cache with another number is dropped."""
        if self.keys and next(iter(self.keys.values())).shape[0] != rows:
            self.keys, self.values = {}, {}

    def at(self, slots_T: Tensor, width: int) -> CacheView:
        """The view for a forward pass that writes its T tokens to these slots, and reads the first `width` slots."""
        return CacheView(self, slots_T, width)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.keys.values(), *self.values.values()))


class CacheView:
    """What a model gets as `past_key_values` or `cache`: of transformers' caches: `update`, `get_seq_length`."""

    is_compileable = True

    def __init__(self, cache: StaticCache, slots_T: Tensor, width: int):
        self._cache, self._slots_T, self._width = cache, slots_T, width

    def update(
        self, keys_BHTd: Tensor, values_BHTd: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return all so far, [B, H, width, d]."""
        return self._kept(self._cache.keys, keys_BHTd, layer), self._kept(self._cache.values, values_BHTd, layer)

    def get_seq_length(self, layer: int = 0) -> int:
        """The slots before the new tokens. Models derive positions from it if they are given none, as OPT may."""
        return self._width - len(self._slots_T)

    def _kept(self, layers: dict[int, Tensor], x_BHTd: Tensor, layer: int) -> Tensor:
        if layer not in layers:
            B, H, _, d = x_BHTd.shape
            layers[layer] = x_BHTd.new_zeros(B, H, self._cache.slots, d)
        layers[layer].index_copy_(2, self._slots_T, x_BHTd)
        return layers[layer][:, :, : self._width]
