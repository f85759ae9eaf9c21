"""The loss scale moves by DeepSpeed's rule: equal to a textbook loop, resumed to the bit, never below its least."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import onebit
from onebit import zero
from onebit.comm import SimTransport, run_ranks
from onebit.zero.config.sections import Fp16
from onebit.zero.precision import LossScale, cast_floats, cast_tables, loss_scale

RULES = st.fixed_dictionaries(
    {
        "initial_scale_power": st.integers(0, 8),
        "loss_scale_window": st.integers(1, 6),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
        "min_loss_scale": st.sampled_from([1.0, 0.25, 1e-5]),
    }
)


def textbook(rule: dict, overflows: list[bool]) -> list[float]:
    """The scale before each step, from the indices of the steps, as the peer keeps them; ends where it gives up."""
    scale, last_overflow, left = 2.0 ** rule["initial_scale_power"], -1, rule["hysteresis"]
    scales = []
    for step, overflowed in enumerate(overflows):
        scales.append(scale)
        if overflowed:
            if left > 1:
                left -= 1
            elif scale == rule["min_loss_scale"]:
                break
            else:
                scale = max(scale / 2, rule["min_loss_scale"])
            last_overflow = step
            continue
        quiet = step - last_overflow - 1
        if quiet > 0 and quiet % rule["loss_scale_window"] == 0:
            scale *= 2
            left = rule["hysteresis"]
        if rule["consecutive_hysteresis"]:
            left = rule["hysteresis"]
    return scales


def follow(scale: LossScale, overflows: list[bool]) -> list[float]:
    scales = []
    for overflowed in overflows:
        scales.append(scale.value)
        try:
            scale = scale.after(overflowed)
        except OverflowError:
            break
    return scales


@given(rule=RULES, overflows=st.lists(st.booleans(), max_size=120))
def test_the_scale_is_the_textbooks(rule: dict, overflows: list[bool]) -> None:
    assert follow(loss_scale(Fp16(enabled=True, **rule)), overflows) == textbook(rule, overflows)


@given(rule=RULES, before=st.lists(st.booleans(), max_size=40), after=st.lists(st.booleans(), max_size=40))
def test_resumed_is_uninterrupted(rule: dict, before: list[bool], after: list[bool]) -> None:
    start = scale = loss_scale(Fp16(enabled=True, **rule))
    for overflowed in before:
        try:
            scale = scale.after(overflowed)
        except OverflowError:
            break
    resumed = start.with_state(scale.state_dict())
    assert resumed == scale and follow(resumed, after) == follow(scale, after)


def test_defaults_are_the_peers() -> None:
    scale = loss_scale(Fp16(enabled=True))
    assert scale.value == 2.0**16 and (scale.window, scale.hysteresis, scale.least) == (1000, 2, 1.0)
    assert follow(scale, [True] * 4) == [2.0**16, 2.0**16, 2.0**15, 2.0**14]


def test_overflow_at_the_least_scale_is_an_error() -> None:
    scale = loss_scale(Fp16(enabled=True, initial_scale_power=1, hysteresis=1))
    scale = scale.after(True)
    assert scale.value == 1.0
    with pytest.raises(OverflowError, match="least loss scale, 1,"):
        scale.after(True)
    assert scale.after(False).value == 1.0


@given(overflows=st.lists(st.booleans(), max_size=30))
def test_a_static_scale_never_moves(overflows: list[bool]) -> None:
    static = loss_scale(Fp16(enabled=True, loss_scale=128))
    assert follow(static, overflows) == [128.0] * len(overflows)
    assert follow(loss_scale(Fp16(loss_scale=128)), overflows) == [1.0] * len(overflows)
    assert static.with_state({"value": 4.0, "patience": 1, "clean_steps": 0}) == static


def test_a_state_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a value above 0"):
        loss_scale(Fp16(enabled=True)).with_state({"value": float("inf"), "patience": 1, "clean_steps": 0})


def test_an_overflow_on_one_rank_lowers_the_scale_of_all_and_touches_nothing() -> None:
    """How an engine connects it: the optimizer's verdict, the same on all ranks, is what the rule is told."""

    def train(transport: SimTransport) -> tuple[list[float], list[torch.Tensor]]:
        p = torch.nn.Parameter(torch.linspace(-1, 1, 500))
        optimizer = onebit.OnebitAdam(
            [p], lr=1e-2, transport=transport, freeze_step=2, overlap=False, compression="always", weight_decay=0.0
        )
        scale, scales, states = loss_scale(Fp16(enabled=True, hysteresis=1)), [], []
        for step in range(6):
            loss = (p - 0.5).square().sum() * scale.value
            loss.backward()
            if step == 3 and transport.rank == 1:
                p.grad[7] = float("inf")
            optimizer.grad_scale = torch.tensor(scale.value)
            skipped = optimizer.stats.skipped_steps
            optimizer.step()
            scale = scale.after(optimizer.stats.skipped_steps > skipped)
            optimizer.zero_grad()
            scales.append(scale.value)
            states.append(p.detach().clone())
        return scales, states

    (scales, states), (other_scales, other_states) = run_ranks(2, train)
    assert scales == other_scales == [2.0**16] * 3 + [2.0**15] * 3
    assert torch.equal(states[2], states[3]) and not torch.equal(states[3], states[4])
    assert all(torch.equal(a, b) for a, b in zip(states, other_states, strict=True))


class Pair(NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor


def test_inputs_are_cast_wherever_they_lie() -> None:
    x, mask = torch.ones(2), torch.ones(2, dtype=torch.int64)
    given = {"a": [x, mask, (x, None)], "b": OrderedDict(c={"d": x}), "e": Pair(x, mask), "f": "text", 3: 1.5}
    cast = cast_floats(given, torch.bfloat16)
    low = torch.bfloat16
    assert [cast["a"][0].dtype, cast["a"][2][0].dtype, cast["b"]["c"]["d"].dtype, cast["e"].x.dtype] == [low] * 4
    assert cast["a"][1] is mask and cast["e"].mask is mask and type(cast["e"]) is Pair
    assert cast["a"][2][1] is None and cast["f"] == "text" and cast[3] == 1.5
    assert given["a"][0] is x and x.dtype == torch.float32


def test_buffers_that_meet_activations_are_cast_and_no_others() -> None:
    """Not those of checkpoints, nor frequencies, statistics, and values that the dtype would round."""
    third = torch.full((1, 1, 2, 2), 1 / 3)
    buffers = {  # by name: the buffer, whether checkpoints have it, and its dtype afterwards
        "mask": (torch.ones(1, 1, 2, 2).tril(), False, torch.bfloat16),
        "positions": (torch.randn(5, 6), False, torch.bfloat16),
        "saved mask": (torch.ones(1, 1, 2, 2), True, torch.float32),
        "saved positions": (torch.randn(5, 6), True, torch.float32),
        "weights of scores": (third, False, torch.float32),
        "other width": (torch.randn(6, 5), False, torch.float32),
        "frequencies": (torch.ones(6), False, torch.float32),
        "count": (torch.tensor(1.0), False, torch.float32),
        "places": (torch.zeros(1, 1, 2, dtype=torch.int64), False, torch.int64),
        "nothing": (None, False, None),
    }
    net = nn.Linear(6, 6)
    net.config = SimpleNamespace(hidden_size=6)
    for name, (buffer, is_saved, _) in buffers.items():
        net.register_buffer(name, buffer, persistent=is_saved)
    net.to_meta = nn.Linear(6, 6)
    net.to_meta.register_buffer("mask", torch.ones(1, 1, 2, device="meta"), persistent=False)
    cast_tables(net, torch.bfloat16)
    assert {name: None if x is None else x.dtype for name, x in net._buffers.items()} == {
        name: dtype for name, (*_, dtype) in buffers.items()
    }
    assert torch.equal(net._buffers["mask"].float(), torch.ones(1, 1, 2, 2).tril())
    assert net.weight.dtype == net.to_meta.mask.dtype == torch.float32


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_batch_norm_keeps_float32_statistics(kind: str, stage: int) -> None:
    """The oracle is the float32 norm of the rounded inputs; the tolerance is that of the output's dtype."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    engine, *_ = zero.initialize(
        model=net,
        config={
            "train_batch_size": 64,
            kind: {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )
    try:
        low = (5 + 3 * torch.randn(64, 3, generator=torch.Generator().manual_seed(1))).to(engine.config.dtype)
        seen = []
        engine.module[0].register_forward_hook(lambda _, inputs, output: seen.append(output.detach()))
        engine.backward(engine(low.float()).float().square().mean())
        mean, var = low.float().mean(0), low.float().var(0)
        torch.testing.assert_close(engine.module[0].running_mean, 0.1 * mean)
        torch.testing.assert_close(engine.module[0].running_var, 0.9 + 0.1 * var)
        expected = (low.float() - mean) / (low.float().var(0, unbiased=False) + 1e-5).sqrt()
        torch.testing.assert_close(seen[0], expected.to(low.dtype))
        for _ in range(24):  # until the loss scale is low enough
            before = engine.module_state_dict()["0.weight"].clone()
            engine.step()
            if engine.was_step_applied():
                break
            engine.backward(engine(low.float()).float().square().mean())
        assert not torch.equal(before, engine.module_state_dict()["0.weight"])
        assert all(isinstance(p, nn.Parameter) for p in engine.module.parameters())
    finally:
        engine.close()
