"""The form "replicated": stage 0 in float32. The model as it is; a one-bit optimizer sends buckets during backward.

`OneBit` is the base of all three one-bit forms: the optimizer exchanges, votes, clips and skips by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...comm.messages import gather_bytes
from ...model_parallel import ModelParallelGroup
from ...optimizer import CompressedOptimizer
from ..config.whole import Config
from ..form import Form, Given, is_plain
from ..grid import GridShape
from ..offload.mapped import map_state
from .in_node import InNode, uses_files


class OneBit(Form):
    """A form with an optimizer that does the data-parallel exchange."""

    optimizer: Any  # its stats report on the step
    keys = frozenset(
        {
            "codec", "warmup_codec", "compression", "error_dtype", "block", "variance_floor", "check_replicas_every",
            "delay",
        }
    )  # fmt: skip

    def update(self, number: int, scale: float) -> bool:
        before = self.optimizer.stats.skipped_steps
        self.optimizer.step()
        is_skipped = bool(self.optimizer.stats.skipped_steps > before)
        if self.config.fp16.enabled:
            # In a local step of 0/1 Adam a replica drops its gradients silently; loss scales must not differ.
            is_skipped = any(said != b"\0" for said in gather_bytes(self.grid.world, bytes([is_skipped])))
        return is_skipped

    @property
    def grad_norm(self) -> float | None:
        norm: float | None = self.optimizer.stats.grad_norm
        return norm


class Replicated(OneBit, InNode):
    """Keeps the whole model on every rank."""

    name = "replicated"
    example: ClassVar[Mapping[str, object]] = {
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 4}}
    }
    same_state = frozenset({"intra_node"})

    @classmethod
    def fits(cls, config: Config, shape: GridShape) -> bool:
        return is_plain(config) and config.optimizer is not None and config.optimizer.is_one_bit

    @classmethod
    def make_optimizer(cls, given: Given, held: ModelParallelGroup) -> torch.optim.Optimizer:
        config = given.config
        made = given.optimizer(held, **config.optimizer_options())(given.groups(given.model))
        if uses_files(config):
            assert isinstance(made, CompressedOptimizer)
            map_state(made, config.zero_optimization.offload_optimizer.nvme_path or "", given.grid.world.rank)
        return made
