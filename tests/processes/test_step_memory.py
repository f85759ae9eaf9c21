"""No step needs much more memory than the steps around it: neither the freeze, nor a refresh, nor a variance step."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peak_memory import EARLY, KINDS, WARMUP

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux: peaks are read from /proc"),
    pytest.mark.thorough,
    pytest.mark.timeout(300),
]

SCRIPT = Path(__file__).with_name("peak_memory.py")


@functools.cache
def measured() -> dict[str, list[tuple[str, float, float]]]:
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "32768", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    steps: dict[str, list[tuple[str, float, float]]] = json.loads(run.stdout)
    return steps


def steps_of(kind: str) -> tuple[list[tuple[str, float, float]], str]:
    """They, and what they are to be said as; of more than one phase."""
    steps = measured()[kind]
    lines = "\n".join(f"{phase}: {peak:.2f} bytes per parameter, {after:.2f} after" for phase, peak, after in steps)
    assert len({phase for phase, _, _ in steps}) > 1, lines
    return steps, lines


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_needs_5_percent_more_than_what_is_kept_between_steps(kind: str) -> None:
    """A bucket is 1/40 of the model here: what one needs for a moment is within the bound, what all need is not."""
    steps, lines = steps_of(kind)
    *_, steady = steps[-1]
    assert 16.0 < steady < 50.0, lines  # the parameters and gradients alone are 8
    assert max(peak for _, peak, _ in steps) <= 1.05 * steady, lines


@pytest.mark.parametrize("kind", EARLY)
def test_what_fits_in_the_first_steps_fits_in_all(kind: str) -> None:
    """A warm-up in wider frames, or a round under way, holds more than what follows; no later step does."""
    steps, lines = steps_of(kind)
    assert max(peak for _, peak, _ in steps) <= 1.05 * max(after for _, _, after in steps[: WARMUP + 1]), lines
