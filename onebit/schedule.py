"""When to do what: pure functions of the step and of numbers that all ranks share. No tensors, no side effects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class VarianceFreeze:
    """When 1-bit Adam stops its dense warm-up and fixes the variance (arXiv 2102.02888, section 7.1).

    freeze_step: a number of updates, or "auto": the first step t at which the L1 norm of the bias-corrected variance
    has changed by no more than 1 - `stable` since step t - 1/(1-beta2), at the latest after `cap` of total_steps.
    The paper's test is one-sided (>= 0.96); here growth counts as change too.
    """

    freeze_step: int | str
    total_steps: int | None = None
    beta2: float = 0.999
    stable: float = 0.96
    cap: float = 0.15

    def __post_init__(self) -> None:
        if isinstance(self.freeze_step, str):
            if self.freeze_step != "auto":
                raise ValueError(f'freeze_step must be a number of steps or "auto", got {self.freeze_step!r}')
            if self.total_steps is None:
                raise ValueError(
                    'freeze_step="auto" needs total_steps, the number of optimizer steps of the whole run '
                    "(compression starts after at most 15 % of them); or give freeze_step as a number"
                )
        elif self.freeze_step < 1:
            raise ValueError(f"freeze_step must be at least 1 (the variance needs a gradient), got {self.freeze_step}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")

    @property
    def latest(self) -> int:
        """The step after which the variance is fixed whatever its norm does."""
        if isinstance(self.freeze_step, int):
            return self.freeze_step
        assert self.total_steps is not None
        return max(1, round(self.cap * self.total_steps))

    @property
    def memory(self) -> int:
        """1/(1-beta2): how many steps the variance remembers."""
        return max(1, round(1.0 / (1.0 - self.beta2)))

    def reason(self, step: int, norms: Mapping[int, float]) -> str | None:
        """Why the variance is to be fixed after `step` updates; None: go on.

        norms: step -> L1 norm of v̂ after it; known up to step - 1, as norms travel with the next step's ballot.
        """
        if step >= self.latest:
            return (
                f"freeze_step = {self.latest}" if self.freeze_step != "auto" else f"the cap, {self.cap:.0%} of the run"
            )
        now, before = norms.get(step - 1), norms.get(step - 1 - self.memory)
        if self.freeze_step == "auto" and now and before and self.stable <= now / before <= 1.0 / self.stable:
            return f"the variance is stable: its norm changed by a factor of {now / before:.3f} in {self.memory} steps"
        return None


@dataclass(frozen=True)
class VarianceUpdates:
    """In which steps 0/1 Adam refreshes the variance (arXiv 2202.06009, section 4.1).

    Steps count from 0. The gap between two updates starts at 1 and doubles after every var_update_scaler of them;
    there is none after step var_freeze_step (None: they just grow rare).
    """

    var_update_scaler: int = 16
    var_freeze_step: int | None = None

    def __post_init__(self) -> None:
        if self.var_update_scaler < 1:
            raise ValueError(f"var_update_scaler must be at least 1, got {self.var_update_scaler}")
        if self.var_freeze_step is not None and self.var_freeze_step < 0:
            raise ValueError(f"var_freeze_step must not be negative, got {self.var_freeze_step}")

    def is_due(self, step: int) -> bool:
        """Whether the variance is updated in this step."""
        if self.var_freeze_step is not None and step > self.var_freeze_step:
            return False
        # With kappa updates per gap, gaps of 2^k fill kappa·2^k steps and start at kappa·(2^k - 1).
        k = (step // self.var_update_scaler + 1).bit_length() - 1
        return (step - self.var_update_scaler * (2**k - 1)) % 2**k == 0


@dataclass(frozen=True)
class LocalSteps:
    """How many steps 0/1 Adam takes between two synchronisations (arXiv 2202.06009, section 4.2).

    local_step_scaler: a number: 1 until step `start`, then twice as many after every local_step_scaler steps; "auto":
    twice as many whenever the learning rate has halved since its peak, which is what the paper's numbers amount to.
    local_step_clipper: never more than this; 1 synchronises in every step.
    """

    local_step_scaler: int | str = "auto"
    local_step_clipper: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.local_step_scaler, str):
            if self.local_step_scaler != "auto":
                raise ValueError(
                    f'local_step_scaler must be a number of steps or "auto", got {self.local_step_scaler!r}'
                )
        elif self.local_step_scaler < 1:
            raise ValueError(f"local_step_scaler must be at least 1, got {self.local_step_scaler}")
        if self.local_step_clipper < 1:
            raise ValueError(f"local_step_clipper must be at least 1, got {self.local_step_clipper}")

    def interval(self, step: int, lr: float, peak_lr: float) -> int:
        """Steps per synchronisation at this step; peak_lr: the largest learning rate so far, this one included."""
        if isinstance(self.local_step_scaler, int):
            doublings = 0 if step < self.start else (step - self.start) // self.local_step_scaler
        elif lr <= 0.0 or peak_lr <= 0.0:
            doublings = 0 if peak_lr <= 0.0 else 63
        else:
            doublings = math.floor(math.log2(peak_lr / lr) + 1e-9)
        return min(2 ** min(doublings, 62), self.local_step_clipper)
