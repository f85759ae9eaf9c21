"""The form "untrained": no optimizer, or nothing to train. Reference and reward models beside those that train.

`build` takes it without asking other forms. The model computes in the configuration's dtype and holds no masters; at
stage 3 FSDP2 shards it, at the others it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NoReturn

import torch

from ..config.whole import Config
from ..form import Form, Given
from ..grid import GridShape
from ..parallel import fsdp, tensor
from ..parallel.sharding import Sharding
from ..pipeline.layers import Stage, parts_of
from ..precision import cast_parameters
from .in_node import fill


class NoOptimizer(torch.optim.Optimizer):
    """Has no parameters; its rate is 0."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure: object = None) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(_REFUSAL)


_REFUSAL = (
    "this engine trains nothing: it was made without an optimizer, or no parameter required gradients. Write a block "
    '"optimizer" into the configuration, or pass optimizer= to initialize(); for a reference or reward model compute '
    "under torch.no_grad() and leave backward() and step() out"
)


class Untrained(Form):
    """Computes, and takes no steps."""

    name = "untrained"
    example: ClassVar[Mapping[str, object]] = {}
    trains = False
    optimizer: NoOptimizer

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        return config.optimizer is None

    @classmethod
    def build(cls, given: Given) -> Form:
        config, grid, model = given.config, given.grid, given.model
        stage = config.zero_optimization.stage
        if config.dtype != torch.float32:
            cast_parameters(model, config.dtype)
        if given.tensor_plan is not None:
            tensor.parallelize(model, grid, given.tensor_plan, is_stage=given.ties is not None)
        for part in parts_of(model) if stage == 3 else ():
            blocks = part.blocks() if isinstance(part, Stage) else None
            fsdp.shard(
                part, grid, stage, blocks=blocks, whole=fsdp.refused(part), methods=config.onebit.forward_methods
            )
        if given.fill is not None:
            fill(given.fill, grid, model, 0.0)
        return cls(given, NoOptimizer(), fsdp.FullyShard(model) if stage == 3 else Sharding(model))

    def set_grad_scale(self, scale: float) -> None:
        """Raise RuntimeError: a backward pass is about to begin."""
        raise RuntimeError(f"rank {self.grid.world.rank}: {_REFUSAL}")

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, number: int, scale: float) -> bool:
        raise RuntimeError(f"rank {self.grid.world.rank}: {_REFUSAL}")

    @property
    def grad_norm(self) -> None:
        return None
