"""The cases of test_triton.py that need Triton's interpreter, which a process chooses once, when it imports Triton.

    TRITON_INTERPRET=1 PYTHONPATH=tests:tests/golden python tests/triton_cases.py    # JSON: case -> what is wrong

Tolerance: none. On a machine with a GPU, scripts/gpu_check.py runs such comparisons on the device.

Shape legend: K rows, N elements, J blocks, B bytes.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

import test_kernels
import torch
from test_kernels import (
    ERRORS,
    SPECIAL,
    assert_same,
    frames_for,
    misaligned,
    overlapping,
    random,
    random_counts,
)
from torch import Tensor
from write_golden import PATH, frames_of

from onebit.comm import ErrorFeedback, SignCodec, SimTransport, allreduce_mean, kernels, run_ranks
from onebit.comm.kernels import reference, triton

SCALES = ("rms", "mean_abs")
BLOCKS = test_kernels.BLOCKS["rms"]
WEIGHTS = ((1.0, 0.0), (0.1, 0.0), (1.0, 1.0), (0.1, 0.9), (-1.0, 1.0), (0.0, 0.5), (1.0, 1e-60))
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def encode_both(x_KN: Tensor, error_KN: Tensor | None, counts_KJ: Tensor | None, *, block: int, scale: str) -> Tensor:
    """Assert that both kernels agree on frames and residuals; the frames."""
    K, N = x_KN.shape
    residuals, frames = [x_KN.clone(), x_KN.clone()], [frames_for(K, N, block, fill) for fill in (0xAB, 0xCD)]
    reference.encode(residuals[0], error_KN, frames[0], counts_KJ, block=block, scale=scale)
    triton.encode(residuals[1], error_KN, frames[1], counts_KJ, block=block, scale=scale)
    assert_same(frames[1], frames[0])
    assert_same(residuals[1], residuals[0])
    return frames[1]


def decode_both(frames_KB: Tensor, out_KN: Tensor, *, block: int, weight: float, keep: float) -> None:
    outs = [out_KN.clone(), out_KN.clone()]
    reference.decode(frames_KB, outs[0], block=block, weight=weight, keep=keep)
    triton.decode(frames_KB, outs[1], block=block, weight=weight, keep=keep)
    assert_same(outs[1], outs[0])


def decode_mean_both(frames_KB: Tensor, N: int, *, block: int) -> None:
    outs = torch.full((2, N), -7.0)
    reference.decode_mean(frames_KB, outs[0], block=block)
    triton.decode_mean(frames_KB, outs[1], block=block)
    assert_same(outs[1], outs[0])


def raises(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as raised:
        assert message in str(raised), raised
    else:
        raise AssertionError(f"nothing was raised, expected: {message}")


@case
def encode_gives_the_bytes_and_residuals_of_the_reference() -> None:
    for block in BLOCKS:
        for scale in SCALES:
            for error_dtype in ERRORS:
                for K, J in ((1, 0), (2, 0), (1, 1), (3, 11)) if block <= 256 else ((2, 1),):
                    x = random(K, J * block, seed=K)
                    error = None if error_dtype is None else random(K, J * block, seed=100).to(error_dtype)
                    for counts in (None, random_counts(K, J, block, seed=J)):
                        encode_both(x, error, counts, block=block, scale=scale)


@case
def blocks_across_programs_and_rows_keep_their_places() -> None:
    for block, J in ((64, 45), (192, 13), (512, 9)):
        P = triton.blocks_per_program(block)
        assert 3 * J > P and J % P
        frames = encode_both(random(3, J * block), None, random_counts(3, J, block), block=block, scale="rms")
        decode_both(frames, random(3, J * block), block=block, weight=0.1, keep=0.9)
        decode_mean_both(frames, J * block, block=block)


@case
def encode_counts_every_length_of_a_block() -> None:
    """One row per length 0..block: the padding holds NaN, which must not enter anything."""
    for block in (64, 256):
        counts = torch.arange(block + 1, dtype=torch.int32).unsqueeze(1)
        x = random(block + 1, block)
        x[torch.arange(block) >= counts] = float("nan")
        for scale in SCALES:
            encode_both(x, random(block + 1, block, seed=1), counts, block=block, scale=scale)


@case
def decode_gives_the_floats_of_the_reference() -> None:
    for block in BLOCKS:
        for K, J in ((1, 1), (2, 5), (5, 2)):
            frames = encode_both(random(K, J * block, seed=K), None, None, block=block, scale="rms")
            for weight, keep in WEIGHTS:
                decode_both(frames, random(K, J * block, seed=2), block=block, weight=weight, keep=keep)
            decode_mean_both(frames, J * block, block=block)


@case
def decode_takes_any_bits_and_any_finite_or_infinite_scale() -> None:
    block, J = 64, 300
    frames = torch.randint(256, (3, SignCodec(block).frame_bytes(J * block)), dtype=torch.uint8)
    scales = reference.scales(frames, J * block, block=block)
    frames[:, J * block // 8 :][:, : 2 * J] = torch.where(scales.isnan(), 0.5, scales).view(torch.uint8)
    for weight, keep in ((1.0, 0.0), (0.0, 0.0), (0.3, 0.7)):
        decode_both(frames, random(3, J * block), block=block, weight=weight, keep=keep)
    decode_mean_both(frames, J * block, block=block)


@case
def the_old_content_of_out_is_not_read_without_keep() -> None:
    frames = encode_both(random(1, 128), None, None, block=64, scale="rms")
    out = torch.full((1, 128), float("nan"))
    triton.decode(frames, out, block=64, weight=0.5, keep=0.0)
    assert out.isfinite().all()


@case
def special_values_travel_as_in_the_reference() -> None:
    """NaN, infinities, zeros of both signs, subnormals, squares that overflow or vanish; alone, alike and mixed."""
    special = torch.tensor(SPECIAL)
    J = len(special)
    for block in (64, 256):
        alone = random(1, J * block) * 1e-3
        alone.view(J, block)[torch.arange(J), torch.arange(J) * 3 % block] = special
        everywhere = special.repeat_interleave(block).unsqueeze(0)
        mixed = special[torch.randint(J, (1, J * block), generator=torch.Generator().manual_seed(3))]
        for scale in SCALES:
            for x in (alone, everywhere, mixed):
                for error in (None, alone, everywhere.bfloat16()):
                    for counts in (None, random_counts(1, J, block)):
                        frames = encode_both(x, error, counts, block=block, scale=scale)
                        decode_mean_both(frames, J * block, block=block)
                        decode_both(frames, alone, block=block, weight=0.3, keep=0.9)
                        decode_both(frames, alone, block=block, weight=-1.0, keep=0.0)


@case
def scales_round_to_bfloat16_as_in_the_reference() -> None:
    """Blocks of one value each, around every tie and up to the largest that is finite in bfloat16."""
    tops = torch.tensor([0x3F80, 0x3F81, 0x0001, 0x007F, 0x0080, 0x7F7E, 0x7F7F], dtype=torch.int32)
    lows = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = ((tops << 16)[:, None] + lows).flatten().view(torch.float32)
    counts = torch.ones(1, len(values), dtype=torch.int32)
    x = values.repeat_interleave(64).unsqueeze(0)
    encode_both(x, None, counts, block=64, scale="mean_abs")
    encode_both(-x, None, counts, block=64, scale="mean_abs")


@case
def golden_frames_are_met() -> None:
    golden = json.loads(PATH.read_text())
    for name, codec in (
        ("sign block=64 scale=rms", SignCodec(block=64, kernel="triton")),
        ("sign block=256 scale=rms", SignCodec(kernel="triton")),
        ("sign block=256 scale=mean_abs", SignCodec(scale="mean_abs", kernel="triton")),
    ):
        for row, hexed in frames_of(codec).items():
            assert golden[f"{name} {row}"] == hexed, (name, row)


def open_golden() -> str:
    from write_golden import PATH

    return PATH.read_text()


@case
def rows_of_wider_tensors_are_taken_and_their_surroundings_left_alone() -> None:
    block, K, N = 64, 3, 192
    B = SignCodec(block).frame_bytes(N)
    x_wide, error_wide, counts_wide = random(K, N + 5), random(K, N + 7, seed=1), random_counts(K, 9, block)
    frames_wide = torch.full((K, B + 24), 0xEE, dtype=torch.uint8)
    x, error, frames, counts = x_wide[:, 2:-3], error_wide[:, 7:], frames_wide[:, 8:-16], counts_wide[:, 4:7]
    before = x_wide.clone()
    expected_x, expected_frames = x.clone(), frames_for(K, N, block)
    reference.encode(expected_x, error.clone(), expected_frames, counts.clone(), block=block, scale="rms")

    triton.encode(x, error, frames, counts, block=block, scale="rms")
    assert_same(x, expected_x)
    assert_same(frames, expected_frames)
    assert_same(x_wide[:, :2], before[:, :2])
    assert_same(x_wide[:, -3:], before[:, -3:])
    assert (frames_wide[:, :8] == 0xEE).all() and (frames_wide[:, -16:] == 0xEE).all()

    out_wide = torch.full((K, N + 1), 5.0)
    triton.decode(frames[1:2], out_wide[1:2, 1:], block=block, weight=1.0, keep=0.0)
    expected = torch.empty(1, N)
    reference.decode(expected_frames[1:2], expected, block=block, weight=1.0, keep=0.0)
    assert_same(out_wide[1:2, 1:], expected)
    assert (out_wide[0] == 5.0).all() and (out_wide[2] == 5.0).all() and (out_wide[:, 0] == 5.0).all()


@case
def the_edge_rejects_what_the_kernel_cannot_take() -> None:
    x, frames = torch.zeros(2, 128), torch.zeros(2, 32, dtype=torch.uint8)

    def encode(x: Tensor = x, frames: Tensor = frames, **others: object) -> Callable[[], None]:
        arguments = {"error_KN": None, "counts_KJ": None, "block": 64, "scale": "rms"} | others
        return lambda: triton.encode(x, frames_KB=frames, **arguments)  # type: ignore[arg-type]

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
    raises(ValueError, "no rows", lambda: triton.decode_mean(frames[:0], x[0], block=64))
    raises(ValueError, "one dimension", lambda: triton.decode_mean(frames, x, block=64))
    raises(TypeError, "out must be", lambda: triton.decode(frames, x.double(), block=64, weight=1.0, keep=0.0))


@case
def ranks_as_threads_do_not_disturb_each_other() -> None:
    def ranks(kernel: str) -> list[Tensor]:
        def rank(link: SimTransport) -> Tensor:
            codec = SignCodec(64, kernel=kernel)
            ef, sums = ErrorFeedback.zeros(3 * 128, 3), torch.zeros(3 * 128)
            for step in range(2):
                x = random(1, 3 * 128, seed=10 * step + link.rank)[0]
                assert allreduce_mean(x, ef, codec, link)
                sums += x
            return sums

        return run_ranks(3, rank)

    for got, expected in zip(ranks("triton"), ranks("reference"), strict=True):
        assert_same(got, expected)


@case
def a_kernel_is_said_to_be_interpreted() -> None:
    assert kernels.select("triton", torch.device("cpu")) is triton
    assert "interpreted" in kernels.describe()


def main() -> None:
    results = {}
    for name, run in CASES.items():
        try:
            run()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
