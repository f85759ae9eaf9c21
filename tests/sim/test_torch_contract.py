"""Every optimizer takes what torch.optim.AdamW takes, or says by name why not: arguments, groups, states, copies."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable

import numpy
import pytest
import torch
from errors import refused
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.testing._internal.two_tensor import TwoTensor

import onebit
from onebit import zero
from onebit.comm import SimTransport, run_ranks, torch_versions

ONE_BIT = {
    "OnebitAdam": (onebit.OnebitAdam, {"freeze_step": 2}),
    "OnebitLamb": (onebit.OnebitLamb, {"freeze_step": 2}),
    "ZeroOneAdam": (onebit.ZeroOneAdam, {"var_update_scaler": 1, "var_freeze_step": 2}),
    "ShardedOnebitAdam": (zero.ShardedOnebitAdam, {}),
    "ShardedOnebitLamb": (zero.ShardedOnebitLamb, {}),
    "ShardedZeroOneAdam": (zero.ShardedZeroOneAdam, {}),
}
ALL = ["Lamb", *ONE_BIT]


def make(name: str, params: object, transport: SimTransport | None = None, **options: object) -> torch.optim.Optimizer:
    if name == "Lamb":
        return onebit.Lamb(params, **options)
    kind, defaults = ONE_BIT[name]
    return kind(params, transport=transport or SimTransport(), **defaults | options)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1.0, 1.0, n, dtype=dtype)) for n in (300, 40)]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, rank: int = 0) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", ALL)
def test_torchs_other_arguments_are_taken_where_they_change_nothing(name: str) -> None:
    plain, told = parameters(), parameters()
    train(make(name, plain), plain, range(4))
    names = ("foreach", "fused", "maximize", "capturable", "differentiable", "amsgrad")
    for value in (False, None):
        make(name, parameters(), **dict.fromkeys(names, value))
    train(make(name, told, foreach=True, fused=True), told, range(4))
    assert all(map(torch.equal, plain, told))


@pytest.mark.parametrize("name", ALL)
def test_what_has_no_form_is_refused_with_its_reason(name: str) -> None:
    reasons = {"amsgrad": "maximum", "maximize": "loss", "capturable": "graph", "differentiable": "derivative"}
    for key, reason in reasons.items():
        with pytest.raises(ValueError, match=rf"{name}: {key}=True is not supported \(.*{reason}.*; leave {key}=False"):
            make(name, parameters(), **{key: True})
        refused(ValueError, f"group 0: {key}=True is not supported", make, name, [{"params": parameters(), key: True}])


@pytest.mark.parametrize("name", ALL)
def test_an_unknown_argument_is_an_error_of_the_class_that_was_called(name: str) -> None:
    for key in ("warmup", "hooks", "parts"):  # the last two are arguments between our own classes
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{key}'"):
            make(name, parameters(), **{key: 3})


BAD = [
    ({"lr": -1.0}, ValueError, "lr must not be negative, infinite or nan, got -1.0"),
    ({"lr": float("inf")}, ValueError, "lr must not be negative, infinite or nan, got inf"),
    ({"lr": float("nan")}, ValueError, "lr must not be negative, infinite or nan, got nan"),
    ({"lr": "1e-3"}, TypeError, "lr must be a number, got '1e-3'"),
    ({"lr": None}, TypeError, "lr must be a number, got None"),
    ({"lr": torch.ones(2)}, TypeError, "lr must be a number, got tensor"),
    ({"betas": (0.9,)}, ValueError, r"betas must be two numbers, got \(0.9,\)"),
    ({"betas": 0.9}, ValueError, "betas must be two numbers, got 0.9"),
    ({"betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
    ({"betas": (0.9, float("nan"))}, ValueError, "betas must not be negative, infinite or nan"),
    ({"eps": -1e-8}, ValueError, "eps must not be negative"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay must not be negative"),
    ({"weight_decay": float("nan")}, ValueError, "weight_decay must not be negative, infinite or nan"),
]


@pytest.mark.parametrize("name", ALL)
def test_bad_options_are_refused_of_all_groups_of_one_and_of_one_added_later(name: str) -> None:
    params, (later,) = parameters(), parameters()[:1]
    optimizer = make(name, params)
    for options, error, message in BAD:
        refused(error, f"group 0: {message}", make, name, parameters(), **options)
        with pytest.raises(error, match=f"group 1: {message}"):
            first, second = parameters()
            make(name, [{"params": [first]}, {"params": [second], **options}])
        refused(error, f"group 1: {message}", optimizer.add_param_group, {"params": [later], **options})
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [later], "lr": torch.tensor(1e-3), "betas": [0.8, 0.9]})
    before = later.detach().clone()
    train(optimizer, [*params, later], range(2))
    assert not torch.equal(later, before)


NET = nn.Sequential(nn.Linear(3, 2))
NO_PARAMETERS = {
    "model": (NET, TypeError, r"takes parameters, got a Sequential: pass model.parameters\(\)"),
    "list of a model": ([NET], TypeError, r"takes parameters, got a Sequential \(number 0\): pass its .parameters"),
    "group of a model": ([{"params": NET}], TypeError, r"takes parameters, got a Sequential \(number 0\)"),
    "group without": ([{"lr": 1.0}], ValueError, 'group 0 has no "params", only lr'),
    "state": (NET.state_dict(), TypeError, "takes parameters or groups, got a OrderedDict: pass its values"),
    "one": (torch.ones(3), TypeError, "takes an iterable of parameters or groups, got Tensor: pass a list"),
    "None": (None, TypeError, "takes an iterable of parameters or groups, got NoneType"),
    "used generator": (
        iter(()),
        ValueError,
        r"got no parameters; a generator such as model.parameters\(\) gives them once",
    ),
    "float64": ([nn.Parameter(torch.ones(3).double())], TypeError, r"is torch.float64; .*: cast it first: model.float"),
    "complex": (
        [nn.Parameter(torch.ones(3) * 1j)],
        TypeError,
        "is torch.complex64; .*: train torch.view_as_real of it",
    ),
}


@pytest.mark.parametrize("what", NO_PARAMETERS)
def test_what_is_no_list_of_parameters_is_refused_with_the_remedy(what: str) -> None:
    given, error, message = NO_PARAMETERS[what]
    for name in ALL:
        refused(error, message, make, name, given)
    for kind in (onebit.LaProp, onebit.Lion, onebit.HostAdam):
        refused(error, message, kind, given)


def test_another_spelling_of_a_name_is_answered_with_the_name() -> None:
    found = {
        "OneBitAdam": "OnebitAdam",
        "OneBitLamb": "OnebitLamb",
        "ZeroOneadam": "ZeroOneAdam",
        "onebitadamw": "OnebitAdam",
    }
    for given, name in found.items():
        refused(AttributeError, f"no attribute '{given}'; did you mean onebit.{name}", getattr, onebit, given)
    with pytest.raises(AttributeError, match=r"did you mean onebit\.zero\.ShardedOnebitAdam"):
        _ = onebit.ShardedOnebitAdam
    with pytest.raises(AttributeError, match=r"'OneBitAdam'; did you mean onebit\.OnebitAdam\?"):
        _ = zero.OneBitAdam
    assert not hasattr(onebit, "__path_of_no_one__")


@pytest.mark.parametrize("name", ONE_BIT)
def test_strings_for_numbers_types_and_codecs_are_named_in_the_error(name: str) -> None:
    for key in ("bucket_cap_mb", "max_grad_norm", "check_replicas_every", "max_consecutive_skips"):
        refused(TypeError, f"{name}: {key} must be a number, got '1'", make, name, parameters(), **{key: "1"})
    refused(TypeError, f"{name}: overlap must be True or False, got 'no'", make, name, parameters(), overlap="no")
    make(name, parameters(), overlap=numpy.bool_(True))
    if "Sharded" in name:
        with pytest.raises(TypeError, match="block must be a whole number, a positive multiple of 64, got '256'"):
            make(name, parameters(), block="256")
        refused(TypeError, "warmup_steps must be a number, got '64'", make, name, parameters(), warmup_steps="64")
        with pytest.raises(ValueError, match=r"momentum_dtype must be torch.float32 or .*, got 'bfloat16'"):
            make(name, parameters(), momentum_dtype="bfloat16")
        return
    with pytest.raises(TypeError, match=f"{name}: bias_correction must be True or False, got 'no'"):
        make(name, parameters(), bias_correction="no")
    with pytest.raises(TypeError, match=r"model_parallel_group must be a ModelParallelGroup or a transport .*, got 2"):
        make(name, parameters(), model_parallel_group=2)
    refused(TypeError, r"as onebit.comm.Log4Codec\(\); got 'log4'", make, name, parameters(), codec="log4")
    with pytest.raises(ValueError, match=r"error_dtype must be torch.float32 or .*, got 'bfloat16'"):
        make(name, parameters(), error_dtype="bfloat16")


@pytest.mark.parametrize("name", ALL)
def test_lr_may_be_a_tensor_and_no_other_number(name: str) -> None:
    """Betas in tensors, and in NumPy's float32, were taken, and died in the first step."""
    plain, told = parameters(), parameters()
    train(make(name, plain, lr=0.5**9, betas=(0.5, 0.75)), plain, range(6))
    train(make(name, told, lr=torch.tensor(0.5**9), betas=[0.5, 0.75]), told, range(6))
    assert all(map(torch.equal, plain, told))
    for key, value in (
        ("eps", torch.tensor(1e-8)),
        ("weight_decay", torch.tensor(0.1)),
        ("betas", (torch.tensor(0.9),) * 2),
        ("weight_decay", numpy.float32(0.1)),
        ("betas", (0.9, numpy.float32(0.99))),
    ):
        with pytest.raises(TypeError, match=rf"{key} must be a Python number, got .*: only lr may be a tensor"):
            make(name, parameters(), **{key: value})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_comes_twice_is_named(name: str) -> None:
    p, q = parameters()
    with pytest.raises(ValueError, match="rank 0: parameter 2 of group 0 is also parameter 0 of group 0: the same"):
        make(name, [p, q, p])


# ---------------------------------------------------------------- torch's defaults of type and device

CLIPPED = {"max_grad_norm": 0.1}
EVERY: dict[str, Callable[[list[nn.Parameter], SimTransport], torch.optim.Optimizer]] = {
    "OnebitAdam, moves": lambda ps, t: make("OnebitAdam", ps, t, momentum_of="moves", error_dtype=torch.bfloat16),
    "OnebitAdam, log4": lambda ps, t: make("OnebitAdam", ps, t, codec=onebit.comm.Log4Codec(), **CLIPPED),
    "OnebitAdam, delayed": lambda ps, t: make("OnebitAdam", ps, t, delay=1),
    "OnebitLamb": lambda ps, t: make("OnebitLamb", ps, t),
    "OnebitMuon": lambda ps, t: onebit.OnebitMuon(
        [{"params": ps[:2], "use_muon": True}, {"params": ps[2:], "use_muon": False}], freeze_step=2, transport=t
    ),
    "ZeroOneAdam": lambda ps, t: make("ZeroOneAdam", ps, t, local_step_scaler=2, local_step_clipper=2),
    **{
        f"ShardedOnebitAdam, stage {stage}": lambda ps, t, stage=stage: make(
            "ShardedOnebitAdam", ps, t, stage=stage, warmup_steps=3, **CLIPPED if stage < 2 else {}
        )
        for stage in (0, 1, 2)
    },
    "ShardedOnebitLamb": lambda ps, t: make("ShardedOnebitLamb", ps, t, warmup_steps=3),
    "ShardedZeroOneAdam": lambda ps, t: make(
        "ShardedZeroOneAdam", ps, t, warmup_steps=2, local_step_scaler=2, local_step_clipper=2
    ),
    "LocalSteps": lambda ps, t: onebit.LocalSteps(
        torch.optim.SGD(ps, lr=1e-3), every=2, outer_momentum=0.9, correction_steps=4, transport=t
    ),
    "Lamb": lambda ps, _: onebit.Lamb(ps),
    "LaProp": lambda ps, _: onebit.LaProp(ps),
    "Lion": lambda ps, _: onebit.Lion(ps, lr=1e-3),  # so that 8 steps move bfloat16
    "Muon": lambda ps, _: onebit.Muon(by_dimensions(ps), lr=1e-2),
    "HostAdam": lambda ps, _: onebit.HostAdam(ps),
    "HostAdam, small": lambda ps, _: onebit.HostAdam(ps, moment_dtype=torch.bfloat16, variance_dtype=torch.uint8),
    "Offload": lambda ps, _: zero.Offload(ps, onebit.HostAdam, mode="gradients"),
}
DENSE = ("Lamb", "LaProp", "Lion", "Muon", "HostAdam", "HostAdam, small", "Offload")


def by_dimensions(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": [p for p in params if (p.dim() > 1) == use_muon], "use_muon": use_muon} for use_muon in (True, False)
    ]


def matrices_and_vectors() -> list[nn.Parameter]:
    shapes = ((33, 20), torch.float32), ((20, 20), torch.bfloat16), ((300,), torch.float32), ((7,), torch.bfloat16)
    return [
        nn.Parameter(torch.linspace(-1.0, 1.0, math.prod(shape), dtype=dtype, device="cpu").view(shape))
        for shape, dtype in shapes
    ]


def trained_bits(name: str, steps: int, dtype: torch.dtype, device: str, size: float = 1.0) -> list[list[Tensor]]:
    """Of each rank the parameters after some steps under these defaults, the state saved and loaded on the way."""

    def ours(transport: SimTransport) -> list[Tensor]:
        torch.set_default_device(device)  # of a thread
        params = matrices_and_vectors()
        optimizer = EVERY[name](params, transport)
        for step in range(steps):
            generator = torch.Generator("cpu").manual_seed(100 * step + transport.rank)
            optimizer.zero_grad()
            for p in params:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu")
                (p * (size * noise).to(p.dtype)).sum().backward()
            optimizer.step()
            if step == 6 and name != "Offload":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return [p.detach().clone() for p in params]

    torch.set_default_dtype(dtype)
    try:
        return run_ranks(1 if name in DENSE else 2, ours)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_torchs_defaults_of_type_and_device_change_no_bit(name: str) -> None:
    expected = trained_bits(name, 8, torch.float32, "cpu")
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "meta")):
        for a, b in zip(expected, trained_bits(name, 8, dtype, device), strict=True):
            assert all(map(torch.equal, a, b)), (dtype, device)


@pytest.mark.parametrize("kind", [onebit.Lamb, onebit.LaProp, onebit.Lion, onebit.HostAdam])
def test_steps_are_counted_beyond_256_whatever_the_default_dtype(kind: type) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = nn.Parameter(torch.ones(2, dtype=torch.float32))
        optimizer = kind([p])
        for _ in range(260):
            p.grad = torch.ones_like(p)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert int(optimizer.state[p]["step"]) == 260


@pytest.mark.parametrize("name", ONE_BIT)
def test_parameters_without_values_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=r'rank 0: parameter 0 of group 0 is on the device "meta".*to_empty'):
        make(name, [nn.Parameter(torch.ones(3, device="meta"))])


# ---------------------------------------------------------------- eps=0


@pytest.mark.parametrize("name", [name for name in EVERY if name != "LocalSteps"])
def test_with_eps_0_what_has_no_gradient_stays_and_the_rest_trains(name: str) -> None:
    """Exact zeros, what rounds to zero beside a large element, and a parameter that sees zeros alone at first."""

    def ours(transport: SimTransport) -> bool:
        params = matrices_and_vectors()
        before = [p.detach().clone() for p in params]
        optimizer = EVERY[name](params, transport)
        for group in optimizer.param_groups:
            group["eps"] = 0.0
        for step in range(8):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            optimizer.zero_grad()
            for k, p in enumerate(params):
                g = torch.randn(p.shape, generator=generator)
                g.view(-1)[0] = 1e4
                g.view(-1)[1::3] = 0.0
                (p * (g * (0.0 if k == 2 and step < 4 else 1.0)).to(p.dtype)).sum().backward()
            optimizer.step()
        if hasattr(optimizer, "sync"):
            optimizer.sync()
        moved = [(p.detach() - q).float() for p, q in zip(params, before, strict=True)]
        return all(bool(x.isfinite().all()) and float(x.abs().sum()) > 0.0 for x in moved)

    assert all(run_ranks(1 if name in DENSE else 2, ours))


@pytest.mark.parametrize("kind", [onebit.OnebitAdam, onebit.HostAdam])
def test_with_eps_0_and_gradients_everywhere_it_is_adamw(kind: type) -> None:
    exact, ours = parameters(), parameters()
    options = (
        {} if kind is onebit.HostAdam else {"transport": SimTransport(), "warmup_codec": onebit.comm.IdentityCodec()}
    )
    train(torch.optim.AdamW(exact, eps=0.0), exact, range(5))
    train(kind(ours, eps=0.0, **options), ours, range(5))
    for a, b in zip(exact, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- frozen parameters


@pytest.mark.parametrize("name", ALL)
def test_frozen_parameters_may_have_any_dtype_and_are_made_equal(name: str) -> None:
    """Quantised weights under adapters, as in QLoRA. Those of rank 0 are sent to all, or the ranks told apart."""
    dtypes = (torch.uint8, torch.bool, torch.int64, torch.float64, torch.complex128)

    def ours(transport: SimTransport) -> list[Tensor]:
        values = torch.arange(7) + 5 * transport.rank, torch.tensor(3 * transport.rank + 1)
        frozen, scalars = ([nn.Parameter(x.to(dtype), requires_grad=False) for dtype in dtypes] for x in values)
        params = parameters()
        train(make(name, [*frozen, *params, *scalars], transport), params, range(3))
        return [p.detach() for p in (*frozen, *scalars)]

    first, second = run_ranks(2, ours)
    for x, dtype in zip(first, dtypes, strict=False):
        assert torch.equal(x, torch.arange(7).to(dtype)) and x.dtype == dtype
    assert name == "Lamb" or all(map(torch.equal, first, second))


def test_a_frozen_parameter_that_consists_of_several_tensors_is_made_equal() -> None:
    """As torchao's quantised weights do."""

    def ours(transport: SimTransport) -> tuple[Tensor, Tensor]:
        codes, scales = torch.arange(6, dtype=torch.uint8), torch.ones(6, dtype=torch.uint8)
        pair = TwoTensor(codes + transport.rank, scales * 7 * transport.rank)
        make("OnebitAdam", [nn.Parameter(pair, requires_grad=False), *parameters()], transport)
        return pair.a, pair.b

    for codes, scales in run_ranks(2, ours):
        assert torch.equal(codes, torch.arange(6)) and not scales.any()


# ---------------------------------------------------------------- closures and states


@pytest.mark.parametrize("name", ALL)
def test_a_closure_gives_its_loss(name: str) -> None:
    params = parameters()
    optimizer = make(name, params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    expected = sum(p.detach().square().sum() for p in params)
    assert torch.equal(optimizer.step(closure).detach(), expected) and closure() < expected


def trained(name: str, steps: int, **options: object) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = parameters()
    optimizer = make(name, params, **options)
    train(optimizer, params, range(steps))
    return params, optimizer


@pytest.mark.parametrize("name", ONE_BIT)
def test_torchs_adamw_never_steps_on_a_state_that_is_not_adams(name: str) -> None:
    """0/1 Adam keeps m/D; under Adam's name for m, AdamW's first step on it was 107 learning rates long."""
    params, optimizer = trained(name, 5)
    adamw = torch.optim.AdamW(params, lr=1e-3)
    with pytest.raises(KeyError, match="exp_avg"):
        adamw.load_state_dict(optimizer.state_dict())
        adamw.step()


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"])
def test_a_state_of_ours_without_its_record_is_refused_by_what_leaves_it_out(name: str) -> None:
    params, optimizer = trained(name, 5)
    found = get_optimizer_state_dict(nn.ParameterList(params), optimizer)
    with pytest.raises(ValueError, match=r'"onebit" is missing, as torch\.distributed\.checkpoint\.state_dict leaves'):
        set_optimizer_state_dict(nn.ParameterList(params), make(name, params), found)


@pytest.mark.parametrize("name", ["OnebitAdam", "OnebitLamb"])
def test_the_state_of_a_warm_up_is_adams(name: str) -> None:
    """What AdamW and Lamb make of it in the next step is what they would have made themselves."""
    for kind in (torch.optim.AdamW, onebit.Lamb):
        exact, ours = parameters(), parameters()
        reference = kind(exact, lr=0.0, weight_decay=0.0)
        train(reference, exact, range(5))
        warm = make(name, ours, lr=0.0, weight_decay=0.0, freeze_step=100, warmup_codec=onebit.comm.IdentityCodec())
        train(warm, ours, range(5))
        dense = kind(ours, lr=0.0)
        dense.load_state_dict(warm.state_dict())
        for optimizer, params in ((reference, exact), (dense, ours)):
            optimizer.param_groups[0]["lr"] = 1e-2
            train(optimizer, params, range(5, 6))
        for a, b in zip(exact, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_the_state_of_another_optimizer_is_refused_by_name(name: str) -> None:
    for other in ONE_BIT:
        if other != name:
            _, optimizer = trained(name, 1)
            before = copy.deepcopy(optimizer.state_dict())
            with pytest.raises(ValueError, match="cannot load this optimizer state: "):
                optimizer.load_state_dict(trained(other, 5)[1].state_dict())
            assert str(optimizer.state_dict()) == str(before)
    strangers: list[tuple[type[torch.optim.Optimizer], dict[str, float]]] = [(torch.optim.SGD, {"momentum": 0.9})]
    if torch_versions.TORCH >= (2, 7):  # whose state tells Adam from AdamW
        strangers.append((torch.optim.Adam, {"weight_decay": 0.1}))
    for stranger, options in strangers:
        params = parameters()
        optimizer = stranger(params, lr=0.1, **options)
        train(optimizer, params, range(2))
        with pytest.raises(ValueError, match="cannot load this optimizer state: "):
            make(name, parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lamb_resumes_in_low_precision_to_the_bit(dtype: torch.dtype) -> None:
    params, again = parameters(dtype), parameters(dtype)
    optimizer, resumed = onebit.Lamb(params), onebit.Lamb(again)
    train(optimizer, params, range(3))
    with torch.no_grad():
        for p, q in zip(params, again, strict=True):
            q.copy_(p)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(resumed.state[p]["exp_avg_sq"].dtype == torch.float32 for p in again)
    train(optimizer, params, range(3, 6))
    train(resumed, again, range(3, 6))
    assert all(map(torch.equal, params, again))


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("name", ONE_BIT)
def test_a_copy_is_refused_and_its_remedy_works(name: str) -> None:
    params, optimizer = trained(name, 3)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        refused(TypeError, f"{name} can be neither copied nor pickled.*load_state_dict", duplicate, optimizer)
    twins = copy.deepcopy(params)
    twin = make(name, twins)
    twin.load_state_dict(optimizer.state_dict())
    train(optimizer, params, range(3, 6))
    train(twin, twins, range(3, 6))
    assert all(map(torch.equal, params, twins))


def test_lamb_is_copied_as_torchs_optimizers_are() -> None:
    params, optimizer = trained("Lamb", 3)
    twins, twin = copy.deepcopy((params, optimizer))
    train(twin, twins, range(3, 6))
    train(optimizer, params, range(3, 6))
    assert all(map(torch.equal, params, twins))


@pytest.mark.parametrize("kind", [onebit.Lamb, onebit.OnebitLamb, zero.ShardedOnebitLamb])
def test_bounds_of_the_trust_ratio_are_numbers(kind: Callable[..., torch.optim.Optimizer]) -> None:
    given = {} if kind is onebit.Lamb else {"transport": SimTransport()}
    refused(TypeError, "max_coeff must be a number, got '5'", kind, parameters(), max_coeff="5", **given)
