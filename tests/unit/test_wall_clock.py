"""wall_clock_breakdown: the mean milliseconds of a step's parts are logged, of a pipeline too."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from onebit import zero
from onebit.zero import grid as grids
from onebit.zero.monitor import WallClock

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW"},
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
}


@pytest.fixture
def grid() -> Iterator[grids.Grid]:
    made = grids.start()
    yield made
    made.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("milliseconds per step: ")]


def parts(line: str) -> dict[str, float]:
    return {part: float(ms) for part, ms in re.findall(r"(\w+) ([\d.]+)(?:,|$)", line)}


def test_forward_backward_and_step(grid: grids.Grid, caplog: pytest.LogCaptureFixture) -> None:
    """Means over the steps, sums over micro-batches: two passes of 20 ms are 40 ms of a step."""
    caplog.set_level(logging.INFO, "onebit")
    net = nn.Linear(8, 2)
    net.register_forward_pre_hook(lambda module, inputs: time.sleep(0.02))
    engine = zero.initialize(model=net, config=CONFIG, grid=grid)[0]
    for _ in range(8):
        engine.backward(engine(torch.ones(4, 8)).mean())
        engine.step()
    assert len(lines(caplog)) == 2
    for found in map(parts, lines(caplog)):
        assert list(found) == ["forward", "backward", "step"] and 40 <= found["forward"] < 4000
        assert all(0 < ms < 4000 for ms in found.values())


def test_a_pipeline_has_its_run_in_place_of_forward_and_backward(caplog: pytest.LogCaptureFixture) -> None:
    """As `train_batch` measures it; tests/processes/pipeline_ranks.py runs it with the clock on."""
    caplog.set_level(logging.INFO, "onebit")
    clock = WallClock()
    for _ in range(2):
        for part in ("pipeline", "step"):
            with clock.measure(part):
                time.sleep(0.01)
    clock.report()
    (found,) = map(parts, lines(caplog))
    assert list(found) == ["pipeline", "step"] and all(10 <= ms < 2000 for ms in found.values())


def test_off_it_does_not_wait_for_the_device(grid: grids.Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    for is_on in (False, True):
        config = CONFIG | {"wall_clock_breakdown": is_on, "gradient_accumulation_steps": 1}
        engine = zero.initialize(model=nn.Linear(8, 2), config=config, grid=grid)[0]
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_initialized", lambda: True)
            patched.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
            loss = engine(torch.ones(4, 8)).mean()
            engine.backward(loss)
            engine.step()
        assert bool(waits) == is_on
