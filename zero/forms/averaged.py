"""The form "dense" over members that come and go: `AveragedSteps` averages gradients after the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from ...averaged_steps import AveragedSteps
from ...membership.members import Members
from ...model_parallel import ModelParallelGroup
from ..config.whole import Config
from ..form import Given
from ..grid import GridShape
from .in_node import InNode
from .replicated import OneBit


class Averaged(OneBit, InNode):
    """Keeps the model on every member: on one rank, or divided among some. `Dense` builds it; `fits` is not asked."""

    name = "dense"
    example: ClassVar[Mapping[str, object]] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        return False

    @classmethod
    def make_optimizer(cls, given: Given, held: ModelParallelGroup) -> torch.optim.Optimizer:
        members, config = given.grid.transport, given.config
        assert isinstance(members, Members)
        return AveragedSteps(
            super().make_optimizer(given, held),
            transport=members,
            model_parallel_group=held,
            max_grad_norm=config.gradient_clipping,
            bucket_cap_mb=config.onebit.bucket_cap_mb,
            check_replicas_every=config.onebit.check_replicas_every,
            max_consecutive_skips=config.onebit.max_consecutive_skips,
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # nothing is sent during a backward pass
