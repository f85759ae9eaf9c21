"""The block "scheduler": DeepSpeed's learning-rate schedules as torch `LRScheduler`s, under its names.

    scheduler = WarmupDecayLR(optimizer, total_num_steps=100_000, warmup_max_lr=3e-4, warmup_num_steps=2_000)
    ...; optimizer.step(); scheduler.step()

Each takes the parameters of its schedule in `config/lr_schedules.py` as keywords; that file has the formulas. Steps
count as in DeepSpeed: n below is the number of calls of step(), less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import StateDict

from .config.lr_schedules import Cycle, RangeTest, Schedule, Warmup, WarmupCosine, WarmupDecay
from .config.reader import write_block


class ScheduleLR(LRScheduler):
    """Base of the five: puts a schedule's learning rates, and momenta, into an optimizer's groups.

    The state is the count of steps and the groups' first rates; the schedule's parameters are those of this run, as in
    DeepSpeed. Raises ValueError if a parameter is out of range, a list does not fit the groups, or the optimizer has no
    momentum to cycle.
    """

    kind: ClassVar[type]

    def __init__(self, optimizer: torch.optim.Optimizer, *, last_epoch: int = -1, **params: object):
        self.schedule: Schedule = self.kind(**params)
        if self.schedule.momenta(0, len(optimizer.param_groups)) is not None:
            for g, group in enumerate(optimizer.param_groups):
                if "betas" not in group and "momentum" not in group:
                    raise ValueError(
                        f"group {g} of {type(optimizer).__name__} has no momentum to cycle; set cycle_momentum to false"
                    )
        super().__init__(optimizer, last_epoch)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next batch, or to this one, counted from 0 as in DeepSpeed: step(0) is the first step()."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration  # the count before the step; torch's own argument is deprecated
        super().step()

    def get_lr(self) -> list[float | Tensor]:
        """The rates of this step. Also sets the momenta."""
        self._set_momenta()
        return list(self._rates())

    def _rates(self) -> list[float]:
        return self.schedule.rates(self.last_epoch, [float(lr) for lr in self.base_lrs])

    def _set_momenta(self) -> None:
        momenta = self.schedule.momenta(self.last_epoch, len(self.optimizer.param_groups))
        for group, momentum in zip(self.optimizer.param_groups, momenta or (), strict=momenta is not None):
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            else:
                group["momentum"] = momentum

    def state_dict(self) -> dict[str, object]:
        """The position in the schedule, as plain numbers."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": [float(lr) for lr in self.base_lrs],
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue at the saved step, and set its rates and momenta in the groups.

        Args:
            state_dict: From `state_dict()`.

        Raises:
            ValueError: It is of another number of groups.
        """
        if len(state_dict["base_lrs"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"cannot load this scheduler state: it has {len(state_dict['base_lrs'])} groups, the optimizer "
                f"{len(self.optimizer.param_groups)}"
            )
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self.base_lrs = list(state_dict["base_lrs"])
        self._set_momenta()
        for group, lr in zip(self.optimizer.param_groups, self._rates(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = list(self._rates())


class WarmupLR(ScheduleLR):
    """Warm-up to a constant rate: lr = warmup_min_lr + (warmup_max_lr - warmup_min_lr)·rise(n).

    rise(n) is ln(n+1)/ln N ("log") or n/N ("linear") over N = max(2, warmup_num_steps) batches, then 1.

    Args:
        optimizer: The optimizer; its groups are modified.
        last_epoch: As in torch. Default -1.
        warmup_min_lr: Rate at the start; a number, or one per group. Default 0.
        warmup_max_lr: Rate after the warm-up; a number, or one per group. Default None: each group's own rate.
        warmup_num_steps: Steps of the warm-up. Default 1000.
        warmup_type: "log" or "linear". Default "log".
    """

    kind = Warmup


class WarmupDecayLR(ScheduleLR):
    """Warm-up as in `WarmupLR`, then a linear decay to warmup_min_lr at step total_num_steps.

    Args:
        optimizer: The optimizer; its groups are modified.
        last_epoch: As in torch. Default -1.
        total_num_steps: Steps of the run. Required.
        warmup_min_lr: Rate at the start and at the end; a number, or one per group. Default 0.
        warmup_max_lr: Rate after the warm-up; a number, or one per group; None: each group's own rate. Default 1e-3.
        warmup_num_steps: Steps of the warm-up. Default 1000.
        warmup_type: "log" or "linear". Default "log".
    """

    kind = WarmupDecay


class WarmupCosineLR(ScheduleLR):
    """Warm-up, then half a cosine down, as factors of each group's own rate.

    Args:
        optimizer: The optimizer; its groups are modified.
        last_epoch: As in torch. Default -1.
        total_num_steps: Steps of the run. Required.
        warmup_min_ratio: Factor at the start. Default 0.
        warmup_num_steps: Steps of the warm-up. Default 1000.
        cos_min_ratio: Factor at the end. Default 1e-4.
        warmup_type: "log" or "linear". Default "log".
    """

    kind = WarmupCosine


class OneCycle(ScheduleLR):
    """1cycle (arXiv 1803.09820): up from cycle_min_lr to cycle_max_lr and down again, with the momentum in reverse.

    After the cycle, rate and momentum decay if decay_step_size is not 0.

    Args:
        optimizer: The optimizer; its groups are modified.
        last_epoch: As in torch. Default -1.
        cycle_min_lr: Smallest rate; a number, or one per group. Required.
        cycle_max_lr: Largest rate; a number, or one per group. Required.
        decay_lr_rate: Decay of the rate after the cycle, per decay_step_size steps. Default 0.
        cycle_first_step_size: Steps of the way up. Default 2000.
        cycle_second_step_size: Steps of the way down. Default None: as the way up.
        cycle_first_stair_count: Stairs of the way up; 0: smooth. Default 0.
        cycle_second_stair_count: Stairs of the way down. Default None: as the way up.
        decay_step_size: Steps of the decay's unit; 0: no decay. Default 0.
        cycle_momentum: Whether the momentum (β1, or SGD's) cycles, too. Default True.
        cycle_min_mom: Smallest momentum. Default .8.
        cycle_max_mom: Largest momentum. Default .9.
        decay_mom_rate: Growth of the momentum after the cycle, per decay_step_size steps. Default 0.
    """

    kind = Cycle


class LRRangeTest(ScheduleLR):
    """A rising rate, to find the largest that trains (arXiv 1803.09820).

    lr = lr_range_test_min_lr·(1 + lr_range_test_step_rate·k/lr_range_test_step_size) at step k.

    Args:
        optimizer: The optimizer; its groups are modified.
        last_epoch: As in torch. Default -1.
        lr_range_test_min_lr: Rate at the start; a number, or one per group. Default 1e-3.
        lr_range_test_step_size: Steps of the rate's unit. Default 2000.
        lr_range_test_step_rate: Growth per unit. Default 1.
        lr_range_test_staircase: Whether the rate grows in whole units. Default False.
    """

    kind = RangeTest


SCHEDULERS: Mapping[str, type[ScheduleLR]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


@dataclass(frozen=True)
class SchedulerChoice:
    """A schedule by its name, with its parameters."""

    type: str
    params: Schedule

    def __post_init__(self) -> None:
        if type(self.params) is not getattr(SCHEDULERS.get(self.type), "kind", None):
            raise ValueError(f"scheduler.type {self.type!r} does not go with {type(self.params).__name__}")


def build_scheduler(choice: SchedulerChoice, optimizer: torch.optim.Optimizer) -> ScheduleLR:
    """Construct the chosen scheduler, which sets the first rates. Call its step() after every optimizer.step()."""
    params: dict[str, Any] = write_block(choice.params)
    return SCHEDULERS[choice.type](optimizer, **params)
