"""The block "scheduler": DeepSpeed's learning-rate schedules as torch `LRScheduler`s, under its names.

    scheduler = WarmupDecayLR(optimizer, total_num_steps=100_000, warmup_max_lr=3e-4, warmup_num_steps=2_000)
    ...; optimizer.step(); scheduler.step()

Each takes the parameters of its schedule in `config/lr_schedules.py` as keywords; the formulas are there.
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
    DeepSpeed. Raises ValueError on a parameter out of range, a list that does not fit the groups, or a cycled momentum
    that the optimizer does not have.
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

    def get_lr(self) -> list[float | Tensor]:
        """The rates of this step; sets the momenta."""
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
        """Plain numbers."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "base_lrs": [float(lr) for lr in self.base_lrs],
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue at that step, with its rates and momenta in the groups."""
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
    """Parameters and formula: `Warmup`."""

    kind = Warmup


class WarmupDecayLR(ScheduleLR):
    """Parameters and formula: `WarmupDecay`."""

    kind = WarmupDecay


class WarmupCosineLR(ScheduleLR):
    """Parameters and formula: `WarmupCosine`."""

    kind = WarmupCosine


class OneCycle(ScheduleLR):
    """Parameters and formula: `Cycle`."""

    kind = Cycle


class LRRangeTest(ScheduleLR):
    """Parameters and formula: `RangeTest`."""

    kind = RangeTest


SCHEDULERS: Mapping[str, type[ScheduleLR]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


@dataclass(frozen=True)
class SchedulerChoice:
    """Which schedule, with what."""

    type: str
    params: Schedule

    def __post_init__(self) -> None:
        if type(self.params) is not getattr(SCHEDULERS.get(self.type), "kind", None):
            raise ValueError(f"scheduler.type {self.type!r} does not go with {type(self.params).__name__}")


def build_scheduler(choice: SchedulerChoice, optimizer: torch.optim.Optimizer) -> ScheduleLR:
    """The scheduler of the choice; its first rates are in the groups. Call step() after every optimizer.step()."""
    params: dict[str, Any] = write_block(choice.params)
    return SCHEDULERS[choice.type](optimizer, **params)
