"""Gradients in four logarithmic bits, and momenta of moves: exact resume, other worlds, what is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from config_files import small
from family import FAMILY, FREEZE, flat, fresh, model, snapshot, train
from family_contract import World, check_resume
from sharded_ranks import initial
from torch import Tensor

import onebit
from onebit.comm import Int8Codec, Log4Codec, SimTransport, run_ranks
from onebit.zero import ShardedOnebitAdam
from onebit.zero.forms import inter_node

IN_WARMUP, BEHIND = FREEZE - 2, FREEZE + 7
OPTIONS = {name: {"warmup_codec": Log4Codec()} for name in FAMILY}
OPTIONS["ZeroOneAdam"] = {"variance_codec": Log4Codec()}
EIGHT: dict[str, dict] = {"OnebitAdam": {"warmup_codec": Int8Codec()}, "ZeroOneAdam": {}}
CASES = [(name, options) for name, options in OPTIONS.items()]
CASES += [("OnebitAdam", {"momentum_of": "moves"}), ("OnebitAdam", {"momentum_of": "moves", **EIGHT["OnebitAdam"]})]
RESUMED = [(name, options, IN_WARMUP, (3, None)) for name, options in CASES]
RESUMED += [(name, options, BEHIND, (2, 2)) for name, options in CASES if "OnebitLamb" != name != "OnebitMuon"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "stop", "world"), RESUMED, ids=str)
def test_a_resumed_run_goes_on_as_if_nothing_had_been(name: str, options: dict, stop: int, world: World) -> None:
    check_resume(name, world, stop, **options)


def test_two_ranks_take_a_warm_up_of_moves_over_from_three() -> None:
    """In the warm-up all state is what all ranks share: the moments are the same bits."""
    options = {"momentum_of": "moves"}

    def before(transport: SimTransport) -> tuple[dict, dict]:
        net, optimizer = fresh(transport, **options)
        train(transport, range(IN_WARMUP), net, optimizer)
        return snapshot(optimizer), net.state_dict()

    saved = run_ranks(3, before)

    def after(transport: SimTransport) -> Tensor:
        net, optimizer = fresh(transport, **options)
        net.load_state_dict(saved[0][1])
        optimizer.load_state_dicts([copy.deepcopy(state) for state, _ in saved])
        for mine, theirs in zip(optimizer.state_dict()["state"].values(), saved[0][0]["state"].values(), strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in ("exp_avg_update", "exp_avg_sq"))
        train(transport, range(IN_WARMUP, BEHIND), net, optimizer)
        return flat(net).clone()

    first, second = run_ranks(2, after)
    assert torch.equal(first, second)


@pytest.mark.parametrize("there", ["gradients", "moves"])
def test_a_warm_up_of_the_other_momentum_is_refused_and_what_comes_after_is_not(there: str) -> None:
    here = "moves" if there == "gradients" else "gradients"
    net, optimizer = fresh(SimTransport(), momentum_of=there)
    for stop in (IN_WARMUP, BEHIND):
        train(SimTransport(), range(stop), net, optimizer)
        _, other = fresh(SimTransport(), momentum_of=here)
        if stop == BEHIND:
            other.load_state_dict(snapshot(optimizer))
            continue
        with pytest.raises(ValueError, match=f"warm-up averages {there}, this one {here}; .* momentum_of='{there}'"):
            other.load_state_dict(snapshot(optimizer))


def test_the_moments_of_adamw_become_moves() -> None:
    net = model()
    adamw = torch.optim.AdamW(net.parameters())
    train(SimTransport(), range(4), net, adamw)
    _, optimizer = fresh(SimTransport(), momentum_of="moves", freeze_step=100)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    ours, theirs = optimizer.state_dict()["state"], adamw.state_dict()["state"]
    for key, entry in theirs.items():
        moves = entry["exp_avg"].double() / ((entry["exp_avg_sq"].double() / (1 - 0.999**4)).sqrt() + 1e-8)
        torch.testing.assert_close(ours[key]["exp_avg_update"].double(), moves, rtol=1e-5, atol=1e-8)


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="momentum_of must be one of gradients, moves, got 'laprop'"):
        fresh(SimTransport(), momentum_of="laprop")
    for make_one in (lambda codec: fresh(SimTransport(), warmup_codec=codec), sharded):
        with pytest.raises(TypeError, match=r"gradients travel in a Codec, .*Log4Codec\(\), .*got 'log4'"):
            make_one("log4")
        with pytest.raises(ValueError, match="has blocks of 64, the one-bit codec of 256"):
            make_one(Log4Codec(64))


def sharded(codec: object) -> ShardedOnebitAdam:
    return ShardedOnebitAdam(initial(), transport=SimTransport(), warmup_codec=codec)


@pytest.mark.parametrize(
    ("ours", "codec"),
    [({}, None), ({"warmup_codec": "int8"}, Int8Codec(256)), ({"warmup_codec": "log4", "block": 64}, Log4Codec(64))],
)
def test_the_engines_sharded_form_takes_the_codec_of_the_file(ours: dict, codec: object) -> None:
    config = small(optimizer={"type": "OneBitAdam"}, onebit=ours, zero_optimization={"stage": 1})
    transport = SimTransport()
    made = inter_node.make_optimizer(config, SimpleNamespace(world=transport, transport=transport), initial())
    assert isinstance(made, ShardedOnebitAdam) and made.placement.config.warmup_codec == codec


@pytest.mark.parametrize("name", ["OnebitAdam", "ZeroOneAdam"])
def test_four_bits_are_half_of_eight(name: str) -> None:
    def first_step(transport: SimTransport, options: dict) -> float:
        p = torch.nn.Parameter(torch.zeros(1 << 14))
        optimizer = getattr(onebit, name)([p], transport=transport, check_replicas_every=0, **options)
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(transport.rank))
        optimizer.step()
        return optimizer.stats.bits_per_parameter

    eight, four = (
        run_ranks(2, lambda transport, o=o: first_step(transport, o))[0] for o in (EIGHT[name], OPTIONS[name])
    )
    assert four == pytest.approx(eight - 4, abs=0.1)
