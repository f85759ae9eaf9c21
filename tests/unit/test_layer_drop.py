"""Progressive layer dropping: what the forward pass of each step is told, against the paper's formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from onebit import zero

BLOCK = {"enabled": True, "theta": 0.5, "gamma": 0.1}


class Stack(nn.Module):
    """Residual layers, each kept with a probability that falls to θ at the last one; it notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.told: list[tuple[bool, float]] = []

    def forward(self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 1.0) -> Tensor:
        self.told.append((progressive_layer_drop, pld_theta))
        generator = torch.Generator().manual_seed(len(self.told))
        for k, layer in enumerate(self.layers, 1):
            keep = 1.0 - k / len(self.layers) * (1.0 - pld_theta)
            if not self.training or torch.rand((), generator=generator) < keep:
                x = x + layer(x) / keep
        return x


class Wrapper(nn.Module):
    """Hands on what it is given, as compiled models and adapters do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **named: object) -> Tensor:
        return self.inner(x, **named)


class LooksUp(Stack):
    """As the layers of DeepSpeed's BERT example find what they are told."""

    def forward(self, x: Tensor, **named: object) -> Tensor:
        return super().forward(x, named.get("progressive_layer_drop", False), named.get("pld_theta", 1.0))


class Ignores(nn.Linear):
    """As transformers' models do what they do not know."""

    def forward(self, x: Tensor, **named: object) -> Tensor:
        return super().forward(x)


Start = Callable[..., zero.DeepSpeedEngine]


@pytest.fixture
def engine_of() -> Iterator[Start]:
    engines: list[zero.DeepSpeedEngine] = []

    def start(model: nn.Module, **block: object) -> zero.DeepSpeedEngine:
        config = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2}},
            "progressive_layer_drop": BLOCK | block,
        }
        engines.append(zero.initialize(model=model, config=config)[0])
        return engines[-1]

    yield start
    for engine in reversed(engines):
        engine.close()


def train(engine: zero.DeepSpeedEngine, steps: int) -> None:
    for _ in range(2 * steps):
        engine.backward(engine(torch.ones(4, 4)).square().mean())
        engine.step()


def test_each_step_is_told_the_papers_share(engine_of: Start, tmp_path: Path) -> None:
    """Both micro-batches the same, evaluation nothing, and a resumed run goes on with the next step's."""
    engine = engine_of(Stack())
    assert engine.pld_enabled() and engine.get_pld_theta() == 1.0
    train(engine, 5)
    expected = [0.5 * math.exp(-0.1 * step) + 0.5 for step in range(5)]
    assert engine.module.told == [(True, theta) for theta in expected for _ in range(2)]
    assert engine.get_pld_theta() == 0.5 * math.exp(-0.5) + 0.5
    engine.save_checkpoint(tmp_path)
    engine.eval()
    engine(torch.ones(4, 4))
    assert engine.module.told[-1] == (False, 1.0)

    resumed = engine_of(Stack())
    resumed.load_checkpoint(tmp_path)
    train(resumed, 1)
    assert resumed.module.told == 2 * [(True, engine.get_pld_theta())]


@pytest.mark.parametrize(
    "model", [Wrapper(Stack()), LooksUp(), Wrapper(LooksUp())], ids=["hands on", "looks up", "both"]
)
def test_a_model_may_take_the_share_by_other_names(engine_of: Start, model: nn.Module) -> None:
    train(engine_of(model), 1)
    assert getattr(model, "inner", model).told == 2 * [(True, 1.0)]


def test_a_model_that_cannot_drop_is_refused(engine_of: Start) -> None:
    for model in (nn.Linear(4, 4), Ignores(4, 4), Wrapper(Ignores(4, 4)), nn.Sequential(Stack())):
        with pytest.raises(ValueError, match=f"forward pass of {type(model).__name__} takes no pld_theta"):
            engine_of(model)


def test_off_is_off(engine_of: Start) -> None:
    engine = engine_of(Stack(), enabled=False)
    train(engine, 1)
    assert engine.module.told == 2 * [(False, 1.0)] and not engine.pld_enabled() and engine.get_pld_theta() is None


@pytest.mark.parametrize("wrong", [{"theta": 0.0}, {"theta": 1.5}, {"gamma": -1.0}], ids=str)
def test_shares_that_make_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"progressive_layer_drop.*expected a number"):
        zero.read_config({"train_batch_size": 8, "progressive_layer_drop": BLOCK | wrong}, world_size=1)
