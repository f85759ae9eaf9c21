"""Optimizers and schedules that a script has made itself and passes to `initialize`.

An optimizer of the plain model's parameters keeps its groups, and gets the sharded parameters instead: it remains the
object that the script and its schedule hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from ..lamb import Lamb
from ..local.local_steps import LocalSteps
from ..optimizer import CompressedOptimizer
from .grid import GridShape
from .parallel.dense import stepping
from .parallel.groups import Groups, remembered
from .sharded.optimizer import ShardedOnebitOptimizer

MakeOptimizer = Callable[[ParamsT], torch.optim.Optimizer]


@runtime_checkable
class Schedule(Protocol):
    """A schedule made by the caller, with LRScheduler's methods. The engine steps it after every step taken."""

    def step(self) -> object: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def check_optimizer(made: object) -> torch.optim.Optimizer:
    """Return the optimizer, checked: the engine averages gradients before its steps.

    Args:
        made: The caller's.

    Raises:
        TypeError: It is no optimizer, sends gradients or differences itself, or evaluates a closure.
    """
    if isinstance(made, CompressedOptimizer | ShardedOnebitOptimizer):
        raise TypeError(
            f"{type(made).__name__} sends its own gradients, and the engine would average them once more; write it "
            f'into the configuration, as {{"optimizer": {{"type": "OneBitAdam", "params": {{...}}}}}}, or use it '
            "without the engine"
        )
    if isinstance(made, LocalSteps):
        raise TypeError(
            "LocalSteps exchanges differences in place of gradients, and the engine would average gradients in every "
            f"step; pass its {type(made.inner).__name__} alone, and write how often into the configuration, as "
            '{"onebit": {"local_steps": {"every": 32}}}, or use LocalSteps without the engine (docs/local-steps.md)'
        )
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, or a function that makes one, got {type(made).__name__}")
    if isinstance(made, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates a closure several times in a step, and the gradients of the engine's step are there once: "
            "take another optimizer, or LBFGS without the engine"
        )
    return made


def check_fits(made: torch.optim.Optimizer, shape: GridShape) -> None:
    """Check that an optimizer which needs norms of whole layers knows the ranks with the other parts.

    Args:
        made: The optimizer.
        shape: Number of ranks along each axis.

    Raises:
        ValueError: It does not know them.
    """
    ranks = shape.size("shard") * shape.size("tensor")
    made = made.inner if isinstance(made, LocalSteps) else stepping(made)
    knows_alone = isinstance(made, Lamb) and made.model_parallel_group.whole.world_size == 1
    if knows_alone and ranks > 1 and any(group["min_coeff"] != group["max_coeff"] for group in made.param_groups):
        raise ValueError(
            f"{type(made).__name__} needs the norms of whole layers, of which {ranks} ranks hold a part each; write "
            '"optimizer": {"type": "Lamb"} into the configuration, which knows them, in place of optimizer='
        )


def optimizer_for(given: object, model: nn.Module) -> tuple[MakeOptimizer, Groups | None]:
    """Prepare the caller's optimizer for the sharded parameters.

    Args:
        given: An optimizer of the plain model's parameters, or a function that makes one from parameters.
        model: The plain model.

    Returns:
        A function that takes the sharded parameters and returns the optimizer; and, for an instance, a function that
        finds its groups in the sharded model, else None.

    Raises:
        TypeError: It is neither, or sends gradients itself.
        ValueError: It has taken steps, or has parameters of another model.
    """
    if not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            check_optimizer(given)
        make = cast(Callable[[ParamsT], object], given)
        return lambda params: check_optimizer(make(params)), None
    optimizer = check_optimizer(given)
    if optimizer.state:
        raise ValueError(
            f"the {type(optimizer).__name__} in optimizer= has a state, of parameters that sharding replaces: pass it "
            "before its first step, and load a state with engine.load_checkpoint; if it has one from the start, pass a "
            f"function, optimizer=lambda params: {type(optimizer).__name__}(params, ...)"
        )
    try:
        find = remembered(model, cast(ParamsT, optimizer.param_groups))
    except ValueError as error:
        raise ValueError(f"optimizer= was made of other parameters than model='s: {error}") from error

    def take_over(params: ParamsT) -> torch.optim.Optimizer:
        for group, now in zip(optimizer.param_groups, cast(list[dict[str, Any]], list(params)), strict=True):
            group["params"] = list(now["params"])
        return optimizer

    return take_over, find


def scheduler_for(given: object, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the schedule that the engine steps.

    Args:
        given: A schedule of this optimizer, or a function that makes one for it.
        optimizer: The engine's optimizer.

    Raises:
        TypeError: It is no schedule.
        ValueError: It sets the learning rates of another optimizer.
    """
    made = given
    if not isinstance(given, Schedule) or isinstance(given, type):
        if not callable(given):
            raise TypeError(f"expected a schedule, or a function that makes one, got {type(given).__name__}")
        made = given(optimizer)
        if not isinstance(made, Schedule):
            raise TypeError(f"lr_scheduler= is a function that gave a {type(made).__name__}, expected a schedule")
    its_own = getattr(made, "optimizer", optimizer)
    if its_own not in (optimizer, getattr(optimizer, "inner", optimizer)):  # local steps wrap the script's optimizer
        raise ValueError(
            f"the {type(made).__name__} in lr_scheduler= sets the rates of another {type(its_own).__name__} than the "
            f"engine's {type(optimizer).__name__}; pass a function, lr_scheduler=lambda optimizer: "
            f"{type(made).__name__}(optimizer, ...), or the optimizer that it was made for as optimizer="
        )
    return cast(LRScheduler, made)
