"""Checks of the kernels on the device, bit for bit against the reference on the host.

Shape legend: K rows, N elements, J blocks, B bytes, W ranks.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from gpu_check.section import Outcome, Setting, outcome
from onebit.comm import kernels
from onebit.comm.kernels import reference

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
import fused_cases
from kernel_inputs import ERRORS, SPECIAL, frames_for, function, random, steps_of

SCALES = ("rms", "mean_abs")


def assert_same(what: str, got: Tensor, expected: Tensor) -> None:
    """Bit for bit; but a NaN equals a NaN, for a device's own may have other bits than the host's."""
    got, expected = got.cpu(), expected.cpu()
    different = got != expected
    if got.dtype == torch.float32:
        different = (got.view(torch.int32) != expected.view(torch.int32)) & ~(got.isnan() & expected.isnan())
    if different.any():
        raise AssertionError(
            f"{what}: {int(different.sum())} of {got.numel()} differ, first at {different.nonzero()[0]}"
        )


def check_kernel(kernel: ModuleType, device: torch.device, block: int, K: int, J: int) -> None:
    """encode, decode and decode_mean of one shape, over all options and kinds of input."""
    N = J * block
    plain = random(K, N, seed=J)
    special = plain.clone()
    if N:
        at = torch.arange(0, N, 97)
        special[:, at] = torch.tensor(SPECIAL)[torch.arange(len(at)) % len(SPECIAL)]
    edges = torch.tensor([0, 1, 15, 16, 17, block - 1, block], dtype=torch.int32)
    ragged = edges[torch.arange(K * J) % len(edges)].view(K, J)
    errors = (None, random(K, N, seed=1), random(K, N, seed=2).bfloat16())
    for frame in (*SCALES, *steps_of(kernel)):
        for x in (plain, special):
            for error in errors:
                for counts in (None, ragged):
                    _check_encode(kernel, device, x, error, counts, block, frame)
    for frame in ("rms", *steps_of(kernel)):
        frames = frames_for(K, N, block, frame=frame)
        function(reference, "encode", frame)(special.clone(), None, frames, None, block=block)
        decode, expected_decode = (function(module, "decode", frame) for module in (kernel, reference))
        for weight, keep in ((1.0, 0.0), (0.1, 0.0), (0.1, 0.9), (-1.0, 1.0), (1.0, 1e-60)):
            expected, got = plain.clone(), plain.to(device, copy=True)
            expected_decode(frames, expected, block=block, weight=weight, keep=keep)
            decode(frames.to(device), got, block=block, weight=weight, keep=keep)
            assert_same(f"decode of {frame}, weight={weight}, keep={keep}", got, expected)
        mean, got_mean = torch.empty(N), torch.empty(N, device=device)
        function(reference, "decode_mean", frame)(frames, mean, block=block)
        function(kernel, "decode_mean", frame)(frames.to(device), got_mean, block=block)
        assert_same(f"decode_mean of {frame}", got_mean, mean)


def _check_encode(
    kernel: ModuleType,
    device: torch.device,
    x_KN: Tensor,
    error_KN: Tensor | None,
    counts_KJ: Tensor | None,
    block: int,
    frame: str,
) -> None:
    K, N = x_KN.shape
    name = f"encode of {frame}, error={error_KN.dtype if error_KN is not None else None}, " + (
        "full" if counts_KJ is None else "ragged"
    )
    residual, frames = x_KN.clone(), frames_for(K, N, block, frame=frame)
    got_residual, got_frames = x_KN.to(device, copy=True), torch.full_like(frames, 0xCD).to(device)
    function(reference, "encode", frame)(residual, error_KN, frames, counts_KJ, block=block)
    there = [None if t is None else t.to(device) for t in (error_KN, counts_KJ)]
    function(kernel, "encode", frame)(got_residual, there[0], got_frames, there[1], block=block)
    assert_same(f"frames of {name}", got_frames, frames)
    assert_same(f"residuals of {name}", got_residual, residual)


def fused_cases_for(blocks: Sequence[int], elements: Sequence[int]) -> Iterator[fused_cases.Case]:
    """Those of the tests in such blocks, and larger ones: tensors of every type, their ends around block borders."""
    yield from (case for case in fused_cases.CASES if case.block in blocks and case.numels)
    types = (torch.float32, torch.bfloat16, torch.float16, None, torch.float32)
    for block in blocks:
        for n in elements:
            if n > block:
                numels = (n, 1, block, n // 3 + 1, block - 1)
                filled = sum(-(-numel // block) + 1 for numel in numels)
                yield fused_cases.Case(3, -(-filled // 3), block, numels, types)


def check_fused(kernel: ModuleType, device: torch.device, case: fused_cases.Case) -> None:
    is_on_the_host = device.type == "cpu"  # a rehearsal, slow enough with a third of them
    for k, (packed, variance) in enumerate(itertools.product((False, True), repeat=2)):
        for error in ERRORS if not is_on_the_host else ERRORS[k % 3 :][:1]:
            fused_cases.check_encode_momentum(
                kernel.encode_momentum, case, error=error, packed=packed, variance=variance, scale=SCALES[k % 2],
                device=str(device),
            )  # fmt: skip
    for k, (owed, returned) in enumerate(itertools.product(fused_cases.DTYPES, (None, 0.9))):
        fused_cases.check_encode_gradients(
            kernel.encode_gradients, case, owed=owed, returned=returned, scale=SCALES[k % 2], device=str(device),
            closed=k == 1,
        )  # fmt: skip
    for k, rows in enumerate((1, 2, 5)):
        for error in ERRORS if not is_on_the_host else ERRORS[k:][:1]:
            fused_cases.check_encode_mean(
                kernel.encode_mean, case, rows=rows, error=error, scale=SCALES[k % 2], device=str(device)
            )
    fused_cases.check_apply(kernel.apply, case, device=str(device))
    fused_cases.check_step_masters(kernel.step_masters, case, scale="mean_abs", device=str(device))
    fused_cases.check_apply(function(kernel, "apply", "int4"), case, frame="int4", device=str(device))
    fused_cases.check_step_masters(function(kernel, "step_masters", "int4"), case, frame="int4", device=str(device))
    for ranks, each in ((1, False), (2, True), (5, False)):
        fused_cases.check_owner_step(kernel.owner_step, case, ranks=ranks, each=each, with_D=each, device=str(device))
    for anchored in (False, True):
        fused_cases.check_local_step(kernel.local_step, case, variance=anchored, anchored=anchored, device=str(device))
        error = torch.bfloat16 if anchored else torch.float32
        fused_cases.check_correct_residual(
            kernel.correct_residual, case, error=error, variance=anchored, device=str(device)
        )
        fused_cases.check_momentum_sums(
            kernel.momentum_sums, case, packed=not anchored, variance=anchored, device=str(device)
        )


def kernel_checks(setting: Setting) -> Iterator[Outcome]:
    device, elements = setting.device, setting.sizes
    for name in ("reference", *setting.kernels):
        kernel = kernels.select(name, device)
        for block in setting.blocks:
            for n in elements:
                for K in (1, 3):
                    J = -(-n // block)
                    title = f"{name}: {K} × {J} blocks of {block}"
                    yield outcome(title, functools.partial(check_kernel, kernel, device, block, K, J))
        for case in fused_cases_for(setting.blocks, elements):
            title = f"{name}: fused, {case.K} × {case.J} blocks of {case.block}, {len(case.numels)} tensors"
            yield outcome(title, functools.partial(check_fused, kernel, device, case))
