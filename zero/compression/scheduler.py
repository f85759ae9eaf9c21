"""The scheduler: counts optimizer steps and switches techniques on, in an engine and in plain loops.

    scheduler = CompressionScheduler(model)
    handle = scheduler.attach(optimizer)             # after every optimizer.step(); or call scheduler.step() there

An engine whose model is armed has one as `engine.compression_scheduler`, which it steps itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .armed import STEP, armed_in
from .techniques import ActivationQuantization, Pruning, WeightQuantization

log = logging.getLogger(__name__)


class CompressionScheduler:
    """Advances the techniques of a model from `init_compression`. Step and masks are the model's buffers.

    Call `step` after every optimizer step, on all ranks; `attach` does that for you.

    Args:
        model: The model.
        synchronise: Called before masks are chosen, to make weights equal that differ between ranks (local steps of 0/1
            Adam): `optimizer.sync`, `engine.synchronise`. Default None.
        says: Whether to log changes. Default True.

    Raises:
        ValueError: The model has no techniques.
    """

    def __init__(self, model: nn.Module, synchronise: Callable[[], object] | None = None, *, says: bool = True):
        armed = armed_in(model)
        if armed is None:
            raise ValueError("the model has no techniques: call onebit.zero.init_compression(model, config) first")
        self._armed, self._synchronise, self._says = armed, synchronise, says

    @property
    def training_steps(self) -> int:
        """Optimizer steps done."""
        return self._armed.step

    def step(self, step_zero_print: bool = False) -> None:
        """Count an optimizer step, and advance the techniques. All ranks.

        Args:
            step_zero_print: Without effect, for DeepSpeed's callers.
        """
        armed, before = self._armed, self.describe() if self._says else []
        if self._synchronise is not None and armed.is_due(armed.step + 1):
            self._synchronise()
        armed.advance(armed.step + 1)
        if self._says:
            for line in sorted(set(self.describe()) - set(before)):
                log.info("step %d: %s", armed.step, line)

    def check_trains(self, params: Iterable[Tensor]) -> None:
        """Raise ValueError if the optimizer was made before `init_compression`: it lacks the learned masks.

        Args:
            params: The parameters of the model that it has.
        """
        trained = {id(p) for p in params}
        for name, p in self._armed.model.named_parameters():
            if name.endswith(".scores") and p.requires_grad and id(p) not in trained:
                raise ValueError(
                    f"the optimizer does not train {name}, the scores of a learned mask: make it after "
                    "init_compression, of all of model.parameters()"
                )

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Call `step` after every step of this optimizer. Raises as `check_trains`.

        Args:
            optimizer: The model's optimizer.

        Returns:
            A handle; its `remove()` ends that.
        """
        self.check_trains(p for group in optimizer.param_groups for p in group["params"])
        if self._synchronise is None and hasattr(optimizer, "sync"):
            self._synchronise = optimizer.sync

        def has_stepped(optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(has_stepped)

    def describe(self) -> list[str]:
        """The active techniques, a line for each technique and strength."""
        lines = []
        for technique in self._armed.techniques():
            if isinstance(technique, WeightQuantization) and technique.bits is not None:
                lines.append(f"weights in {technique.bits} bits")
            elif isinstance(technique, Pruning) and technique.density < 1:
                lines.append(f"{technique.units.kind} pruning ({technique.method}) keeps {technique.density:.1%}")
            elif isinstance(technique, ActivationQuantization) and technique.is_on:
                lines.append(f"activations in {technique.bits} bits")
        return list(dict.fromkeys(lines))

    def state_dict(self) -> dict[str, int]:
        """The step. Masks and scores are in the model's state."""
        return {STEP: self._armed.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a state, with the model's masks.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: The model's own step differs.
        """
        if state_dict[STEP] != self._armed.step:
            raise ValueError(
                f"the scheduler's step is {state_dict[STEP]}, the model's is {self._armed.step}; load the model's "
                "state of the same checkpoint first"
            )

    def reload(self) -> None:
        """Continue from the model's buffers, after these were filled in place, as torch.distributed.checkpoint does."""
        self._armed.resume()


def scheduler_of(
    model: nn.Module, trained: Iterable[Tensor], synchronise: Callable[[], object], *, says: bool
) -> CompressionScheduler | None:
    """The scheduler of a model with techniques, else None. Raises as `CompressionScheduler.check_trains`."""
    if armed_in(model) is None:
        return None
    scheduler = CompressionScheduler(model, synchronise, says=says)
    scheduler.check_trains(trained)
    return scheduler
