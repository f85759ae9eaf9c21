"""Dense Lion and LaProp: equal to their textbook loops, resumable to the bit, and never another optimizer's state."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.reference.laprop import laprop

SIZES = (7, 30)
STEPS = 30
BOTH = (onebit.Lion, onebit.LaProp)


def gradients(step: int, fall: float = 0.0) -> np.ndarray:
    """Of sizes that fall by this power of ten in all steps, which tells the order of LaProp's two averages apart."""
    generator = np.random.default_rng(step)
    return (generator.normal(size=sum(SIZES)) * 10 ** (-fall * step / STEPS)).astype(np.float32).astype(np.float64)


def start(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    x = torch.from_numpy(np.random.default_rng(99).normal(size=sum(SIZES))).to(dtype)
    return [nn.Parameter(part.clone()) for part in x.split(SIZES)]


def flat(params: list[nn.Parameter]) -> np.ndarray:
    return torch.cat([p.detach().double() for p in params]).numpy()


def rates(lr: float) -> list[float]:
    return [lr * (1 - k / 60) for k in range(STEPS)]


def train(
    params: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: range = range(STEPS),
    lr: float = 0.01,
    fall: float = 0.0,
) -> np.ndarray:
    trajectory = []
    for step in steps:
        optimizer.param_groups[0]["lr"] = rates(lr)[step]
        for p, g in zip(params, torch.from_numpy(gradients(step, fall)).split(SIZES), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
        trajectory.append(flat(params))
    return np.stack(trajectory)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98)])
def test_lion_equals_its_textbook_loop(betas: tuple[float, float], weight_decay: float) -> None:
    """float32 against float64, rounding only: no sum of these gradients is so near to zero that its sign differs."""
    params = start()
    found = train(params, onebit.Lion(params, betas=betas, weight_decay=weight_decay))
    x, m = flat(start()), np.zeros(sum(SIZES))
    for step, lr in enumerate(rates(0.01)):
        g = gradients(step)
        update = np.sign(betas[0] * m + (1 - betas[0]) * g)
        x = (1 - lr * weight_decay) * x - lr * update
        m = betas[1] * m + (1 - betas[1]) * g
        np.testing.assert_allclose(found[step], x, atol=2e-6, rtol=0)


@pytest.mark.parametrize("beta2", [0.999, 15 / 16])
def test_laprop_equals_its_textbook_loop(beta2: float) -> None:
    """float32 against float64: rounding only. AdamW's order of averages is far away."""
    params, others, falls = start(), start(), {"lr": 0.05, "fall": 2.0}
    options = {"betas": (0.9, beta2), "weight_decay": 0.1}
    expected = laprop(flat(params), [gradients(step, 2.0) for step in range(STEPS)], rates(0.05), **options)
    found = train(params, onebit.LaProp(params, **options), **falls)
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
    adamw = train(others, torch.optim.AdamW(others, **options), **falls)
    assert np.abs(adamw - expected).max() > 1e-2


@pytest.mark.parametrize("kind", BOTH)
def test_a_resumed_run_goes_on_to_the_bit_and_moments_stay_float32(kind: type[torch.optim.Optimizer]) -> None:
    params = start(torch.bfloat16)
    optimizer = kind(params)
    train(params, optimizer, range(11))
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(params)
    resumed = kind(values)
    resumed.load_state_dict(state)
    for each, its in ((optimizer, params), (resumed, values)):
        assert {t.dtype for p in its for t in each.state[p].values()} == {torch.float32}
    both = [train(ps, o, range(11, 20)) for ps, o in ((params, optimizer), (values, resumed))]
    assert np.array_equal(*both)


@pytest.mark.parametrize(
    ("kind", "other", "words"),
    [
        *(
            (onebit.Lion, other, r"has (no )?\w+ there.*not Lion's; load a state of Lion, or none")
            for other in (torch.optim.AdamW, onebit.LaProp)
        ),
        (onebit.LaProp, torch.optim.AdamW, "has no exp_avg_update there, so it is not LaProp's"),
    ],
)
def test_another_optimizers_state_is_refused_before_anything_changes(
    kind: type[torch.optim.Optimizer], other: type[torch.optim.Optimizer], words: str
) -> None:
    """AdamW's has moments of the same names."""
    params = start()
    theirs = other(params)
    train(params, theirs, range(2))
    optimizer = kind(params)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state


def test_a_state_of_another_shape_is_refused_before_anything_changes() -> None:
    """A moment of one element would be spread over all of a parameter."""
    ours, theirs = ([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(n))] for n in (3, 1))
    saved, optimizer = onebit.LaProp(theirs), onebit.LaProp(ours)
    for p in theirs:
        p.grad = torch.ones_like(p)
    saved.step()
    with pytest.raises(ValueError, match=r"of parameter 1 has shape \(1,\) there and \(3,\) here"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize(("kind", "lr", "gradient"), [(onebit.Lion, 0.1, 0.0), (onebit.LaProp, 0.0, 1.0)])
def test_what_has_no_gradient_stays_nor_do_zeros_or_a_rate_of_zero_move(
    kind: type[torch.optim.Optimizer], lr: float, gradient: float
) -> None:
    params = start()
    optimizer = kind(params, lr=lr)
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.full_like(params[0], gradient)
    optimizer.step()
    assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True)) and params[1] not in optimizer.state
    optimizer.param_groups[0]["lr"] = 0.1
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0]) and torch.equal(params[1], before[1])


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        *((kind, {"lr": -1.0}, ValueError, "lr must not be negative") for kind in BOTH),
        *((kind, {"betas": (0.9, 1.0)}, ValueError, "betas must be in") for kind in BOTH),
        (onebit.Lion, {"weight_decay": -1.0}, ValueError, "weight_decay must not be negative"),
        (onebit.Lion, {"eps": 1e-8}, TypeError, "unexpected keyword argument 'eps'"),
        (onebit.LaProp, {"amsgrad": True}, ValueError, "no one-bit form|amsgrad"),
        (onebit.LaProp, {"momentum": 0.9}, TypeError, "unexpected keyword argument 'momentum'"),
    ],
)
def test_bad_options_are_refused(
    kind: type[torch.optim.Optimizer], options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kind(start(), **options)


def test_a_bad_group_is_refused_before_anything_changes() -> None:
    optimizer = onebit.LaProp(start())
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
