"""Checkpointed activations wait for the backward pass in shares, in host memory or in a file: `../activations.py`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ..activations import Keep, checkpoint_calls, checkpoint_with, kept_within
from ..config.whole import Config
from ..feature import Asked, Feature, Training
from ..grid import Grid
from ..pipeline.layers import parts_of

log = logging.getLogger(__name__)


class ActivationCheckpointing(Feature):
    """For parts that call `checkpoint` of `activations.py`: pipelines' layers do, and transformers' models if they use
    gradient checkpointing.

    Args:
        config: The configuration.
    """

    blocks, keys = ("activation_checkpointing",), ("activation_folder",)
    example: ClassVar[Mapping[str, object]] = {"activation_checkpointing": {"cpu_checkpointing": True}}
    only_watches = True

    def __init__(self, config: Config):
        self._settings, self._folder = config.activation_checkpointing, config.onebit.activation_folder
        self._calls = 0

    @classmethod
    def of(cls, asked: Asked) -> ActivationCheckpointing | None:
        settings, folder = asked.config.activation_checkpointing, asked.config.onebit.activation_folder
        is_asked = settings.partition_activations or settings.cpu_checkpointing or folder is not None
        return cls(asked.config) if is_asked else None

    def prepare(self, model: nn.Module, grid: Grid, *, is_part: bool) -> None:
        tensor = grid.transports["tensor"]
        is_divided = self._settings.partition_activations and tensor.world_size > 1
        group = tensor.group if is_divided else None  # type: ignore[attr-defined]
        if self._settings.partition_activations and group is None and grid.world.rank == 0:
            log.info("partition_activations divides nothing: there is one tensor rank")
        keep = Keep(group, self._folder or ("host" if self._settings.cpu_checkpointing else "device"))
        for part in parts_of(model):
            kept_within(part, keep)
        module: Any
        for module in model.modules():  # of transformers, after gradient_checkpointing_enable()
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = checkpoint_with(keep)

    def begin(self, engine: Training) -> None:
        self._calls = checkpoint_calls()

    def after_step(self, engine: Training) -> None:
        if engine.global_steps == 1 and self._calls == checkpoint_calls() and engine.grid.world.rank == 0:
            log.warning(
                "activation_checkpointing has no effect: no part of the model has called "
                "onebit.zero.checkpointing.checkpoint, and its gradient_checkpointing_enable() was not called"
            )
