"""onebit.integrations.torchtitan: what a loop in torchtitan's manner asks of its optimizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import onebit
from onebit.comm import SimTransport, run_ranks
from onebit.integrations.torchtitan import OptimizersContainer, build_optimizers

CONFIG = {"name": "AdamW", "lr": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.2}


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    frozen = nn.Linear(3, 3)
    frozen.requires_grad_(False)
    return [nn.Linear(6, 20), nn.Sequential(nn.Tanh(), nn.Linear(20, 3), frozen)]


def build(model: list[nn.Module], transport: SimTransport | None = None, **config: Any) -> OptimizersContainer:
    options = {"transport": transport or SimTransport(), "freeze_step": 3, "compression": "always"}
    return build_optimizers(model, SimpleNamespace(**CONFIG | config), **options)


def train(model: list[nn.Module], optimizers: OptimizersContainer, steps: range, rank: int = 0) -> torch.Tensor:
    for step in steps:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model[1](model[0](x)).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
    return torch.cat([p.detach().flatten() for part in model for p in part.parameters()])


def test_it_is_the_optimizer_of_all_parts() -> None:
    ours, model = parts(), parts()
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2, "freeze_step": 3}
    trained = [p for part in model for p in part.parameters() if p.requires_grad]
    direct = OptimizersContainer(
        onebit.OnebitAdam(trained, compression="always", transport=SimTransport(), **options)  # type: ignore[arg-type]
    )
    assert torch.equal(train(ours, build(ours), range(8)), train(model, direct, range(8)))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_how_torch_would_run_it_changes_no_bit(implementation: str) -> None:
    model, other = parts(), parts()
    assert torch.equal(
        train(model, build(model, implementation=implementation), range(5)), train(other, build(other), range(5))
    )
    for value in (None, False, True):
        again = parts()
        params = [p for part in again for p in part.parameters() if p.requires_grad]
        optimizer = onebit.OnebitAdam(params, transport=SimTransport(), fused=value, foreach=value)
        assert len(OptimizersContainer(optimizer)) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Adam", "OnebitAdam"),
        ("OnebitAdam", "OnebitAdam"),
        ("OnebitLamb", "OnebitLamb"),
        ("ZeroOneAdam", "ZeroOneAdam"),
    ],
)
def test_names_choose_the_optimizer(name: str, kind: str) -> None:
    options = {} if kind == "ZeroOneAdam" else {"freeze_step": 3}
    config = SimpleNamespace(**CONFIG | {"name": name})
    (optimizer,) = build_optimizers(parts(), config, transport=SimTransport(), **options)
    assert type(optimizer).__name__ == kind and optimizer.defaults["lr"] == 0.01


def test_schedulers_iterate_over_it_and_hooks_run_with_its_steps() -> None:
    model = parts()
    optimizers, seen = build(model), []
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in optimizers]
    optimizers.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizers.register_step_post_hook(lambda *_: seen.append("behind"))
    train(model, optimizers, range(1))
    schedulers[0].step()
    assert seen == ["before", "behind"]
    assert [group["lr"] for group in optimizers.param_groups] == [0.005]
    assert all(p.grad is None for part in model for p in part.parameters())


def test_a_saved_container_goes_on_in_the_same_bits() -> None:
    def ours(transport: SimTransport) -> bool:
        model = parts()
        optimizers = build(model, transport)
        train(model, optimizers, range(5), transport.rank)
        saved = optimizers.state_dict()
        assert list(saved) == [f"rank {transport.rank}, part 0"]  # other ranks have other names
        weights = [{k: v.clone() for k, v in part.state_dict().items()} for part in model]
        straight = train(model, optimizers, range(5, 9), transport.rank)
        other = parts()
        for part, held in zip(other, weights, strict=True):
            part.load_state_dict(held)
        resumed = build(other, transport)
        resumed.load_state_dict(saved)
        with pytest.raises(ValueError, match="on as many ranks"):
            resumed.load_state_dict({"rank 7, part 0": b""})
        return torch.equal(train(other, resumed, range(5, 9), transport.rank), straight)

    assert run_ranks(2, ours) == [True, True]


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"name": "Muon"}, {}, "must be one of Adam, AdamW"),
        ({"implementation": "fast"}, {}, "must be one of fused"),
        ({"early_step_in_backward": True}, {}, "set it to False"),
        ({}, {"ft_manager": SimpleNamespace(enabled=True)}, "turn it off"),
        ({}, {"parallel_dims": SimpleNamespace(dp_replicate=2, dp_shard=4, tp=2)}, r"dp_shard, tp\); give .* mesh"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_remedy(
    config: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizers(parts(), SimpleNamespace(**CONFIG | config), transport=SimTransport(), **arguments)


def test_what_torchtitan_passes_where_it_divides_nothing_is_taken() -> None:
    dims, manager = SimpleNamespace(dp_replicate=4, dp_shard=1, tp=1, pp=1), SimpleNamespace(enabled=False)
    assert len(build_optimizers(parts(), SimpleNamespace(**CONFIG), dims, manager, transport=SimTransport())) == 1
