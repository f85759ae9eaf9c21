"""Quantizers against loops in float64, packed bits, grids of tiles, and the schedules' tables by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit.zero.compression.quantizers import Code, Grid, pack_bits, quantize, quantize_range, unpack_bits
from onebit.zero.compression.schedule import BitSchedule, DensitySchedule


def oracle(tile: list[float], kind: str, bits: int) -> list[float]:
    """Of one tile, in float64, from the papers' rules."""
    size = [abs(x) for x in tile]
    mean = sum(size) / len(size)
    if bits == 1:
        return [mean if x >= 0 else -mean for x in tile]
    if bits == 2:
        kept = [s for s in size if s > 0.7 * mean]
        scale = sum(kept) / len(kept)
        return [math.copysign(scale, x) if abs(x) > 0.7 * mean else 0.0 for x in tile]
    if kind == "symmetric":
        scale = max(size) / (2 ** (bits - 1) - 1)
        return [round(x / scale) * scale for x in tile]
    low, high = min(0.0, *tile), max(0.0, *tile)
    scale = (high - low) / (2**bits - 1)
    zero = round(-low / scale)
    return [(min(max(round(x / scale) + zero, 0), 2**bits - 1) - zero) * scale for x in tile]


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("tiles", [1, 3, 6, 12])
def test_values_are_those_of_the_oracle(kind: str, bits: int, tiles: int) -> None:
    """6 rows of 8: tiles of 6, 2 and 1 rows, and of half a row. Float32 against float64: 1e-6 of the largest."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(bits)) + 0.3
    scales, levels = quantize(x, Code(kind, bits), tiles)
    expected = torch.tensor([oracle(part, kind, bits) for part in x.reshape(tiles, -1).tolist()]).reshape(6, 8)
    torch.testing.assert_close(scales.values(levels), expected, rtol=0, atol=1e-6 * float(x.abs().max()))
    assert len(scales.values(levels).reshape(tiles, -1)[0].unique()) <= (3 if bits == 2 else 2**bits)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_codes_give_the_same_bits_back(kind: str, bits: int) -> None:
    scales, levels = quantize(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), Code(kind, bits), 4)
    values, codes = scales.values(levels), scales.encode(levels)
    assert int(codes.min()) >= 0 and int(codes.max()) < 2**bits
    assert torch.equal(scales.values(scales.decode(unpack_bits(pack_bits(codes, bits), bits, 24).view(4, 6))), values)
    assert torch.equal(scales.levels(values), levels)  # which a file's codes are made of


@given(st.integers(1, 16), st.lists(st.integers(0, 2**16 - 1), max_size=40))
def test_packed_codes_come_back(bits: int, codes: list[int]) -> None:
    given_codes = torch.tensor([c % 2**bits for c in codes], dtype=torch.int32)
    packed = pack_bits(given_codes, bits)
    assert packed.numel() == -(-len(codes) * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, len(codes)).int(), given_codes)


def test_a_packed_stream_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="9 codes of 3 bits take 4 bytes, got 3"):
        unpack_bits(torch.zeros(3, dtype=torch.uint8), 3, 9)


def test_zeros_and_what_is_not_finite() -> None:
    for bits in (1, 2, 4):
        scales, levels = quantize(torch.zeros(2, 4), Code("symmetric", bits), 2)
        assert torch.equal(scales.values(levels), torch.zeros(2, 4))
        for bad in (math.nan, math.inf):
            x = torch.ones(2, 4)
            x[0, 1] = bad
            scales, levels = quantize(x, Code("symmetric", bits), 2)
            assert not torch.isfinite(scales.values(levels)[0]).all() and torch.isfinite(scales.values(levels)[1]).all()


def test_tiles_shrink_with_the_matrix() -> None:
    keep_rows, keep_columns = torch.tensor([1, 0, 1, 1]).bool(), torch.tensor([0, 0, 1, 1, 1, 0]).bool()
    for tiles in (2, 4, 8):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(tiles))
        scales, levels = quantize(x, Code("asymmetric", 4), tiles)
        smaller = scales.without(keep_rows, keep_columns)
        expected = scales.values(levels)[keep_rows][:, keep_columns]
        assert torch.equal(smaller.values(levels[keep_rows][:, keep_columns]), expected)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 outputs and 8 inputs cannot be cut into 4 equal groups"):
        Grid.of(6, 8, 4)


def test_stochastic_rounding_is_right_on_average() -> None:
    """The mean of 4000 draws: 5 standard errors of a uniform level."""
    x, noise = torch.tensor([[0.33, -0.71, 1.0]]), torch.rand(4000, 3, generator=torch.Generator().manual_seed(0))
    scales, levels = quantize(x.repeat(4000, 1), Code("symmetric", 3), 4000, noise)
    step = float(scales.scale_IJ[0])
    torch.testing.assert_close(scales.values(levels).mean(0), x[0], rtol=0, atol=5 * step / 2 / 4000**0.5)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_a_range_for_each_token(kind: str) -> None:
    """Half a level at most is lost, of each token's own range."""
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(3)) * torch.tensor([0.1, 1.0, 30.0])[:, None, None]
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    width = 2 * torch.maximum(-low, high) if kind == "symmetric" else high.clamp(min=0) - low.clamp(max=0)
    lost = (quantize_range(x, low, high, kind, 8) - x).abs()
    assert bool((lost <= 0.51 * width / (2**8 - 2)).all()) and lost.max() > 0


def test_bits_fall_and_their_period_doubles() -> None:
    schedule = BitSchedule(offset=10, start_bits=8, target_bits=5, period=3)
    table = {0: None, 9: None, 10: 8, 12: 8, 13: 7, 15: 7, 16: 6, 21: 6, 22: 5, 33: 5, 34: 5, 1000: 5}
    assert {step: schedule.bits(step) for step in table} == table
    at_once = BitSchedule(offset=10, start_bits=8, target_bits=5, period=0, change_ratio=0.5)
    assert [at_once.bits(step) for step in (9, 10, 11)] == [None, 5, 5]
    assert [at_once.mix(step) for step in (9, 10, 11, 12)] == [0, 1, 0.5, 0]


def test_the_mix_begins_anew_when_the_bits_fall() -> None:
    schedule = BitSchedule(offset=2, start_bits=4, target_bits=3, period=4, change_ratio=0.25)
    assert [schedule.mix(step) for step in range(12)] == [0, 0, 1, 0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25, 0, 0]
    assert BitSchedule(2, 4, 3, 4).mix(5) == 0


def test_the_density_falls_to_its_ratio() -> None:
    at_once, slowly = DensitySchedule(3, 0.25), DensitySchedule(2, 0.5, end=10, stride=4)
    assert [at_once.density(step) for step in (0, 2, 3, 100)] == [1, 1, 0.25, 0.25]
    assert [slowly.density(step) for step in (0, 2, 5, 6, 9, 10, 99)] == [1, 1, 1, 0.5625, 0.5625, 0.5, 0.5]
