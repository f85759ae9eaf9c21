"""Block-sparse attention, in models that are known by name; see `../sparse_attention/`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from ..feature import Asked, Feature
from ..grid import Grid
from ..sparse_attention.config import SparsityConfig
from ..sparse_attention.replace import attention_of, place_heads, replace_attention

log = logging.getLogger(__name__)


class SparseAttention(Feature):
    """Replaces attention before the model is sharded, and does nothing in a step."""

    blocks = ("sparse_attention",)
    example: ClassVar[Mapping[str, object]] = {"sparse_attention": {"mode": "fixed", "block": 4, "num_local_blocks": 1}}

    def __init__(self, sparsity: SparsityConfig):
        self._sparsity = sparsity

    @classmethod
    def of(cls, asked: Asked) -> SparseAttention | None:
        sparsity = asked.config.sparse_attention
        if sparsity.mode is None:
            return None
        for name in sparsity.without_effect() if asked.rank == 0 else ():
            log.warning('sparse_attention.%s has no effect: mode "%s" does not read it', name, sparsity.mode)
        if asked.config.sequence_ranks > 1:
            return None  # the attention of split sequences takes the layout, see sequence_parallelism.py
        attention_of(asked.outline, sparsity)
        return cls(sparsity)

    def prepare(self, model: nn.Module, grid: Grid, *, is_part: bool) -> None:
        replace_attention(model, self._sparsity, is_part=is_part)
        place_heads(model, grid.coordinates["tensor"], grid.shape.size("tensor"))  # before slices are cut
