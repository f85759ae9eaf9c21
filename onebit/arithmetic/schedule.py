"""Schedules: pure functions of the step and of numbers that all ranks share. No tensors, no side effects."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

# The most local steps that were measured; the loss stayed within 1 % of AdamW's (scripts/records/study_2026-11.md).
AUTO_CLIPPER = 8

# First steps in which a rank's own gradient weighs as much in a variance that is refreshed as in a refresh, not 1 - β2:
# it consists of fewer than 16 gradients, and runs diverged (scripts/records/warmup_2026-11.md).
GUARDED_STEPS = 64


def whole_steps(name: str, value: object) -> int:
    """A number of steps as an int, from an int of Python or NumPy.

    Args:
        name: Name of the argument, for the message.
        value: What the user passed.

    Raises:
        ValueError: It is a float, such as a share of a run; the message contains the remedy.
        TypeError: It is not a number.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    if not isinstance(value, float):
        raise TypeError(f"{name} must be a number of steps, got {value!r}")
    if 0 < value < 1:
        remedy = f"of a run of total_steps that share is {name}=round({value:g} * total_steps)"
    else:
        remedy = f"write {name}={value:.0f}"
    raise ValueError(f"{name} must be a whole number of steps, got {value!r}; {remedy}")


def at_least_one(name: str, value: object) -> int:
    """A number of steps, as `whole_steps`. Raises ValueError, too, if it is below 1."""
    if (steps := whole_steps(name, value)) < 1:
        raise ValueError(f"{name} must be at least 1, got {steps}")
    return steps


def steps_or_auto(name: str, value: object) -> int | str:
    """A number of steps, as `at_least_one`, or "auto". Raises ValueError for another string."""
    if not isinstance(value, str):
        return at_least_one(name, value)
    if value != "auto":
        raise ValueError(f'{name} must be a number of steps or "auto", got {value!r}')
    return value


@dataclass(frozen=True)
class VarianceUpdates:
    """The steps in which 0/1 Adam refreshes the variance (arXiv 2202.06009, section 4.1).

    Steps count from 0. The gap between two updates starts at 1 and doubles after every var_update_scaler of them.

    Attributes:
        var_update_scaler: Number of updates with each gap. Default 16.
        var_freeze_step: Step after which there are no updates. Default None: they become ever rarer.
    """

    var_update_scaler: int = 16
    var_freeze_step: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "var_update_scaler", at_least_one("var_update_scaler", self.var_update_scaler))
        if self.var_freeze_step is not None:
            object.__setattr__(self, "var_freeze_step", whole_steps("var_freeze_step", self.var_freeze_step))
        if self.var_freeze_step is not None and self.var_freeze_step < 0:
            raise ValueError(f"var_freeze_step must not be negative, got {self.var_freeze_step}")

    def is_due(self, step: int) -> bool:
        """Whether the variance is updated in this step."""
        if self.var_freeze_step is not None and step > self.var_freeze_step:
            return False
        # With kappa updates per gap, gaps of 2^k fill kappa·2^k steps and start at kappa·(2^k - 1).
        k = (step // self.var_update_scaler + 1).bit_length() - 1
        gap: int = 2**k
        return (step - self.var_update_scaler * (gap - 1)) % gap == 0

    def count(self, steps: int) -> int:
        """Number of updates in the first `steps` steps."""
        return sum(map(self.is_due, range(steps)))


@dataclass(frozen=True)
class DenseSteps:
    """The steps in which 1-bit Adam and 1-bit LAMB exchange gradients, and so update the variance; in others, momentum.

    Steps count from 0.

    Attributes:
        freeze_step: A number of steps: only the first freeze_step steps, the warm-up of arXiv 2102.02888 and
            2104.06069. "auto" (default): the first `warmup` steps and those of `refreshes`, ever more rarely, whatever
            the length of the run.
        warmup: Least number of steps of the warm-up with "auto". Default 0: as many as `refreshes` begins with.
        refreshes: Refreshes with "auto". Default: four with each gap, which begins at 1 and doubles.
        undelayed: First steps of a group with "auto" that are not delayed. Default 256: in these a gradient of older
            parameters costs most, with AdamW as well (scripts/records/delay_2026-11.md).
        guarded: First steps with "auto" in which a rank's own gradient weighs as much in the variance as in a refresh,
            not 1 - β2. Default: GUARDED_STEPS.
    """

    freeze_step: int | str = "auto"
    warmup: int = 0
    refreshes: VarianceUpdates = field(default_factory=lambda: VarianceUpdates(4))
    undelayed: int = 256
    guarded: int = GUARDED_STEPS

    def __post_init__(self) -> None:
        object.__setattr__(self, "freeze_step", steps_or_auto("freeze_step", self.freeze_step))

    def is_dense(self, step: int) -> bool:
        """Whether gradients are exchanged in this step."""
        if isinstance(self.freeze_step, int):
            return step < self.freeze_step
        return step < self.warmup or self.refreshes.is_due(step)

    def count(self, steps: int) -> int:
        """Number of steps, among the first `steps`, in which gradients are exchanged."""
        return sum(map(self.is_dense, range(steps)))

    def may_delay(self, step: int) -> bool:
        """Whether steps may be delayed by now: with "auto" after the first `undelayed`, else after the warm-up."""
        return self.freeze_step != "auto" or step >= self.undelayed

    def is_guarded(self, step: int) -> bool:
        """Whether the variance consists of so few gradients that one far beyond it must count in it."""
        return self.freeze_step == "auto" and step < self.guarded

    def rests(self, step: int, steps: int = 16) -> bool:
        """Whether no gradient is exchanged in this step and those after it, so that memory for gradients may be freed.

        Args:
            step: The first step.
            steps: Number of steps to look at. Default 16.
        """
        return not any(self.is_dense(k) for k in range(step, step + steps))


def long_warmup(freeze_step: int | str = "auto") -> DenseSteps:
    """The dense steps of 1-bit LAMB, whose warm-up measures more than a variance: its trust ratios.

    Args:
        freeze_step: As in `DenseSteps`; "auto" has a warm-up of 100 steps, and then 16 refreshes with each gap.
    """
    return DenseSteps(freeze_step, warmup=100, refreshes=VarianceUpdates(16))


def variance_weight(beta2: float, gap: int, samples: int = 16) -> float:
    """The weight of a squared gradient in the variance, `gap` steps after the one before it: 1 - β2^gap.

    It is at most 1/samples (or 1 - β2, if that is larger): once gaps are long, 1 - β2^gap would make a single gradient
    the whole variance.

    Args:
        beta2: Decay of the variance.
        gap: Steps since the last gradient in the variance.
        samples: Number of gradients of which the variance consists at least. Default 16.
    """
    return max(1.0 - beta2, min(1.0 - beta2**gap, 1.0 / samples))


@dataclass(frozen=True)
class Synchronisations:
    """The number of steps that 0/1 Adam takes per synchronisation, the paper's T_u (arXiv 2202.06009, section 4.2).

    Attributes:
        local_step_scaler: A number of steps: 1 until step `start`, then doubled after every local_step_scaler steps.
            "auto" (default): doubled whenever the learning rate has halved since its peak, to which the paper's numbers
            amount.
        local_step_clipper: Upper bound; 1 (default) synchronises in every step. "auto": AUTO_CLIPPER.
        start: First step of the doubling, if local_step_scaler is a number. Default 0.
    """

    local_step_scaler: int | str = "auto"
    local_step_clipper: int | str = 1
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("local_step_scaler", "local_step_clipper"):
            object.__setattr__(self, name, steps_or_auto(name, getattr(self, name)))

    @property
    def longest(self) -> int:
        """The largest number of steps per synchronisation."""
        return AUTO_CLIPPER if isinstance(self.local_step_clipper, str) else self.local_step_clipper

    def interval(self, step: int, lr: float, peak_lr: float) -> int:
        """Number of steps per synchronisation at this step.

        Args:
            step: The step, from 0.
            lr: Its learning rate.
            peak_lr: The largest learning rate so far, including this one.
        """
        if isinstance(self.local_step_scaler, int):
            doublings = 0 if step < self.start else (step - self.start) // self.local_step_scaler
        elif lr <= 0.0 or peak_lr <= 0.0:
            doublings = 0 if peak_lr <= 0.0 else 63
        else:
            doublings = math.floor(math.log2(peak_lr / lr) + 1e-9)
        return min(1 << min(doublings, 62), self.longest)
