"""The scheduler: counts optimizer steps and switches techniques on, in an engine and in plain loops.

    scheduler = CompressionScheduler(model)
    handle = scheduler.attach(optimizer)             # after every optimizer.step(); or call scheduler.step() there

An engine whose model is armed has one as `engine.compression_scheduler`, which it steps itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .armed import STEP, armed_in
from .techniques import ActivationQuantization, Pruning, WeightQuantization

log = logging.getLogger(__name__)


class CompressionScheduler:
    """Moves the techniques of an armed model. It keeps nothing: the step and the masks are the model's buffers.

    step: call it after every optimizer step, on all ranks, unless `attach` does. synchronise: called before masks are
    chosen, where ranks hold weights that differ (local steps of 0/1 Adam): `optimizer.sync`, `engine.synchronise`.
    Raises ValueError where the model is not armed.
    """

    def __init__(self, model: nn.Module, synchronise: Callable[[], object] | None = None, *, says: bool = True):
        armed = armed_in(model)
        if armed is None:
            raise ValueError("the model has no techniques: call onebit.zero.init_compression(model, config) before")
        self._armed, self._synchronise, self._says = armed, synchronise, says

    @property
    def training_steps(self) -> int:
        """Optimizer steps done."""
        return self._armed.step

    def step(self, step_zero_print: bool = False) -> None:
        """One more optimizer step is done. step_zero_print: no effect, it is DeepSpeed's."""
        armed, before = self._armed, self.describe() if self._says else []
        if self._synchronise is not None and armed.is_due(armed.step + 1):
            self._synchronise()
        armed.advance(armed.step + 1)
        if self._says:
            for line in sorted(set(self.describe()) - set(before)):
                log.info("step %d: %s", armed.step, line)

    def check_trains(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError where the optimizer was made before the model was armed: it lacks the learned masks."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in self._armed.model.named_parameters():
            if name.endswith(".scores") and p.requires_grad and id(p) not in trained:
                raise ValueError(
                    f"the optimizer does not train {name}, the scores of a learned mask: make it after "
                    "init_compression, of all of model.parameters()"
                )

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Step after every step of this optimizer; `remove()` of what is returned ends that. As `check_trains`."""
        self.check_trains(optimizer)
        if self._synchronise is None and hasattr(optimizer, "sync"):
            self._synchronise = optimizer.sync

        def has_stepped(optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(has_stepped)

    def describe(self) -> list[str]:
        """What is on now, a line for each technique and strength."""
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
        """The step. Masks and scores are in the model's."""
        return {STEP: self._armed.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there, with the model's masks. Raises ValueError where the model's own step is another."""
        if state_dict[STEP] != self._armed.step:
            raise ValueError(
                f"the scheduler's step is {state_dict[STEP]}, the model's is {self._armed.step}; load the model's "
                "state of the same checkpoint before"
            )

    def reload(self) -> None:
        """The model's buffers were filled in place, as torch.distributed.checkpoint does: go on from these."""
        self._armed.resume()


def scheduler_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, synchronise: Callable[[], object], *, says: bool
) -> CompressionScheduler | None:
    """Of a model that is armed; None of any other. Raises as `CompressionScheduler.check_trains`."""
    if armed_in(model) is None:
        return None
    scheduler = CompressionScheduler(model, synchronise, says=says)
    scheduler.check_trains(optimizer)
    return scheduler
