"""The flops profiler counts one forward pass, to the operation, and leaves the training's bits as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from onebit import zero
from onebit.zero import grid as grids

BATCH, WIDTH = 4, 8


class Net(nn.Module):
    """2·4·8·16 + 2·4·16·8 operations in the blocks, 2·4·8·2 in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return self.head(torch.relu(self.blocks(x)))


BLOCKS, HEAD = 2 * BATCH * WIDTH * 16 * 2, 2 * BATCH * WIDTH * 2


@pytest.fixture
def grid() -> Iterator[grids.Grid]:
    made = grids.start()
    yield made
    made.close()
    assert not torch.distributed.is_initialized()


def train(grid: grids.Grid, steps: int = 4, **keys: object) -> nn.Module:
    torch.manual_seed(3)
    config: dict = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 2, "steps_per_print": None}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    config |= {"flops_profiler": keys} if keys else {}
    engine = zero.initialize(model=Net(), config=config, grid=grid)[0]
    for step in range(2 * steps):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()
    return engine.module


def profiles(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "flops profile" in record.getMessage()]


def test_one_pass_is_counted_to_the_operation_with_its_modules(
    grid: grids.Grid, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onebit")
    train(grid, enabled=True, profile_step=2, recompute_fwd_factor=1.0)
    (text,) = profiles(caplog)
    total = BLOCKS + HEAD
    assert "after step 2" in text and f"parameters {8 * 16 + 16 + 16 * 8 + 8 + 8 * 2 + 2}" in text
    assert f"forward {total:.4g} flops, " in text and f"forward and backward {4 * total:.4g} flops" in text
    assert f"  blocks: parameters 280, forward {BLOCKS:.4g} flops ({100 * BLOCKS / total:.1f} %)" in text
    assert f"  blocks.0: parameters 144, forward {BLOCKS // 2:.4g} flops" in text
    assert f"  head: parameters 18, forward {HEAD:.4g} flops" in text


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"module_depth": 1}, ["blocks", "head"]),
        ({"module_depth": 1, "detailed": False}, ["blocks"]),
        ({"detailed": False, "top_modules": 3}, ["blocks.0", "blocks.1"]),
    ],
)
def test_the_modules_of_a_level(grid: grids.Grid, tmp_path: Path, keys: dict, shown: list[str]) -> None:
    file = tmp_path / "new" / "profile.txt"
    train(grid, enabled=True, output_file=str(file), **keys)
    lines = file.read_text().splitlines()
    assert [line.strip().partition(":")[0] for line in lines if line.startswith("  ")] == shown


def test_a_profile_that_cannot_be_written_is_logged(
    grid: grids.Grid, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    train(grid, enabled=True, output_file=str(tmp_path / "taken" / "profile.txt"))
    (text,) = profiles(caplog)
    assert "profile.txt cannot be written: " in text and f"forward {BLOCKS + HEAD:.4g} flops, " in text


def test_the_training_is_the_same_to_the_bit(grid: grids.Grid) -> None:
    plain, counted = train(grid), train(grid, enabled=True)
    pairs = zip(plain.parameters(), counted.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_a_pass_that_fails_is_not_reported_and_counting_ends(
    grid: grids.Grid, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onebit")
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW"},
        "flops_profiler": {"enabled": True, "profile_step": 0},
    }
    engine = zero.initialize(model=Net(), config=config, grid=grid)[0]
    with pytest.raises(ValueError, match="not a number"):
        engine(torch.full((BATCH, WIDTH), torch.nan))
    assert not profiles(caplog) and torch.utils._python_dispatch._get_current_dispatch_mode() is None
    engine(torch.ones(BATCH, WIDTH))
    assert len(profiles(caplog)) == 1
