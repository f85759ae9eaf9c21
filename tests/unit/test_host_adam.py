"""Adam on the host: kernel against reference, both against a float64 loop, and `HostAdam` against torch's AdamW."""

from __future__ import annotations

import copy
import io
import itertools
import math
import shutil
import unittest.mock
from pathlib import Path

import pytest
import torch
from errors import refused
from kernel_inputs import load
from test_kernels import load_sanitized, needs_compiler
from torch import Tensor, nn

import onebit
from onebit.arithmetic.adam import adam_direction_, direction_in_torch_
from onebit.comm.kernels import library
from onebit.host import (
    BLOCK,
    EightBitVariance,
    adam_,
    direction_,
    empty_variance,
    from_eight_bits,
    native,
    reference,
    to_eight_bits,
)
from onebit.host.operands import AdamChunk, AdamConstants

SIZES = (0, 1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7)
COMPILER = shutil.which("c++")
CSRC = Path(__file__).parents[2] / "csrc"
NARROW = (torch.float32, torch.bfloat16)
OUTPUTS = (None, torch.float32, torch.bfloat16, torch.float16)
BUILT = pytest.mark.skipif(not native.is_built(), reason=f"needs the C++ library: {native.why_not()}")


def random(n: int, seed: int = 0) -> Tensor:
    """Of many magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).pow(12)
    return torch.where(torch.rand(n, generator=generator) < 0.05, 0.0, x)


def chunk(n: int, grad: torch.dtype, m: torch.dtype, is_packed: bool, out: torch.dtype | None) -> AdamChunk:
    v = empty_variance(n) if is_packed else torch.zeros(n)
    made = None if out is None else torch.zeros(n, dtype=out)
    return AdamChunk(random(n, 1), random(n, 2).to(grad), torch.zeros(n, dtype=m), v, made)


def tensors(c: AdamChunk) -> list[Tensor]:
    v = list(c.v) if isinstance(c.v, EightBitVariance) else [c.v]
    return [c.master, c.m, *v, *([] if c.out is None else [c.out])]


def constants(step: int, **options: object) -> AdamConstants:
    given = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 1.0}
    given |= {"is_decoupled": True, "bias_correction": True} | options
    return AdamConstants.of(step=step, **given)


def assert_same(one: AdamChunk, other: AdamChunk) -> None:
    for x, y in zip(tensors(one), tensors(other), strict=True):
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x[~x.isnan()], y[~y.isnan()])


# ---------------------------------------------------------------- the arithmetic


def textbook(p: list[float], grads: list[list[float]], lr: float, b1: float, b2: float, eps: float, wd: float) -> list:
    """AdamW in Python's floats, from arXiv 1711.05101."""
    m, v = [0.0] * len(p), [0.0] * len(p)
    for t, g in enumerate(grads, 1):
        for i in range(len(p)):
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
            p[i] -= lr * (m[i] / (1 - b1**t) / (math.sqrt(v[i] / (1 - b2**t)) + eps) + wd * p[i])
    return p


def test_float32_steps_follow_the_textbook() -> None:
    p, m, v = random(70), torch.zeros(70), torch.zeros(70)
    grads = [random(70, seed) for seed in range(20)]
    expected = textbook(p.tolist(), [g.tolist() for g in grads], 1e-2, 0.9, 0.99, 1e-8, 0.1)
    for t, g in enumerate(grads, 1):
        adam_(p, g, m, v, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, step=t)
    # Twenty steps round p, and what they add, by a few units in the last place of 1.
    assert (p.double() - torch.tensor(expected, dtype=torch.float64)).abs().max() < 20 * 2.0**-23


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("betas", "bias_correction"), [((0.9, 0.99), True), ((0.0, 0.5), False)])
def test_a_direction_is_the_step_from_zero(n: int, betas: tuple[float, float], bias_correction: bool) -> None:
    """To the bit; and where the library is not built, the reference gives the same."""
    given = {"betas": betas, "eps": 1e-8, "bias_correction": bias_correction}
    (p, *theirs), *both = ([torch.zeros(n) for _ in range(3)] for _ in range(3))
    for t in range(1, 6):
        g = random(n, t)
        adam_(p.zero_(), g, *theirs, lr=1.0, step=t, **given)
        for is_built, (ours, *moments) in zip((native.is_built(), False), both, strict=True):
            with unittest.mock.patch.object(native, "is_built", return_value=is_built):
                direction_(ours.copy_(g), *moments, step=t, **given)
            for x, expected in zip((ours, *moments), (-p, *theirs), strict=True):
                assert torch.equal(x, expected)


@pytest.mark.parametrize("n", SIZES)
def test_a_direction_elsewhere_differs_in_last_bits(n: int) -> None:
    """What a GPU runs, here."""
    ours, theirs = ([torch.zeros(n) for _ in range(3)] for _ in range(2))
    for t in range(1, 6):
        for (g, *moments), call in ((ours, adam_direction_), (theirs, direction_in_torch_)):
            call(g.copy_(random(n, t)), *moments, betas=(0.9, 0.99), eps=1e-8, step=t, bias_correction=True)
        # Where m and g all but cancel, what is left of them has the errors of both.
        for one, other, least in zip(ours, theirs, (1e-6, 1e-6, 0.0), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=least)


@BUILT
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("isa", native.available_isas() if native.is_built() else ())
def test_the_kernel_gives_the_bits_of_the_reference(isa: str, n: int) -> None:
    for grad, m, is_packed, out in itertools.product(NARROW, NARROW, (False, True), OUTPUTS):
        ours, theirs = (chunk(n, grad, m, is_packed, out) for _ in range(2))
        steps = (
            constants(1),
            constants(2, grad_scale=0.37, weight_decay=0.0),
            constants(3, is_decoupled=False, betas=(0.0, 0.5)),
            constants(1000, bias_correction=False, betas=(0.4, 0.0)),
        )
        for c in steps:
            native.adam_(ours, c, 3 * BLOCK, isa)
            reference.adam_(theirs, c, 3 * BLOCK)
            assert_same(ours, theirs)


@BUILT
@pytest.mark.parametrize("isa", native.available_isas() if native.is_built() else ())
def test_the_kernel_agrees_on_what_is_not_finite_or_hardly_a_number(isa: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-20, 1e-10, 70000.0, -65519.0, 6e-8, 1e19, -3e38, math.inf])
    special = torch.cat([special, -special, torch.tensor([math.nan])])
    for is_packed, out in itertools.product((False, True), OUTPUTS):
        ours, theirs = (chunk(3 * BLOCK, torch.float32, torch.bfloat16, is_packed, out) for _ in range(2))
        for c in (ours, theirs):
            c.master[: len(special)] = special
            c.grad[100 : 100 + len(special)] = special
        for t in (1, 2, 3):
            native.adam_(ours, constants(t), 0, isa)
            reference.adam_(theirs, constants(t), 0)
            assert_same(ours, theirs)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_step_in_chunks_ends_in_the_bits_of_a_step_in_one(is_packed: bool) -> None:
    n, c = 7 * BLOCK + 5, constants(4)
    whole, parts = (chunk(n, torch.bfloat16, torch.bfloat16, is_packed, torch.bfloat16) for _ in range(2))
    for _ in range(3):
        reference.adam_(whole, c, 0)
        for begin, end in ((0, BLOCK), (BLOCK, 4 * BLOCK), (4 * BLOCK, n)):
            piece = parts.piece(begin, end)
            options = {"lr": 1e-2, "weight_decay": 0.1, "step": 4, "offset": begin}
            adam_(piece.master, piece.grad, piece.m, piece.v, out=piece.out, **options)
        assert_same(whole, parts)


@BUILT
def test_threads_change_no_bit() -> None:
    n, threads = 4 * library.ELEMENTS_PER_THREAD + 11, torch.get_num_threads()
    one, two = (chunk(n, torch.float32, torch.bfloat16, True, torch.bfloat16) for _ in range(2))
    try:
        for t in (1, 2, 3):
            torch.set_num_threads(1)
            native.adam_(one, constants(t), 0)
            torch.set_num_threads(2)
            native.adam_(two, constants(t), 0)
    finally:
        torch.set_num_threads(threads)
    assert_same(one, two)


@pytest.mark.processes
@BUILT
@needs_compiler
def test_no_undefined_behaviour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under the sanitizer, also with no elements, whose tensors have no memory."""
    load_sanitized(monkeypatch, native, "host_adam.cpp", tmp_path)
    for isa, n, is_packed, out in itertools.product(native.available_isas(), (0, 1, 600), (False, True), OUTPUTS):
        ours, theirs = (chunk(n, torch.bfloat16, torch.bfloat16, is_packed, out) for _ in range(2))
        if is_packed:
            for c in (ours, theirs):
                c.v.codes.fill_(200)
                c.v.scales.fill_(math.inf)
        for t in (1, 2):
            native.adam_(ours, constants(t), 0, isa)
            reference.adam_(theirs, constants(t), 0)
            assert_same(ours, theirs)
    assert "runtime error" not in capfd.readouterr().err


def test_arguments_are_checked_before_anything_is_written() -> None:
    p, g, m, v = (torch.ones(2 * BLOCK) for _ in range(4))

    def check(kind: type[Exception], said: str, **changed: object) -> None:
        given = {"master": p, "grad": g, "m": m, "v": v, "lr": 1e-3, "step": 1} | changed
        refused(kind, said, adam_, **given)

    check(TypeError, "master must be torch.float32, got torch.bfloat16", master=p.bfloat16())
    check(TypeError, "grad must be torch.float32 or torch.bfloat16, got torch.float16", grad=g.half())
    check(TypeError, "v.codes must be torch.uint8", v=EightBitVariance(v, torch.zeros(2)))
    check(ValueError, r"v.scales must be contiguous, of shape \(2,\)", v=EightBitVariance(v.byte(), torch.zeros(3)))
    check(
        ValueError,
        r"m must be contiguous, of shape \(512,\); it is \(512,\), not contiguous",
        m=torch.ones(4 * BLOCK)[::2],
    )
    check(ValueError, r"it is \(256,\), contiguous", m=m[:BLOCK])
    check(ValueError, "host memory, it is on meta", out=torch.empty(2 * BLOCK, device="meta"))
    check(ValueError, "overlap in memory", out=g)
    check(ValueError, "multiple of 256", v=empty_variance(2 * BLOCK), offset=1)
    check(ValueError, "counts from 1", step=0)
    check(ValueError, "lr must not be negative", lr=-1.0)
    check(ValueError, "eps must not be", eps=math.nan)
    check(ValueError, "betas in", betas=(0.9, 1.0))
    check(ValueError, "grad_scale is nan", grad_scale=math.nan)
    for x, kind, said in (
        (m.view(2, -1), ValueError, r"g must be contiguous, of shape \(512,\)"),
        (m, ValueError, "overlap"),
        (g.bfloat16(), TypeError, "g must be torch.float32, got torch.bfloat16"),  # twice as long as it says
    ):
        refused(kind, said, direction_, x, m, v, betas=(0.9, 0.999), eps=1e-8, step=1, bias_correction=True)
    assert all(bool((x == 1).all()) for x in (p, g, m, v))


def test_without_the_library_the_reference_runs_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(monkeypatch, native, tmp_path / "_host.so")
    c = chunk(300, torch.float32, torch.float32, False, None)
    expected = copy.deepcopy(c)
    for t in (1, 2):
        adam_(c.master, c.grad, c.m, c.v, lr=1e-2, weight_decay=0.1, step=t)
        reference.adam_(expected, constants(t), 0)
    assert_same(c, expected)
    assert [record.name for record in caplog.records] == [native.__name__]
    assert "not built" in caplog.text


# ---------------------------------------------------------------- eight bits


def test_eight_bits_keep_the_mean_and_lose_at_most_an_eighth() -> None:
    v = random(2000).square() + 1e-6
    found = []
    for seed in range(400):
        packed = empty_variance(2000)
        to_eight_bits(v, packed, seed=seed * 7919)
        found.append(from_eight_bits(packed))
    ratios = torch.stack(found) / v
    assert ratios.min() > 1 - 1 / 8 and ratios.max() < 1 + 1 / 8
    # A ratio's deviation is at most a sixteenth: the mean of 400 stays within 5 of its own.
    assert (ratios.mean(0) - 1).abs().max() < 5 / 16 / math.sqrt(400)
    assert abs(float(ratios.mean()) - 1) < 5 / 16 / math.sqrt(400 * 2000)


def test_eight_bits_follow_a_variance_that_moves_slowly() -> None:
    """A step moves v by 1 %. Rounding to nearest, to an eighth, would leave it where it is."""
    n = 2000
    p, m, v, exact = torch.zeros(n), torch.zeros(n), empty_variance(n), 0.0
    for t in range(1, 500):
        g = 1.0 if t < 100 else 0.1
        exact = 0.99 * exact + 0.01 * g**2
        adam_(p, torch.full((n,), g), m, v, lr=0.0, betas=(0.9, 0.99), step=t)
        if t in (99, 200, 499):
            # An element strays by a quarter at most: the mean of 2000 by 4 of its own deviations.
            assert abs(float(from_eight_bits(v).mean()) / exact - 1) < 4 * 0.25 / math.sqrt(n)


def test_a_variance_becomes_zero_only_where_it_was() -> None:
    v = torch.tensor([0.0, 1e-45, 1e-30, 1e-12, 1.0])
    packed = empty_variance(5)
    to_eight_bits(v, packed, seed=3)
    said = from_eight_bits(packed)
    assert said[0] == 0 and bool((said[1:] >= 2.0**-31.75).all()) and 0.87 < said[4] < 1.13


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_a_gradient_that_is_not_finite_halts_its_block(bad: float) -> None:
    n = 3 * BLOCK
    p, m, v = torch.ones(n), torch.zeros(n), empty_variance(n)
    g = torch.full((n,), 1e-3)
    g[BLOCK + 7] = bad
    adam_(p, g, m, v, lr=1e-2, step=1)
    before = p.clone()
    adam_(p, torch.full((n,), 1e-3), m, v, lr=1e-2, step=2)
    others = torch.arange(n) != BLOCK + 7
    is_halted = (p == before)[others]
    assert is_halted[BLOCK : 2 * BLOCK - 1].all() and not is_halted[:BLOCK].any() and not is_halted[2 * BLOCK :].any()


# ---------------------------------------------------------------- the optimizer


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> float:
    loss = torch.zeros(())
    dtype = next(model.parameters()).dtype
    for t in range(first, first + steps):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(32, 20, generator=generator)
        loss = (model(x.to(dtype)).float() - x[:, :7].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_a_model_trains_as_with_torchs_adam(is_decoupled: bool) -> None:
    ours, theirs = net(), net()
    options = {"lr": 1e-3, "weight_decay": 0.05}
    one = onebit.HostAdam(ours.parameters(), decoupled_weight_decay=is_decoupled, **options)
    of_torch = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    torchs = of_torch(theirs.parameters(), foreach=False, **options)
    train(ours, one, 100)
    train(theirs, torchs, 100)
    assert (values(ours) - values(theirs)).abs().max() < 1e-6
    assert one.state_bytes() == 8 * values(ours).numel()


def test_one_step_is_torchs_to_last_bits() -> None:
    """|Δp| ≤ a unit in p's last place + 8 roundings of the move; m and v: 2 units."""
    n = 5000
    p, q = (random(n).requires_grad_() for _ in range(2))
    one = onebit.HostAdam([p], lr=1e-2, weight_decay=0.1)
    torchs = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.1, foreach=False)
    for t in range(5):
        before = q.detach().clone()
        p.grad, q.grad = random(n, t + 9), random(n, t + 9)
        one.step()
        torchs.step()
        place = torch.finfo(torch.float32).eps * q.detach().abs().clamp_min(1e-30)
        move = (q.detach() - before).abs()
        assert ((p - q).detach().abs() <= place + 8 * 2.0**-24 * move).all()
        for name in ("exp_avg", "exp_avg_sq"):
            here, there = one.state[p][name], torchs.state[q][name]
            scale = torch.maximum(there.abs(), q.grad.abs() if name == "exp_avg" else torch.zeros(n))
            assert ((here - there).abs() <= 2 * torch.finfo(torch.float32).eps * scale + 1e-44).all()
        one.load_state_dict(torchs.state_dict())
        p.data.copy_(q.data)


SMALL = {"moment_dtype": torch.bfloat16, "variance_dtype": torch.uint8}


def test_small_states_train_as_well() -> None:
    losses = {}
    for name, options in {"large": {}, "m": {"moment_dtype": torch.bfloat16}, "both": SMALL}.items():
        model = net()
        optimizer = onebit.HostAdam(model.parameters(), lr=3e-3, **options)
        train(model, optimizer, 150)
        losses[name] = sum(train(model, optimizer, 1, first=t) for t in range(150, 190))
    assert abs(losses["m"] / losses["large"] - 1) < 0.01, losses
    assert abs(losses["both"] / losses["large"] - 1) < 0.05, losses


def test_state_bytes_are_what_the_types_say() -> None:
    model = net(torch.bfloat16)
    optimizer = onebit.HostAdam(model.parameters(), **SMALL)
    train(model, optimizer, 1)
    numels = [p.numel() for p in model.parameters()]
    assert optimizer.state_bytes() == sum((4 + 2 + 1) * n + 4 * -(-n // BLOCK) for n in numels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_their_masters_rounded(dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = onebit.HostAdam(model.parameters(), lr=1e-5)
    before = values(model)
    train(model, optimizer, 100)
    assert (values(model) != before).any(), "steps below a parameter's last place add up in the master"
    for p in model.parameters():
        assert optimizer.state[p]["master"].dtype == torch.float32
        assert torch.equal(p, optimizer.state[p]["master"].to(dtype))


def test_a_master_follows_what_others_write_into_its_parameter() -> None:
    p = torch.ones(10, dtype=torch.bfloat16, requires_grad=True)
    optimizer = onebit.HostAdam([p], lr=1e-4, weight_decay=0.0)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    master = optimizer.state[p]["master"].clone()
    with torch.no_grad():
        p[3] = 5.0
    optimizer.step()
    moved = optimizer.state[p]["master"]
    assert abs(float(moved[3]) - 5.0) < 1e-3
    assert ((moved - master)[:3] < 0).all() and ((moved - master)[:3] > -2e-4).all(), "the others keep their fractions"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, SMALL])
def test_a_resumed_run_ends_in_the_bits_of_one_without_interruption(dtype: torch.dtype, options: dict) -> None:
    model = net(dtype)
    optimizer = onebit.HostAdam(model.parameters(), lr=1e-3, **options)
    train(model, optimizer, 12)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 12, first=12)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = net(dtype)
    resumed = onebit.HostAdam(other.parameters(), lr=7.0, **options)
    resumed.load_state_dict(saved["optimizer"])
    other.load_state_dict(saved["model"])
    train(other, resumed, 12, first=12)
    assert torch.equal(values(model), values(other))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name, x in optimizer.state[p].items():
            assert torch.equal(x, resumed.state[q][name]) and x.dtype == resumed.state[q][name].dtype, name


def test_states_move_between_torchs_adamw_and_ours() -> None:
    model, twin = net(), net()
    torchs = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    train(model, torchs, 10)
    twin.load_state_dict(model.state_dict())
    ours = onebit.HostAdam(twin.parameters(), fused=True)
    ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["lr"] == 1e-3
    train(model, torchs, 10, first=10)
    train(twin, ours, 10, first=10)
    assert (values(model) - values(twin)).abs().max() < 1e-6

    torchs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch keeps the tensors that it loads
    model.load_state_dict(twin.state_dict())
    train(model, torchs, 10, first=20)
    train(twin, ours, 10, first=20)
    assert (values(model) - values(twin)).abs().max() < 1e-6


def test_states_are_converted_to_other_types() -> None:
    model = net()
    large = onebit.HostAdam(model.parameters())
    train(model, large, 10)
    small = onebit.HostAdam(model.parameters(), **SMALL)
    small.load_state_dict(large.state_dict())
    back = onebit.HostAdam(model.parameters())
    back.load_state_dict(small.state_dict())
    for p in model.parameters():
        here, there = back.state[p], large.state[p]
        assert torch.equal(here["exp_avg"], there["exp_avg"].bfloat16().float())
        assert torch.allclose(
            here["exp_avg_sq"], there["exp_avg_sq"], rtol=0.13, atol=1e-9 * float(there["exp_avg_sq"].max())
        )
        assert here["step"] == there["step"] == 10


def test_torchs_adamw_does_not_take_codes_for_a_variance() -> None:
    model = net()
    small = onebit.HostAdam(model.parameters(), **SMALL)
    train(model, small, 3)
    torchs = torch.optim.AdamW(model.parameters())
    torchs.load_state_dict(small.state_dict())
    refused(KeyError, "exp_avg_sq", train, model, torchs, 1)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = net()
    optimizer = onebit.HostAdam(model.parameters())
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())

    def check(said: str, change) -> None:
        state = copy.deepcopy(before)
        change(state)
        refused(ValueError, said, optimizer.load_state_dict, state)

    check("groups of", lambda s: s["param_groups"][0]["params"].pop())
    check("has no betas", lambda s: s["param_groups"][0].pop("betas"))
    check("amsgrad=True is not supported", lambda s: s["param_groups"][0].update(amsgrad=True))
    check("no exp_avg_sq", lambda s: s["state"][0].pop("exp_avg_sq"))
    check("has shape", lambda s: s["state"][1].update(exp_avg=torch.zeros(2)))
    check("no exp_avg_sq_scales", lambda s: s["state"][1].update(exp_avg_sq_codes=torch.zeros(33, dtype=torch.uint8)))
    for key, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(x, before["state"][key][name]) for name, x in entry.items())


def test_arguments_of_torchs_adamw_mean_the_same_or_are_refused() -> None:
    def made(**options: object) -> onebit.HostAdam:
        return onebit.HostAdam([torch.ones(3, requires_grad=True)], **options)

    for options in ({"foreach": True}, {"fused": True}, {"foreach": False, "fused": None}, {"lr": torch.tensor(0.1)}):
        made(**options)
    for name in ("amsgrad", "capturable", "differentiable"):
        refused(ValueError, f"{name}=True is not supported", made, **{name: True})
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": math.nan}, {"weight_decay": -1.0}, {"betas": 0.9}):
        refused(ValueError, "group 0", made, **options)
    refused(ValueError, "variance_dtype must be", made, variance_dtype=torch.bfloat16)
    refused(TypeError, r"torch\.float64", onebit.HostAdam, [torch.ones(3, dtype=torch.float64, requires_grad=True)])
    optimizer = made()
    with pytest.raises(ValueError, match="group 1"):
        optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_groups_closures_and_learning_rates_work_as_torchs() -> None:
    def run(kind: type[torch.optim.Optimizer]) -> tuple[Tensor, float]:
        model = net()
        first, second, frozen, _ = model.parameters()
        optimizer = kind([{"params": [first], "lr": torch.tensor(1e-2)}], maximize=True)
        optimizer.add_param_group({"params": [second], "weight_decay": 0.3, "betas": (0.0, 0.5)})
        optimizer.add_param_group({"params": [frozen], "lr": 0.0})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 20)).square().sum()
            loss.backward()
            return float(loss.detach())

        losses = []
        for _ in range(6):
            losses.append(optimizer.step(closure))
            schedule.step()
        return values(model), sum(losses)

    (ours, said), (theirs, torchs) = run(onebit.HostAdam), run(torch.optim.AdamW)
    assert torch.allclose(ours, theirs, atol=1e-6) and abs(said / torchs - 1) < 1e-5


def test_odd_parameters_step_as_torchs() -> None:
    def run(kind: type[torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(1)
        odd = [
            torch.randn(4, 6).t().requires_grad_(),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),
            torch.zeros(0, 3, requires_grad=True),
            torch.tensor(2.0, requires_grad=True),
            torch.ones(3, requires_grad=True),
        ]
        optimizer = kind(odd, lr=1e-2)
        for _ in range(3):
            for p in odd[:-1]:
                p.grad = torch.randn(p.shape)
            optimizer.step()
        assert odd[-1] not in optimizer.state or not optimizer.state[odd[-1]]
        return [p.detach() for p in odd]

    for ours, theirs in zip(run(onebit.HostAdam), run(torch.optim.AdamW), strict=True):
        assert ours.stride() == theirs.stride() and torch.allclose(ours, theirs, atol=1e-6)


def test_a_nan_spoils_its_element_alone() -> None:
    p = torch.ones(5, requires_grad=True)
    optimizer = onebit.HostAdam([p])
    p.grad = torch.tensor([1.0, math.nan, 0.0, math.inf, -1.0])
    optimizer.step()
    assert p.isnan().tolist() == [False, True, False, True, False]


def test_sparse_gradients_are_refused() -> None:
    p = torch.ones(5, requires_grad=True)
    p.grad = torch.zeros(5).to_sparse()
    refused(RuntimeError, r"HostAdam needs dense gradients.*sparse=False", onebit.HostAdam([p]).step)


def test_a_copy_goes_on_as_the_original() -> None:
    model = net(torch.bfloat16)
    optimizer = onebit.HostAdam(model.parameters(), **SMALL)
    train(model, optimizer, 3)
    twin, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3, first=3)
    train(twin, copied, 3, first=3)
    assert torch.equal(values(model), values(twin)) and copied.state_bytes() == optimizer.state_bytes()


def test_a_step_counts_as_an_edit_of_the_parameter() -> None:
    p = torch.ones(5, requires_grad=True)
    optimizer = onebit.HostAdam([p])
    loss = (p * p).sum()
    p.grad = torch.ones(5)
    optimizer.step()
    refused(RuntimeError, "modified by an inplace operation", loss.backward)
