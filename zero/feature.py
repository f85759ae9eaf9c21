"""The contract of a feature: what a block of the configuration adds around the steps of any form.

A feature is a file in `features/` and a line in `features/__init__.py`; what it does is in a room that needs no engine.
An engine has those that its configuration or its model asks for, and none in a plain run. Every method does nothing
unless a feature says otherwise; the order is that of the methods here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .config.whole import Config
from .data import Loader
from .grid import Grid
from .parallel.tensor import Plan

if TYPE_CHECKING:
    from .engine import Engine

T = TypeVar("T")
F = TypeVar("F", bound="Feature")


@dataclass(frozen=True)
class Asked:
    """What a feature is asked with, before anything is sharded or sent.

    outline: the model, or all layers of a pipeline without values.
    lr_scheduler: what the caller gave; None: nothing.
    tensor_plan: how tensor-parallel ranks divide the layers.
    """

    config: Config
    outline: nn.Module
    rank: int
    lr_scheduler: object = None
    tensor_plan: Plan | None = None


class Feature:
    """One feature of one engine."""

    blocks: ClassVar[tuple[str, ...]]
    """Its keys at the top level of the configuration."""
    example: ClassVar[Mapping[str, object]]
    """Values of some of them that turn it on; the tests of all features run it."""

    # ---------------------------------------------------------------- initialize()

    @classmethod
    def of(cls, asked: Asked) -> Feature | None:
        """The feature, if it is asked for. Raises ValueError if this model or configuration cannot have it."""
        raise NotImplementedError

    def prepare(self, model: nn.Module, grid: Grid, *, is_part: bool) -> None:
        """Change the model in place, before it is sharded. is_part: it is a pipeline's stage."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        """The schedule, if this feature sets the learning rates."""

    def loader(
        self, grid: Grid, dataset: Dataset[object], collate_fn: Callable[[list[Any]], object] | None, seed: int
    ) -> Loader | None:
        """This rank's loader, if this feature chooses samples."""

    def begin(self, engine: Engine) -> None:
        """The engine is made, and has taken no step."""

    # ---------------------------------------------------------------- a step

    def batches(self, engine: Engine, batches: list[T]) -> list[T]:
        """The micro-batches of a `train_batch()`, inputs and targets."""
        return batches

    def begin_step(self, engine: Engine) -> None:
        """Before any gradient of the step leaves; in some steps more than once."""

    def inputs(self, engine: Engine, inputs: Sequence[object], named: Mapping[str, object]) -> Mapping[str, object]:
        """The named arguments of a forward pass in training."""
        return named

    def end_step(self, engine: Engine) -> Mapping[str, object]:
        """After the update, or a skipped one, and before the schedule: arguments of the schedule's step()."""
        return {}

    def after_step(self, engine: Engine) -> None:
        """After the schedule; `engine.global_steps` are done."""

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, object]:
        """Plain values that a checkpoint holds of each rank; names are unique among features."""
        return {}

    def load_state(self, engine: Engine, state: Mapping[str, object]) -> None:
        """Go on at `engine.global_steps`. state: those of all features; files of before a feature lack its names."""

    def weights_were_loaded(self) -> None:
        """A checkpoint has filled the model."""
