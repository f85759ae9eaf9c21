"""onebit.LocalSteps of parameters in bfloat16: each step is that of their float32 masters, rounded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from family import same
from torch import Tensor, nn

import onebit
from onebit.comm import IdentityCodec, SignCodec, SimTransport, Transport, run_ranks

SHAPES = [(30, 20), (300,), (), (0, 4), (16, 16)]
LOW = torch.bfloat16
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "LaProp": lambda params: onebit.LaProp(params, lr=0.01),  # has masters of its own where nobody else has
}


class Run:
    """One rank's training, on gradients that are representable in bfloat16 and the same for every dtype."""

    def __init__(self, transport: Transport, dtype: torch.dtype, inner: str = "AdamW", **options: Any):
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape, generator=generator).to(LOW).to(dtype)) for shape in SHAPES]
        options = {"codec": SignCodec(block=64), "bucket_cap_mb": 0.0015, "every": 3} | options
        self.optimizer = onebit.LocalSteps(INNER[inner](self.params), transport=transport, **options)
        self.rank = transport.rank

    def train(self, steps: Iterable[int]) -> Run:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            for p in self.params:
                p.grad = torch.randn(p.shape, generator=generator).to(LOW).to(p.dtype)
            kept = [p.grad for p in self.params]
            self.optimizer.step()
            assert all(p.grad is grad for p, grad in zip(self.params, kept, strict=True))
        return self

    def low(self) -> list[Tensor]:
        return [p.detach().to(LOW, copy=True) for p in self.params]

    def masters(self) -> list[Tensor]:
        return [w.clone() for bucket in self.optimizer.buckets for w in bucket.local_values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "options"),
    [*((inner, {}) for inner in INNER), ("AdamW", {"delay": 2}), ("SGD", {"codec": IdentityCodec()})],
)
def test_a_step_is_that_of_float32_parameters_rounded(inner: str, options: dict[str, Any]) -> None:
    def ours(transport: SimTransport, dtype: torch.dtype) -> list[list[Tensor]]:
        run, found = Run(transport, dtype, inner, **options), []
        for step in range(10):
            run.train([step])
            found += [run.low(), run.masters()]
            assert all(p.dtype == dtype for p in run.params)
        with run.optimizer.anchors():
            found.append(run.low())
        run.optimizer.sync()
        assert "master" not in run.optimizer.state[run.params[0]]
        return [*found, run.low(), run.masters()]

    low, full = (run_ranks(2, lambda t, dtype=dtype: ours(t, dtype)) for dtype in (LOW, torch.float32))
    for mine, theirs in zip(low, full, strict=True):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))
    assert same(low[0][-1], low[1][-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "stop"), [*(({}, stop) for stop in (0, 2, 3)), *(({"delay": 2}, stop) for stop in (3, 4, 5))]
)
def test_a_resumed_run_is_one_without_interruption(options: dict[str, Any], stop: int) -> None:
    def ours(transport: SimTransport) -> bool:
        whole = Run(transport, LOW, **options).train(range(9))
        first = Run(transport, LOW, **options).train(range(stop))
        saved = copy.deepcopy((first.optimizer.state_dict(), first.low()))
        second = Run(transport, LOW, **options)
        for p, value in zip(second.params, saved[1], strict=True):
            p.data.copy_(value)
        second.optimizer.load_state_dict(saved[0])
        second.train(range(stop, 9))
        return same(second.low(), whole.low()) and same(second.masters(), whole.masters())

    assert run_ranks(2, ours) == [True, True]


def test_what_others_write_is_taken_over_and_what_they_leave_keeps_its_low_bits() -> None:
    def ours(transport: SimTransport) -> None:
        run = Run(transport, LOW, every=100).train(range(4))
        before = run.masters()
        with torch.no_grad():
            run.params[1][5] = 3.0
        run.optimizer.state_dict()
        after = run.masters()
        edited = next(k for k, w in enumerate(before) if w.shape == (300,))
        assert after[edited][5] == 3.0
        before[edited][5] = 3.0
        assert same(before, after)

    run_ranks(2, ours)


def test_a_state_of_the_inner_optimizer_in_bfloat16_becomes_float32() -> None:
    def ours(transport: SimTransport) -> None:
        params = [nn.Parameter(torch.ones(5, 3, dtype=LOW))]
        inner = torch.optim.AdamW(params, lr=0.01)
        params[0].grad = torch.ones_like(params[0])
        inner.step()
        assert inner.state[params[0]]["exp_avg"].dtype == LOW
        saved = copy.deepcopy(inner.state_dict())
        wrapped = onebit.LocalSteps(inner, 2, transport=transport)
        assert inner.state[params[0]]["exp_avg"].dtype == torch.float32
        wrapped.step()
        fresh = onebit.LocalSteps(torch.optim.AdamW(params, lr=0.01), 2, transport=transport)
        fresh.load_state_dict(saved)
        assert fresh.state[params[0]]["exp_avg"].dtype == torch.float32
        fresh.step()

    run_ranks(2, ours)


def test_another_world_takes_the_masters_over() -> None:
    def first(transport: SimTransport) -> dict:
        return copy.deepcopy(Run(transport, LOW).train(range(6)).optimizer.state_dict())  # right behind a round

    states = run_ranks(4, first)

    def second(transport: SimTransport) -> list[Tensor]:
        run = Run(transport, LOW)
        run.optimizer.load_state_dicts(states)
        anchors = [view for bucket in run.optimizer.buckets for view in bucket.layout.views(bucket.anchor)]
        assert same(run.masters(), anchors)
        return run.train(range(6, 12)).low()

    a, b = run_ranks(2, second)
    assert same(a, b)


def test_small_updates_add_up_and_a_change_of_dtype_is_an_error() -> None:
    """Steps of 1e-4 on ones, which bfloat16 alone would round away."""

    def ours(transport: SimTransport) -> None:
        params = [nn.Parameter(torch.ones(4, dtype=LOW))]
        optimizer = onebit.LocalSteps(torch.optim.SGD(params, lr=1e-4), 10, transport=transport)
        for _ in range(100):
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        assert (params[0] < 0.995).all()
        params[0].grad = None
        params[0].data = params[0].data.float()
        with pytest.raises(RuntimeError, match="cast the model first"):
            optimizer.step()

    run_ranks(2, ours)
