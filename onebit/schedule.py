"""When to do what: pure functions of the step and of numbers that all ranks share. No tensors, no side effects."""

from __future__ import annotations

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
