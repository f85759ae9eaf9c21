"""The form "intra_node": stages 1 to 3, and any stage in bf16 and fp16, over the ranks of a node.

The shards are of `parallel/partitioned.py`, or FSDP2's at stage 3; a one-bit optimizer works on them, between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..config.whole import Config
from ..grid import GridShape
from .replicated import Replicated


class IntraNode(Replicated):
    """Shards the model inside each node, so that every node holds all of it."""

    name = "intra_node"
    example: ClassVar[Mapping[str, object]] = {
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 4}},
        "zero_optimization": {"stage": 2},
        "onebit": {"sharding": "intra_node"},
    }
    same_state = frozenset({"replicated"})

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        choice, stage, sharding = config.optimizer, config.zero_optimization.stage, config.onebit.sharding
        if stage == 0:
            return True
        has_shards, is_alone = shape.size("shard") > 1, shape.size("shard") == shape.size("replica") == 1
        # A lone rank of a stage has the whole stage: it shards over itself and sends nothing.
        has_other_form = (
            stage < 3 and config.pipeline.ranks == 1 and choice is not None and choice.entry.sharded is not None
        )
        if sharding == "intra_node" and not (has_shards or is_alone):
            raise ValueError(
                'onebit.sharding is "intra_node" and a node has one rank: there is nobody to shard with; leave it to '
                '"auto", or say how many ranks share a node with onebit.ranks_per_node'
            )
        return sharding == "intra_node" or (sharding == "auto" and (has_shards or (is_alone and not has_other_form)))
