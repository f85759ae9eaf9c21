# ruff: noqa: RUF009  (`key` is dataclasses.field)
"""DeepSpeed's learning-rate schedules as pure functions of the step: frozen dataclasses, with its parameters' names.

Steps count as DeepSpeed counts batches: the step taken after k calls of scheduler.step() is batch n = k - 1, so the
first two steps of a warm-up are both taken at its start. Formulas from its documentation (deepspeed.readthedocs.io,
"Learning Rate Schedulers"), the count from what its schedulers do. `lr_schedulers.py` puts them into an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from .schema import BOOL, FLOAT, INT, RATES, TEXT, Block, Inert, key, required_key

Rates = float | tuple[float, ...]

_RESUME = {
    "last_batch_iteration": Inert(INT, "resume with the scheduler's state_dict", fine=(-1,), refused=True),
}


class Schedule(Protocol):
    """Learning rates, and with them perhaps the momentum, as a function of the step."""

    def rates(self, step: int, base_lrs: Sequence[float]) -> list[float]:
        """The learning rate of each group after `step` calls of scheduler.step(). base_lrs: the groups' first rates."""

    def momenta(self, step: int, groups: int) -> list[float] | None:
        """β1 of each group; None: it stays as it is."""


@dataclass(frozen=True, kw_only=True)
class _Warmup(Block):
    """The rise from 0 to 1 that three of the schedules share, over N = max(2, warmup_num_steps) batches.

    "log": ln(n+1)/ln N. "linear": n/N. From batch N on: 1.
    """

    inert: ClassVar[Mapping[str, Inert]] = _RESUME

    warmup_num_steps: int = key(1000, INT, fill="warmup_num_steps", asks=True, least=0)
    warmup_type: str = key("log", TEXT, choices=("log", "linear"))

    def momenta(self, step: int, groups: int) -> list[float] | None:
        """Untouched."""
        return None

    @property
    def _length(self) -> int:
        return max(2, self.warmup_num_steps)

    def _rise(self, n: int) -> float:
        if n >= self._length:
            return 1.0
        return math.log(n + 1) / math.log(self._length) if self.warmup_type == "log" else n / self._length


@dataclass(frozen=True, kw_only=True)
class Warmup(_Warmup):
    """lr = warmup_min_lr + (warmup_max_lr - warmup_min_lr)·rise(n), and warmup_max_lr from there on.

    warmup_max_lr is each group's own rate if it is null or absent.
    """

    warmup_min_lr: Rates = key(0.0, RATES, fill="warmup_min_lr", least=0)
    warmup_max_lr: Rates | None = key(None, RATES, fill="warmup_max_lr", asks=True, null=True, least=0)

    def rates(self, step: int, base_lrs: Sequence[float]) -> list[float]:
        """See `Schedule`."""
        gamma = self._gamma(max(0, step - 1))
        least = _spread(self, "warmup_min_lr", base_lrs)
        most = base_lrs if self.warmup_max_lr is None else _spread(self, "warmup_max_lr", base_lrs)
        return [low + (high - low) * gamma for low, high in zip(least, most, strict=True)]

    def _gamma(self, n: int) -> float:
        return self._rise(n)


@dataclass(frozen=True, kw_only=True)
class WarmupDecay(Warmup):
    """The warm-up, then linearly back to warmup_min_lr: (T - n)/(T - N) of the way at batch n, T = total_num_steps.

    An absent warmup_max_lr is 1e-3 here, as in DeepSpeed 0.19.6; null takes each group's own rate.
    """

    warmup_max_lr: Rates | None = key(1e-3, RATES, fill="warmup_max_lr", asks=True, null=True, least=0)
    total_num_steps: int = required_key(INT, fill="total_num_steps", least=1)

    def _gamma(self, n: int) -> float:
        if n < self._length:
            return self._rise(n)
        return max(0.0, (self.total_num_steps - n) / max(1, self.total_num_steps - self._length))


@dataclass(frozen=True, kw_only=True)
class WarmupCosine(_Warmup):
    """lr = base_lr·ratio, with the group's own base_lr.

    ratio = warmup_min_ratio + (1 - warmup_min_ratio)·rise(n) in the warm-up, then
    cos_min_ratio + (1 - cos_min_ratio)·(1 + cos(π·(n - N + 1)/(T - N)))/2, and cos_min_ratio from batch T - 1 on.
    DeepSpeed takes the very first step at 0 for every warmup_min_ratio; here it is taken at warmup_min_ratio.
    """

    total_num_steps: int = required_key(INT, fill="total_num_steps", least=1)
    warmup_min_ratio: float = key(0.0, FLOAT, least=0, most=1)
    cos_min_ratio: float = key(1e-4, FLOAT, least=0, most=1)

    def rates(self, step: int, base_lrs: Sequence[float]) -> list[float]:
        """See `Schedule`."""
        ratio = self._ratio(max(0, step - 1))
        return [ratio * lr for lr in base_lrs]

    def _ratio(self, n: int) -> float:
        if n < self._length:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._rise(n)
        progress = min(1.0, (n - self._length + 1) / max(1, self.total_num_steps - self._length))
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0


@dataclass(frozen=True, kw_only=True)
class Cycle(Block):
    """1cycle (arXiv 1803.09820): up from cycle_min_lr to cycle_max_lr, down again, then a decay of cycle_min_lr.

    With s the share of the way up (first k/first steps, then (total - k)/second steps; in whole stairs if there are
    stairs) at step k: lr = min + (max - min)·s and momentum = max - (max - min)·s. Past the cycle, i = (k - total) /
    decay_step_size: lr = min/(1 + decay_lr_rate·i), momentum = max·(1 + decay_mom_rate·i); decay_step_size 0: none.
    Absent, the second half is like the first. The momentum is β1, or SGD's; β2 stays the optimizer's (DeepSpeed sets it
    to 0.99), and the first step has cycle_max_mom (DeepSpeed's has cycle_min_mom).
    """

    inert: ClassVar[Mapping[str, Inert]] = _RESUME

    cycle_min_lr: Rates = required_key(RATES, least=0, fill="cycle_min_lr")
    cycle_max_lr: Rates = required_key(RATES, least=0, fill="cycle_max_lr")
    decay_lr_rate: float = key(0.0, FLOAT, least=0)
    cycle_first_step_size: int = key(2000, INT, least=1, fill="cycle_first_step_size")
    cycle_second_step_size: int | None = key(None, INT, null=True, least=1)
    cycle_first_stair_count: int = key(0, INT, least=0)
    cycle_second_stair_count: int | None = key(None, INT, null=True, least=0)
    decay_step_size: int = key(0, INT, least=0)
    cycle_momentum: bool = key(True, BOOL)
    cycle_min_mom: Rates = key(0.8, RATES, least=0, below=1)
    cycle_max_mom: Rates = key(0.9, RATES, least=0, below=1)
    decay_mom_rate: float = key(0.0, FLOAT, least=0)

    def rates(self, step: int, base_lrs: Sequence[float]) -> list[float]:
        """See `Schedule`."""
        least, most = _spread(self, "cycle_min_lr", base_lrs), _spread(self, "cycle_max_lr", base_lrs)
        past = self._past(step)
        if past > 0.0:
            return [low / (1.0 + self.decay_lr_rate * past) for low in least]
        share = self._share(step)
        return [low + (high - low) * share for low, high in zip(least, most, strict=True)]

    def momenta(self, step: int, groups: int) -> list[float] | None:
        """See `Schedule`. Raises ValueError once the decay has raised it to 1."""
        if not self.cycle_momentum:
            return None
        least, most = (_spread(self, name, [0.0] * groups) for name in ("cycle_min_mom", "cycle_max_mom"))
        past, share = self._past(step), self._share(step)
        if past <= 0.0:
            return [high - (high - low) * share for low, high in zip(least, most, strict=True)]
        raised = [high * (1.0 + self.decay_mom_rate * past) for high in most]
        if max(raised) >= 1.0:
            raise ValueError(
                f"decay_mom_rate {self.decay_mom_rate:g} has raised the momentum to {max(raised):g} at step {step}; "
                "it must stay below 1: lower the rate"
            )
        return raised

    @property
    def _halves(self) -> tuple[int, int]:
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return first, first if second is None else second

    def _past(self, step: int) -> float:
        beyond = step - sum(self._halves)
        return beyond / self.decay_step_size if self.decay_step_size and beyond > 0 else 0.0

    def _share(self, step: int) -> float:
        """The share of the way up at this step, from 0 to 1."""
        first, second = self._halves
        stairs, later_stairs = self.cycle_first_stair_count, self.cycle_second_stair_count
        way, size = step, first
        if step > first:
            way, size = max(0, first + second - step), second
            stairs = stairs if later_stairs is None else later_stairs
        return way * stairs // size / stairs if stairs else way / size


@dataclass(frozen=True, kw_only=True)
class RangeTest(Block):
    """A rising rate, to find the largest that trains (arXiv 1803.09820).

    lr = lr_range_test_min_lr·(1 + lr_range_test_step_rate·k/lr_range_test_step_size); with lr_range_test_staircase the
    quotient is rounded down.
    """

    inert: ClassVar[Mapping[str, Inert]] = _RESUME

    lr_range_test_min_lr: Rates = key(1e-3, RATES, least=0)
    lr_range_test_step_size: int = key(2000, INT, least=1)
    lr_range_test_step_rate: float = key(1.0, FLOAT, least=0)
    lr_range_test_staircase: bool = key(False, BOOL)

    def rates(self, step: int, base_lrs: Sequence[float]) -> list[float]:
        """See `Schedule`."""
        intervals = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = step // self.lr_range_test_step_size
        factor = 1.0 + self.lr_range_test_step_rate * intervals
        return [factor * lr for lr in _spread(self, "lr_range_test_min_lr", base_lrs)]

    def momenta(self, step: int, groups: int) -> list[float] | None:
        """Untouched."""
        return None


def _spread(schedule: Schedule, name: str, groups: Sequence[float]) -> list[float]:
    """A parameter as one number for each group."""
    value = getattr(schedule, name)
    if not isinstance(value, tuple):
        return [value] * len(groups)
    if len(value) != len(groups):
        raise ValueError(f"expected {name} to have one number for each of {len(groups)} groups, got {list(value)}")
    return list(value)
