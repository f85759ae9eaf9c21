"""The key "sparse_attention" under ZeRO stages, pipeline stages and tensor slices: one process's losses."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from ranks import run_torchrun
from sparse_ranks import LAYOUTS, RATE, SIZE, SPARSE, STEPS, run, windows
from train.model_layers import build_layers

from onebit import zero
from onebit.zero.sparse_attention import replace_attention


@cache
def results() -> list[dict[str, tuple[list[float], int]]]:
    """Of all four ranks, of one start of processes."""
    return list(run_torchrun(4, run, timeout_s=110).check().results)  # type: ignore[arg-type]


@cache
def losses_of_one_process() -> list[float]:
    """The same model, by hand, with plain AdamW on all that the ranks read."""
    model = build_layers(SIZE, seed=0)
    (whole,) = model.stages([range(len(model))])
    replace_attention(whole, SPARSE)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = model.loss_fn(whole(windows(step)[:, :-1]), windows(step)[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_ranks_trains_as_one_process_does(layout: str) -> None:
    """float32: sums in another order, through 2 steps. The heads' layouts differ, so a slice needs its own."""
    for found in results():
        losses, _ = found[layout]
        assert losses == pytest.approx(losses_of_one_process(), abs=2e-5)
    assert sum(found[layout][1] for found in results()) == (8 if "pipe" not in LAYOUTS[layout][1] else 4)


def test_the_layout_matters() -> None:
    """The same model and bytes without the key: other losses, by more than the tolerance above."""
    model = build_layers(SIZE, seed=0)
    (whole,) = model.stages([range(len(model))])
    dense = model.loss_fn(whole(windows(0)[:, :-1]), windows(0)[:, 1:]).item()
    assert abs(dense - losses_of_one_process()[0]) > 1e-4


def test_a_model_without_known_attention_is_refused_before_any_rank_is_asked() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "sparse_attention": {"mode": "bigbird"}}
    with pytest.raises(ValueError, match="Linear has no attention module that onebit knows"):
        zero.initialize(model=torch.nn.Linear(2, 2), config=config)
