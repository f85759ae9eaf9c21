"""What every kernel's fused steps must give: the reference's bytes and floats. Run over each kernel by its own tests.

Tolerance: none; floats are compared as integers. Shape legend: K rows, N elements, J blocks, B bytes, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from kernel_inputs import random as numbers
from torch import Tensor

from onebit.comm import CODECS, SignCodec
from onebit.comm.kernels import int4_reference, reference
from onebit.comm.kernels.operands import (
    EncodeOutput,
    GradientSum,
    LocalStep,
    MasterStep,
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


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def assert_same(got: Tensor, expected: Tensor, what: str) -> None:
    different = bits(got.cpu()) != bits(expected)
    assert not different.any(), f"{what}: {int(different.sum())} differ, first at {different.nonzero()[0].tolist()}"


def to(where: str, *xs: Tensor | None) -> list[Tensor | None]:
    """Copies there."""
    return [None if x is None else x.to(where, copy=True) for x in xs]


def assert_all_same(got: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str) -> None:
    for k, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        if mine is not None and wanted is not None:
            assert_same(mine, wanted, f"{what} {k}")


def compare(device: str, take: Callable[[str, bool], list[Tensor | None]], what: str) -> None:
    """What take(where, is_reference) has written there is what the reference has written here."""
    assert_all_same(take(device, False), take("cpu", True), what)


def frames_of(case: Case, seed: int, frame: str = "sign") -> Tensor:
    codec = CODECS[frame](case.block, kernel="reference")
    frames = torch.zeros(case.K, codec.frame_bytes(case.N), dtype=torch.uint8)
    codec.encode(numbers(case.K, case.N, seed=seed), None, frames, None)
    return frames


def garbage(case: Case, rows: int) -> Tensor:
    return torch.full((rows, SignCodec(case.block).frame_bytes(case.N)), 0xAB, dtype=torch.uint8)


def tensors_of(case: Case, seed: int) -> list[Tensor | None]:
    pairs = enumerate(zip(case.numels, case.dtypes, strict=True))
    return [None if dtype is None else numbers(n, seed=seed + k).to(dtype) for k, (n, dtype) in pairs]


def divisor(case: Case, where: str, variance: bool) -> Tensor | Variance:
    D = numbers(case.K, case.N, seed=1).abs() + 1e-6
    if not variance:
        return D.to(where)
    return Variance(D.square().to(where), numbers(case.K, case.J, seed=4).abs().to(where), 1.25, 1e-8)


def check_encode_momentum(
    function: Callable[..., None], case: Case, *, error: torch.dtype | None, packed: bool, variance: bool,
    scale: str = "rms", device: str = "cpu", grads: Sequence[Tensor | None] | None = None,
) -> None:  # fmt: skip
    """Frames and residual, and in half of the cases the sums; what is read stays as it is."""
    K, N = case.K, case.N
    read = [*(tensors_of(case, 10) if grads is None else grads)]
    read += [frames_of(case, 2) if packed else numbers(K, N, seed=2)]
    read += [None if error is None else numbers(K, N, seed=3).to(error)]

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        *g, momentum, error_KN = there = to(where, *read)
        frames = garbage(case, K).fill_(0xAB if is_reference else 0xCD).to(where)
        residual = torch.full((K, N), 7.0, dtype=error or torch.float32, device=where)
        made_of = MomentumInputs(g, case.segments(), divisor(case, where, variance), momentum, WEIGHTS)
        sums = torch.full((K, case.J, 2), 7.0, device=where) if packed != variance else None
        out = EncodeOutput(error_KN, frames, case.counts().to(where), residual, sums)
        (reference.encode_momentum if is_reference else function)(made_of, out, block=case.block, scale=scale)
        assert_all_same(there, read, "what is read")
        return [frames, residual, sums]

    compare(device, take, "frames, residual and sums")


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

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        frames = garbage(case, case.K).fill_(0xAB if is_reference else 0xCD).to(where)
        there, (rest, counted) = to(where, *grads), to(where, before, counts)
        step = GradientSum(there, case.segments(), rest, frames, counted, 0.1, 0.5, returned)
        (reference.encode_gradients if is_reference else function)(step, block=case.block, scale=scale)
        assert_all_same(there, grads, "a gradient")
        if returned is None:
            assert_all_same([rest], [before], "what is owed and stays")
        return [frames, rest]

    compare(device, take, "frames and what is owed")


def check_encode_mean(
    function: Callable[..., None], case: Case, *, rows: int, error: torch.dtype | None, scale: str = "rms",
    device: str = "cpu",
) -> None:  # fmt: skip
    received = torch.cat([frames_of(case, seed)[:1] for seed in range(rows)])
    error_1N = None if error is None else numbers(1, case.N, seed=9).to(error)

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        frame = garbage(case, 1).to(where)
        residual = torch.full((1, case.N), 7.0, dtype=error or torch.float32, device=where)
        there, error_there, counts = to(where, received, error_1N, case.counts()[:1])
        out = EncodeOutput(error_there, frame, counts, residual)
        (reference.encode_mean if is_reference else function)(there, out, block=case.block, scale=scale)
        return [frame, residual]

    compare(device, take, "frame and residual")


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
    K, N, grads = case.K, case.N, tensors_of(case, 10)
    params = wide([numbers(n, seed=20 + k).to(DTYPES[k % 2]) if k != 1 else None for k, n in enumerate(case.numels)])
    flats = [numbers(K, N, seed=2), numbers(K, N, seed=3), torch.full((K, N), 7.0) if anchored else None]

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        *written, m, u, anchor = changed = to(where, *params, *flats)
        there = to(where, *grads)
        momentum = MomentumInputs(there, case.segments(), divisor(case, where, variance), m, WEIGHTS)
        step = LocalStep(momentum, u, anchor, inside(written), weight=0.01, kept=0.999)
        (reference.local_step if is_reference else function)(step, block=case.block)
        assert_all_same(there, grads, "a gradient")
        return changed

    compare(device, take, "parameter, momentum, sum, anchor")


def check_correct_residual(
    function: Callable[..., None], case: Case, *, error: torch.dtype, variance: bool, device: str = "cpu"
) -> None:
    """The residual of both; gradients stay as they are."""
    grads = tensors_of(case, 10)
    before = (numbers(case.K, case.N, seed=3) + 0.0).to(error)  # no frame leaves -0.0 in padding

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        there, (residual,) = to(where, *grads), to(where, before)
        made_of = MomentumInputs(there, case.segments(), divisor(case, where, variance), residual, WEIGHTS)
        (reference.correct_residual if is_reference else function)(made_of, 0.7, residual, block=case.block)
        assert_all_same(there, grads, "a gradient")
        return [residual]

    compare(device, take, "residual")


def check_momentum_sums(
    function: Callable[..., None], case: Case, *, packed: bool, variance: bool, device: str = "cpu"
) -> None:
    """The sums of every block, those without gradients as well."""
    old = frames_of(case, 2) if packed else numbers(case.K, case.N, seed=2)

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        grads = to(where, *tensors_of(case, 10))
        made_of = MomentumInputs(grads, case.segments(), divisor(case, where, variance), old.to(where), WEIGHTS)
        sums = torch.full((case.K, case.J, 2), 7.0, device=where)
        (reference.momentum_sums if is_reference else function)(made_of, sums, block=case.block)
        return [sums]

    compare(device, take, "sums")


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
    before = [variance, torch.full((N,), 7.0), torch.full((N,), 8.0) if with_D else None, torch.full((J, 4), 9.0)]
    weights = {"weight": 0.01, "own": 0.3, "common": 0.6, "eps": 1e-8, "floor": 0.01, "inverse_limit": 0.2}

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        frames, grad, counts = there = to(where, *read)
        written = to(where, *before)
        corrected = corrections.to(where) if isinstance(corrections, Tensor) else corrections
        step = OwnerStep(frames, ranks - 1, grad, counts, *written, corrected, **weights)
        (reference.owner_step if is_reference else function)(step, block=case.block)
        assert_all_same(there, read, "what is read")
        floats = [x for x in written if x is not None]  # a NaN is a NaN, whatever its bits
        return [*(x.isnan() for x in floats), *(x.nan_to_num(5.0) for x in floats)]

    compare(device, take, "variance, direction, D, sums")


def check_step_masters(
    function: Callable[..., None], case: Case, *, frame: str = "sign", device: str = "cpu", **scale: str
) -> None:
    """Of all blocks as one chunk, some of them not seen; what is read stays as it is.

    function: `step_masters`, or that of another frame. scale: its option, of the sign frame.
    """
    N, J = case.K * case.N, case.K * case.J
    specified = reference.step_masters if frame == "sign" else int4_reference.int4_step_masters
    replicas = [
        numbers(n, seed=60 + k).to(dtype or torch.float32)
        for k, (n, dtype) in enumerate(zip(case.numels, case.dtypes, strict=True))
    ]
    segments, counts = case.segments(), case.counts().view(-1)
    counts[1::3] = 0
    read = [numbers(N, seed=61), counts, *replicas]
    if J > 2:
        read[0][case.block :: 97] = float("nan")
    codec = CODECS[frame](case.block)
    before = [numbers(N, seed=62), torch.full((1, codec.frame_bytes(N)), 0xAB, dtype=torch.uint8)]

    def take(where: str, is_reference: bool) -> list[Tensor | None]:
        update, blocks, *held = there = to(where, *read)
        masters, sent = to(where, *before)
        step = MasterStep(update, masters, held, segments, blocks, sent, weight=-0.01, keep=0.999)
        (specified if is_reference else function)(step, block=case.block, **scale)
        assert_all_same(there, read, "what is read")
        return [masters.isnan(), masters.nan_to_num(5.0), sent]  # a NaN is a NaN, whatever its bits

    compare(device, take, "masters, frame")


def check_apply(function: Callable[..., None], case: Case, *, frame: str = "sign", device: str = "cpu") -> None:
    """Parameters: each in the middle of a wider tensor whose edges stay, and each at the beginning of its memory."""
    S, specified = len(case.numels), reference.apply if frame == "sign" else int4_reference.int4_apply
    read = frames_of(case, 5, frame), numbers(S, seed=6), 1.0 - numbers(S, seed=7).abs() * 1e-3
    for around, of in ((wide, inside), (list, list)):

        def take(where: str, is_reference: bool, around: Callable = around, of: Callable = of) -> list[Tensor | None]:
            params = to(where, *around(tensors_of(case, 20)))
            frames, weight, keep = to(where, *read)
            update = ParamUpdate(of(params), case.segments(), weight, keep)
            (specified if is_reference else function)(frames, case.N, update, block=case.block)
            return params

        compare(device, take, "parameter")


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
