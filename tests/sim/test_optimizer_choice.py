"""What the file says about the optimizer is what is built, and what is built does what its words say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from config_files import FILES, optimizer, read, small

import onebit
import onebit.dense
from onebit.comm import Bf16Codec, IdentityCodec, Int8Codec, Log4Codec, SignCodec, SimTransport, run_ranks
from onebit.zero.config.optimizers import build_optimizer
from onebit.zero.config.whole import Config
from onebit.zero.lr_schedulers import build_scheduler

PEER_ADAM = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def build(
    config: Config, params: object, transport: SimTransport | None = None, model: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    options = config.optimizer_options() | {"transport": transport or SimTransport(), "model": model}
    return build_optimizer(config.optimizer, params, **options)


def parameter(n: int = 300) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-2.0, 2.0, n))


def gradients(n: int, steps: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(steps, n)) * np.linspace(0.1, 3.0, n)


# ---------------------------------------------------------------- the same as if constructed by hand

LAMB = {"max_coeff": 0.3, "min_coeff": 0.02}
FACTORS = {"coeff_beta": 0.8, "factor_max": 3.0, "factor_min": 0.6, "factor_threshold": 0.2}
ZERO_ONE = {"var_freeze_step": 7, "var_update_scaler": 3, "local_step_scaler": 11, "local_step_clipper": 4}


@pytest.mark.parametrize(
    "name, cls, params",
    [
        ("OneBitAdam", onebit.OnebitAdam, {"freeze_step": 5}),
        ("OneBitAdam", onebit.OnebitAdam, {"freeze_step": "auto", "bias_correction": False}),
        ("ZeroOneAdam", onebit.ZeroOneAdam, ZERO_ONE),
        ("ZeroOneAdam", onebit.ZeroOneAdam, {"local_step_clipper": "auto", "local_step_scaler": "auto"}),
        ("OneBitLamb", onebit.OnebitLamb, {"freeze_step": 5, **LAMB, **FACTORS}),
    ],
    ids=str,
)
def test_a_one_bit_optimizer_has_the_files_options(name: str, cls: type, params: dict) -> None:
    p = parameter()
    built = build(optimizer(name, **PEER_ADAM, **params), [p])
    by_hand = cls([p], **PEER_ADAM, **params, transport=SimTransport())
    assert type(built) is cls
    assert built.option_lines() == by_hand.option_lines()
    assert [{**g, "params": None} for g in built.param_groups] == [{**g, "params": None} for g in by_hand.param_groups]


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Adam", "AdamW", "Lamb"])
def test_nothing_said_is_the_peers_default_and_no_decay(name: str) -> None:
    group = build(optimizer(name), [parameter()]).param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0.0)


def test_a_numeric_freeze_step_is_passed_on_as_it_stands() -> None:
    assert build(optimizer("OneBitAdam", freeze_step=23000), [parameter()]).rule.schedule.freeze_step == 23000
    assert build(optimizer("OneBitLamb", freeze_step=1e3), [parameter()]).rule.schedule.freeze_step == 1000
    assert build(optimizer("OneBitAdam"), [parameter()]).rule.schedule.freeze_step == "auto"


def test_the_rest_of_the_file_reaches_the_optimizer() -> None:
    config = small(
        optimizer={"type": "OneBitAdam"},
        gradient_clipping=0.7,
        zero_optimization={"overlap_comm": False},
        onebit={
            "block": 128,
            "error_dtype": "bf16",
            "bucket_cap_mb": 2,
            "compression": "always",
            "check_replicas_every": 3,
            "variance_floor": 0.5,
            "delay": 1,
        },
    )
    built = build(config, [parameter()])
    by_hand = onebit.OnebitAdam(
        [parameter()],
        weight_decay=0.0,
        max_grad_norm=0.7,
        overlap=False,
        codec=SignCodec(128),
        error_dtype=torch.bfloat16,
        bucket_cap_mb=2.0,
        compression="always",
        check_replicas_every=3,
        variance_floor=0.5,
        delay=1,
        transport=SimTransport(),
    )
    assert built.delay == 1 and built.option_lines() == by_hand.option_lines()


def test_a_delay_that_an_optimizer_has_not_is_refused_by_name() -> None:
    for name, said in (("OneBitLamb", "OnebitLamb has no delay"), ("ZeroOneAdam", "ZeroOneAdam has no delay")):
        with pytest.raises(ValueError, match=said):
            build(small(optimizer={"type": name}, onebit={"delay": 1}), [parameter()])


def test_under_a_loss_scale_nothing_leaves_before_the_step() -> None:
    assert small(optimizer={"type": "OneBitAdam"}).optimizer_options()["overlap"] is True
    assert small(optimizer={"type": "OneBitAdam"}, fp16={"enabled": True}).optimizer_options()["overlap"] is False


@pytest.mark.parametrize(
    "dtype, codec", [(None, None), ("fp32", IdentityCodec(256)), ("bf16", Bf16Codec(256))], ids=str
)
def test_gradients_travel_in_the_communication_type(dtype: str | None, codec: object) -> None:
    defaults = {"OneBitAdam": Log4Codec(256), "OneBitLamb": Int8Codec(256), "ZeroOneAdam": Int8Codec(256)}
    for name, default in defaults.items():
        config = small(optimizer={"type": name}, communication_data_type=dtype)
        attribute = "variance_codec" if name == "ZeroOneAdam" else "warmup_codec"
        assert getattr(build(config, [parameter()]).rule, attribute) == (codec or default)
    half = small(optimizer={"type": "OneBitAdam"}, communication_data_type="fp16")
    assert build(half, [parameter()]).rule.warmup_codec == Bf16Codec(256)


# ---------------------------------------------------------------- decay and bias correction mean what they say


def textbook_adam(x: np.ndarray, grads: np.ndarray, decoupled: bool, corrected: bool) -> np.ndarray:
    lr, betas, eps, wd = (PEER_ADAM[name] for name in ("lr", "betas", "eps", "weight_decay"))
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(grads, 1):
        g = g if decoupled else g + wd * x
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if corrected else (1.0, 1.0)
        u = (m / c1) / (np.sqrt(v / c2) + eps)
        x = x - lr * (u + wd * x if decoupled else u)
    return x


@pytest.mark.parametrize(
    "name, params, decoupled, corrected",
    [
        ("Adam", {}, True, True),
        ("Adam", {"adam_w_mode": True}, True, True),
        ("Adam", {"adam_w_mode": False}, False, True),
        ("Adam", {"bias_correction": False}, True, False),
        ("AdamW", {}, True, True),
        ("AdamW", {"adam_w_mode": True, "bias_correction": False}, True, False),
        ("OneBitAdam", {"freeze_step": 1000}, True, True),
        ("OneBitAdam", {"freeze_step": 1000, "bias_correction": False}, True, False),
    ],
    ids=str,
)
def test_decay_and_bias_correction_are_the_textbooks(name: str, params: dict, decoupled: bool, corrected: bool) -> None:
    steps, p = 20, parameter()
    start, grads = p.detach().double().numpy().copy(), gradients(300, steps)
    config = small(optimizer={"type": name, "params": {**PEER_ADAM, **params}}, communication_data_type="fp32")
    built = build(config, [p])
    for g in grads:
        p.grad = torch.from_numpy(g).float()
        built.step()
    expected, other = (textbook_adam(start, grads, way, corrected) for way in (decoupled, not decoupled))
    # 20 steps of at most 0.03 in float32, at |x| up to 2; the two kinds of decay are a thousand times that apart.
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=2e-6)
    assert np.abs(expected - other).max() > 2e-3


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "AdamW"])
def test_a_decay_in_the_gradient_is_refused_where_there_is_none(name: str) -> None:
    message = "contradicts itself" if name == "AdamW" else f"{name} decays decoupled"
    with pytest.raises(ValueError, match=f"config: optimizer: .*{message}"):
        optimizer(name, adam_w_mode=False)
    assert optimizer(name, adam_w_mode=True).optimizer.params.adam_w_mode


@pytest.mark.parametrize(
    "name, params",
    [
        ("OneBitAdam", {"amsgrad": True}),
        ("Lamb", {"amsgrad": True}),
        ("Adam", {"adam_w_mode": False, "bias_correction": False}),
        ("AdamW", {"amsgrad": True, "bias_correction": False}),
    ],
    ids=str,
)
def test_forms_that_do_not_exist_are_refused(name: str, params: dict) -> None:
    with pytest.raises(ValueError, match=r"config: optimizer: .*no .*form"):
        optimizer(name, **params)


def test_amsgrad_of_adam_is_torchs() -> None:
    assert build(optimizer("Adam", amsgrad=True), [parameter()]).param_groups[0]["amsgrad"] is True


# ---------------------------------------------------------------- every file builds and trains


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_builds_and_trains(path: Path) -> None:
    """A layer learns a line on two ranks, by the optimizer and the schedule of the file, from its rates' own scale."""

    def train(transport: SimTransport) -> tuple[float, float, torch.Tensor]:
        config = read(path.name, world_size=transport.world_size if path.stem == "onebit_adam_sharded" else 4)
        if config.optimizer is None:
            assert path.stem == "everything_documented"
            return 1.0, 0.0, torch.zeros(1)
        layer = torch.nn.Linear(8, 1)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-0.3, 0.3, 8))  # ranks are threads, which share torch's generator
            layer.bias.zero_()
        data = torch.randn(64, 8, generator=torch.Generator().manual_seed(transport.rank))
        model = torch.nn.ModuleDict({"head": layer})  # as the file of 1-bit Muon calls it
        built = build(config, layer.parameters(), transport, model)
        scheduler = build_scheduler(config.scheduler, built) if config.scheduler else None
        losses = []
        for _ in range(40):
            loss = (layer(data) - data.sum(1, keepdim=True)).square().mean()
            built.zero_grad()
            loss.backward()
            if not config.optimizer.is_one_bit:
                onebit.dense.average_gradients(layer.parameters(), transport)
            built.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss.detach()))
        if hasattr(built, "sync"):
            built.sync()
        return losses[0], losses[-1], torch.cat([p.detach().flatten() for p in layer.parameters()])

    (first, last, mine), (_, _, other) = run_ranks(2, train)
    assert last < first
    assert torch.equal(mine, other)
