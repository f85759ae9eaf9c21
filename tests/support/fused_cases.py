"""What every kernel's fused steps must give: the reference's bytes and floats. Run over each kernel by its own tests.

Tolerance: none; floats are compared as integers. Shape legend: K rows, N elements, J blocks, B bytes, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from onebit.comm import SignCodec
from onebit.comm.kernels import reference
from onebit.comm.kernels.operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MomentumInputs,
    MomentumWeights,
    OwnerStep,
    ParamUpdate,
    Segments,
    Variance,
)

DTYPES = (torch.float32, torch.bfloat16)
WEIGHTS = MomentumWeights(keep=0.9, add=0.1, own=0.3, unscale=0.5)


@dataclass(frozen=True)
class Case:
    """K rows of J blocks, and tensors of these lengths in them, one block of padding in between."""

    K: int
    J: int
    block: int
    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]

    @property
    def N(self) -> int:
        return self.J * self.block

    def segments(self) -> Segments:
        first, at = [], 0
        for numel in self.numels:
            first.append(at)
            at += -(-numel // self.block) + (len(first) % 2)
        assert at <= self.K * self.J + 1
        return Segments(tuple(first), self.numels, self.block)

    def counts(self) -> Tensor:
        counts = torch.zeros(self.K * self.J, dtype=torch.int32)
        segments = self.segments()
        for first, numel in zip(segments.first, segments.numels, strict=True):
            full, rest = divmod(numel, self.block)
            counts[first : first + full] = self.block
            if rest:
                counts[first + full] = rest
        return counts.view(self.K, self.J)


CASES = (
    Case(1, 1, 64, (1,), (torch.float32,)),
    Case(1, 3, 256, (256, 100), (torch.float32, None)),
    Case(3, 4, 64, (65, 64, 200, 7), (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)),
    Case(4, 5, 256, (2000, 255, 257, 1), (torch.bfloat16, torch.float32, None, torch.float32)),
    Case(2, 9, 64, (), ()),
)


def numbers(*shape: int, seed: int) -> Tensor:
    """Values of many sizes, some of them zeros of either sign."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=g) * 10 ** torch.randint(-4, 3, shape, generator=g).float()
    values[torch.rand(shape, generator=g) < 0.05] *= 0.0
    return values


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def assert_same(got: Tensor, expected: Tensor, what: str) -> None:
    different = bits(got.cpu()) != bits(expected)
    assert not different.any(), f"{what}: {int(different.sum())} differ, first at {different.nonzero()[0].tolist()}"


def to(device: str, *xs: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.to(device) for x in xs]


def frames_of(case: Case, seed: int) -> Tensor:
    codec = SignCodec(case.block, kernel="reference")
    frames = torch.zeros(case.K, codec.frame_bytes(case.N), dtype=torch.uint8)
    codec.encode(numbers(case.K, case.N, seed=seed), None, frames, None)
    return frames


def garbage(case: Case, rows: int) -> Tensor:
    return torch.full((rows, SignCodec(case.block).frame_bytes(case.N)), 0xAB, dtype=torch.uint8)


def tensors_of(case: Case, seed: int) -> list[Tensor | None]:
    pairs = enumerate(zip(case.numels, case.dtypes, strict=True))
    return [None if dtype is None else numbers(n, seed=seed + k).to(dtype) for k, (n, dtype) in pairs]


def check_encode_momentum(
    function: Callable[..., None], case: Case, *, error: torch.dtype | None, packed: bool, variance: bool,
    scale: str = "rms", device: str = "cpu", grads: Sequence[Tensor | None] | None = None,
) -> None:  # fmt: skip
    """Frames and residual; what is read stays as it is."""
    K, J, N = case.K, case.J, case.N
    grads = tensors_of(case, 10) if grads is None else grads
    D = numbers(K, N, seed=1).abs() + 1e-6
    momentum = frames_of(case, 2) if packed else numbers(K, N, seed=2)
    error_KN = None if error is None else numbers(K, N, seed=3).to(error)
    counts = case.counts()
    operand: Tensor | Variance = D
    there: Tensor | Variance = D.to(device)
    if variance:
        floor = numbers(K, J, seed=4).abs()
        operand = Variance(D.square(), floor, 1.25, 1e-8)
        there = Variance(D.square().to(device), floor.to(device), 1.25, 1e-8)
    residual_dtype = error or torch.float32
    expected = garbage(case, K), torch.full((K, N), 7.0, dtype=residual_dtype)
    got = [x.clone().to(device) for x in expected]
    got[0].fill_(0xCD)
    options, segments = {"block": case.block, "scale": scale}, case.segments()
    made_of = MomentumInputs(grads, segments, operand, momentum, WEIGHTS)
    reference.encode_momentum(made_of, EncodeOutput(error_KN, expected[0], counts, expected[1]), **options)
    g_there = to(device, *grads)
    m_there, e_there, c_there = to(device, momentum, error_KN, counts)
    made_of = MomentumInputs(g_there, segments, there, m_there, WEIGHTS)
    function(made_of, EncodeOutput(e_there, got[0], c_there, got[1]), **options)
    assert_same(got[0], expected[0], "frames")
    assert_same(got[1], expected[1], "residual")
    for before, after in zip([*grads, momentum, error_KN], [*g_there, m_there, e_there], strict=True):
        if before is not None and after is not None:
            assert_same(after, before, "what is read")


def check_encode_gradients(
    function: Callable[..., None], case: Case, *, owed: torch.dtype, returned: float | None, scale: str = "rms",
    device: str = "cpu", grads: Sequence[Tensor | None] | None = None, closed: bool = False,
) -> None:  # fmt: skip
    """Frames and what is owed; gradients stay as they are. closed: every other block counts for nothing."""
    grads = tensors_of(case, 10) if grads is None else grads
    counts = case.counts()
    if closed:
        counts.view(-1)[::2] = 0
    before = numbers(case.K, case.N, seed=3).to(owed)
    expected, got = (garbage(case, case.K), before.clone()), (garbage(case, case.K).fill_(0xCD), before.clone())
    there = [x.to(device) for x in got]
    options, segments = {"block": case.block, "scale": scale}, case.segments()
    reference.encode_gradients(
        GradientSum(grads, segments, expected[1], expected[0], counts, 0.1, 0.5, returned), **options
    )
    g_there, (c_there,) = to(device, *grads), to(device, counts)
    function(GradientSum(g_there, segments, there[1], there[0], c_there, 0.1, 0.5, returned), **options)
    assert_same(there[0], expected[0], "frames")
    assert_same(there[1], expected[1], "what is owed")
    if returned is None:
        assert_same(there[1], before, "what is owed and stays")
    for x, after in zip(grads, g_there, strict=True):
        if x is not None and after is not None:
            assert_same(after, x, "what is read")


def check_encode_mean(
    function: Callable[..., None], case: Case, *, rows: int, error: torch.dtype | None, scale: str = "rms",
    device: str = "cpu",
) -> None:  # fmt: skip
    received = torch.cat([frames_of(case, seed)[:1] for seed in range(rows)])
    error_1N = None if error is None else numbers(1, case.N, seed=9).to(error)
    counts = case.counts()[:1]
    expected = garbage(case, 1), torch.full((1, case.N), 7.0, dtype=error or torch.float32)
    got = [x.clone().to(device) for x in expected]
    options = {"block": case.block, "scale": scale}
    reference.encode_mean(received, EncodeOutput(error_1N, expected[0], counts, expected[1]), **options)
    r_there, e_there, c_there = to(device, received, error_1N, counts)
    function(r_there, EncodeOutput(e_there, got[0], c_there, got[1]), **options)
    assert_same(got[0], expected[0], "frame")
    assert_same(got[1], expected[1], "residual")


def inside(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of `wide` tensors, what the kernel is given: its address is no multiple of two elements."""
    return [None if p is None else p[7:-8] for p in tensors]


def wide(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Each in the middle of a wider tensor, whose edges must stay."""
    return [None if p is None else torch.cat([p.new_full((7,), 3.0), p, p.new_full((8,), 4.0)]) for p in tensors]


def check_local_step(
    function: Callable[..., None], case: Case, *, variance: bool, anchored: bool, device: str = "cpu"
) -> None:
    """Momentum, sum, anchor and parameters; gradients stay as they are. Parameters are there in other segments."""
    K, J, N = case.K, case.J, case.N
    grads = tensors_of(case, 10)
    params = wide([numbers(n, seed=20 + k).to(DTYPES[k % 2]) if k != 1 else None for k, n in enumerate(case.numels)])
    D, floor = numbers(K, N, seed=1).abs() + 1e-6, numbers(K, J, seed=4).abs()
    flats = [numbers(K, N, seed=2), numbers(K, N, seed=3), torch.full((K, N), 7.0) if anchored else None]

    def step(where: str, params: Sequence[Tensor | None], flats: Sequence[Tensor | None]) -> LocalStep:
        m, u, anchor = flats
        divisor = Variance(D.square().to(where), floor.to(where), 1.25, 1e-8) if variance else D.to(where)
        assert m is not None and u is not None
        momentum = MomentumInputs(to(where, *grads), case.segments(), divisor, m, WEIGHTS)
        return LocalStep(momentum, u, anchor, inside(params), weight=0.01, kept=0.999)

    got = [None if x is None else x.clone().to(device) for x in (*params, *flats)]
    expected = [None if x is None else x.clone() for x in (*params, *flats)]
    made = step(device, got[: len(params)], got[len(params) :])
    function(made, block=case.block)
    reference.local_step(step("cpu", expected[: len(params)], expected[len(params) :]), block=case.block)
    for k, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        if mine is not None and wanted is not None:
            assert_same(mine, wanted, f"parameter {k}" if k < len(params) else f"flat {k - len(params)}")
    for before, after in zip(grads, made.momentum.grads, strict=True):
        if before is not None and after is not None:
            assert_same(after, before, "a gradient")


def check_correct_residual(
    function: Callable[..., None], case: Case, *, error: torch.dtype, variance: bool, device: str = "cpu"
) -> None:
    """The residual of both; gradients stay as they are."""
    K, J, N = case.K, case.J, case.N
    grads, residual = tensors_of(case, 10), (numbers(K, N, seed=3) + 0.0).to(error)  # no frame leaves -0.0 in padding
    D, floor = numbers(K, N, seed=1).abs() + 1e-6, numbers(K, J, seed=4).abs()

    def take(where: str, function: Callable[..., None], residual: Tensor) -> MomentumInputs:
        divisor = Variance(D.square().to(where), floor.to(where), 1.25, 1e-8) if variance else D.to(where)
        made_of = MomentumInputs(to(where, *grads), case.segments(), divisor, residual, WEIGHTS)
        function(made_of, 0.7, residual, block=case.block)
        return made_of

    got, expected = residual.clone().to(device), residual.clone()
    made_of = take(device, function, got)
    take("cpu", reference.correct_residual, expected)
    assert_same(got, expected, "residual")
    for before, after in zip(grads, made_of.grads, strict=True):
        if before is not None and after is not None:
            assert_same(after, before, "a gradient")


def check_momentum_sums(
    function: Callable[..., None], case: Case, *, packed: bool, variance: bool, device: str = "cpu"
) -> None:
    """The sums of every block, those without gradients as well; gradients stay as they are."""
    K, J, N = case.K, case.J, case.N
    grads, old = tensors_of(case, 10), frames_of(case, 2) if packed else numbers(K, N, seed=2)
    D, floor = numbers(K, N, seed=1).abs() + 1e-6, numbers(K, J, seed=4).abs()

    def take(where: str, function: Callable[..., None]) -> Tensor:
        divisor = Variance(D.square().to(where), floor.to(where), 1.25, 1e-8) if variance else D.to(where)
        made_of = MomentumInputs(to(where, *grads), case.segments(), divisor, old.to(where), WEIGHTS)
        sums = torch.full((K, J, 2), 7.0, device=where)
        function(made_of, sums, block=case.block)
        return sums

    assert_same(take(device, function), take("cpu", reference.momentum_sums), "sums")


def check_owner_step(
    function: Callable[..., None], case: Case, *, ranks: int, each: bool, with_D: bool, device: str = "cpu"
) -> None:
    """Of the case's first row, whose last rank owns it. Variances of either sign; what is read stays as it is."""
    N, J = case.N, case.J
    received = torch.cat([frames_of(case, 30 + k)[:1] for k in range(ranks)])
    corrections = torch.stack([1.0 + numbers(J, seed=k).abs() for k in (41, 42)]) if each else (1.7, 3.1)
    read = [received, numbers(N, seed=43), case.counts()[0].contiguous()]
    behind = torch.arange(case.block) >= read[2].unsqueeze(1)
    read[1].view(J, -1)[behind] = float("nan")  # nobody reads it there
    variance = numbers(N, seed=44).square() - 1e-3 * numbers(N, seed=45).square()
    if J > 2:
        variance[case.block :: 97] = float("nan")
    written = [variance, torch.full((N,), 7.0), torch.full((N,), 8.0) if with_D else None, torch.full((J, 4), 9.0)]

    def step(where: str, written: Sequence[Tensor | None]) -> OwnerStep:
        frames, grad, counts = to(where, *read)
        v, direction, D, sums = written
        assert frames is not None and grad is not None and counts is not None
        assert v is not None and direction is not None and sums is not None
        there = corrections.to(where) if isinstance(corrections, Tensor) else corrections
        numbers = {"weight": 0.01, "own": 0.3, "common": 0.6, "eps": 1e-8, "floor": 0.01, "inverse_limit": 0.2}
        return OwnerStep(frames, ranks - 1, grad, counts, v, direction, D, sums, there, **numbers)

    got = [None if x is None else x.clone().to(device) for x in written]
    made = step(device, got)
    function(made, block=case.block)
    expected = [None if x is None else x.clone() for x in written]
    reference.owner_step(step("cpu", expected), block=case.block)
    for mine, wanted, what in zip(got, expected, ("variance", "direction", "D", "sums"), strict=True):
        if mine is not None and wanted is not None:
            assert torch.equal(mine.cpu().isnan(), wanted.isnan()), f"NaNs of {what}"
            assert_same(mine.cpu().nan_to_num(5.0), wanted.nan_to_num(5.0), what)
    for before, after in zip(read, (made.received_WB, made.grad_N, made.counts_J), strict=True):
        assert_same(after.cpu().nan_to_num(5.0), before.nan_to_num(5.0), "what is read")


def check_apply(function: Callable[..., None], case: Case, *, device: str = "cpu") -> None:
    """Parameters: each in the middle of a wider tensor whose edges stay, and each at the beginning of its memory."""
    frames, segments, S = frames_of(case, 5), case.segments(), len(case.numels)
    weight, keep = numbers(S, seed=6), 1.0 - numbers(S, seed=7).abs() * 1e-3
    f_there, w_there, k_there = to(device, frames, weight, keep)
    for around, of in ((wide, inside), (list, list)):
        params = around(tensors_of(case, 20))
        there = [None if p is None else p.clone().to(device) for p in params]
        expected = [None if p is None else p.clone() for p in params]
        reference.apply(frames, case.N, ParamUpdate(of(expected), segments, weight, keep), block=case.block)
        function(f_there, case.N, ParamUpdate(of(there), segments, w_there, k_there), block=case.block)
        for got, want in zip(there, expected, strict=True):
            if got is not None and want is not None:
                assert_same(got, want, "parameter")


def check_copies(kernel: ModuleType, dtype: torch.dtype) -> None:
    """A type that the kernel does not read, and a channels-last weight: the same as their contiguous twins."""
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    other = torch.randn(77).to(dtype)
    segments = Segments((0, 2), (300, 77), 256)
    frames = frames_of(Case(1, 3, 256, (), ()), 1)
    S = torch.tensor([0.5, 0.25])
    expected = [weight.clone(memory_format=torch.contiguous_format), other.clone()]
    got = [weight.clone(memory_format=torch.preserve_format), other.clone()]
    outs, stepped = [], []
    for module, tensors in ((reference, expected), (kernel, got)):
        module.apply(frames, 768, ParamUpdate(tensors, segments, S, S), block=256)
        out = EncodeOutput(None, torch.zeros_like(frames), None, torch.empty(1, 768))
        module.encode_momentum(
            MomentumInputs(tensors, segments, torch.ones(1, 768), frames, WEIGHTS), out, block=256, scale="rms"
        )
        outs.append(out)
        flats = [torch.full((1, 768), float(k)) for k in range(3)]
        made_of = MomentumInputs(tensors, segments, torch.ones(1, 768), flats[0], WEIGHTS)
        module.local_step(LocalStep(made_of, flats[1], flats[2], tensors, weight=0.01, kept=0.999), block=256)
        stepped.append(torch.cat(flats))
    assert_same(stepped[1], stepped[0], "momentum, sum and anchor")
    assert got[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert_same(outs[1].frames_KB, outs[0].frames_KB, "frames")
    assert_same(outs[1].residual_KN, outs[0].residual_KN, "residual")
