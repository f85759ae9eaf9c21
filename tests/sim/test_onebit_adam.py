"""OnebitAdam: equal to the textbook loop and to AdamW, bit-identical replicas, one path for any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit.arithmetic.schedule import DenseSteps, VarianceUpdates, long_warmup, variance_weight
from onebit.comm import IdentityCodec, Int8Codec, Log4Codec, SignCodec, SimTransport, run_ranks
from onebit.optimizer import CompressedOptimizer
from onebit.reference.codecs import eight_bits, four_log_bits, mean_in
from onebit.reference.onebit_adam import OnebitAdam as OnebitAdamOracle
from onebit.reference.onebit_adam import run

SIZES = (300, 1, 513, 256, 7)
SLOW_MOVES = pytest.param("moves", marks=pytest.mark.slow)


Gradient = Callable[[np.ndarray, int, int], np.ndarray]


def targets(worker: int) -> np.ndarray:
    return np.random.default_rng(worker).normal(size=sum(SIZES))


def gradient(x: np.ndarray, step: int, worker: int) -> np.ndarray:
    """A drifting pull of each worker's own, with noise. No function of x: a rounding must not feed back into it."""
    noise = np.random.default_rng((step, worker)).normal(size=x.shape)
    pull = targets(worker) * np.cos(0.1 * step) + 1.5
    return (pull + 0.5 * noise).astype(np.float32).astype(np.float64)


def spiking(x: np.ndarray, step: int, worker: int) -> np.ndarray:
    return gradient(x, step, worker) * (1000.0 if step >= 36 else 1.0)


def start() -> np.ndarray:
    return np.random.default_rng(99).normal(size=sum(SIZES)).astype(np.float32).astype(np.float64)


def split(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(SIZES))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(p.clone()) for p in split(torch.from_numpy(start()).float())]


def trajectory_of(
    optimizer: torch.optim.Optimizer, lrs: list[float], workers: Iterable[int], of: Gradient = gradient
) -> tuple[np.ndarray, list[str]]:
    """Parameters after each step with the mean gradient of these workers, and the phases of a one-bit optimizer."""
    params, trajectory, phases = optimizer.param_groups[0]["params"], [], []
    for step, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        x = torch.cat([p.detach() for p in params]).double().numpy()
        mean = np.mean([of(x, step, worker) for worker in workers], axis=0)
        for p, g in zip(params, split(torch.from_numpy(mean).float()), strict=True):
            p.grad = g.clone()
        optimizer.step()
        phases += [optimizer.stats.phase] if isinstance(optimizer, CompressedOptimizer) else []
        trajectory.append(torch.cat([p.detach() for p in params]).double().numpy())
    return np.stack(trajectory), phases


def train(transport: SimTransport, lrs: list[float], of: Gradient = gradient, **options: object) -> np.ndarray:
    return trajectory_of(onebit.OnebitAdam(parameters(), transport=transport, **options), lrs, [transport.rank], of)[0]


LRS = [0.05 * (1 - k / 60) for k in range(40)]


@pytest.mark.pairwise
@pytest.mark.parametrize("momentum_of", ["gradients", SLOW_MOVES])
@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_textbook_loop(world_size: int, scale: str, momentum_of: str) -> None:
    """float32 against float64: rounding only. One flipped sign of an element moves it by lr·2s >= 1e-2 at once.

    Thirds are no binary fractions: with 3 ranks a sum that cancels has another sign in float32 sooner or later, and
    then its block another scale; so only the first 18 steps, of which 6 are compressed.
    """
    lrs = LRS[:18] if world_size == 3 else LRS
    of_moves = momentum_of == "moves"
    oracle = OnebitAdamOracle(start(), world_size, SIZES, dense=lambda step: step < 12, scale=scale, of_moves=of_moves)
    expected = run(oracle, gradient, lrs)
    options = {"freeze_step": 12, "codec": SignCodec(scale=scale), "warmup_codec": IdentityCodec()}
    options["momentum_of"] = momentum_of
    results = run_ranks(world_size, lambda transport: train(transport, lrs, **options))
    for trajectory in results:
        np.testing.assert_array_equal(trajectory, results[0])
    np.testing.assert_allclose(results[0], expected, atol=2e-4, rtol=0)


WARMUPS = {"fp32": (None, IdentityCodec()), "int8": (eight_bits, Int8Codec()), "log4": (four_log_bits, Log4Codec())}


@pytest.mark.pairwise
@pytest.mark.parametrize("momentum_of", ["gradients", SLOW_MOVES])
@pytest.mark.parametrize("name", ["fp32", "int8", pytest.param("log4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_textbook_loop_over_refreshes(
    world_size: int, name: str, momentum_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up, then momentum with a refresh of the variance now and then; at last a gradient that goes beyond it.

    A sum that cancels to rounding may have another sign in float32, and a gradient another eighth bit: up to 1 % of the
    elements may leave the path. With 3 ranks (thirds) that is common: 18 steps there.
    """
    rule = DenseSteps("auto", warmup=6, refreshes=VarianceUpdates(2), guarded=20)
    assert [step for step in range(40) if rule.is_dense(step)] == [0, 1, 2, 3, 4, 5, 6, 10, 14, 22, 30]
    bits, codec = WARMUPS[name]
    options = {"guarded": 20, "of_moves": momentum_of == "moves"}
    oracle = OnebitAdamOracle(start(), world_size, SIZES, dense=rule.is_dense, bits=bits, **options)
    expected = run(oracle, spiking, LRS)
    monkeypatch.setattr("onebit.onebit_adam.DenseSteps", lambda _: rule)
    given = {"warmup_codec": codec, "momentum_of": momentum_of}
    results = run_ranks(world_size, lambda transport: train(transport, LRS, of=spiking, **given))
    for trajectory in results:
        np.testing.assert_array_equal(trajectory, results[0])
    differs = np.abs(results[0] - expected)[: 18 if world_size == 3 else None] > 5e-4
    assert differs.mean(axis=1).max() <= 0.01


@pytest.mark.parametrize("size", [7, 256])
def test_gradients_in_four_bits_are_those_of_the_oracle(size: int) -> None:
    """A short block has padding, even if no block is full: its smallest values travel as s/64."""
    p = nn.Parameter(torch.zeros(size))
    p.grad = torch.cat([torch.tensor([1.0, 1e-3]), torch.linspace(0.1, 1.0, size - 2)])
    optimizer = onebit.OnebitAdam([p], transport=SimTransport())
    optimizer.step()
    sent = mean_in(four_log_bits, p.grad.double().numpy()[None], [slice(0, size)])
    np.testing.assert_allclose(optimizer.state[p]["exp_avg"].numpy() / 0.1, sent, rtol=1e-6)


def test_without_any_option_it_compresses_from_the_fifth_step() -> None:
    """2.6 bits per parameter and step over 1,000 steps, both phases counted in full; fewer over more."""
    rule = DenseSteps()
    assert [step for step in range(40) if rule.is_dense(step)] == [0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 36]
    assert rule.count(1000) == 32 and rule.count(100_000) == 59
    assert all(long_warmup().is_dense(step) for step in range(100)) and long_warmup().count(1000) == 151

    def bits(steps: int) -> float:
        dense = sum(rule.is_dense(step) for step in range(steps)) / steps
        return dense * 2 * (8 + 16 / 256) + (1 - dense) * 2 * (1 + 16 / 256)

    assert bits(1000) < 2.6 and bits(2000) < 2.4 and bits(20000) < 2.2


def test_a_late_gradient_is_never_the_whole_variance() -> None:
    assert variance_weight(0.999, 1) == pytest.approx(0.001)
    assert variance_weight(0.999, 10) == pytest.approx(1 - 0.999**10)
    assert variance_weight(0.999, 5000) == 1 / 16
    assert variance_weight(0.5, 1) == variance_weight(0.5, 9) == 0.5
