"""torch.compile around steps, forward and backward passes: the graph breaks at the step, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport

# At least one for each class that defines step().
MAKERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "OnebitAdam": lambda params: onebit.OnebitAdam(params, freeze_step=2, transport=SimTransport()),
    "OnebitAdam, delayed": lambda params: onebit.OnebitAdam(params, freeze_step=2, delay=1, transport=SimTransport()),
    "ZeroOneAdam": lambda params: onebit.ZeroOneAdam(params, transport=SimTransport()),
    "ShardedOnebitAdam, stage 2": lambda params: onebit.zero.ShardedOnebitAdam(
        params, stage=2, transport=SimTransport()
    ),
    "Lion": onebit.Lion,
    "HostAdam": onebit.HostAdam,
    "LocalSteps": lambda params: onebit.LocalSteps(torch.optim.AdamW(params), transport=SimTransport()),
    "Offload": lambda params: onebit.zero.Offload(params, torch.optim.AdamW),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(name: str, compiled: str, steps: int = 5) -> Tensor:
    """The parameters after some steps, of which this is compiled: nothing, "step", "model", or the "whole" of one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = MAKERS[name](list(net.parameters()))
    forward = torch.compile(net, backend="aot_eager") if compiled == "model" else net
    step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step

    def whole(x: Tensor) -> None:
        forward(x).square().mean().backward()
        step()
        optimizer.zero_grad()

    run = torch.compile(whole, backend="eager") if compiled == "whole" else whole
    for k in range(steps):
        run(torch.randn(8, 12, generator=torch.Generator().manual_seed(k)))
    if hasattr(optimizer, "sync"):
        optimizer.sync()
    return torch.cat([p.detach().view(-1) for p in net.parameters()])


@pytest.mark.slow
@pytest.mark.stranger("breaks", "20: torch.compile(optimizer.step), or of a whole training step, dies in dynamo")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", MAKERS)
def test_compiled_steps_are_the_plain_ones_to_the_bit(name: str) -> None:
    plain = trained(name, "")
    for compiled in ("step", "whole"):
        assert torch.equal(trained(name, compiled), plain), compiled


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["OnebitAdam", "ShardedOnebitAdam, stage 2"])
def test_hooks_run_behind_a_compiled_backward_pass(name: str) -> None:
    assert torch.equal(trained(name, "model"), trained(name, ""))


@pytest.mark.slow
@pytest.mark.stranger("breaks", "20: a compiled function that drives the engine dies in dynamo")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_compiled_function_may_drive_the_engine(stage: int) -> None:
    def weights(is_compiled: bool) -> Tensor:
        torch.manual_seed(0)
        net = nn.Linear(12, 12)
        optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}
        config = {"train_micro_batch_size_per_gpu": 8, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
        engine = onebit.zero.initialize(model=net, config=config)[0]

        def whole(x: Tensor) -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        run = torch.compile(whole, backend="eager") if is_compiled else whole
        for k in range(4):
            run(torch.randn(8, 12, generator=torch.Generator().manual_seed(k)))
        engine.close()
        return torch.cat([p.detach().view(-1) for p in net.parameters()])

    assert torch.equal(weights(True), weights(False))
