"""What every kernel must give: the reference's bytes and floats. Run over each of them by its own tests.

Each case takes a kernel that works on host tensors: in C++, in an interpreter, or emulated. On a machine with a GPU,
scripts/gpu_check.py runs such comparisons on the device. Tolerance: none.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import ModuleType

import fused_cases
import torch
from kernel_inputs import (
    ERRORS,
    SPECIAL,
    assert_same,
    frames_for,
    function,
    misaligned,
    overlapping,
    random,
    random_counts,
    steps_of,
)
from torch import Tensor
from write_golden import PATH, frames_of

from onebit.comm import ErrorFeedback, Int4Codec, Int8Codec, SignCodec, SimTransport, allreduce_mean, run_ranks
from onebit.comm.kernels import reference
from onebit.comm.kernels.operands import EncodeOutput

WEIGHTS = ((1.0, 0.0), (0.1, 0.0), (1.0, 1.0), (0.1, 0.9), (-1.0, 1.0), (0.0, 0.5), (1.0, 1e-60))
BLOCKS = {
    "rms": (64, 192, 256, 576),
    "mean_abs": (64, 576),
    "int8": (16, 192, 256, 576),
    "int4": (32, 192, 256, 576),
    "log4": (32, 192, 256, 576),
}
"""The smallest, one that is no power of two, the usual one, and one whose c no kernel keeps in registers."""

CASES: dict[str, Callable[[ModuleType], None]] = {}


def case(function: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    CASES[function.__name__] = function
    return function


def frames_of_kernel(kernel: ModuleType) -> tuple[str, ...]:
    return ("rms", "mean_abs", *steps_of(kernel))


def name_of(kernel: ModuleType) -> str:
    return kernel.__name__.removesuffix(".backend").rpartition(".")[2]


def encode_both(
    kernel: ModuleType, x_KN: Tensor, error_KN: Tensor | None, counts_KJ: Tensor | None, *, block: int, frame: str
) -> Tensor:
    """Assert that both kernels agree on frames and residuals; the frames."""
    K, N = x_KN.shape
    residuals = [x_KN.clone(), x_KN.clone()]
    frames = [frames_for(K, N, block, fill, frame=frame) for fill in (0xAB, 0xCD)]
    error_before = None if error_KN is None else error_KN.clone()
    function(reference, "encode", frame)(residuals[0], error_KN, frames[0], counts_KJ, block=block)
    function(kernel, "encode", frame)(residuals[1], error_KN, frames[1], counts_KJ, block=block)
    assert_same(frames[1], frames[0])
    assert_same(residuals[1], residuals[0])
    if error_KN is not None and error_before is not None:
        assert torch.equal(error_KN.view(torch.uint8), error_before.view(torch.uint8)), "error is only read"
    return frames[1]


def decode_both(
    kernel: ModuleType, frames_KB: Tensor, out_KN: Tensor, *, block: int, frame: str, weight: float, keep: float
) -> None:
    outs = [out_KN.clone(), out_KN.clone()]
    for module, out in ((reference, outs[0]), (kernel, outs[1])):
        function(module, "decode", frame)(frames_KB, out, block=block, weight=weight, keep=keep)
    assert_same(outs[1], outs[0])


def decode_mean_both(kernel: ModuleType, frames_KB: Tensor, N: int, *, block: int, frame: str) -> None:
    outs = torch.full((2, N), -7.0)
    for module, out in ((reference, outs[0]), (kernel, outs[1])):
        function(module, "decode_mean", frame)(frames_KB, out, block=block)
    assert_same(outs[1], outs[0])


def raises(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as raised:
        assert message in str(raised), raised
    else:
        raise AssertionError(f"nothing was raised, expected: {message}")


@case
def encode_gives_the_bytes_and_residuals_of_the_reference(kernel: ModuleType) -> None:
    """All kinds of error at the smallest block: they are read the same way in a larger one."""
    for frame in frames_of_kernel(kernel):
        for block in BLOCKS[frame]:
            encode_both(kernel, random(2, 0), None, None, block=block, frame=frame)
            K, J = (2, 3) if block <= 256 else (2, 1)
            x, counts = random(K, J * block), random_counts(K, J, block)
            for error_dtype in ERRORS if block == BLOCKS[frame][0] else ERRORS[-1:]:
                error = None if error_dtype is None else random(K, J * block, seed=100).to(error_dtype)
                encode_both(kernel, x, error, None, block=block, frame=frame)
                encode_both(kernel, x, error, counts, block=block, frame=frame)


@case
def blocks_across_programs_and_rows_keep_their_places(kernel: ModuleType) -> None:
    for frame in ("rms", *steps_of(kernel)):
        for block, J in ((64, 45), (192, 13), (512, 9)):
            x, counts = random(3, J * block), random_counts(3, J, block)
            frames = encode_both(kernel, x, None, counts, block=block, frame=frame)
            decode_both(kernel, frames, x, block=block, frame=frame, weight=0.1, keep=0.9)
            decode_mean_both(kernel, frames, J * block, block=block, frame=frame)


@case
def encode_counts_every_length_of_a_block(kernel: ModuleType) -> None:
    """A row per length, 0..64, and around the borders of words in 256. Padding is NaN, and must not enter anything."""
    around_words = [word + n for word in (0, 64, 128, 192, 256) for n in (-1, 0, 1) if 0 <= word + n <= 256]
    for frame in frames_of_kernel(kernel):
        for block, lengths in ((64, [*range(65)]), (256, [*around_words, 15, 16, 17])):
            counts = torch.tensor(lengths, dtype=torch.int32).unsqueeze(1)
            x = random(len(lengths), block)
            x[torch.arange(block) >= counts] = float("nan")
            encode_both(kernel, x, random(len(lengths), block, seed=1), counts, block=block, frame=frame)


@case
def decode_gives_the_floats_of_the_reference(kernel: ModuleType) -> None:
    """All weights at the smallest block: they meet values, which no longer know of blocks."""
    for frame in ("rms", *steps_of(kernel)):
        for block in BLOCKS[frame]:
            is_smallest = block == BLOCKS[frame][0]
            for K, J in ((1, 1), (3, 5)) if is_smallest else ((3, 5),):
                frames = frames_for(K, J * block, block, frame=frame)
                function(reference, "encode", frame)(random(K, J * block, seed=K), None, frames, None, block=block)
                for weight, keep in WEIGHTS if is_smallest else ((1.0, 0.0), (0.1, 0.9)):
                    out = random(K, J * block, seed=2)
                    decode_both(kernel, frames, out, block=block, frame=frame, weight=weight, keep=keep)
                decode_mean_both(kernel, frames, J * block, block=block, frame=frame)


@case
def decode_takes_any_code_and_any_scale(kernel: ModuleType) -> None:
    """Around zero, among the denormals, around infinity, NaNs; and means of any three of them."""
    block, J = 64, 100
    near = torch.cat([torch.arange(start, start + 50) for start in (0, 0x60, 0x3F80, 0x7F60, 0x7F90, 0x7FCE)])
    g = torch.Generator().manual_seed(0)
    scales = (near - 0x8000 * (torch.arange(300) % 2))[torch.randperm(300, generator=g)].to(torch.int16).view(3, J)
    code_bytes = {"rms": J * block // 8, "int8": J * block, "int4": J * block // 2, "log4": J * block // 2}
    for frame in ("rms", *steps_of(kernel)):
        frames = torch.randint(256, frames_for(3, J * block, block, frame=frame).shape, dtype=torch.uint8, generator=g)
        frames[:, code_bytes[frame] :][:, : 2 * J] = scales.view(torch.uint8)
        for weight, keep in ((1.0, 0.0), (0.0, 0.0), (2.0, 0.0), (0.3, 0.7)):
            decode_both(kernel, frames, random(3, J * block), block=block, frame=frame, weight=weight, keep=keep)
        decode_mean_both(kernel, frames, J * block, block=block, frame=frame)


@case
def the_old_content_of_out_is_not_read_without_keep(kernel: ModuleType) -> None:
    for frame in ("rms", *steps_of(kernel)):
        frames = encode_both(kernel, random(1, 128), None, None, block=64, frame=frame)
        out = torch.full((1, 128), float("nan"))
        function(kernel, "decode", frame)(frames, out, block=64, weight=0.5, keep=0.0)
        assert out.isfinite().all()


@case
def special_values_travel_as_in_the_reference(kernel: ModuleType) -> None:
    """NaN, infinities, zeros of both signs, subnormals, squares that overflow or vanish; alone, alike and mixed."""
    special = torch.tensor(SPECIAL)
    J = len(special)
    for frame in frames_of_kernel(kernel):
        for block in (64,) if frame == "mean_abs" else (64, 256):
            alone = random(1, J * block) * 1e-3
            alone.view(J, block)[torch.arange(J), torch.arange(J) * 3 % block] = special
            everywhere = special.repeat_interleave(block).unsqueeze(0)
            mixed = special[torch.randint(J, (1, J * block), generator=torch.Generator().manual_seed(3))]
            x, rows = torch.cat([alone, everywhere, mixed]), (3, 1)
            errors = (None, alone.repeat(rows), everywhere.bfloat16().repeat(rows))
            for error in errors if block == 64 else errors[:1]:
                for counts in (None, random_counts(1, J, block).repeat(rows)):
                    frames = encode_both(kernel, x, error, counts, block=block, frame=frame)
                    decode_both(kernel, frames, alone.repeat(rows), block=block, frame=frame, weight=0.3, keep=0.9)
                    decode_both(kernel, frames, alone.repeat(rows), block=block, frame=frame, weight=-1.0, keep=0.0)
                    for row in frames.split(1) if error is None else ():
                        decode_mean_both(kernel, row, J * block, block=block, frame=frame)


@case
def a_nan_of_any_bits_makes_its_block_travel_as_one(kernel: ModuleType) -> None:
    """Quiet and signalling, up to all ones, whose rounding would carry over into a scale of zero."""
    payloads = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001, 0x7FC00000, -0x7FFFFF, -0x400000], dtype=torch.int32)
    rows = torch.arange(len(payloads))
    for frame in frames_of_kernel(kernel):
        x = random(len(payloads), 64)
        x.view(torch.int32)[rows, rows * 9] = payloads
        frames = encode_both(kernel, x, None, None, block=64, frame=frame)
        scales_at = {"int8": 64, "int4": 32, "log4": 32}.get(frame, 8)
        assert reference.scales_at(frames, scales_at, 1).isnan().all()


@case
def scales_round_to_bfloat16_as_in_the_reference(kernel: ModuleType) -> None:
    """Blocks of one value each, around every tie and up to the largest that is finite in bfloat16."""
    tops = torch.tensor([0x3F80, 0x3F81, 0x0001, 0x007F, 0x0080, 0x7F7E, 0x7F7F], dtype=torch.int32)
    lows = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = ((tops << 16)[:, None] + lows).flatten().view(torch.float32)
    counts = torch.ones(1, len(values), dtype=torch.int32)
    x = values.repeat_interleave(64).unsqueeze(0)
    for frame in ("mean_abs", *steps_of(kernel)):
        encode_both(kernel, x, None, counts, block=64, frame=frame)
        encode_both(kernel, -x, None, counts, block=64, frame=frame)


@case
def golden_frames_are_met(kernel: ModuleType) -> None:
    golden, name = json.loads(PATH.read_text()), name_of(kernel)
    for title, codec in (
        ("sign block=64 scale=rms", SignCodec(block=64, kernel=name)),
        ("sign block=256 scale=rms", SignCodec(kernel=name)),
        ("sign block=256 scale=mean_abs", SignCodec(scale="mean_abs", kernel=name)),
        ("int8 block=64", Int8Codec(block=64, kernel=name)),
        ("int4 block=64", Int4Codec(block=64, kernel=name)),
    ):
        for row, hexed in frames_of(codec).items():
            assert golden[f"{title} {row}"] == hexed, (title, row)


@case
def rows_of_wider_tensors_are_taken_and_their_surroundings_left_alone(kernel: ModuleType) -> None:
    block, K, N = 64, 3, 192
    for frame in ("rms", *steps_of(kernel)):
        B = frames_for(1, N, block, frame=frame).shape[1]
        x_wide, error_wide, counts_wide = random(K, N + 5), random(K, N + 7, seed=1), random_counts(K, 9, block)
        at = 1 if name_of(kernel) == "cpu" else 8  # the others take frames that start at multiples of 8 bytes
        frames_wide = torch.full((K, B + 3 * at), 0xEE, dtype=torch.uint8)
        frames = frames_wide[:, at : at + B]
        x, error, counts = x_wide[:, 2:-3], error_wide[:, 7:], counts_wide[:, 4:7]
        before = x_wide.clone()
        expected_x, expected_frames = x.clone(), frames_for(K, N, block, frame=frame)
        encode = function(reference, "encode", frame)
        encode(expected_x, error.clone(), expected_frames, counts.clone(), block=block)

        function(kernel, "encode", frame)(x, error, frames, counts, block=block)
        assert_same(x, expected_x)
        assert_same(frames, expected_frames)
        assert_same(x_wide[:, :2], before[:, :2])
        assert_same(x_wide[:, -3:], before[:, -3:])
        assert (frames_wide[:, :at] == 0xEE).all() and (frames_wide[:, at + B :] == 0xEE).all()

        out_wide = torch.full((K, N + 1), 5.0)
        function(kernel, "decode", frame)(frames[1:2], out_wide[1:2, 1:], block=block, weight=1.0, keep=0.0)
        expected = torch.empty(1, N)
        function(reference, "decode", frame)(expected_frames[1:2], expected, block=block, weight=1.0, keep=0.0)
        assert_same(out_wide[1:2, 1:], expected)
        assert (out_wide[0] == 5.0).all() and (out_wide[2] == 5.0).all() and (out_wide[:, 0] == 5.0).all()


@case
def the_edge_rejects_what_the_kernel_cannot_take(kernel: ModuleType) -> None:
    x, frames = torch.zeros(2, 128), torch.zeros(2, 32, dtype=torch.uint8)

    def encode(x: Tensor = x, frames: Tensor = frames, **others: object) -> Callable[[], None]:
        arguments = {"error_KN": None, "counts_KJ": None, "block": 64, "scale": "rms"} | others
        return lambda: kernel.encode(x, frames_KB=frames, **arguments)  # type: ignore[arg-type]

    shifted = torch.zeros(72, dtype=torch.uint8)
    raises(ValueError, "multiples of 8 bytes", encode(frames=shifted[2:66].view(2, 32)))
    raises(ValueError, "multiples of 8 bytes", encode(frames=shifted.as_strided((2, 32), (36, 1))))
    raises(ValueError, "multiple of 4 bytes", encode(misaligned(128), frames[:1]))
    raises(ValueError, "overlap", encode(overlapping(2, 128)))
    raises(ValueError, "contiguous", encode(torch.zeros(2, 256)[:, ::2]))
    raises(ValueError, "meta", encode(x.to("meta")))
    raises(ValueError, "100 elements", encode(torch.zeros(2, 100)))
    raises(ValueError, "shape (2, 32)", encode(frames=frames[:, :16]))
    raises(TypeError, "float16", encode(error_KN=x.half()))
    raises(TypeError, "int32", encode(counts_KJ=torch.ones(2, 2, dtype=torch.int64)))
    raises(ValueError, "scale must be", encode(scale="max"))
    raises(ValueError, "no rows", lambda: kernel.decode_mean(frames[:0], x[0], block=64))
    raises(ValueError, "one dimension", lambda: kernel.decode_mean(frames, x, block=64))
    raises(TypeError, "out must be", lambda: kernel.decode(frames, x.double(), block=64, weight=1.0, keep=0.0))


@case
def ranks_as_threads_do_not_disturb_each_other(kernel: ModuleType) -> None:
    def ranks(name: str) -> list[Tensor]:
        def rank(transport: SimTransport) -> Tensor:
            codec = SignCodec(64, kernel=name)
            ef, sums = ErrorFeedback.zeros(3 * 128, 3), torch.zeros(3 * 128)
            for step in range(2):
                x = random(1, 3 * 128, seed=10 * step + transport.rank)[0]
                assert allreduce_mean(x, ef, codec, transport)
                sums += x
            return sums

        return run_ranks(3, rank)

    for got, expected in zip(ranks(name_of(kernel)), ranks("reference"), strict=True):
        assert_same(got, expected)


FUSED = (*fused_cases.CASES, fused_cases.Case(3, 4, 64, (65, 64, 200, 7), (torch.float16,) * 4),
         fused_cases.Case(1, 2, 576, (700,), (torch.float32,)))  # fmt: skip


@case
def encode_momentum_gives_the_bytes_and_residuals_of_the_reference(kernel: ModuleType) -> None:
    for i, each in enumerate(FUSED):
        kinds = itertools.product((False, True), repeat=2) if each.block <= 256 else ((False, True), (True, False))
        for k, (packed, variance) in enumerate(kinds):
            error, scale = ERRORS[(i + k) % 3], ("rms", "mean_abs")[(i + k // 2) % 2]
            fused_cases.check_encode_momentum(
                kernel.encode_momentum, each, error=error, packed=packed, variance=variance, scale=scale
            )


@case
def a_gradient_that_is_not_finite_is_seen(kernel: ModuleType) -> None:
    each = fused_cases.CASES[3]
    for bad in (float("nan"), float("inf"), -float("inf")):
        grads = fused_cases.tensors_of(each, 10)
        assert grads[1] is not None
        grads[1][17] = bad
        fused_cases.check_encode_momentum(
            kernel.encode_momentum, each, error=torch.float32, packed=True, variance=False, grads=grads
        )


@case
def encode_gradients_gives_the_bytes_and_what_is_owed_of_the_reference(kernel: ModuleType) -> None:
    for i, each in enumerate(FUSED):
        for k, returned in enumerate((None, 0.9)):
            owed, scale = fused_cases.DTYPES[(i + k) % 2], ("rms", "mean_abs")[i % 2]
            fused_cases.check_encode_gradients(
                kernel.encode_gradients, each, owed=owed, returned=returned, scale=scale, closed=i % 3 == 0
            )
    for bad in (float("nan"), float("inf")):
        grads = fused_cases.tensors_of(each := fused_cases.CASES[3], 10)
        assert grads[1] is not None
        grads[1][17] = bad
        fused_cases.check_encode_gradients(kernel.encode_gradients, each, owed=torch.float32, returned=0.9, grads=grads)


@case
def encode_mean_gives_the_bytes_and_residuals_of_the_reference(kernel: ModuleType) -> None:
    for i, each in enumerate(FUSED):
        for k, (rows, scale) in enumerate(((1, "rms"), (2, "mean_abs"), (5, "rms"))):
            fused_cases.check_encode_mean(kernel.encode_mean, each, rows=rows, error=ERRORS[(i + k) % 3], scale=scale)


@case
def apply_gives_the_parameters_of_the_reference(kernel: ModuleType) -> None:
    for each in FUSED:
        fused_cases.check_apply(kernel.apply, each)
        fused_cases.check_apply(kernel.int4_apply, each, frame="int4")


@case
def step_masters_gives_the_masters_and_frames_of_the_reference(kernel: ModuleType) -> None:
    for each in FUSED:
        for scale in ("rms", "mean_abs"):
            fused_cases.check_step_masters(kernel.step_masters, each, scale=scale)
        fused_cases.check_step_masters(kernel.int4_step_masters, each, frame="int4")


@case
def owner_step_gives_the_variance_and_direction_of_the_reference(kernel: ModuleType) -> None:
    for each in fused_cases.CASES:
        for ranks, by_block in ((1, False), (2, True), (5, False)):
            fused_cases.check_owner_step(kernel.owner_step, each, ranks=ranks, each=by_block, with_D=by_block)


@case
def what_clipping_needs_is_that_of_the_reference(kernel: ModuleType) -> None:
    for i, each in enumerate(FUSED):
        for variance in (False, True):
            error = (torch.float32, torch.bfloat16)[(i + variance) % 2]
            fused_cases.check_correct_residual(kernel.correct_residual, each, error=error, variance=variance)
            for packed in (False, True):
                fused_cases.check_momentum_sums(kernel.momentum_sums, each, packed=packed, variance=variance)


@case
def local_step_gives_the_state_and_parameters_of_the_reference(kernel: ModuleType) -> None:
    for each in FUSED:
        for variance, anchored in itertools.product((False, True), repeat=2):
            fused_cases.check_local_step(kernel.local_step, each, variance=variance, anchored=anchored)


@case
def tensors_of_other_types_and_strides_go_through_a_copy(kernel: ModuleType) -> None:
    fused_cases.check_copies(kernel, torch.float64)


@case
def the_residual_may_lie_where_the_error_did(kernel: ModuleType) -> None:
    for block in (256, 576):
        each = fused_cases.Case(1, 2, block, (2 * block - 7,), (torch.float32,))
        received = torch.cat([fused_cases.frames_of(each, seed) for seed in range(3)])
        error = fused_cases.numbers(1, each.N, seed=1)
        outs = []
        for module in (reference, kernel):
            owed, frame = error.clone(), fused_cases.garbage(each, 1)
            module.encode_mean(received, EncodeOutput(owed, frame, each.counts(), owed), block=block, scale="rms")
            outs.append((owed, frame))
        assert_same(outs[1][0], outs[0][0])
        assert_same(outs[1][1], outs[0][1])
