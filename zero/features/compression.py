"""Compression of the model during training, prepared by `init_compression`; see `../compression/`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from ..compression.armed import ARMED, armed_in
from ..compression.config import compression_in
from ..compression.scheduler import CompressionScheduler, scheduler_of
from ..feature import Asked, Feature, Training
from ..grid import Grid


class Compression(Feature):
    """Steps the scheduler of an armed model. It counts every step, skipped ones included.

    Attributes:
        scheduler: The scheduler; None before `begin`.
    """

    blocks, mark = ("compression_training",), ARMED
    example: ClassVar[Mapping[str, object]] = {
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": {"enabled": True, "schedule_offset": 2},
                "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["*"]}},
            }
        }
    }
    scheduler: CompressionScheduler | None = None

    @classmethod
    def of(cls, asked: Asked) -> Compression | None:
        config, rank, armed = asked.config, asked.rank, armed_in(asked.outline)
        wanted = None if config.compression_training is None else compression_in(config)
        if wanted and armed is None:
            raise ValueError(
                f"rank {rank}: the configuration has compression_training, and the model is as it was: call "
                "onebit.zero.init_compression(model, config) before initialize()"
            )
        if armed is None:
            return None
        if wanted is not None and wanted != armed.compression:
            raise ValueError(
                f"rank {rank}: the configuration's compression_training is not the one that init_compression was "
                "given; pass both the same"
            )
        return cls()

    def prepare(self, model: nn.Module, grid: Grid, *, is_part: bool) -> None:
        if (ranks := grid.shape.size("tensor")) > 1:
            raise ValueError(
                f"rank {grid.world.rank}: {ranks} tensor ranks divide layers, and compression needs whole weights; "
                "leave one of them out"
            )

    def begin(self, engine: Training) -> None:
        is_first = engine.grid.world.rank == 0
        trained = engine.sharding.trained(engine.optimizer)
        self.scheduler = scheduler_of(engine.module, trained, engine.synchronise, says=is_first)

    def after_step(self, engine: Training) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def weights_were_loaded(self) -> None:
        if self.scheduler is not None:
            self.scheduler.reload()
