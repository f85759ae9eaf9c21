"""The form "inter_node": stages 1 and 2 with one rank per node. Sharding itself crosses the network (`sharded/`).

Gradients go to their owners in one bit, differences of parameters come back in four.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ...comm import codec_named
from ..config.entries.base import ShardedForm
from ..config.optimizers import OptimizerChoice
from ..config.whole import Config
from ..form import Form, Given, choice_of, offloads
from ..grid import Grid, GridShape
from ..sharded.optimizer import WARMUP_STEPS, ShardedOnebitOptimizer, ShardedOptions
from .in_node import fill
from .replicated import OneBit

log = logging.getLogger(__name__)


class InterNode(OneBit):
    """Shards the optimizer state over all nodes, which together hold it once."""

    name = "inter_node"
    example: ClassVar[Mapping[str, object]] = {
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 4}},
        "zero_optimization": {"stage": 1},
        "onebit": {"sharding": "inter_node"},
    }
    keys = OneBit.keys - {"codec", "compression", "error_dtype", "delay"} | {"differences"}
    sends = "sends gradients in onebit.warmup_codec"
    fixed_cut = "sharding across nodes"
    divides_state = True
    optimizer: ShardedOnebitOptimizer

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        stage = config.zero_optimization.stage
        if config.pipeline.ranks > 1:
            raise ValueError(
                f"stage {stage} with one rank per node and a pipeline: sharding across nodes knows of no other stages; "
                "use stage 0, or several ranks on each node"
            )
        if stage == 3:
            raise ValueError(
                "stage 3 gathers parameters for every layer, which a slow network cannot carry, and a node has one "
                "rank here; use stage 2, or several ranks on each node"
            )
        _sharded_form(choice_of(config))
        return True

    @classmethod
    def check(cls, given: Given) -> None:
        super().check(given)
        if given.grid.shape.size("tensor") > 1:
            raise ValueError(
                "a tensor-parallel model is sharded inside a node or not at all: use stage 0, or several times as many "
                "ranks per node as onebit.tensor"
            )
        if offloads(given.config):
            raise ValueError(
                "offload_optimizer with one rank per node: the sharded form keeps master weights and variance with the "
                'parameters; leave it out, or shard inside nodes ("onebit": {"sharding": "intra_node"})'
            )

    @classmethod
    def without_effect(cls, config: Config, shape: GridShape) -> list[str]:
        lines, choice = super().without_effect(config, shape), choice_of(config)
        # The variance never freezes here, so options of its freezing have no effect, but may shorten the warm-up.
        params, sharded = choice.params, _sharded_form(choice)
        names, steps = list(sharded.without_effect), getattr(params, sharded.warmup)
        if isinstance(steps, int) and steps > WARMUP_STEPS and not sharded.counts_from_warmup(params):
            names.append(sharded.warmup)
        fresh = type(params)()
        lines += [
            f"optimizer.params.{name} has no effect across nodes: momentum is of gradients, nothing freezes, and "
            f"{WARMUP_STEPS} steps warm up"
            for name in names
            if getattr(params, name) != getattr(fresh, name)
        ]
        if not getattr(params, "bias_correction", True):
            lines.append(
                "optimizer.params.bias_correction: moments are always corrected where sharding is across nodes"
            )
        return lines

    @classmethod
    def sum_dtype(cls, config: Config) -> torch.dtype:
        return config.dtype

    @classmethod
    def build(cls, given: Given) -> Form:
        given.model.to(given.config.dtype)
        if given.fill is not None:
            fill(given.fill, given.grid, given.model, 0.0)
        return cls(given, make_optimizer(given.config, given.grid, given.groups(given.model)))

    def adopt_parameters(self) -> None:
        super().adopt_parameters()
        self.optimizer.adopt_parameters()


def make_optimizer(config: Config, grid: Grid, params: ParamsT) -> ShardedOnebitOptimizer:
    """Make the configuration's optimizer in its form that is sharded across nodes. All ranks.

    Args:
        config: The configuration.
        grid: The ranks.
        params: Parameters or groups.

    Raises:
        ValueError: The optimizer has no such form.
    """
    ours, stage = config.onebit, config.zero_optimization.stage
    if stage == 2 and config.gradient_clipping > 0:
        stage = 1
        if grid.world.rank == 0:
            log.warning(
                "gradient_clipping needs all gradients before the first one may leave: stage 2 across nodes runs as "
                "stage 1, which keeps gradients until the step; set gradient_clipping to 0 for stage 2"
            )
    options: ShardedOptions = {
        "stage": stage,
        "differences": ours.differences,
        "warmup_codec": None if ours.warmup_codec is None else codec_named(ours.warmup_codec, ours.block),
        "max_grad_norm": config.gradient_clipping,
        "transport": grid.transport,
        "block": ours.block,
        "variance_floor": ours.variance_floor,
        "bucket_cap_mb": ours.bucket_cap_mb,
        "check_replicas_every": ours.check_replicas_every,
        "max_consecutive_skips": ours.max_consecutive_skips,
        "overlap": config.zero_optimization.overlap_comm,
    }
    choice = choice_of(config)
    sharded = _sharded_form(choice)
    if isinstance(steps := getattr(choice.params, sharded.warmup), int):
        options["warmup_steps"] = min(WARMUP_STEPS, steps)
    return sharded.build(choice.params, params, options)


def _sharded_form(choice: OptimizerChoice) -> ShardedForm[Any]:
    if (sharded := choice.entry.sharded) is None:
        raise ValueError(
            f"{choice.type} has no form that is sharded across nodes; use stage 0, or several ranks on each node"
        )
    return sharded
