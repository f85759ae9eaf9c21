"""A bad batch: gradients of one rank that are far beyond all others, for a step or several. AdamW is the measure."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import IdentityCodec, SimTransport, run_ranks
from onebit.dense import average_gradients
from onebit.zero import ShardedOnebitAdam, ShardedOnebitLamb, ShardedZeroOneAdam

pytestmark = pytest.mark.slow

COMMON = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": 0.0}
FORMS: dict[str, tuple[type, dict]] = {
    "stage 0": (ShardedOnebitAdam, {"stage": 0}),
    "stage 1": (ShardedOnebitAdam, {"stage": 1}),
    "stage 2": (ShardedOnebitAdam, {"stage": 2}),
    "LAMB, stage 2": (ShardedOnebitLamb, {"stage": 2}),
    "0/1, stage 1": (ShardedZeroOneAdam, {"local_step_scaler": 2, "local_step_clipper": 2, "local_step_start": 20}),
}
BEGIN, STEPS = 20, 48
SHAPES = ((33, 20), (33,), (700,))

Spoil = Callable[[int, int], float]  # what a rank's gradients are multiplied by: of a step, and a rank


def bad_batch(factor: float, steps: int = 1, begin: int = BEGIN) -> Spoil:
    return lambda step, rank: factor if rank == 1 and begin <= step < begin + steps else 1.0


class Training:
    """Parameters on their way to a target; a gradient is the distance and noise of (step, rank)."""

    def __init__(self, rank: int):
        generator = torch.Generator().manual_seed(7)
        self.rank = rank
        self.targets = [1.0 + torch.randn(shape, generator=generator) for shape in SHAPES]
        self.params = [nn.Parameter(0.5 + 0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]

    def backward(self, step: int, spoil: Spoil) -> None:
        """Through autograd: some of it is sent meanwhile."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        grads = [
            (p.detach() - t - 0.3 * torch.randn(t.shape, generator=generator)) * spoil(step, self.rank)
            for p, t in zip(self.params, self.targets, strict=True)
        ]
        for p in self.params:
            p.grad = None
        torch.autograd.backward(self.params, grads)

    def loss(self) -> float:
        squares = [(p.detach() - t).square().sum() for p, t in zip(self.params, self.targets, strict=True)]
        return float(sum(squares)) / sum(t.numel() for t in self.targets)


def train(
    make: Callable[[list[nn.Parameter], SimTransport], torch.optim.Optimizer],
    spoil: Spoil,
    ranks: int = 3,
    steps: int = STEPS,
) -> list[tuple[float, list[Tensor], object]]:
    """By rank: the loss, the parameters and the stats after these steps."""

    def ours(transport: SimTransport) -> tuple[float, list[Tensor], object]:
        run = Training(transport.rank)
        optimizer = make(run.params, transport)
        for step in range(steps):
            run.backward(step, spoil)
            if isinstance(optimizer, torch.optim.AdamW):
                average_gradients(run.params, transport)
            optimizer.step()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        return run.loss(), [p.detach().clone() for p in run.params], getattr(optimizer, "stats", None)

    return run_ranks(ranks, ours)


def sharded(form: str, **options: object) -> Callable[[list[nn.Parameter], SimTransport], torch.optim.Optimizer]:
    kind, own = FORMS[form]
    return lambda params, transport: kind(
        params, transport=transport, bucket_cap_mb=2e-3, **COMMON | {"warmup_steps": 8} | own | options
    )


def replicated(params: list[nn.Parameter], transport: SimTransport) -> torch.optim.Optimizer:
    return onebit.OnebitAdam(params, transport=transport, **COMMON)


@functools.cache
def adamw(factor: float, steps: int) -> float:
    return train(lambda params, _: torch.optim.AdamW(params, **COMMON), bad_batch(factor, steps))[0][0]


@functools.cache
def calm(form: str) -> list[tuple[float, list[Tensor], object]]:
    return train(sharded(form), bad_batch(1.0))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("form", "factor"), [*((form, 1e4) for form in FORMS), ("stage 1", 1e8)])
def test_one_bad_batch_on_one_rank_costs_no_more_than_in_adamw(form: str, factor: float) -> None:
    loss, _, _ = train(sharded(form), bad_batch(factor))[0]
    assert loss <= min(adamw(factor, 1), 1.5 * calm(form)[0][0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("form", "steps"), [("stage 1", 25), ("LAMB, stage 2", 5)])
def test_bad_batches_in_a_row_cost_no_more_than_in_adamw(form: str, steps: int) -> None:
    loss, _, _ = train(sharded(form), bad_batch(1e4, steps))[0]
    assert loss <= max(adamw(1e4, steps), 2.0 * calm(form)[0][0])


def test_what_is_sent_during_backward_is_bounded_to_the_bit_as_what_is_sent_after_it() -> None:
    storm = bad_batch(1e4, 5)
    early, late = (train(sharded("stage 1", overlap=overlap), storm, steps=BEGIN + 8) for overlap in (True, False))
    for (_, ours, stats), (_, theirs, _) in zip(early, late, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert stats.resent_steps == 0  # it is no edit of the user's: later steps go on to send in backward
    assert [stats.bounded_steps for _, _, stats in early] == [0, 5, 0]


@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_read_the_same_kind_of_data_are_never_bounded(form: str) -> None:
    assert [stats.bounded_steps for _, _, stats in calm(form)] == [0, 0, 0]


@pytest.mark.parametrize("factor", [0.0, 1e-30])
def test_a_rank_with_next_to_nothing_is_not_the_others_measure(factor: float) -> None:
    """Of two ranks one has (next to) no gradient for a while: the other trains on."""
    found = train(sharded("stage 1"), bad_batch(factor, 60), ranks=2, steps=60)
    assert found[0][0] < 0.5 and found[0][2].bounded_steps == 0


def test_a_run_resumed_before_a_storm_is_bounded_as_one_that_went_on() -> None:
    def ours(transport: SimTransport, interrupted: bool) -> list[Tensor]:
        run, storm = Training(transport.rank), bad_batch(1e-30, 9)  # with two ranks only what was usual can tell
        optimizer = sharded("stage 1")(run.params, transport)
        for step in range(30):
            if interrupted and step == 18:
                state, optimizer = optimizer.state_dict(), sharded("stage 1")(run.params, transport)
                optimizer.load_state_dict(state)
            run.backward(step, storm)
            optimizer.step()
        return [p.detach().clone() for p in run.params]

    whole, halves = (run_ranks(2, lambda transport, cut=cut: ours(transport, cut)) for cut in (False, True))
    assert all(torch.equal(a, b) for x, y in zip(whole, halves, strict=True) for a, b in zip(x, y, strict=True))


# ---------------------------------------------------------------- local steps

INNER: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.005),
}


def moves_after(inner: str, factor: float, **options: object) -> list[float]:
    """How far each rank moves by itself in the last local steps, long after a gradient times the factor on rank 1."""

    def ours(transport: SimTransport) -> float:
        run, spoil = Training(transport.rank), bad_batch(factor)
        optimizer = onebit.LocalSteps(INNER[inner](run.params), 8, transport=transport, **options)
        for step in range(102):  # 6 steps after a round
            run.backward(step, spoil)
            optimizer.step()
            if step % 8 == 1:
                before = [p.detach().clone() for p in run.params]
        return float(sum((p.detach() - q).square().sum() for p, q in zip(run.params, before, strict=True))) ** 0.5

    return run_ranks(3, ours)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("inner", "factor", "options"),
    [
        ("AdamW", 1e30, {}),
        ("AdamW", 1e15, {"delay": 1}),
        ("Adagrad", 1e30, {"delay": 1}),
        ("RMSprop", 1e15, {"codec": IdentityCodec()}),
    ],
    ids=["AdamW", "AdamW, finite", "Adagrad", "RMSprop, in full"],
)
def test_a_rank_whose_inner_state_is_spoilt_moves_again(inner: str, factor: float, options: dict, caplog) -> None:
    moves = moves_after(inner, factor, **options)
    assert moves[1] > 0.2 * moves[0]
    assert any("rank 1: " in message and "the inner optimizer's state of" in message for message in caplog.messages)


@pytest.mark.timeout(60)
def test_a_resumed_run_drops_inner_state_that_is_not_finite(caplog) -> None:
    def ours(transport: SimTransport) -> tuple[bool, int]:
        run = Training(transport.rank)
        optimizer = onebit.LocalSteps(INNER["AdamW"](run.params), 4, transport=transport)
        for step in range(6):
            run.backward(step, bad_batch(1.0))
            optimizer.step()
        state = optimizer.state_dict()
        if transport.rank == 1:
            state["state"][0]["exp_avg_sq"].fill_(torch.inf)
        optimizer = onebit.LocalSteps(INNER["AdamW"](run.params), 4, transport=transport)
        optimizer.load_state_dict(state)
        for step in range(6, 10):
            run.backward(step, bad_batch(1.0))
            optimizer.step()
        is_finite = bool(optimizer.state[run.params[0]]["exp_avg_sq"].isfinite().all())
        return is_finite, optimizer.stats.dropped_states

    assert run_ranks(3, ours) == [(True, 0), (True, 1), (True, 0)]


def test_a_run_that_converges_without_noise_keeps_its_inner_state() -> None:
    """Gradients and moves shrink by orders of magnitude in a few rounds: that is no standstill."""

    def ours(transport: SimTransport) -> int:
        p = nn.Parameter(torch.linspace(1.0, 2.0, 300))
        optimizer = onebit.LocalSteps(torch.optim.Adam([p], lr=0.05), 4, transport=transport, codec=IdentityCodec())
        for _ in range(200):
            p.grad = p.detach().clone()
            optimizer.step()
        return optimizer.stats.dropped_states

    assert run_ranks(2, ours) == [0, 0]


@pytest.mark.parametrize(("elements", "largest", "dropped"), [(1, 1.0, 0), (1, 1e15, 1), (8, 1e15, 1)])
def test_a_number_that_is_back_after_a_round_keeps_its_inner_state(elements: int, largest: float, dropped: int) -> None:
    """Number 0 goes to and fro in every third round; after a gradient that is far too large all stand still."""

    def ours(transport: SimTransport) -> int:
        p = nn.Parameter(torch.zeros(elements))
        inner = torch.optim.Adam([p], lr=0.05, betas=(0.0, 0.999))  # moves by the sign of the gradient
        optimizer = onebit.LocalSteps(inner, 4, transport=transport, codec=IdentityCodec())
        for step in range(80):
            p.grad = torch.full_like(p, largest if step == 20 and transport.rank == 1 else 1.0)
            if step // 4 % 3 == 1 and step % 2:
                p.grad[::2] *= -1
            optimizer.step()
        return optimizer.stats.dropped_states

    assert run_ranks(2, ours) == [0, dropped]


# ---------------------------------------------------------------- what is said of skipped steps


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", ["OnebitAdam", "stage 1", "stage 2"])
def test_a_finite_gradient_that_is_too_large_is_called_so(form: str, caplog) -> None:
    train(replicated if form == "OnebitAdam" else sharded(form), bad_batch(1e30, 3, begin=2), steps=6)
    told = [message for message in caplog.messages if "rank 1: " in message]
    assert told and all("too large to be squared in float32" in message for message in told)
    assert not any("gradient not finite" in message for message in told)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", ["OnebitAdam", "stage 1"])
def test_skips_in_a_row_are_told_with_their_step_and_ever_more_rarely(form: str, caplog) -> None:
    train(replicated if form == "OnebitAdam" else sharded(form), bad_batch(float("nan"), 40, begin=2), steps=43)
    told = [message for message in caplog.messages if "rank 1: gradient not finite" in message]
    assert len(told) == 7  # the first three, and the 4th, 8th, 16th, 32nd
    assert len(set(told)) == len(told) and all("step 3: " in message for message in told)
