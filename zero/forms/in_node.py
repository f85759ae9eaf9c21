"""The base of most forms: the model as it is, or sharded over the ranks of a node; an optimizer of local shards.

Masters are float32, and the model computes in the configuration's dtype. Each form has its own exchange between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...model_parallel import ModelParallelGroup
from ..config.whole import Config
from ..form import Form, Given, is_plain, offloads, pins
from ..grid import Grid, GridShape
from ..parallel import fsdp, leaves, tensor
from ..parallel.partitioned import Partitioned
from ..parallel.sharding import Sharding
from ..pipeline.layers import Stage, parts_of

IN_FILES = "its state is in files, and a newcomer gets tensors"


class InNode(Form):
    """A form in which nodes hold replicas: sharding stays inside them."""

    @classmethod
    def why_members_stay(cls, given: Given) -> str:
        if uses_files(given.config):
            return IN_FILES
        # Without a mesh a member is one rank, which has no shards: only masters in low precision, which FSDP2 places.
        has_node = given.grid.device_mesh is not None
        return "" if is_plain(given.config) or has_node else super().why_members_stay(given)

    @classmethod
    def build(cls, given: Given) -> Form:
        if given.tensor_plan is not None:
            tensor.parallelize(given.model, given.grid, given.tensor_plan, is_stage=given.ties is not None)
        sharding = cls.shard(given)
        held = given.grid.model_parallel_group
        if given.ties is not None:
            held = replace(held, tied={sharding.shard_of(p): count for p, count in given.ties.holders().items()})
        optimizer = cls.make_optimizer(replace(given, model=sharding.held), held)
        sharding.keep(optimizer)
        return cls(given, optimizer, sharding, held)

    @classmethod
    def shard(cls, given: Given) -> Sharding:
        """Shard the model by its stage, and give it its values. All ranks.

        Args:
            given: The inputs from which the form is built.
        """
        config, grid, model = given.config, given.grid, given.model
        low = None if config.dtype == torch.float32 else config.dtype
        on_host, stage = cls.share_on_host(config), config.zero_optimization.stage
        whole, methods = fsdp.refused(model) if stage == 3 else None, config.onebit.forward_methods
        if stage == 3:
            for part in parts_of(model):
                blocks = part.blocks() if isinstance(part, Stage) else None
                if blocks is None:  # a pipeline's layer is a block in any case, and other stages have the others
                    leaves.mark_configured(part, config.zero_optimization.leaf_module, warns=grid.world.rank == 0)
                options: dict[str, Any] = {"offload": on_host > 0.0, "ratio": on_host, "pin_memory": pins(config)}
                fsdp.shard(part, grid, stage, dtype=low, blocks=blocks, whole=whole or (), methods=methods, **options)
        if given.fill is not None:
            fill(given.fill, grid, model, on_host if stage == 3 else 0.0)
        if is_plain(config):
            return Sharding(model)
        if stage == 3 and not whole:
            return fsdp.FullyShard(model)
        partitioned = Partitioned(
            model,
            grid,
            min(max(stage, 1), 2),
            dtype=low,
            on_host=on_host,
            pin_memory=pins(config),
            bucket_cap_mb=config.onebit.bucket_cap_mb,
            params=whole,
        )
        return fsdp.FullyShard(model, partitioned) if stage == 3 else partitioned

    @classmethod
    def make_optimizer(cls, given: Given, held: ModelParallelGroup) -> torch.optim.Optimizer:
        """Make the optimizer of the sharded model.

        Args:
            given: The inputs from which the form is built.
            held: The ranks that hold this replica.
        """
        return given.optimizer(held)(given.groups(given.model))

    @classmethod
    def without_effect(cls, config: Config, shape: GridShape) -> list[str]:
        lines, zero = super().without_effect(config, shape), config.zero_optimization
        if zero.offload_param.device == "nvme":
            lines += cls.params_in_files(config, shape)
        if zero.offload_optimizer.ratio != 1.0 and offloads(config) and (why := cls.why_all_on_host(config)):
            lines.append(f"offload_optimizer.ratio has no effect: {why}")
        return lines

    @classmethod
    def params_in_files(cls, config: Config, shape: GridShape) -> list[str]:
        """Return one line for each deviation from offload_param with device nvme, which the configuration has."""
        return ["offload_param.device nvme: the parameters' shards are in host memory, as with cpu"]

    @classmethod
    def share_on_host(cls, config: Config) -> float:
        """Return the share of the shards' elements, 0 to 1, that FSDP2 offloads and the optimizer steps on the host."""
        if not offloads(config):
            return 0.0
        return 1.0 if cls.why_all_on_host(config) else config.zero_optimization.offload_optimizer.ratio

    @classmethod
    def why_all_on_host(cls, config: Config) -> str:
        """Return the reason why offload_optimizer.ratio has no effect and all is offloaded; "" if it has one."""
        zero = config.zero_optimization
        if zero.offload_param.device != "none":
            return "offload_param keeps all shards in host memory, and they are the masters"
        if uses_files(config):
            return "files have the state of all shards"
        if not cls.steps_in_two_memories(config):
            return "the optimizer steps all shards in one memory; Adam, AdamW, LaProp and Lion step each where it is"
        return ""

    @classmethod
    def steps_in_two_memories(cls, config: Config) -> bool:
        """Whether the optimizer steps some shards on the device and others in host memory."""
        return False


def uses_files(config: Config) -> bool:
    """Whether the configuration keeps the optimizer's state in files."""
    return config.zero_optimization.offload_optimizer.device == "nvme"


def fill(values: Callable[..., object], grid: Grid, model: nn.Module, on_host: float) -> None:
    """Give this rank's part of the model its values. All ranks.

    Args:
        values: Called with the model, a transport and a device, as `materialize`.
        grid: The ranks.
        model: The sharded model, modified in place.
        on_host: Share of its elements in host memory. If it is between 0 and 1, the rest moves to the device after.
    """
    values(model, transport=grid.world, device=torch.device("cpu") if on_host > 0.0 else grid.device)
    if 0.0 < on_host < 1.0:
        for part in parts_of(model):
            fsdp.bring_near(part, grid.device)
