"""Dense LaProp: equal to its textbook loop, resumable to the bit, and never another optimizer's state."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.reference.laprop import laprop

SIZES = (7, 30)
LRS = [0.05 * (1 - k / 60) for k in range(30)]


def gradients(step: int) -> np.ndarray:
    """Of sizes that fall by a factor of a hundred, which the order of the two averages tells apart."""
    generator = np.random.default_rng(step)
    return (generator.normal(size=sum(SIZES)) * 10 ** (-2 * step / 30)).astype(np.float32).astype(np.float64)


def start(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    x = torch.from_numpy(np.random.default_rng(99).normal(size=sum(SIZES))).to(dtype)
    return [nn.Parameter(part.clone()) for part in x.split(SIZES)]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> np.ndarray:
    trajectory = []
    for step in steps:
        optimizer.param_groups[0]["lr"] = LRS[step]
        for p, g in zip(params, torch.from_numpy(gradients(step)).split(SIZES), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
        trajectory.append(torch.cat([p.detach().double() for p in params]).numpy())
    return np.stack(trajectory)


@pytest.mark.parametrize("beta2", [0.999, 15 / 16])
def test_equals_the_textbook_loop(beta2: float) -> None:
    """float32 against float64: rounding only. AdamW's order of averages is far away."""
    params, others = start(), start()
    options = {"betas": (0.9, beta2), "weight_decay": 0.1}
    x0 = torch.cat([p.detach().double() for p in params]).numpy()
    expected = laprop(x0, [gradients(step) for step in range(len(LRS))], LRS, **options)
    found = train(params, onebit.LaProp(params, **options), range(len(LRS)))
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
    adamw = train(others, torch.optim.AdamW(others, **options), range(len(LRS)))
    assert np.abs(adamw - expected).max() > 1e-2


def test_a_resumed_run_goes_on_to_the_bit_and_moments_stay_float32() -> None:
    params = start(torch.bfloat16)
    optimizer = onebit.LaProp(params)
    train(params, optimizer, range(11))
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(params)
    assert {t.dtype for p in params for t in optimizer.state[p].values()} == {torch.float32}
    resumed = onebit.LaProp(values)
    resumed.load_state_dict(state)
    both = [train(ps, o, range(11, 20)) for ps, o in ((params, optimizer), (values, resumed))]
    assert np.array_equal(*both) and resumed.state[values[0]]["exp_avg_sq"].dtype == torch.float32


def test_another_optimizers_state_is_refused_before_anything_changes() -> None:
    params = start()
    adamw = torch.optim.AdamW(params)
    train(params, adamw, range(2))
    optimizer = onebit.LaProp(params)
    with pytest.raises(ValueError, match="has no exp_avg_update there, so it is not LaProp's"):
        optimizer.load_state_dict(adamw.state_dict())
    assert not optimizer.state


def test_a_state_of_another_shape_is_refused_before_anything_changes() -> None:
    """A moment of one element would be spread over all of a parameter."""
    ours, theirs = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))], [nn.Parameter(torch.ones(3)),
                                                                               nn.Parameter(torch.ones(1))]  # fmt: skip
    saved, optimizer = onebit.LaProp(theirs), onebit.LaProp(ours)
    for p in theirs:
        p.grad = torch.ones_like(p)
    saved.step()
    with pytest.raises(ValueError, match=r"of parameter 1 has shape \(1,\) there and \(3,\) here"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state


def test_what_has_no_gradient_stays_and_lr_0_moves_nothing() -> None:
    params = start()
    optimizer = onebit.LaProp(params, lr=0.0)
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True)) and params[1] not in optimizer.state
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(params[0], before[0]) and torch.equal(params[1], before[1])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "lr must not be negative"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas must lie in"),
        ({"amsgrad": True}, ValueError, "no one-bit form|amsgrad"),
        ({"momentum": 0.9}, TypeError, "unexpected keyword argument 'momentum'"),
    ],
)
def test_bad_options_are_refused(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        onebit.LaProp(start(), **options)
    p = nn.Parameter(torch.zeros(3))
    optimizer = onebit.LaProp([p])
    with pytest.raises(ValueError, match="also"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))] * 2, "foo": 1})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    p, table = (torch.ones(5, requires_grad=True) for _ in range(2))
    p.grad, table.grad = torch.ones(5), torch.zeros(5).to_sparse()
    optimizer = onebit.LaProp([p, table])
    with pytest.raises(RuntimeError, match=r"LaProp needs dense gradients.*sparse=False"):
        optimizer.step()
    assert not optimizer.state and torch.equal(p.detach(), torch.ones(5))
