"""Sequences that are split over ranks; see `../sequence/`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import ClassVar, cast

from torch import nn

from ...comm import codec_named
from ...comm.messages import gather_texts
from ..config.entries.zero_one_adam import ZeroOneAdamParams
from ..config.schema import AUTO
from ..config.sections import Sequence
from ..config.whole import Config
from ..feature import Asked, Feature
from ..grid import Grid
from ..parallel.tensor import splits_sequence
from ..pipeline.layers import Stage, parts_of
from ..sequence.models import check_splits, sequence_parallel
from ..sequence.ranks import SequenceRanks, widest_degree
from ..sequence.stages import Split, check_stages_split

log = logging.getLogger(__name__)


class SequenceParallelism(Feature):
    """Splits the model's sequences before it is sharded, and does nothing in a step.

    Args:
        config: The configuration.
        heads: Query heads of the whole model; None: not known, and ulysses_degree is a number.
        divides_pieces: Whether tensor ranks divide a piece between layers.
    """

    blocks, keys = ("sequence_parallel_size",), ("sequence",)
    example: ClassVar[Mapping[str, object]] = {"sequence_parallel_size": 2}

    def __init__(self, config: Config, heads: int | None, *, divides_pieces: bool):
        self._config, self._heads, self._divides_pieces = config, heads, divides_pieces

    @classmethod
    def of(cls, asked: Asked) -> SequenceParallelism | None:
        config, given = asked.config, asked.config.onebit.sequence
        if config.sequence_ranks == 1:
            if given != Sequence() and asked.rank == 0:
                log.warning("onebit.sequence has no effect: sequence_parallel_size is 1")
            return None
        degree, heads = given.ulysses_degree, _heads_of(asked.outline)
        if isinstance(degree, int) and config.sequence_ranks % degree:
            raise ValueError(
                f"rank {asked.rank}: expected onebit.sequence.ulysses_degree to divide sequence_parallel_size, got "
                f"{degree} and {config.sequence_ranks}"
            )
        if degree == AUTO and heads is None:
            raise ValueError(
                f'rank {asked.rank}: onebit.sequence.ulysses_degree is "auto", which reads the number of heads from a '
                f"model of transformers, and this is a {type(asked.outline).__name__}; write a number"
            )
        if config.data_efficiency.random_ltd is not None:
            raise ValueError(
                f"rank {asked.rank}: sequence_parallel_size is {config.sequence_ranks}, and data_efficiency."
                "data_routing.random_ltd needs whole sequences on each rank; leave one of them out"
            )
        if isinstance(asked.outline, Stage):
            check_stages_split(asked.outline, asked.rank)
        else:
            check_splits(asked.outline, asked.rank, has_layout=config.sparse_attention.mode is not None)
        return cls(config, heads, divides_pieces=splits_sequence(asked.tensor_plan or {}))

    def prepare(self, model: nn.Module, grid: Grid, *, is_part: bool) -> None:
        shards, ranks = grid.shape.size("shard"), grid.shape.sequence
        if _replicas_differ(self._config) and shards % ranks:
            raise ValueError(
                f"rank {grid.world.rank}: the {ranks} ranks of a sequence need equal weights, and between its rounds "
                f"this optimizer keeps them equal only inside a replica, of {shards} ranks here; raise "
                "onebit.ranks_per_node to a multiple of sequence_parallel_size at stage 1 to 3, or take an optimizer "
                "that exchanges in every step"
            )
        given, sparsity = self._config.onebit.sequence, self._config.sparse_attention
        if sparsity.different_layout_per_head and (given.ulysses_degree != 1 or grid.shape.size("tensor") > 1):
            raise ValueError(
                f"rank {grid.world.rank}: ranks divide the heads of split sequences, and sparse_attention."
                "different_layout_per_head gives each head a layout of its own; set it to false"
            )
        codec = None if given.codec is None else codec_named(given.codec, given.block)
        parts = grid.shape.size("tensor") if self._divides_pieces else 1
        levels = SequenceRanks.of(grid.sequence, self._degree(grid), parts)
        grid.close_first(levels)
        its = None if sparsity.mode is None else sparsity
        if is_part:
            split = Split(levels, codec, its)  # one of all stages of this rank
            for stage in parts_of(model):
                cast(Stage, stage).split_sequences(split)
        else:
            sequence_parallel(model, levels, codec=codec, sparsity=its)

    def _degree(self, grid: Grid) -> int:
        """How many ranks divide the heads. All ranks of a sequence."""
        if (given := self._config.onebit.sequence.ulysses_degree) != AUTO:
            return cast(int, given)
        heads = cast(int, self._heads) // grid.shape.size("tensor")
        degree = widest_degree(gather_texts(grid.sequence, socket.gethostname()), heads)
        if grid.world.rank == 0:
            log.info(
                "ulysses_degree is %d: that many neighbouring ranks share a host and divide %d heads", degree, heads
            )
        return degree


def _heads_of(model: object) -> int | None:
    """The number of query heads of a model of transformers; None if it is none, or its configuration does not tell."""
    text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    heads = None if text_config is None else getattr(text_config(), "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def _replicas_differ(config: Config) -> bool:
    """Whether replicas take steps between their exchanges."""
    params = None if config.optimizer is None else config.optimizer.params
    skips = isinstance(params, ZeroOneAdamParams) and params.local_step_clipper != 1
    return config.onebit.local_steps.is_on or skips
