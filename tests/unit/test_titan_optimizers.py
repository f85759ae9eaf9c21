"""onebit.integrations.torchtitan: what a loop in torchtitan's manner asks of its optimizers.

With torchtitan 0.3 itself if it is installed, and with a copy of its configuration's fields if not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import onebit
from onebit.comm import IdentityCodec, SimTransport, run_ranks
from onebit.integrations.torchtitan import OptimizersContainer, build_optimizers

RAW = {"compression": "always", "freeze_step": 100, "warmup_codec": IdentityCodec(256)}
"""Options with which OnebitAdam is AdamW."""


@dataclass(kw_only=True)
class ParamGroupConfig:
    """Fields as torchtitan 0.3.0's."""

    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Config:
    """Fields as torchtitan 0.3.0's OptimizersContainer.Config."""

    param_groups: list[Any] = field(default_factory=list)
    implementation: str = "fused"
    optimizer_factory_kwargs_by_name: dict[str, dict[str, Any]] = field(default_factory=dict)


def torchtitan() -> ModuleType:
    return pytest.importorskip(
        "torchtitan.components.optimizer",
        reason="needs torchtitan 0.3: pip install --no-deps --requirement .ci/torchtitan.txt (Python 3.11)",
    )


@pytest.fixture(params=["fields", "torchtitan"])
def titan(request: pytest.FixtureRequest) -> Any:
    """What makes a configuration: ParamGroupConfig and Config."""
    if request.param == "fields":
        return SimpleNamespace(ParamGroupConfig=ParamGroupConfig, Config=Config)
    real = torchtitan()
    return SimpleNamespace(ParamGroupConfig=real.ParamGroupConfig, Config=real.OptimizersContainer.Config)


def grouped(titan: Any, *groups: tuple[str, str, dict[str, Any]], **more: Any) -> Any:
    made = [titan.ParamGroupConfig(pattern=p, optimizer_name=n, optimizer_kwargs=k) for p, n, k in groups]
    return titan.Config(param_groups=made, **more)


BIASES = (r"bias$", "AdamW", {"lr": 0.03, "betas": (0.5, 0.6), "eps": 1e-5, "weight_decay": 0.0})
OTHERS = (r".*", "AdamW", {"lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.3})

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


def adamw_of(model: list[nn.Module]) -> torch.optim.AdamW:
    """What torchtitan makes of BIASES and OTHERS, with its own default for the eps that is left out."""
    named = [(name, p) for part in model for name, p in part.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name.endswith("bias") == is_bias], **arguments}
        for is_bias, (_, _, arguments) in ((True, BIASES), (False, OTHERS))
    ]
    return torch.optim.AdamW(groups)


def train_by_schedule(
    model: list[nn.Module], optimizers: Any, each: Iterable[torch.optim.Optimizer], schedulers: Any = None
) -> torch.Tensor:
    schedulers = schedulers or [LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3)) for optimizer in each]
    for step in range(6):
        trained = train(model, optimizers, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    return trained


def test_param_groups_keep_their_parameters_and_arguments(titan: Any) -> None:
    ours, model = build_optimizers(parts(), grouped(titan, BIASES, OTHERS), transport=SimTransport()), parts()
    names = [sorted(group["param_names"]) for group in ours.param_groups]
    assert names == [["0.bias", "1.1.bias"], ["0.weight", "1.1.weight"]]
    for group, theirs in zip(ours.param_groups, adamw_of(model).param_groups, strict=True):
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert group[key] == theirs[key]


def test_param_groups_are_trained_as_torch_trains_them(titan: Any) -> None:
    ours, theirs = parts(), parts()
    container = build_optimizers(ours, grouped(titan, BIASES, OTHERS), transport=SimTransport(), **RAW)
    adamw = adamw_of(theirs)
    both = train_by_schedule(ours, container, container), train_by_schedule(theirs, adamw, [adamw])
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)  # steps of 0.03 in float32


def test_torchtitans_own_container_and_schedules_train_the_same() -> None:
    real = torchtitan()
    config = grouped(SimpleNamespace(ParamGroupConfig=real.ParamGroupConfig, Config=real.OptimizersContainer.Config),
                     BIASES, OTHERS, implementation="foreach")  # fmt: skip
    ours, theirs = parts(), parts()
    schedule = real.LRSchedulersContainer.Config(warmup_steps=3, decay_type="cosine", min_lr_factor=0.1)
    results = []
    for model, container in (
        (ours, build_optimizers(ours, config, transport=SimTransport(), **RAW)),
        (theirs, config.build(model_parts=theirs)),
    ):
        schedulers = schedule.build(optimizers=container, training_steps=6)
        results.append(train_by_schedule(model, container, container, schedulers))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
    (optimizer,) = build_optimizers(parts(), real.default_adamw(lr=3e-4), transport=SimTransport())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.9, 0.95), 1e-8, 0.1)


def test_the_copied_fields_are_torchtitans() -> None:
    real = torchtitan()
    for copy, original in ((ParamGroupConfig, real.ParamGroupConfig), (Config, real.OptimizersContainer.Config)):
        assert [f.name for f in fields(copy)] == [f.name for f in fields(original)]


@pytest.mark.parametrize(
    ("groups", "more", "message"),
    [
        ([], {}, "name no group"),
        ([BIASES], {}, "no pattern of param_groups matches weight, 1.weight"),
        ([OTHERS, BIASES], {}, "'bias\\$' matches no trained parameter that is left"),
        ([BIASES, (".*", "OnebitLamb", {"lr": 0.1})], {}, "AdamW, OnebitLamb: name one in all groups"),
        ([(".*", "DistMuon", {"lr": 0.1})], {}, "must be one of Adam, AdamW.*got 'DistMuon'"),
        ([(".*", "AdamW", {"lr": 0.1, "momentum": 0.9})], {}, "AdamW's momentum would have no effect"),
        ([(".*", "OnebitAdam", {"lr": 0.1, "freeze_step": 9})], {}, "freeze_step .* to build_optimizers"),
        ([(".*", "AdamW", {"lr": 0.1, "amsgrad": True})], {}, "amsgrad=True is not supported"),
        ([(".*", "Adam", {"lr": 0.1, "weight_decay": 0.1})], {}, 'name "AdamW", or set it to 0'),
        ([OTHERS], {"implementation": "fused_opt_states_bf16"}, "must be one of fused, foreach, for-loop"),
        ([OTHERS], {"optimizer_factory_kwargs_by_name": {"AdamW": {"maximize": True}}}, "maximize=True"),
    ],
)
def test_param_groups_that_cannot_be_translated_are_refused(
    titan: Any, groups: list[Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizers(parts(), grouped(titan, *groups, **more), transport=SimTransport())


def test_what_torch_would_take_by_default_is_taken() -> None:
    config = grouped(SimpleNamespace(ParamGroupConfig=ParamGroupConfig, Config=Config), (".*", "Adam", {}))
    group = build_optimizers(parts(), config, transport=SimTransport()).param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 0)
    shared = {"optimizer_factory_kwargs_by_name": {"AdamW": {"lr": 0.5, "eps": 1e-3}}}
    config = grouped(SimpleNamespace(ParamGroupConfig=ParamGroupConfig, Config=Config), OTHERS, **shared)
    group = build_optimizers(parts(), config, transport=SimTransport()).param_groups[0]
    assert (group["lr"], group["eps"], group["weight_decay"]) == (3e-4, 1e-3, 0.3)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_how_torch_would_run_it_changes_no_bit(implementation: str) -> None:
    model, other = parts(), parts()
    found = train(model, build(model, implementation=implementation), range(5))
    assert torch.equal(found, train(other, build(other), range(5)))


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
    config = SimpleNamespace(**CONFIG | {"name": name, "weight_decay": 0.0})
    (optimizer,) = build_optimizers(parts(), config, transport=SimTransport(), **options)
    assert type(optimizer).__name__ == kind and optimizer.param_groups[0]["lr"] == 0.01


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
        with pytest.raises(ValueError, match="on the same number of ranks"):
            resumed.load_state_dict({"rank 7, part 0": b""})
        return torch.equal(train(other, resumed, range(5, 9), transport.rank), straight)

    assert run_ranks(2, ours) == [True, True]


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"name": "Muon"}, {}, "must be one of Adam, AdamW"),
        ({"name": "Adam"}, {}, "adds the decay to the gradient"),
        ({"momentum": 0.9}, {}, "optimizer_config has momentum, which would have no effect"),
        ({}, {"lr": 0.1}, "lr belongs in optimizer_config"),
        ({}, {"parallel_dims": SimpleNamespace(dp_replicate=2, dp_shard=-1)}, r"dp_shard\); give .* mesh"),
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


@pytest.mark.parametrize("config", [None, {}, SimpleNamespace(name="AdamW", learning_rate=1e-4), {"lr": 1e-4}])
def test_a_configuration_that_says_nothing_is_refused(config: object) -> None:
    with pytest.raises(ValueError, match=r"has no name|learning_rate, which would have no effect"):
        build_optimizers(parts(), config, transport=SimTransport())


def test_what_torchtitan_passes_where_it_divides_nothing_is_taken() -> None:
    dims, manager = SimpleNamespace(dp_replicate=4, dp_shard=1, tp=1, pp=1), SimpleNamespace(enabled=False)
    assert len(build_optimizers(parts(), SimpleNamespace(**CONFIG), dims, manager, transport=SimTransport())) == 1
