"""Models in bfloat16 and float16: every optimizer trains float32 masters of them, which checkpoints hold."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator

import pytest
import torch
from family import FAMILY, batch, model, same
from family import make as make_of
from torch import Tensor, nn

import onebit
from onebit import zero
from onebit.comm import SimTransport, run_ranks
from onebit.layout.masters import Masters, master_of
from onebit.optimizer import CompressedOptimizer


def make(name: str, params: list[nn.Parameter], transport: SimTransport, **options: object) -> CompressedOptimizer:
    return make_of(name, nn.ParameterList(params), transport, **options)


DENSE = {
    "Lamb": onebit.Lamb,
    "LaProp": onebit.LaProp,
    "Lion": onebit.Lion,
    "Muon": lambda ps, **options: onebit.Muon(
        [{"params": ps[::2], "use_muon": True}, {"params": ps[1:2], "use_muon": False}], **options
    ),
}
STEPS = 14


def built(name: str, params: list[nn.Parameter], transport: SimTransport) -> torch.optim.Optimizer:
    """With a step so small that bfloat16 alone would lose most of it."""
    if name in DENSE:
        return DENSE[name](params, lr=1e-4, weight_decay=0.1)
    if name == "ShardedOnebitAdam, stage 0":
        return zero.ShardedOnebitAdam(params, lr=1e-4, weight_decay=0.1, stage=0, warmup_steps=4, transport=transport)
    return make(name, params, transport, lr=1e-4, weight_decay=0.1)


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """The values of one dtype's rounding, in any."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(20, 33), (33,), (300, 3)]
    return [nn.Parameter(torch.randn(s, generator=generator).to(torch.bfloat16).to(dtype)) for s in shapes]


def steps(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, rank: int
) -> Iterator[list[Tensor]]:
    """The same gradients whatever the parameters are: rounded to bfloat16 in all dtypes."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16).to(p.dtype)
        optimizer.step()
        yield [p.detach().clone() for p in params]


ALL = [*FAMILY, *DENSE, "ShardedOnebitAdam, stage 0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in ALL),
        *((name, torch.float16) for name in ("OnebitAdam", "Lamb", "ShardedOnebitAdam, stage 0")),
    ],
)
def test_low_parameters_are_the_rounded_float32_ones_of_the_same_gradients(name: str, dtype: torch.dtype) -> None:
    """To the bit, on every rank and in every step; masters are the float32 parameters."""

    def ours(transport: SimTransport) -> bool:
        exact, low = parameters(torch.float32), parameters(dtype)
        here = built(name, exact, transport), built(name, low, transport)
        runs = [
            steps(one, params, range(STEPS), transport.rank) for one, params in zip(here, (exact, low), strict=True)
        ]
        for ours, theirs in zip(*runs, strict=True):
            if not all(torch.equal(p.to(dtype), q) for p, q in zip(ours, theirs, strict=True)):
                return False
        assert all(torch.equal(master_of(here[1], q), p) for p, q in zip(exact, low, strict=True))
        return not any(torch.equal(p, q.float()) for p, q in zip(exact, low, strict=True))

    assert all(run_ranks(1 if name in DENSE else 2, ours))


def test_masters_count_as_state_and_float32_parameters_have_none() -> None:
    def ours(transport: SimTransport) -> list[int]:
        return [make("OnebitAdam", parameters(d), transport).state_bytes() for d in (torch.float32, torch.bfloat16)]

    exact, low = run_ranks(2, ours)[0]
    assert low - exact == 4 * sum(p.numel() for p in parameters(torch.float32))


def test_of_a_mixed_model_only_the_low_parameters_have_masters() -> None:
    params = [*parameters(torch.bfloat16), *parameters(torch.float32, seed=1)]
    optimizer = make("OnebitAdam", params, SimTransport())
    list(steps(optimizer, params, range(STEPS), 0))
    assert ["master" in optimizer.state[p] for p in params] == [True] * 3 + [False] * 3
    assert all(master_of(optimizer, p).data_ptr() == p.data_ptr() for p in params[3:])


# -------------------------------------------------------------------------------- parameters changed outside of a step


@pytest.mark.parametrize("name", ["OnebitAdam", "Lamb", "ShardedOnebitAdam, stage 0"])
def test_a_value_written_outside_of_a_step_becomes_the_masters(name: str) -> None:
    params = parameters(torch.bfloat16)
    optimizer = built(name, params, SimTransport())
    list(steps(optimizer, params, range(6), 0))
    kept = master_of(optimizer, params[0]).clone()
    with torch.no_grad():
        params[0][0, 0] = 64.0
        params[1].zero_()
    for p in params:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    master = master_of(optimizer, params[0])
    assert params[0][0, 0] == master[0, 0] == 64.0 and not params[1].any()
    assert torch.equal(master.flatten()[1:], kept.flatten()[1:])  # all others have lost nothing


def test_weights_swapped_out_and_back_leave_no_trace() -> None:
    """As an average of weights for an evaluation is; also through .data, in a step that is looked at."""

    def run(swaps: bool) -> list[Tensor]:
        params = parameters(torch.bfloat16)
        optimizer = make("OnebitAdam", params, SimTransport())
        for step in range(8):
            if swaps:
                own = [p.detach().clone() for p in params]
                for p in params:
                    p.data = torch.zeros_like(p)
                for p, x in zip(params, own, strict=True):
                    p.data.copy_(x)
            list(steps(optimizer, params, range(step, step + 1), 0))
        return [master_of(optimizer, p) for p in params]

    assert all(map(torch.equal, run(swaps=False), run(swaps=True)))


def test_a_model_that_is_cast_behind_its_optimizer_is_an_error() -> None:
    net = model()
    optimizer = make_of("OnebitAdam", net, SimTransport())
    net.to(torch.bfloat16)
    net(batch(0, 0, torch.bfloat16)[0]).float().sum().backward()
    with pytest.raises(RuntimeError, match=r"was torch.float32 when .* is torch.bfloat16 now.*cast the model first"):
        optimizer.step()


def test_masters_that_differ_between_ranks_are_found() -> None:
    def ours(transport: SimTransport) -> None:
        params = parameters(torch.bfloat16)
        optimizer = make("OnebitAdam", params, transport, check_replicas_every=0)
        list(steps(optimizer, params, range(3), transport.rank))
        if transport.rank == 1:
            master_of(optimizer, params[0])[0, 0] += 1e-6
        with pytest.raises(onebit.ReplicaError, match="masters of the bucket"):
            optimizer.check_replicas()

    run_ranks(2, ours)


# -------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", ALL)
def test_resume_equals_no_interruption_in_bfloat16(name: str) -> None:
    """To the bit, whichever is loaded first; stopped between synchronisations of 0/1 Adam, too."""

    def ours(transport: SimTransport) -> bool:
        rank, stop = transport.rank, 9
        straight = parameters(torch.bfloat16)
        whole = built(name, straight, transport)
        list(steps(whole, straight, range(STEPS), rank))
        first = parameters(torch.bfloat16)
        before = built(name, first, transport)
        list(steps(before, first, range(stop), rank))
        file = io.BytesIO()
        torch.save({"model": [p.data for p in first], "optimizer": before.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for is_model_first in (True, False):
            second = parameters(torch.bfloat16, seed=5)
            after = built(name, second, transport)
            list(steps(after, second, range(50, 53), rank))
            for is_models_turn in (is_model_first, not is_model_first):
                if is_models_turn:
                    with torch.no_grad():
                        for p, x in zip(second, saved["model"], strict=True):
                            p.copy_(x)
                else:
                    after.load_state_dict(copy.deepcopy(saved["optimizer"]))
            list(steps(after, second, range(stop, STEPS), rank))
            assert all(map(torch.equal, straight, second)), is_model_first
            assert same(whole.state_dict(), after.state_dict()), is_model_first
        return True

    assert all(run_ranks(1 if name in DENSE else 2, ours))


@pytest.mark.parametrize("name", ["OnebitAdam", *DENSE, "ShardedOnebitAdam, stage 0"])
def test_a_float32_models_state_is_taken_and_its_masters_are_the_parameters(name: str) -> None:
    exact, low = parameters(torch.float32), parameters(torch.bfloat16)
    before, after = built(name, exact, SimTransport()), built(name, low, SimTransport())
    list(steps(before, exact, range(4), 0))
    list(steps(after, low, range(20, 23), 0))
    with torch.no_grad():
        for p, q in zip(low, exact, strict=True):
            p.copy_(q)
    rounded = [p.detach().float() for p in low]
    after.load_state_dict(before.state_dict())
    for group in after.param_groups:
        group["lr"] = 0.0
    list(steps(after, low, range(1), 0))
    assert all(torch.equal(master_of(after, p), x) for p, x in zip(low, rounded, strict=True))


@pytest.mark.parametrize("name", ["OnebitAdam", *DENSE, "ShardedOnebitAdam, stage 0"])
def test_masters_are_refused_by_float32_parameters(name: str) -> None:
    """They are what the parameters should be, and the parameters are loaded by another call."""
    exact, low = parameters(torch.float32), parameters(torch.bfloat16)
    before, after = built(name, low, SimTransport()), built(name, exact, SimTransport())
    list(steps(before, low, range(4), 0))
    unchanged = copy.deepcopy(after.state_dict()["state"])
    with pytest.raises(ValueError, match=r"parameter.* is float32 here, .* with a float32 master: write the masters"):
        after.load_state_dict(before.state_dict())
    assert same(after.state_dict()["state"], unchanged)


def test_another_number_of_ranks_takes_the_masters_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    def before(transport: SimTransport) -> tuple[dict, list[Tensor]]:
        params = parameters(torch.bfloat16)
        optimizer = make("OnebitAdam", params, transport)
        list(steps(optimizer, params, range(9), transport.rank))
        return copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]

    states, weights = zip(*run_ranks(2, before), strict=True)

    def after(transport: SimTransport) -> bool:
        params = parameters(torch.bfloat16)
        with torch.no_grad():
            for p, x in zip(params, weights[0], strict=True):
                p.copy_(x)
        optimizer = make("OnebitAdam", params, transport)
        optimizer.load_state_dicts(states)
        masters = [master_of(optimizer, p).clone() for p in params]
        list(steps(optimizer, params, range(9, 11), transport.rank))
        return all(torch.equal(m, states[0]["state"][k]["master"]) for k, m in enumerate(masters))

    for world_size in (1, 3):
        assert all(run_ranks(world_size, after))


def test_masters_of_no_parameters() -> None:
    assert not Masters(()).has_any and Masters(()).flat.numel() == 0
    Masters(()).settle()
    Masters(()).write_back()
