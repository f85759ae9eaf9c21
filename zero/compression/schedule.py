"""Strength of a technique by the number of optimizer steps: pure functions, so that a resumed run continues exactly.

bits     start_bits at the offset; one less after P, 2P, 4P, ... steps, down to target_bits
mix      r of w ← r·w + (1-r)·q(w): 1 whenever the bits fall, then less by the change ratio each step
density  1 before the offset, then the dense ratio; with an end, 1 - (1-ratio)·(1-(1-u)³), u from 0 to 1
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BitSchedule:
    """Bits by step, one less after each of period · 1, 2, 4, ... steps; at once, if the period is 0.

    change_ratio: None: weights are quantized completely from the start.
    """

    offset: int
    start_bits: int
    target_bits: int
    period: int
    change_ratio: float | None = None

    def _drops(self, step: int) -> int:
        most = self.start_bits - self.target_bits
        return min(((step - self.offset) // self.period).bit_length(), most) if self.period else most

    def bits(self, step: int) -> int | None:
        """Bits at this step; None: no quantization yet."""
        return None if step < self.offset else self.start_bits - self._drops(step)

    def mix(self, step: int) -> float:
        """The share of the unquantized weight, from 1 to 0."""
        if self.change_ratio is None or step < self.offset:
            return 0.0
        drops = self._drops(step)
        since = self.offset + (self.period << (drops - 1) if drops else 0)
        return max(0.0, 1.0 - self.change_ratio * (step - since))


@dataclass(frozen=True)
class DensitySchedule:
    """Density by step. ratio: the share that is kept in the end. end: None: from the offset on."""

    offset: int
    ratio: float
    end: int | None = None
    stride: int = 1

    def density(self, step: int) -> float:
        """The share that is kept; 1: nothing is pruned."""
        if step < self.offset:
            return 1.0
        if self.end is None or step >= self.end:
            return self.ratio
        done = (step - self.offset) // self.stride * self.stride
        return 1.0 - (1.0 - self.ratio) * (1.0 - (1.0 - done / (self.end - self.offset)) ** 3)
