"""The options of `LocalSteps`, checked; ranks compare them before they build their buckets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm import Codec
from .fragment import OuterStep
from .intervals import Started


@dataclass(frozen=True)
class LocalOptions:
    """The arguments of `LocalSteps` that must be the same on all ranks. bucket_elements: see `Buckets`.

    Raises TypeError or ValueError if one is out of its range.
    """

    schedule: Started
    outer: OuterStep
    codec: Codec
    fragments: int
    delay: int
    correction_steps: int
    balanced: bool
    averages_buffers: bool
    error_dtype: torch.dtype
    bucket_elements: int | None
    check_replicas_every: int
    max_consecutive_skips: int

    def __post_init__(self) -> None:
        for name in ("fragments", "delay", "correction_steps", "check_replicas_every"):
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r}")
        if self.fragments < 1 or min(self.delay, self.correction_steps, self.check_replicas_every) < 0:
            raise ValueError(
                "fragments must be at least 1, delay, correction_steps and check_replicas_every at least 0, got "
                f"{self.fragments}, {self.delay}, {self.correction_steps}, {self.check_replicas_every}"
            )
        if self.delay >= self.schedule.smallest:
            raise ValueError(
                f"a round every {self.schedule.smallest} steps cannot land delay={self.delay} steps after it was sent; "
                "lower delay, or raise every (its least interval, and start_every)"
            )
        if self.balanced and (self.fragments > 1 or self.delay or self.correction_steps):
            raise ValueError(
                "balanced=True needs fragments=1, delay=0 and correction_steps=0, as ranks take unlike numbers; "
                f"got {self.fragments}, {self.delay}, {self.correction_steps}"
            )
        if self.error_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"error_dtype must be torch.float32 or torch.bfloat16, got {self.error_dtype!r}")

    def lines(self, inner: torch.optim.Optimizer) -> list[str]:
        """The options as text, a line each, with the inner optimizer's kind."""
        options = {
            "inner": type(inner).__name__,
            "every": self.schedule.interval,
            "start": (self.schedule.start_steps, self.schedule.start_every),
            "outer": self.outer,
            "codec": self.codec,
            "fragments": self.fragments,
            "delay": self.delay,
            "correction_steps": self.correction_steps,
            "balanced": self.balanced,
            "averages buffers": self.averages_buffers,
            "error_dtype": self.error_dtype,
            "bucket_elements": self.bucket_elements,
            "check_replicas_every": self.check_replicas_every,
            "max_consecutive_skips": self.max_consecutive_skips,
        }
        return [f"option {name} = {value}" for name, value in options.items()]
