"""Guards of the engine: calls that bypass it, and would have no effect or a wrong one, are errors or warnings.

A script that was written for plain torch may call the optimizer, the schedule, `loss.backward()` or `clip_grad_norm_`,
although the engine does that; unfreeze parameters that the optimizer does not have; or save `module.state_dict()`, of
which each rank has only a part. Nothing here communicates: a mistake in a script is the same on all ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ..usage.marks import GradientMark
from .feature import Training
from .form import Form

log = logging.getLogger(__name__)

_EDITED = (
    "rank %d: gradients were changed between engine.backward() and engine.step(), where each rank has its own: "
    'clip_grad_norm_ clips each by its own norm. Write "gradient_clipping" into the configuration, which clips by the '
    "norm of the mean"
)
_SELDOM = (
    "rank %d: %d micro-batches ran between two calls of engine.step(), which counts them and updates with every %dth "
    "call: call engine.step() after every engine.backward(loss), and not at the boundary alone"
)


class Guarded(Training, Protocol):
    """The engine, as its guard sees it: more of it than features see."""

    @property
    def form(self) -> Form: ...
    @property
    def scheduler(self) -> object: ...
    @property
    def has_gradients(self) -> bool: ...
    @property
    def counts_micro_batches(self) -> bool: ...
    def gradient_accumulation_steps(self) -> int: ...


class Guard:
    """Watches an engine's module, optimizer and schedule. The engine wraps its own calls of them in `open`.

    Args:
        engine: The engine. Its optimizer gets hooks; if ranks hold parts of the model, its modules' state_dict is
            replaced.

    Attributes:
        has_run: Whether the model ran in training since the last backward pass.
    """

    def __init__(self, engine: Guarded):
        self._engine, self._is_open = engine, False
        self._optimized = set(engine.sharding.trained(engine.optimizer))
        left_out = [(name, p) for name, p in engine.module.named_parameters() if p not in self._optimized]
        self._frozen = {p: name for name, p in left_out if not p.requires_grad}
        self._is_known = self._optimized | {p for _, p in left_out if p.requires_grad}  # left out on purpose
        self._epoch: int | None = None  # of the schedule, after the engine's last step
        self._passes = engine.sharding.passes
        self._marks: dict[Tensor, GradientMark] = {}  # gradients of the micro-batches before this one
        self._sample: tuple[Tensor, GradientMark] | None = None  # a gradient as backward has left it
        self._micro_batches, self.has_run = 0, False  # the former since the last step()
        self._said: set[str] = set()
        own: Any = engine.optimizer
        while own is not None:  # local steps and offload wrap another optimizer
            own.register_step_pre_hook(self._refuse_step)
            own = getattr(own, "inner", None)
        self._drop = engine.optimizer.zero_grad
        engine.optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        shape = engine.grid.shape
        is_stage = shape.size("pipe") > 1
        if engine.sharding.divides_parameters or shape.size("tensor") > 1 or is_stage:
            for module in engine.module.modules():
                show = _StateDict(module, self._rank, is_stage=is_stage and module is engine.module)
                module.state_dict = show  # type: ignore[method-assign, assignment]
                module.register_load_state_dict_pre_hook(partial(_refuse_whole, self._rank))

    @property
    def _rank(self) -> int:
        return self._engine.grid.world.rank

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow calls of optimizer and schedule within this context, which are the engine's own."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    # ---------------------------------------------------------------- optimizer and schedule

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._is_open:
            raise RuntimeError(
                f"rank {self._rank}: {type(optimizer).__name__}.step() was called past the engine, whose step() "
                "averages gradients over ranks, clips, counts micro-batches and steps the schedule: call engine.step() "
                "in its place, after every engine.backward(loss)"
            )

    def _zero_grad(self, set_to_none: bool = True) -> None:
        engine = self._engine
        if not self._is_open and (engine.has_gradients or engine.micro_steps_of_step):
            raise RuntimeError(
                f"rank {self._rank}: zero_grad() would drop the gradients of "
                f"{engine.micro_steps_of_step + engine.has_gradients} of {engine.gradient_accumulation_steps()} "
                "micro-batches of this step; engine.step() drops them after its update: leave zero_grad() out, or call "
                "engine.zero_grad() to give them up"
            )
        self._drop(set_to_none)
        engine.sharding.drop_gradients()

    def after_update(self) -> None:
        """Note the schedule's position after the engine's step, and that no gradients are left."""
        self._epoch = getattr(self._engine.scheduler, "last_epoch", None)
        self._marks = {}

    def forget(self) -> None:
        """Forget schedule and gradients, after gradients were dropped or a checkpoint was loaded."""
        self._epoch, self._marks, self._sample = None, {}, None
        self._micro_batches, self.has_run = 0, False
        self._passes = self._engine.sharding.passes

    # ---------------------------------------------------------------- gradients

    def before_backward(self) -> None:
        """Raise RuntimeError if a parameter that the optimizer does not have was unfrozen."""
        self._micro_batches += self.has_run
        self.has_run = False
        if any(p.requires_grad for p in self._frozen):
            for p in [p for p in self._frozen if p.requires_grad]:
                self._refuse_untrained(p, self._frozen.pop(p))

    def after_backward(self) -> None:
        """Note the gradients that the engine's backward pass has left."""
        self._passes = self._engine.sharding.passes
        p = next((p for p in self._optimized if p.grad is not None), None)
        self._sample = None if p is None else (p, GradientMark.of(p))

    def before_step(self) -> None:
        """Check the gradients that `step` finds. Raises RuntimeError if the engine did not make them."""
        engine = self._engine
        if not engine.has_gradients and self._has_strange_gradients():
            raise RuntimeError(
                f"rank {self._rank}: step() finds gradients that did not come by engine.backward(loss), "
                "which scales the loss and counts its micro-batch; call it in place of loss.backward(), or "
                "engine.zero_grad() to drop what others have left"
            )
        if self._sample is not None and self._sample[0].requires_grad and not self._sample[1].is_still(self._sample[0]):
            divides = engine.sharding.divides_parameters  # clip_grad_norm_ is right on DTensors of one replica
            others = engine.grid.transport.world_size if divides else engine.grid.shape.data_ranks
            if others > 1 and not engine.form.steps_apart:
                self._warn(_EDITED)
        self._sample = None
        steps = engine.gradient_accumulation_steps()
        if 1 < steps <= self._micro_batches and engine.counts_micro_batches:
            self._warn(_SELDOM, self._micro_batches, steps)
        self._micro_batches = 0

    def _warn(self, text: str, *numbers: int) -> None:
        """Log a warning, once."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text, self._rank, *numbers)

    def after_micro_batch(self) -> None:
        """Note the accumulated gradients, to find changes before the next micro-batch."""
        if not self._engine.sharding.divides_parameters:
            self._marks = {p: GradientMark.of(p) for p in self._optimized}

    def _has_strange_gradients(self) -> bool:
        if self._engine.sharding.passes != self._passes:
            return True
        if self._engine.micro_steps_of_step == 0:
            groups = self._engine.optimizer.param_groups  # shards get theirs if a script looks: safe_get_full_grad
            return any(p.grad is not None for p in chain(self._optimized, *(group["params"] for group in groups)))
        return any(not mark.is_still(p) for p, mark in self._marks.items())

    def before_update(self) -> None:
        """Raise RuntimeError if no optimizer has a parameter with a gradient, or the script stepped the schedule."""
        self.before_backward()
        for name, p in self._engine.module.named_parameters():
            if p.grad is not None and p not in self._is_known:
                self._refuse_untrained(p, name)
        epoch = getattr(self._engine.scheduler, "last_epoch", None)
        if epoch is not None and self._epoch is not None and epoch > self._epoch:
            raise RuntimeError(
                f"rank {self._rank}: {type(self._engine.scheduler).__name__}.step() was called past the engine, which "
                f"steps it after every update: it is at {epoch}, the engine left it at {self._epoch}. Leave "
                "scheduler.step() out; a schedule of your own rhythm (by epoch) is not given to initialize()"
            )

    def _refuse_untrained(self, p: Tensor, name: str) -> None:
        """Raise RuntimeError, unless p was added by add_param_group to an optimizer that sends gradients itself."""
        if not self._engine.form.averages_gradients and p in (
            groups := set(self._engine.sharding.trained(self._engine.optimizer))
        ):
            self._optimized |= groups
            self._is_known |= groups
            return
        raise RuntimeError(
            f"rank {self._rank}: {name} requires gradients, and was frozen, or not there, at initialize(): it would "
            "not be trained. Give it to initialize() with requires_grad=True, and freeze it afterwards, until it is to "
            "be trained; or save the weights (engine.save_16bit_model), unfreeze, and initialize anew"
        )


_READERS = (
    "torch.",
    "onebit.",
    "peft.utils.other",  # `modules_to_save` reads names alone
    "lightning.pytorch.strategies.strategy",  # DeepSpeedStrategy drops it: its checkpoints are the engine's
    "pytorch_lightning.strategies.strategy",
)


class _StateDict:
    """Replaces a module's state_dict(): a script gets whole tensors, or an error if this rank has only a part.

    torch and this package get the rank's own part, DTensors of shards and slices, which their checkpoints know.
    """

    def __init__(self, module: nn.Module, rank: int, *, is_stage: bool):
        self._module, self._rank, self._is_stage = module, rank, is_stage

    def __call__(self, *args: Any, **named: Any) -> Mapping[str, Any]:
        state: Mapping[str, Any] = type(self._module).state_dict(self._module, *args, **named)
        if str(sys._getframe(1).f_globals.get("__name__")).startswith(_READERS):
            return state
        part = next((name for name, x in state.items() if _is_part(x)), None)
        if self._is_stage or part is not None:
            raise self._refusal("one pipeline stage's layers" if self._is_stage else f"a part of {part}")
        for name, x in state.items():
            if hasattr(x, "to_local"):
                state[name] = x.to_local()  # type: ignore[index]
        return state

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"rank {self._rank}: state_dict() has {what} here, and other ranks hold the rest: a file of it would be "
            "half. Call engine.module_state_dict() on every rank for whole weights, and write them on one "
            "(model.save_pretrained(folder, state_dict=whole)); or engine.save_16bit_model(folder) or "
            "engine.save_checkpoint(folder), on every rank. torch.distributed.checkpoint takes what its "
            "get_model_state_dict(model) gives"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _StateDict:
        return _StateDict(memo.get(id(self._module), self._module), self._rank, is_stage=self._is_stage)

    def __reduce__(self) -> NoReturn:
        raise self._refusal("parts of the weights")


def _refuse_whole(rank: int, module: nn.Module, given: Mapping[str, object], prefix: str, *_: object) -> None:
    """Before load_state_dict() writes anything: raise RuntimeError if a tensor is whole of which this rank has a part.

    torch's own error does not name the remedy, and comes after parameters that are whole here have been written.
    """
    for name, p in module.named_parameters():
        # detach: in a block of GatheredParameters this is the complete parameter, which can be written
        if _is_part(p.detach()) and not hasattr(given.get(prefix + name, p), "placements"):
            raise RuntimeError(
                f"rank {rank}: load_state_dict() got all of {prefix + name}, of which this rank has a part; call "
                "engine.load_module_state_dict(weights) on every rank. Nothing was loaded"
            )


def _is_part(x: object) -> bool:
    """Whether other ranks hold elements of this tensor that this one does not."""
    placements, mesh = getattr(x, "placements", ()), getattr(x, "device_mesh", None)
    return any(each.is_shard() and mesh.size(axis) > 1 for axis, each in enumerate(placements))  # type: ignore[union-attr]
