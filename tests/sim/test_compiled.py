"""torch.compile around steps, forward and backward passes: the graph breaks at the step, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.comm import SimTransport
from onebit.zero import Engine, init_inference, read_checkpoint_weights

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


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_checkpoints_of_a_compiled_model_are_those_of_the_model(offload: str, tmp_path: Path) -> None:
    """It goes on compiled or not, to the bit; its weights have the model's names, and are served."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": offload}},
    }

    def engine_of(is_compiled: bool) -> Engine:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
        net[0].bias.requires_grad_(False)
        model = torch.compile(net, backend="aot_eager") if is_compiled else net
        return onebit.zero.initialize(model=model, config=config)[0]

    def train(engine: Engine, steps: range) -> dict[str, Tensor]:
        for k in steps:
            engine.backward(engine(torch.randn(8, 12, generator=torch.Generator().manual_seed(k))).square().mean())
            engine.step()
        return engine.module_state_dict()

    first = engine_of(True)
    saved = train(first, range(3))
    first.save_checkpoint(str(tmp_path))
    whole = train(first, range(3, 6))
    for is_compiled in (True, False):
        other = engine_of(is_compiled)
        other.load_checkpoint(str(tmp_path))
        again = train(other, range(3, 6))
        assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)
        other.load_module_state_dict(saved)
        other.close()
    first.close()
    plain = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    assert whole.keys() == read_checkpoint_weights(str(tmp_path)).keys() == plain.state_dict().keys()
    x = torch.randn(2, 12)
    plain.load_state_dict(saved)
    served = init_inference(plain, checkpoint=str(tmp_path), dtype="fp32")
    torch.testing.assert_close(served(x), plain(x).detach(), rtol=1e-5, atol=1e-6)
