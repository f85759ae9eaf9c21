"""Which parameters share a bucket."""

from __future__ import annotations

import random

import pytest
import torch

from onebit.layout.buckets import default_elements, elements_of
from onebit.layout.flat import SMALL, least_elements, partition


def sums(sizes: list[int], buckets: list[list[int]]) -> list[int]:
    return [sum(sizes[k] for k in bucket) for bucket in buckets]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("capacity", [1, SMALL // 3, SMALL, 4 * SMALL])
def test_every_parameter_is_in_one_bucket_last_first_and_none_is_too_large(capacity: int, seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, SMALL // 50, SMALL // 4, 2 * SMALL]) for _ in range(draw.choice([0, 1, 3, 200]))]
    buckets = partition(sizes, capacity)
    assert [k for bucket in buckets for k in bucket] == [k for k in reversed(range(len(sizes))) if sizes[k]]
    assert all(
        len(bucket) == 1 or total <= capacity for bucket, total in zip(buckets, sums(sizes, buckets), strict=True)
    )


def test_up_to_the_small_size_buckets_are_filled() -> None:
    assert partition([2, 3, 1, 4, 9, 1], 5) == [[5], [4], [3, 2], [1, 0]]
    assert partition([SMALL // 4] * 9, SMALL) == [[8, 7, 6, 5], [4, 3, 2, 1], [0]]


@pytest.mark.parametrize("capacity", [2 * SMALL, 4 * SMALL, 100 * SMALL])
def test_large_buckets_are_smaller_at_both_ends(capacity: int) -> None:
    """As large as what has left before, or as half of what is left; in the middle as large as may be."""
    unit, whole = SMALL // 8, 48 * SMALL
    sizes = [unit] * (whole // unit)
    totals, begun = sums(sizes, partition(sizes, capacity)), 0
    for total in totals:
        bound = min(capacity, whole // 12, begun, (whole - begun) // 2)
        assert total == min(max(SMALL, bound // unit * unit), whole - begun)
        begun += total
    assert max(totals) == min(capacity, whole // 12)


@pytest.mark.parametrize("whole", [SMALL // 2, 3 * SMALL, 25 * SMALL, 300 * SMALL])
def test_what_leaves_last_is_little(whole: int) -> None:
    unit = SMALL // 64
    sizes = [unit] * (whole // unit)
    totals = sums(sizes, partition(sizes, 4 * SMALL))
    assert max(totals[0], totals[-1]) <= SMALL and len(totals) <= max(17, whole // (4 * SMALL) + 8)


def test_a_bucket_is_larger_on_a_gpu_unless_its_size_is_given() -> None:
    assert elements_of(None) is None and elements_of(0.5) == 2**17
    assert (
        default_elements(torch.device("cpu"), 4) == elements_of(16)
        and default_elements(torch.device("cuda"), 4) == 2**24
    )
    for cap in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bucket_cap_mb must be above 0 and finite"):
            elements_of(cap)


@pytest.mark.parametrize("world_size", [1, 4, 255, 1024, 4096])
def test_padding_stays_small_however_many_ranks_there_are(world_size: int) -> None:
    """Each bucket but the last is padded by less than a block for each rank, of sixteen or more."""
    sizes = [300_000] * 400
    least, capacity = least_elements(world_size), default_elements(torch.device("cpu"), world_size)
    totals = sums(sizes, partition(sizes, capacity, least))
    padded = [-(-total // (world_size * 256)) * world_size * 256 for total in totals]
    assert least >= SMALL and capacity >= 2 * least
    assert all(total > least - 300_000 for total in totals[:-1])
    assert sum(padded[:-1]) <= 1.08 * sum(totals[:-1])
