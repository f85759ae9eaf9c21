"""One contract for every codec, and what is particular to the sign frames."""

from __future__ import annotations

import functools
import json
import math

import numpy as np
import pytest
import torch
import write_golden
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebit.comm import CODECS as REGISTRY
from onebit.comm import (
    Bf16Codec,
    Codec,
    EncodeOutput,
    FusedCodec,
    IdentityCodec,
    Int4Codec,
    Int8Codec,
    Log4Codec,
    MomentumInputs,
    MomentumWeights,
    ParamUpdate,
    Segments,
    SignCodec,
    codec_named,
)  # fmt: skip
from onebit.comm.codecs import all_finite
from onebit.comm.kernels import reference
from onebit.reference.codecs import compress

CODECS: list[Codec] = [
    *(codec_named(name, 256) for name in REGISTRY),
    IdentityCodec(),
    SignCodec(block=64),
    SignCodec(block=1024, scale="mean_abs"),
    SignCodec(kernel="reference"),
    Int8Codec(block=64),
    Int8Codec(kernel="reference"),
    Int4Codec(block=32),
    Int4Codec(kernel="reference"),
    Bf16Codec(),
    Log4Codec(block=32),
]
SPECIAL = [0.0, -0.0, 1e-45, -1e-38, 1e-30, 3e38, -1e18, 1.0, -2.0]


def encode(
    codec: Codec, x_KN: Tensor, error: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(frames, residual); the frames start as garbage, as real buffers do."""
    frames = torch.full((x_KN.shape[0], codec.frame_bytes(x_KN.shape[1])), 0xAB, dtype=torch.uint8)
    residual = x_KN.clone()
    codec.encode(residual, error, frames, counts)
    return frames, residual


def decode(codec: Codec, frames: Tensor, n: int) -> Tensor:
    out = torch.full((frames.shape[0], n), float("nan"))
    codec.decode(frames, out)
    return out


def some_rows(codec: Codec, rows: int, blocks: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, blocks * codec.block, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", REGISTRY.values())
def test_a_block_has_elements(kind: type[Codec]) -> None:
    for block in (0, -256):
        with pytest.raises(ValueError, match=f"block must be a positive multiple of .*, got {block}"):
            kind(block=block)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="block must be a whole number"):
        kind(block=256.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("codec", CODECS, ids=str)
class TestContract:
    @pytest.mark.pairwise
    @pytest.mark.parametrize("blocks", [0, 1, 2, 7])
    @pytest.mark.parametrize("rows", [1, 3])
    def test_sent_plus_kept_equals_input(self, codec: Codec, rows: int, blocks: int) -> None:
        """c = decode(frame) + residual to one rounding of the larger of the two: the residual is one subtraction."""
        x = some_rows(codec, rows, blocks)
        frames, residual = encode(codec, x)
        sent = decode(codec, frames, x.shape[1])
        bound = torch.maximum(sent.abs(), x.abs()) * 2**-23
        assert ((sent.double() + residual.double() - x.double()).abs() <= bound).all()

    def test_the_error_is_added_and_not_touched(self, codec: Codec) -> None:
        x, error = some_rows(codec, 2, 3), some_rows(codec, 2, 3, seed=1)
        before = error.clone()
        for e in (error, error.to(torch.bfloat16)):
            frames, residual = encode(codec, x, e)
            plain_frames, plain_residual = encode(codec, x + e.float())
            assert torch.equal(frames, plain_frames) and torch.equal(residual, plain_residual)
        assert torch.equal(error, before)

    def test_frames_are_as_long_as_said_and_aligned(self, codec: Codec) -> None:
        for blocks in range(20):
            assert codec.frame_bytes(blocks * codec.block) % 16 == 0
        refused(ValueError, "whole number of blocks", codec.frame_bytes, codec.block + 1)

    def test_zeros_stay_zero(self, codec: Codec) -> None:
        frames, residual = encode(codec, torch.zeros(2, 2 * codec.block))
        assert not decode(codec, frames, 2 * codec.block).any() and not residual.any()

    def test_mean_is_the_mean_of_the_decoded(self, codec: Codec) -> None:
        """In row order, to the bit, and for one row exactly the row."""
        for rows in (1, 2, 3, 5):
            x = some_rows(codec, rows, 3)
            frames, _ = encode(codec, x)
            mean = torch.full((x.shape[1],), float("nan"))
            codec.decode_mean(frames, mean)
            expected = decode(codec, frames[:1], x.shape[1])[0]
            for k in range(1, rows):
                expected = expected + decode(codec, frames[k : k + 1], x.shape[1])[0]
            assert torch.equal(mean, expected * (1.0 / rows))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_encode_mean_is_a_mean_and_then_an_encode(self, codec: Codec, dtype: torch.dtype) -> None:
        frames, _ = encode(codec, some_rows(codec, 3, 4))
        error = some_rows(codec, 1, 4, seed=5).to(dtype)
        mean = torch.empty(1, 4 * codec.block)
        codec.decode_mean(frames, mean[0])
        expected, residual = encode(codec, mean, error)
        frame, out = torch.full_like(frames[:1], 0xCD), torch.full_like(error, 7.0)
        codec.encode_mean(frames, EncodeOutput(error, frame, None, out))
        assert torch.equal(frame, expected) and torch.equal(out, residual.to(dtype))

    def test_decode_can_scale_and_accumulate(self, codec: Codec) -> None:
        x = some_rows(codec, 2, 3)
        frames, _ = encode(codec, x)
        values = decode(codec, frames, x.shape[1])
        out = x.clone()
        codec.decode(frames, out, weight=0.75, keep=0.1)
        assert torch.equal(out, x * 0.1 + values * 0.75)
        codec.decode(frames, out, weight=3.0)
        assert torch.equal(out, values * 3.0)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_a_value_that_is_not_finite_is_seen_by_every_receiver(self, codec: Codec, bad: float) -> None:
        """Also after averaging with finite rows, and after a second encoding."""
        x = some_rows(codec, 3, 4)
        n = x.shape[1]
        frames, _ = encode(codec, x)
        assert bool(codec.is_finite(frames, n))
        x[1, codec.block] = bad
        frames, _ = encode(codec, x)
        assert not bool(codec.is_finite(frames, n))
        mean = torch.empty(n)
        codec.decode_mean(frames, mean)
        again, _ = encode(codec, mean.view(1, -1))
        assert not bool(codec.is_finite(again, n)) and not decode(codec, again, n).isfinite().all()

    def test_frames_of_many_buckets_are_asked_at_once(self, codec: Codec) -> None:
        """Of different lengths, and where they lie at an odd address."""
        x, n = some_rows(codec, 3, 4), some_rows(codec, 3, 4).shape[1]
        halves = x[:, : codec.block].clone()
        odd = torch.empty(3 * codec.frame_bytes(n) + 1, dtype=torch.uint8)[1:].view(3, -1)
        for row in (None, 0, 2):
            if row is not None:
                x[row, -1] = float("nan")
            bad, _ = encode(codec, x)
            good, _ = encode(codec, halves)
            of_good = codec.witness(good, codec.block)
            # Values in full are read where they lie alone.
            for frames in (bad,) if isinstance(codec, (IdentityCodec, Bf16Codec)) else (bad, odd.copy_(bad)):
                assert bool(all_finite([of_good, codec.witness(frames, n)])) == (row is None)
            x[row or 0, -1] = 1.0

    def test_frames_that_pass_as_finite_decode_to_finite_values(self, codec: Codec) -> None:
        """Whatever their bytes: codes that no encoder sends, at scales around the largest, infinite and NaN."""
        n, seen = codec.block, set()
        code_bytes = codec.frame_bytes(16 * n) // 16 - 2  # behind them the block's scale, where there is one
        bits = torch.arange(0x7A00, 0x7FD0, 7, dtype=torch.int32)
        scales = torch.stack((bits, bits - 0x8000), dim=1).to(torch.int16).view(-1, 1).view(torch.uint8)
        g = torch.Generator().manual_seed(0)
        frames = torch.randint(256, (len(scales), codec.frame_bytes(n)), dtype=torch.uint8, generator=g)
        frames[::2] = torch.tensor([0x80, 0x88, 0x00, 0x7F], dtype=torch.uint8).repeat(codec.frame_bytes(n) // 4)
        frames[:, code_bytes : code_bytes + 2] = scales
        for frame in frames.split(1):
            passes = bool(codec.is_finite(frame, n))
            assert not passes or decode(codec, frame, n).isfinite().all()
            seen.add(passes)
        assert seen == {False, True}

    def test_frames_of_another_shape_are_refused(self, codec: Codec) -> None:
        n = 2 * codec.block
        x, B = some_rows(codec, 2, 2), codec.frame_bytes(n)
        for wrong in (B - 16, B + 16, 0):
            frames = torch.zeros(2, wrong, dtype=torch.uint8)
            for use in (
                lambda frames=frames: codec.encode(x, None, frames, None),
                lambda frames=frames: codec.decode(frames, x),
                lambda frames=frames: codec.decode_mean(frames, x[0]),
                lambda frames=frames: codec.is_finite(frames, n),
            ):
                refused(ValueError, rf"frames must have shape \(., {B}\), got shape \(., {wrong}\)", use)
        refused(ValueError, "frames", codec.decode, torch.zeros(1, B, dtype=torch.uint8), x)

    def test_extreme_values(self, codec: Codec) -> None:
        x = torch.tensor(SPECIAL).repeat(codec.block)[: codec.block].view(1, -1)
        frames, residual = encode(codec, x.clamp(-1e18, 1e18))
        assert bool(codec.is_finite(frames, codec.block)) and residual.isfinite().all()


@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
def test_sign_values_are_those_of_the_oracle(scale: str) -> None:
    codec = SignCodec(scale=scale)
    x = some_rows(codec, 1, 5)
    frames, _ = encode(codec, x)
    expected = compress(x[0].double().numpy(), [slice(k, k + 256) for k in range(0, 1280, 256)], scale)
    np.testing.assert_array_equal(decode(codec, frames, 1280)[0].double().numpy(), expected)


@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=6), st.sampled_from(["rms", "mean_abs"]), st.integers(0, 2**31)
)
@settings(max_examples=60)
def test_padding_is_in_no_scale_and_keeps_nothing(counts: list[int], scale: str, seed: int) -> None:
    codec = SignCodec(block=64, scale=scale)
    x = some_rows(codec, 1, len(counts), seed)
    counts_KJ = torch.tensor([counts], dtype=torch.int32)
    frames, residual = encode(codec, x, counts=counts_KJ)
    other = x.clone()
    for k, n in enumerate(counts):
        other[0, 64 * k + n : 64 * (k + 1)] = float("nan")  # whatever lies in the padding
        assert not residual[0, 64 * k + n : 64 * (k + 1)].any()
        real = x[0, 64 * k : 64 * k + n].double().numpy()
        sent = decode(codec, frames, x.shape[1])[0, 64 * k : 64 * k + n].double().numpy()
        np.testing.assert_array_equal(sent, compress(real, [slice(0, n)], scale) if n else real)
    assert torch.equal(encode(codec, other, counts=counts_KJ)[0], frames)


def test_int8_is_within_half_a_step_of_the_largest_over_127() -> None:
    codec = Int8Codec()
    x = some_rows(codec, 2, 5) * torch.logspace(-3, 3, 5).repeat_interleave(256)
    _, residual = encode(codec, x)
    step = x.view(2, 5, 256).abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)  # the scale is rounded up to bfloat16
    assert (residual.view(2, 5, 256).abs() <= step / 2).all()


@pytest.mark.parametrize("block", [32, 256])
def test_int4_is_the_nearest_of_fifteen_steps(block: int) -> None:
    """Against float64, from the scale's definition: the least bfloat16 not below max|c|/7."""
    codec = Int4Codec(block)
    x = some_rows(codec, 2, 5) * torch.logspace(-3, 3, 5).repeat_interleave(block)
    counts = torch.tensor([[block, 1, 0, 7, block - 1]] * 2, dtype=torch.int32)
    frames, residual = encode(codec, x, counts=counts)
    sent = decode(codec, frames, 5 * block).double().numpy().reshape(10, block)
    for row, c, n, rest in zip(sent, x.reshape(10, -1), counts.reshape(-1), residual.reshape(10, -1), strict=True):
        real = c[: int(n)].double().numpy()
        assert not row[n:].any() and not rest[n:].any()
        if n:
            least = torch.tensor(np.abs(real).max() / 7, dtype=torch.float32)
            s = least.to(torch.bfloat16)
            s = float(s if s >= least else torch.nextafter(s, torch.tensor(float("inf"), dtype=torch.bfloat16)))
            np.testing.assert_array_equal(row[:n], np.round(real / s) * s)


def test_int4_says_what_it_can_of_zeros_and_extremes() -> None:
    """-0.0 arrives as 0 and leaves +0.0; a block whose values would decode to an infinity travels as one not finite."""
    codec = Int4Codec(32)
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 32], x[0, 33], x[0, 64], x[0, 65], x[0, 96] = -0.0, 1e-45, -1e-45, 2.9e38, -1e38, -1e-30
    frames, residual = encode(codec, x)
    sent = decode(codec, frames, 128)
    assert not torch.signbit(sent[0, :32]).any() and not torch.signbit(residual[0, :32]).any()
    assert torch.equal(residual[0, 32:64], x[0, 32:64]) and not sent[0, 32:64].any()  # below the least scale
    assert bool(codec.is_finite(frames, 128)) and sent.isfinite().all()
    assert ((sent - x)[0, 64:].view(2, 32).abs() <= torch.tensor([[2.9e38], [1e-30]]) / 7 * 0.51).all()
    x[0, 70] = torch.finfo(torch.float32).max
    frames, residual = encode(codec, x)
    assert not bool(codec.is_finite(frames, 128)) and not residual[0, 64:96].any()


def test_a_tie_of_the_mean_is_a_plus() -> None:
    """Ranks that cancel: +0.0 in any order of an even number. Three that cancel on paper need not in float32."""
    codec = SignCodec(block=64)
    for signs in ((1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0, 1.0, 1.0)):
        frames, _ = encode(codec, torch.tensor(signs).unsqueeze(1).expand(-1, 64).contiguous())
        mean = torch.empty(64)
        codec.decode_mean(frames, mean)
        assert not mean.any() and not torch.signbit(mean).any()
        sent, _ = encode(codec, mean.view(1, -1))
        assert not sent[0, :8].any()
    frames, _ = encode(codec, torch.tensor([[1.0], [2.0**-30], [-1.0]]).expand(-1, 64).contiguous())
    codec.decode_mean(frames, mean)
    assert not mean.any()  # 2^-30 is lost in 1 + 2^-30: in this order a tie


def test_minus_zero_is_minus() -> None:
    codec = SignCodec(block=64)
    x = torch.ones(1, 64)
    x[0, 3] = -0.0
    assert decode(codec, encode(codec, x)[0], 64)[0, 3] < 0


def test_frames_are_golden() -> None:
    """The wire format. A difference is a break of compatibility between versions; see golden/write_golden.py."""
    assert write_golden.frames() == json.loads(write_golden.PATH.read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"block": 100}, "multiple of 64"), ({"scale": "max"}, "mean_abs"), ({"kernel": "x"}, "kernel must be")],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    refused(ValueError, message, SignCodec, **options)


def test_bad_int4_options_are_refused() -> None:
    refused(ValueError, "multiple of 32", Int4Codec, block=48)
    refused(ValueError, "kernel must be", Int4Codec, kernel="x")


@pytest.mark.parametrize(
    ("options", "message"), [({"block": 24}, "multiple of 16"), ({"kernel": "x"}, "kernel must be")]
)
def test_bad_int8_options_are_refused(options: dict, message: str) -> None:
    refused(ValueError, message, Int8Codec, **options)


@pytest.mark.parametrize("size", [1.0, 1e-35, 1e30])
@pytest.mark.parametrize("block", [32, 256])
def test_log4_is_the_nearest_of_eight_powers_of_two(block: int, size: float) -> None:
    """Half way between two, the larger; in float64, element by element. Also where the smallest are subnormal."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3 * block, generator=generator) * 10 ** (-4 * torch.rand(2, 3 * block, generator=generator))
    x[0, :4] = torch.tensor([1.0, 0.75, 0.375, -0.75]) * 8.0
    x[1, :2] = torch.tensor([0.0, -0.0])
    x *= size
    frames, _ = encode(Log4Codec(block=block), x)
    decoded = decode(Log4Codec(block=block), frames, 3 * block)
    for row, values in zip(x.view(-1, block).double(), decoded.view(-1, block).double(), strict=True):
        largest = float(row.abs().max())
        scale = float(values.abs().max())
        assert largest <= scale <= largest * (1 + 2**-7) and torch.tensor(scale).to(torch.bfloat16).double() == scale
        has_zero = bool((row == 0).any())
        levels = [scale * 2.0**-k for k in range(7 if has_zero else 8)]
        for element, value in zip(row.tolist(), values.tolist(), strict=True):
            gaps = [(abs(level - abs(element)), -level) for level in levels]
            assert value == (math.copysign(min(gaps)[1], element) if element else 0.0)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if isinstance(codec, FusedCodec)], ids=str)
class TestFusedContract:
    """What an optimizer's momentum needs of the codec that it travels and is kept in."""

    def test_what_frames_say_is_encoded_into_them_again(self, codec: FusedCodec) -> None:
        frames, _ = encode(codec, some_rows(codec, 3, 5))
        again, residual = encode(codec, decode(codec, frames, 5 * codec.block))
        assert torch.equal(frames, again) and not residual.any()

    @pytest.mark.parametrize("is_packed", [True, False])
    def test_the_momentum_is_made_then_encoded(self, codec: FusedCodec, is_packed: bool) -> None:
        K, N, weights = 2, 3 * codec.block, MomentumWeights(keep=0.9, add=0.1, own=0.01, unscale=0.5)
        packed, _ = encode(codec, some_rows(codec, K, 3, seed=3))
        old = decode(codec, packed, N)
        D, grad, error = some_rows(codec, K, 3, seed=4).abs() + 0.1, some_rows(codec, K, 3, seed=5), torch.ones(K, N)
        g = 0.5 * grad
        y = g / reference._sqrt(D * D + (g * g) * 0.01)
        expected, residual = encode(codec, y * 0.1 + old * 0.9, error)
        segments = Segments(first=(0,), numels=(K * N,), block=codec.block)
        momentum = MomentumInputs([grad.view(-1)], segments, D, packed if is_packed else old, weights)
        frames, kept = torch.full_like(packed, 0xEE), torch.empty(K, N)
        codec.encode_momentum(momentum, EncodeOutput(error, frames, None, kept))
        assert torch.equal(frames, expected) and torch.equal(kept, residual)

    @pytest.mark.parametrize("is_in_one_pass", [True, False])
    def test_only_what_is_above_a_bound_becomes_it(self, codec: FusedCodec, is_in_one_pass: bool) -> None:
        """A quarter of the largest: powers of two keep log4's values. At an odd address and without blocks, too."""
        x = some_rows(codec, 3, 4)
        x.view(3, 4, codec.block)[:, :3] /= 100 * x.abs().max()
        x[:, -1] = 4 * x.abs().max()
        frames, _ = encode(codec, x)
        values = decode(codec, frames, x.shape[1])
        largest = float(values.abs().max()) / 4
        bound = codec.bound_ if is_in_one_pass else functools.partial(FusedCodec.bound_, codec)
        odd = torch.empty(frames.numel() + 1, dtype=torch.uint8)[1:].view_as(frames)
        both = [(each, x.shape[1]) for each in (frames.clone(), odd.copy_(frames))]
        bound([*both, (torch.empty(3, 0, dtype=torch.uint8), 0)], largest)
        for bounded, n in both:
            assert torch.equal(decode(codec, bounded, n), values.clamp(-largest, largest))
        bound([(frames, x.shape[1])], math.inf)
        assert torch.equal(decode(codec, frames, x.shape[1]), values)

    def test_parameters_move_by_what_frames_say(self, codec: FusedCodec) -> None:
        N = 2 * codec.block
        frames, _ = encode(codec, some_rows(codec, 1, 2))
        p = torch.nn.Parameter(torch.arange(float(N)))
        expected = (p.detach() * 0.5) + decode(codec, frames, N)[0] * -2.0
        segments = Segments(first=(0,), numels=(N,), block=codec.block)
        with torch.no_grad():
            codec.apply(frames, N, ParamUpdate([p], segments, torch.tensor([-2.0]), torch.tensor([0.5])))
        assert torch.equal(p.detach(), expected)
