"""Shares of members of unlike speed: whole micro-batches, none waits long, and all members compute the same."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from onebit.membership.shares import DECIDE_EVERY, Shares, divide


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_ends_sooner(seed: int) -> None:
    draw = np.random.default_rng(seed)
    seconds = draw.uniform(0.1, 1.0, size=3).tolist()
    total = int(draw.integers(3, 12))
    shares = divide(total, seconds)
    others = [n for n in product(range(1, total), repeat=3) if sum(n) == total]
    assert tuple(shares) in others

    def longest(shares: tuple[int, ...]) -> float:
        return max(n * s for n, s in zip(shares, seconds, strict=True))

    assert longest(tuple(shares)) <= min(map(longest, others))


def test_unknown_speeds_count_as_the_mean() -> None:
    assert divide(6, [0.0, 0.0, 0.0]) == [2, 2, 2]
    assert divide(8, [3.0, 1.0, 0.0]) == divide(8, [3.0, 1.0, 2.0])
    assert divide(4, [3.0, 1.0]) == [1, 3]
    assert divide(2, [100.0, 1.0]) == [1, 1]


def test_shares_hold_from_the_step_after_next() -> None:
    """So a member that has missed the votes of one step knows the shares of the next."""
    shares, told = Shares(2, True, 2), [3.0, 1.0]
    changed = [shares.hear(told) for _ in range(DECIDE_EVERY)]
    assert not any(changed) and shares.now == [2, 2] and shares.coming == [1, 3]
    assert shares.hear(told) and shares.now == [1, 3]


def test_noise_changes_nothing() -> None:
    shares = Shares(50, True, 2)
    assert not any(shares.hear([1.0, 1.0 + 0.04 * (k % 2)]) for k in range(40))


def test_equal_members_stay_equal() -> None:
    shares = Shares(2, False, 2)
    assert not any(shares.hear([3.0, 1.0]) for _ in range(20)) and shares.now == [2, 2]
