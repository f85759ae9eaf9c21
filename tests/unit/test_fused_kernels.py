"""The fused C++ steps give the reference's bytes and floats; the reference gives those of float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import fused_cases as cases
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import each_isa, needs_build
from torch import Tensor

from onebit.comm import CODECS
from onebit.comm.kernels import cpu, library, reference
from onebit.comm.kernels.operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
    MomentumInputs,
    MomentumWeights,
    OwnerStep,
    Segments,
    Variance,
)

ERRORS = (None, torch.float32, torch.bfloat16)


@needs_build
@each_isa
@settings(max_examples=40)
@given(data=st.data())
def test_any_layout(isa: str, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from((64, 128, 256)))
    numels = tuple(data.draw(st.lists(st.integers(1, 600), max_size=7)))
    blocks = sum(-(-n // block) for n in numels) + len(numels)
    K = data.draw(st.integers(1, 4))
    dtypes = tuple(data.draw(st.sampled_from((None, torch.float32, torch.bfloat16))) for _ in numels)
    case = cases.Case(K, -(-max(blocks, 1) // K), block, numels, dtypes)
    error = data.draw(st.sampled_from(ERRORS))
    packed, variance = data.draw(st.booleans()), data.draw(st.booleans())
    cases.check_encode_momentum(
        partial(cpu.encode_momentum, isa=isa), case, error=error, packed=packed, variance=variance
    )
    cases.check_apply(partial(cpu.apply, isa=isa), case)
    cases.check_apply(partial(cpu.int4_apply, isa=isa), case, frame="int4")
    cases.check_step_masters(partial(cpu.step_masters, isa=isa), case, scale="mean_abs")
    cases.check_step_masters(partial(cpu.int4_step_masters, isa=isa), case, frame="int4")
    cases.check_local_step(partial(cpu.local_step, isa=isa), case, variance=variance, anchored=packed)
    cases.check_momentum_sums(partial(cpu.momentum_sums, isa=isa), case, packed=packed, variance=variance)
    cases.check_correct_residual(
        partial(cpu.correct_residual, isa=isa), case, error=error or torch.float32, variance=variance
    )


@pytest.mark.slow
@needs_build
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        J = -(-4 * library.ELEMENTS_PER_THREAD // 256)
        case = cases.Case(2, J, 256, (J * 256, J * 128 + 5, 300), (torch.float32, torch.bfloat16, torch.float32))
        cases.check_encode_momentum(cpu.encode_momentum, case, error=torch.float32, packed=True, variance=False)
        cases.check_encode_mean(cpu.encode_mean, case, rows=3, error=torch.float32)
        cases.check_apply(cpu.apply, case)
        cases.check_apply(cpu.int4_apply, case, frame="int4")
        cases.check_step_masters(cpu.int4_step_masters, case, frame="int4")
        cases.check_local_step(cpu.local_step, case, variance=True, anchored=True)
        cases.check_correct_residual(cpu.correct_residual, case, error=torch.bfloat16, variance=False)
        cases.check_owner_step(cpu.owner_step, case, ranks=3, each=True, with_D=True)
    finally:
        torch.set_num_threads(before)


ONE = cases.Case(1, 2, 256, (400,), (torch.float32,))
OWN = MomentumWeights(keep=0.9, add=0.1, own=0.01, unscale=0.125)


def of_one_tensor(weights: MomentumWeights = OWN) -> tuple[MomentumInputs, Tensor, Tensor, Tensor, Tensor]:
    """A tensor of 400 elements in two blocks. The operands; and in float64 its gradient, m, D, and what m becomes."""
    g, v, m = (cases.numbers(1, 512, seed=k) for k in range(3))
    variance = Variance(v.square(), torch.full((1, 2), 1e-3), 1.5, 1e-6)
    D = (v.double().square() * 1.5).clamp(min=1e-3).sqrt() + 1e-6
    grad = torch.where(torch.arange(512) < 400, g.double(), 0.0)
    scaled = grad * weights.unscale
    moved = weights.keep * m.double() + weights.add * scaled / (D.square() + weights.own * scaled.square()).sqrt()
    return MomentumInputs([g[0, :400]], ONE.segments(), variance, m.clone(), weights), grad, m.double(), D, moved


@pytest.mark.parametrize("factor", [None, 3.0])
def test_the_reference_computes_what_rule_6_says_in_float64(factor: float | None) -> None:
    """Frames + residual within 1e-5 of the largest; of the right momentum, if the residual is corrected by a factor."""
    momentum, *_ = of_one_tensor()
    frames, residual, sent = cases.garbage(ONE, 1), torch.empty(1, 512), torch.empty(1, 512)
    reference.encode_momentum(momentum, EncodeOutput(None, frames, ONE.counts(), residual), block=256, scale="rms")
    if factor:
        reference.correct_residual(momentum, factor, residual, block=256)
    reference.decode(frames, sent, block=256, weight=1.0, keep=0.0)
    *_, c = of_one_tensor(replace(OWN, unscale=0.125 * (factor or 1.0)))
    got = sent.double() + residual.double()
    assert (got - c)[:, :400].abs().max() < 1e-5 * c[:, :400].abs().max()


def test_the_reference_computes_what_rule_10_says_in_float64() -> None:
    """Within 1e-5 of the largest: float32 against float64. What is sent and what is left are what there was."""
    g, owed = (cases.numbers(1, 512, seed=k) for k in range(2))
    case, before = cases.Case(1, 2, 256, (400,), (torch.float32,)), owed.double()
    frames = cases.garbage(case, 1)
    step = GradientSum([g[0, :400]], case.segments(), owed, frames, case.counts(), 0.1, 0.125, returned=0.9)
    reference.encode_gradients(step, block=256, scale="rms")
    sent = torch.empty(1, 512)
    reference.decode(frames, sent, block=256, weight=1.0, keep=0.0)
    c = before + 0.1 * torch.where(torch.arange(512) < 400, g.double() * 0.125, 0.0)
    left = (c - 0.1 * sent.double())[:, :400]
    assert (owed[:, :400].double() - left).abs().max() < 1e-5 * c.abs().max() and not owed[:, 400:].any()


def test_the_reference_computes_what_rule_8_says_in_float64() -> None:
    """Within 1e-5 of the largest: float32 against float64."""
    made_of, _, _, _, moved = of_one_tensor()
    u, p, anchor = cases.numbers(1, 512, seed=3), cases.numbers(400, seed=9), torch.zeros(1, 512)
    step = LocalStep(made_of, u.clone(), anchor, [p.clone()], weight=0.02, kept=0.99)
    reference.local_step(step, block=256)
    held = step.params[0]
    assert held is not None and torch.equal(anchor[0, :400], p) and not anchor[0, 400:].any()
    for got, expected in (
        (made_of.old, moved),
        (step.sum_KN, u.double() + 0.02 * moved),
        (held, 0.99 * p.double() - 0.02 * moved[0, :400]),
    ):
        assert (got.double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_reference_computes_what_rule_12_says_in_float64() -> None:
    made_of, grad, m, D, _ = of_one_tensor(cases.WEIGHTS)
    sums = torch.empty(1, 2, 2)
    reference.momentum_sums(made_of, sums, block=256)
    for got, terms in ((sums[..., 0], grad.square()), (sums[..., 1], grad * m * D)):
        assert (got - terms.view(1, 2, 256).sum(-1)).abs().max() < 1e-5 * terms.abs().sum()


def test_the_reference_computes_what_rule_9_says_in_float64() -> None:
    """Within 1e-5 of the largest: float32 against float64. 3 ranks, of which the second owns the chunk."""
    W, N, count = 3, 512, 400
    g, v = cases.numbers(N, seed=1), cases.numbers(N, seed=2).square() - 0.1
    frames = torch.cat([cases.frames_of(cases.Case(1, 2, 256, (), ()), seed) for seed in (3, 4, 5)])
    counts, sums = torch.tensor([256, count - 256], dtype=torch.int32), torch.empty(2, 4)
    direction, D, variance = torch.empty(N), torch.empty(N), v.clone()
    numbers = {"weight": 0.01, "own": 0.2, "common": 2 / 3, "eps": 1e-8, "floor": 0.01, "inverse_limit": 0.2}
    reference.owner_step(
        OwnerStep(frames, 1, g, counts, variance, direction, D, sums, (1.5, 2.5), **numbers), block=256
    )
    values = torch.empty(W, N)
    reference.decode(frames, values, block=256, weight=1.0, keep=0.0)
    q = values.double()[:, :count]
    g, after, m_hat = g.double()[:count], v.double(), 1.5 * q.mean(0)
    after[:count] = 0.99 * after[:count] + 0.01 * g * (0.2 * g + 2 / 3 * m_hat)
    expected, expected_D, expected_sums = torch.zeros(N).double(), torch.ones(N).double(), []
    for block in (slice(0, 256), slice(256, count)):
        v_hat, s = 2.5 * after[block].clamp(min=0.0), 0.2 * 1.5 * q[:, block].abs().mean()
        expected_D[block] = v_hat.clamp(min=max(0.01 * v_hat.mean(), s * s)).sqrt() + 1e-8
        expected[block] = m_hat[block] / expected_D[block]
        own, mine = q[1, block], g[block]
        expected_sums.append(torch.stack([mine @ mine, own @ own, 1.5 * mine @ own, mine @ m_hat[block]]))
    for got, wanted in ((variance, after), (direction, expected), (D, expected_D), (sums, torch.stack(expected_sums))):
        assert (got.double() - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("frame", ["sign", "int4"])
def test_the_reference_computes_what_rule_13_says_in_float64(frame: str) -> None:
    """Within 1e-5 of the largest: float32 against float64; the frame within its rounding. One block is not seen."""
    x, u, replica = (cases.numbers(600, seed=k) for k in (1, 2, 3))
    x, u = (torch.cat([of, torch.zeros(168)]) for of in (x, u))
    masters, codec = x.clone(), CODECS[frame](256, kernel="reference")
    sent, counts = torch.empty(1, codec.frame_bytes(768), dtype=torch.uint8), torch.tensor([256, 0, 88]).int()
    codec.step_masters(MasterStep(u, masters, [replica], Segments((0,), (600,), 256), counts, sent, -0.01, 0.9))
    expected = 0.9 * x.double() - 0.01 * u.double()
    expected[256:512] = x[256:512]
    assert (masters.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    got = torch.empty(1, 768)
    codec.decode(sent, got)
    for block in (slice(0, 256), slice(512, 600)):
        lacks = expected[block] - replica[block].double()
        step, rms = lacks.abs().max() / 7, lacks.square().mean().sqrt()
        wanted, most = (lacks, 0.51 * step) if frame == "int4" else (lacks.sign() * rms, 0.005 * rms)
        assert (got[0, block].double() - wanted).abs().max() < most
    assert not got[0, 256:512].any()


@needs_build
def test_the_edge_says_what_is_wrong_with_a_step_of_masters() -> None:
    ones, counts, sent = torch.ones(512), torch.full((2,), 256, dtype=torch.int32), torch.empty(1, 272).byte()

    def take(update: Tensor = ones, replica: Tensor = ones[:300], frame_1B: Tensor = sent) -> None:
        step = MasterStep(update, ones.clone(), [replica], Segments((0,), (300,), 256), counts, frame_1B, 1.0, 1.0)
        cpu.int4_step_masters(step, block=256)

    take()
    refused(ValueError, r"replicas\[0\] has 512 elements, its segment 300", take, replica=ones)
    refused(ValueError, "update must have shape", take, update=torch.ones(256))
    refused(ValueError, "frames must have shape", take, frame_1B=torch.empty(1, 80).byte())


@needs_build
def test_the_edge_says_what_is_wrong_with_an_owner_s_step() -> None:
    def take(row: int = 0, sums: tuple[int, int] = (2, 4), D: torch.Tensor | None = None) -> None:
        frames, x = cases.frames_of(cases.Case(1, 2, 256, (), ()), 0), [torch.ones(512) for _ in range(3)]
        made_of = OwnerStep(
            frames, row, x[0], torch.full((2,), 256, dtype=torch.int32), x[1], x[2], D, torch.empty(sums), (1.0, 1.0),
            weight=0.1, own=0.5, common=0.5, eps=1e-8, floor=0.01, inverse_limit=0.2,
        )  # fmt: skip
        cpu.owner_step(made_of, block=256)

    take()
    refused(ValueError, "one of the 1 frames, got 1", take, row=1)
    refused(ValueError, "sums must have shape", take, sums=(4, 2))
    refused(TypeError, "D must be", take, D=torch.ones(512).double())


@needs_build
def test_the_edge_says_what_is_wrong_with_a_local_step() -> None:
    ones, segments = torch.ones(1, 512), Segments((0,), (300,), 256)

    def take(old: torch.Tensor = ones, total: torch.Tensor = ones, params: tuple = (None,)) -> None:
        made_of = MomentumInputs([None], segments, ones, old, cases.WEIGHTS)
        cpu.local_step(LocalStep(made_of, total, None, params, weight=1.0, kept=1.0), block=256)

    refused(ValueError, "2 tensors for 1 segments", take, params=(None, None))
    refused(ValueError, "sum must have shape", take, total=torch.ones(1, 256))
    refused(TypeError, "momentum must be", take, old=torch.zeros(1, 80, dtype=torch.uint8))


@needs_build
def test_no_step_takes_an_unknown_scale_for_rms() -> None:
    ones, frames, segments = torch.ones(1, 256), torch.zeros(1, 48, dtype=torch.uint8), Segments((0,), (256,), 256)
    out = EncodeOutput(None, frames.clone(), None, torch.empty(1, 256))
    for encode in (
        partial(cpu.encode, ones.clone(), None, frames, None),
        partial(cpu.encode_mean, frames, out),
        partial(cpu.encode_momentum, MomentumInputs([None], segments, ones, frames, cases.WEIGHTS), out),
        partial(cpu.encode_gradients, GradientSum([None], segments, ones, frames, None, 1.0)),
    ):
        refused(ValueError, "scale must be", encode, block=256, scale="max")


@needs_build
def test_the_edge_says_what_is_wrong() -> None:
    frames, residual = cases.frames_of(cases.Case(1, 2, 256, (), ()), 0), torch.empty(1, 512)
    ones, segments = torch.ones(1, 512), Segments((0,), (300,), 256)
    out = EncodeOutput(None, frames.clone(), None, residual)

    def encode(grads: list, segments: Segments = segments, D: torch.Tensor | Variance = ones) -> None:
        cpu.encode_momentum(MomentumInputs(grads, segments, D, frames, cases.WEIGHTS), out, block=256, scale="rms")

    refused(ValueError, "2 tensors for 1 segments", encode, [None, None])
    refused(ValueError, "299 elements, its segment 300", encode, [torch.ones(299)])
    refused(ValueError, "D must have shape", encode, [None], D=torch.ones(1, 256))
    refused(ValueError, "segments are 4 blocks", encode, [None], segments=Segments((2,), (300,), 256))
    refused(TypeError, "D must be", encode, [None], D=ones.double())
    refused(ValueError, "overlap", Segments, (0, 1), (300, 1), 256)
    refused(ValueError, "at least one frame", cpu.encode_mean, frames[:0], out, block=256, scale="rms")
