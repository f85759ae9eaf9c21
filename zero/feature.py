"""The contract of a feature: additions to the steps of any form, which a block of the configuration turns on.

A feature is a file in `features/` and a line in `features/__init__.py`; its implementation is in a folder that needs no
engine. An engine has the features that its configuration or its model asks for, and none in a plain run. Every method
does nothing unless a feature overrides it. In `initialize` and in a step they are called in the order below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .config.whole import Config
from .data import Loader
from .grid import Grid
from .parallel.sharding import Sharding
from .parallel.tensor import Plan

T = TypeVar("T")
F = TypeVar("F", bound="Feature")


@dataclass(frozen=True)
class Asked:
    """The inputs of `Feature.of`, before anything is sharded or sent.

    Attributes:
        config: The configuration.
        outline: The model, or all layers of a pipeline without values.
        rank: This rank.
        lr_scheduler: The caller's schedule, or a function that makes one. Default None.
        tensor_plan: How tensor-parallel ranks divide the layers. Default None.
    """

    config: Config
    outline: nn.Module
    rank: int
    lr_scheduler: object = None
    tensor_plan: Plan | None = None


class Training(Protocol):
    """The engine, as a feature sees it: what `Engine` documents, to be read."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def grid(self) -> Grid: ...
    @property
    def sharding(self) -> Sharding: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def loader(self) -> Loader | None: ...
    @property
    def pipeline(self) -> object: ...
    @property
    def global_steps(self) -> int: ...
    @property
    def micro_steps_of_step(self) -> int: ...
    def synchronise(self, *, lands: bool = True) -> None: ...


class Feature:
    """One feature of one engine. `of` makes it; all ranks call its methods."""

    blocks: ClassVar[tuple[str, ...]]
    """Its keys at the top level of the configuration; `of` is asked if one of them is not at its default."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Its keys in the block "onebit", likewise."""
    mark: ClassVar[str | None] = None
    """A name in the `__dict__` of a module; `of` is asked if a module of the model has it, too."""
    example: ClassVar[Mapping[str, object]]
    """Values of some of them that turn it on; the tests of all features run it."""

    only_watches: ClassVar[bool] = False
    """Whether it leaves the training's bits as they are."""

    # ---------------------------------------------------------------- initialize()

    @classmethod
    def of(cls, asked: Asked) -> Feature | None:
        """Return the feature if it is asked for, else None.

        Args:
            asked: Configuration, model and arguments.

        Raises:
            ValueError: This model or configuration cannot have it.
        """
        raise NotImplementedError

    def prepare(self, model: nn.Module, grid: Grid, *, is_part: bool) -> None:
        """Change the model in place, before it is sharded.

        Args:
            model: The model, or this rank's stages.
            grid: The ranks.
            is_part: Whether it is a pipeline's stage.
        """

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        """Return a schedule if this feature sets the learning rates, else None."""

    def loader(
        self, grid: Grid, dataset: Dataset[object], collate_fn: Callable[[list[Any]], object] | None, seed: int
    ) -> Loader | None:
        """Return this rank's loader if this feature chooses samples, else None.

        Args:
            grid: The ranks.
            dataset: The training data.
            collate_fn: As in DataLoader; None: torch's default.
            seed: Seed of the data order.
        """

    def begin(self, engine: Training) -> None:
        """Set up with the new engine, before its first step."""

    # ---------------------------------------------------------------- a step

    def batches(self, engine: Training, batches: list[T]) -> list[T]:
        """Return the micro-batches of a `train_batch()`, inputs and targets, as they are to be used."""
        return batches

    def begin_step(self, engine: Training) -> None:
        """Act before any gradient of the step leaves. In some steps it is called more than once."""

    def inputs(self, engine: Training, inputs: Sequence[object], named: Mapping[str, object]) -> Mapping[str, object]:
        """Return the named arguments of a forward pass in training.

        Args:
            engine: The engine.
            inputs: Positional arguments of the pass.
            named: Named arguments so far.
        """
        return named

    def end_step(self, engine: Training) -> Mapping[str, object]:
        """Act after the update, or a skipped one, and return arguments of the schedule's step(), which comes next."""
        return {}

    def after_step(self, engine: Training) -> None:
        """Act after the schedule; `engine.global_steps` steps have been taken."""

    # ---------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, object]:
        """Return plain values for each rank's checkpoint; names are unique among features."""
        return {}

    def load_state(self, engine: Training, state: Mapping[str, object]) -> None:
        """Continue at `engine.global_steps`.

        Args:
            engine: The engine.
            state: The values of all features. Checkpoints that are older than a feature lack its names.
        """

    def weights_were_loaded(self) -> None:
        """Act after a checkpoint has filled the model."""
