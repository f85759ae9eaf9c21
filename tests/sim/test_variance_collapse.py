"""A variance that collapses from one variance step to the next, as that of units that die, blows nothing up.

And one that has seen nothing is not rested on.
"""

from __future__ import annotations

import copy

import pytest
import torch
from muon_of import muon_of
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport, run_ranks

LR = 1e-3
# Steps before a dense one that two compressed ones follow; what is 1e-4 of itself, or its square, if D collapses.
PLACES = {"ZeroOneAdam": (64, "exp_avg_sq", 1e-8), "OnebitAdam": (108, "denominator", 1e-4)}


def largest_move(transport: SimTransport, name: str, beta2: float, size_after: float, by_hand: bool) -> float:
    """In lr: of the dense step in which D collapses and of the two after it. size_after: of gradients, from there."""
    steps, key, factor = PLACES[name]
    p = nn.Parameter(torch.zeros(1024))
    optimizer = getattr(onebit, name)([p], lr=LR, betas=(0.9, beta2), weight_decay=0.0, transport=transport)
    generator, largest = torch.Generator().manual_seed(transport.rank), 0.0
    for step in range(steps + 3):
        if by_hand and step == steps:
            for bucket in optimizer.buckets:
                bucket.flat[key].mul_(factor)
        before = p.detach().clone()
        p.grad = (1.0 if step < steps else size_after) * (0.3 + torch.randn(1024, generator=generator))
        optimizer.step()
        if step >= steps:
            assert (optimizer.stats.phase in ("variance", "refresh")) == (step == steps)
            largest = max(largest, float((p.detach() - before).abs().max()) / LR)
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("size_after", [0.0, 1e-4])
@pytest.mark.parametrize("name", PLACES)
def test_a_collapsed_variance_does_not_multiply_the_momentum(name: str, size_after: float) -> None:
    """Kept in units of moves it is what it was; 0/1 Adam at 5acfc44, which kept gradients, moved by 6,300 lr."""
    for largest in run_ranks(2, lambda transport: largest_move(transport, name, 0.999, size_after, by_hand=True)):
        assert 0.1 < largest < 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_nor_does_one_that_collapses_within_the_step(name: str) -> None:
    """With β2 = 0 the variance is that of one gradient, 1e-8 of the one before."""
    for largest in run_ranks(2, lambda transport: largest_move(transport, name, 0.0, 1e-4, by_hand=False)):
        assert 0.1 < largest < 3.0


# ---------------------------------------------------------------- a variance that has seen nothing

ZEROS = 12
RESTING = {
    "OnebitAdam": (onebit.OnebitAdam, {"freeze_step": 5}),
    "OnebitAdam of moves": (onebit.OnebitAdam, {"freeze_step": 5, "momentum_of": "moves"}),
    "OnebitLamb": (onebit.OnebitLamb, {"freeze_step": 5}),
    "OnebitMuon": (muon_of, {"freeze_step": 5}),
    "ZeroOneAdam": (onebit.ZeroOneAdam, {"var_freeze_step": 5, "local_step_scaler": 12, "local_step_clipper": 2}),
}


def after_zeros(transport: SimTransport, name: str, zeros: int, saves_at: int | None = None) -> list[Tensor]:
    """Parameters after so many steps of gradients of zero and 15 others. saves_at: where another run takes over."""
    kind, options = RESTING[name]

    def begin() -> torch.optim.Optimizer:
        return kind(params, lr=LR, weight_decay=0.0, transport=transport, **options)

    params = [nn.Parameter(torch.linspace(-1.0, 1.0, 320).view(shape)) for shape in ((16, 20), (320,))]
    optimizer = begin()
    for step in range(zeros + 15):
        if step == saves_at:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = begin()
            optimizer.load_state_dict(state)
        generator = torch.Generator().manual_seed(2 * max(step - zeros, 0) + transport.rank)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) * (1e-3 if step >= zeros else 0.0)
        optimizer.step()
    if hasattr(optimizer, "sync"):
        optimizer.sync()
    return [p.detach() for p in params]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTING)
def test_a_warm_up_begins_with_the_first_gradient_that_is_not_zero(name: str) -> None:
    """To the bit, whoever takes over on the way."""
    expected = run_ranks(2, lambda transport: after_zeros(transport, name, 0))
    for saves_at in (None, ZEROS // 2, ZEROS + 2):
        found = run_ranks(2, lambda transport, at=saves_at: after_zeros(transport, name, ZEROS, at))
        for a, b in zip(expected, found, strict=True):
            assert all(map(torch.equal, a, b)), saves_at


def test_a_model_without_gradients_at_first_gets_no_more_refreshes_than_one_with_zeros() -> None:
    """Its first gradients had begun the refreshes anew, as those of layers that are unfrozen: twice as many."""

    def phases(transport: SimTransport, first: Tensor | None) -> list[str]:
        p, found = nn.Parameter(torch.zeros(64)), []
        optimizer = onebit.OnebitAdam([p], transport=transport, compression="always")
        for step in range(40):
            generator = torch.Generator().manual_seed(2 * step + transport.rank)
            p.grad = first if step < 3 else torch.randn(64, generator=generator)
            optimizer.step()
            found.append(optimizer.stats.phase)
        return found

    expected = run_ranks(2, lambda transport: phases(transport, torch.zeros(64)))
    assert run_ranks(2, lambda transport: phases(transport, None)) == expected
