"""Curricula, shorter sequences, dropped tokens and learning rates by consumed tokens; see `../data_efficiency/`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ..config.data_efficiency import RandomLtd
from ..config.whole import Config
from ..data import Loader
from ..data_efficiency import configured
from ..data_efficiency.efficiency import Efficiency
from ..data_efficiency.token_rates import TokenLR
from ..feature import Asked, Feature, Training
from ..grid import Grid
from ..parallel.tensor import splits_sequence

log = logging.getLogger(__name__)

T = TypeVar("T")


class DataEfficiency(Feature):
    """Applies both blocks, data_efficiency and the older curriculum_learning.

    Args:
        config: The configuration.
        efficiency: The parts that are on.
        dropping: Names of the layers that drop tokens.
        splits_sequence: Whether the tensor plan splits sequences.

    Attributes:
        efficiency: The parts that are on.
    """

    blocks = ("data_efficiency", "curriculum_learning")
    example: ClassVar[Mapping[str, object]] = {
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 8,
            "max_difficulty": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
        }
    }

    def __init__(self, config: Config, efficiency: Efficiency, dropping: list[str], *, splits_sequence: bool):
        self.efficiency = efficiency
        self._config, self._dropping, self._splits_sequence = config, dropping, splits_sequence

    @classmethod
    def of(cls, asked: Asked) -> DataEfficiency | None:
        config, ltd, lengths = asked.config, asked.config.data_efficiency.random_ltd, None
        if ltd is None and not configured.has_sampler(config):
            return None
        dropping, layers = ([], 1) if ltd is None else configured.dropped_layers(ltd, asked.outline)
        by_tokens = ltd is not None and ltd.layer_token_lr_schedule.enabled
        if by_tokens and (config.scheduler is not None or asked.lr_scheduler is not None):
            raise ValueError(
                "layer_token_lr_schedule sets the learning rates, and so does "
                f"{'the block scheduler' if config.scheduler is not None else 'lr_scheduler='}; keep one"
            )
        if config.curriculum_learning.enabled:
            lengths = configured.pacing_of(config.curriculum_learning, configured.LEGACY)
        efficiency = Efficiency(lengths=lengths, layers=layers, counts_tokens=by_tokens)
        is_split = asked.tensor_plan is not None and splits_sequence(asked.tensor_plan)
        return cls(config, efficiency, dropping, splits_sequence=is_split)

    def prepare(self, model: nn.Module, grid: Grid, *, is_part: bool) -> None:
        if self._config.data_efficiency.random_ltd is not None:
            self.efficiency.dropping = configured.drop_as_configured(
                self._config, grid, model, self._dropping, splits_sequence=self._splits_sequence
            )

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        if not self.efficiency.counts_tokens:
            return None
        schedule = cast(RandomLtd, self._config.data_efficiency.random_ltd).layer_token_lr_schedule
        return TokenLR(optimizer, cast(int, schedule.total_layer_tokens), schedule.warmup_layer_tokens)

    def loader(
        self, grid: Grid, dataset: Dataset[object], collate_fn: Callable[[list[Any]], object] | None, seed: int
    ) -> Loader | None:
        if not configured.has_sampler(self._config):
            return None
        return configured.loader_of(self._config, grid, dataset, collate_fn, seed)

    def begin(self, engine: Training) -> None:
        ours = self._config.data_efficiency
        is_sampled = ours.curriculum is not None or ours.dynamic_batching is not None
        if is_sampled and engine.loader is None and engine.grid.world.rank == 0:
            log.warning(
                "data_efficiency.data_sampling chooses samples of a loader that the engine makes, and there is none: "
                "pass training_data=dataset to initialize(), or take engine.deepspeed_io(dataset)"
            )

    # ---------------------------------------------------------------- a step

    def batches(self, engine: Training, batches: list[T]) -> list[T]:
        is_counted = engine.pipeline is not None  # else the calls of the model count
        return self.efficiency.prepare_batches(batches, engine.global_steps, is_counted=is_counted)

    def begin_step(self, engine: Training) -> None:
        """Scale the learning rates for dynamic batching."""
        self.efficiency.begin_rates(engine.optimizer, getattr(engine.loader, "lr_scale", 1.0))

    def inputs(self, engine: Training, inputs: Sequence[object], named: Mapping[str, object]) -> Mapping[str, object]:
        rank = engine.grid.world.rank
        return self.efficiency.prepare(engine.module, engine.global_steps, tuple(inputs), named, rank)

    def end_step(self, engine: Training) -> Mapping[str, object]:
        self.efficiency.end_rates(engine.optimizer)
        return {"tokens": self.efficiency.consumed(engine.grid)} if self.efficiency.counts_tokens else {}

    def after_step(self, engine: Training) -> None:
        self.efficiency.go_to(engine.global_steps)

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, object]:
        return {"layer_tokens": self.efficiency.layer_tokens}

    def load_state(self, engine: Training, state: Mapping[str, object]) -> None:
        self.efficiency.layer_tokens = cast(int, state.get("layer_tokens", 0))
        self.efficiency.go_to(engine.global_steps)
