"""Dense Lion: equal to its textbook loop, resumable to the bit, and never another optimizer's state."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import onebit

LRS = [0.01 * (1 - k / 60) for k in range(30)]


def gradients(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=37).astype(np.float32).astype(np.float64)


def start(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    x = torch.from_numpy(np.random.default_rng(99).normal(size=37)).to(dtype)
    return [nn.Parameter(part.clone()) for part in x.split((7, 30))]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> np.ndarray:
    trajectory = []
    for step in steps:
        optimizer.param_groups[0]["lr"] = LRS[step]
        for p, g in zip(params, torch.from_numpy(gradients(step)).split((7, 30)), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
        trajectory.append(torch.cat([p.detach().double() for p in params]).numpy())
    return np.stack(trajectory)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98)])
def test_equals_the_textbook_loop(betas: tuple[float, float], weight_decay: float) -> None:
    """float32 against float64, rounding only: no sum of these gradients is so near to zero that its sign differs."""
    params = start()
    found = train(params, onebit.Lion(params, betas=betas, weight_decay=weight_decay), range(len(LRS)))
    x, m = torch.cat([p.detach().double() for p in start()]).numpy(), np.zeros(37)
    for step, lr in enumerate(LRS):
        g = gradients(step)
        update = np.sign(betas[0] * m + (1 - betas[0]) * g)
        x = (1 - lr * weight_decay) * x - lr * update
        m = betas[1] * m + (1 - betas[1]) * g
        np.testing.assert_allclose(found[step], x, atol=2e-6, rtol=0)


def test_a_resumed_run_goes_on_to_the_bit_and_the_moment_stays_float32() -> None:
    params = start(torch.bfloat16)
    optimizer = onebit.Lion(params)
    train(params, optimizer, range(11))
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(params)
    resumed = onebit.Lion(values)
    resumed.load_state_dict(state)
    both = [train(ps, o, range(11, 20)) for ps, o in ((params, optimizer), (values, resumed))]
    assert np.array_equal(*both) and resumed.state[values[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("other", [torch.optim.AdamW, onebit.LaProp])
def test_another_optimizers_state_is_refused_before_anything_changes(other: type[torch.optim.Optimizer]) -> None:
    """AdamW's has a moment of the same name."""
    params = start()
    theirs = other(params)
    train(params, theirs, range(2))
    optimizer = onebit.Lion(params)
    with pytest.raises(ValueError, match=r"parameter 0 has (no )?\w+ there.*not Lion's; load a state of Lion, or none"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state


def test_what_has_no_gradient_or_only_zeros_stays() -> None:
    params = start()
    optimizer = onebit.Lion(params, lr=0.1)
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True)) and params[1] not in optimizer.state


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "lr must not be negative"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas must lie in"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must not be negative"),
        ({"eps": 1e-8}, TypeError, "unexpected keyword argument 'eps'"),
    ],
)
def test_bad_options_are_refused(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        onebit.Lion(start(), **options)
