"""The engine's data loader: every element once, and a place that can be returned to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from onebit.zero.data import ShardedLoader, forever


def loader(n: int, batch: int, rank: int = 0, world_size: int = 1, **options: bool) -> ShardedLoader:
    return ShardedLoader(TensorDataset(torch.arange(n)), batch, rank=rank, world_size=world_size, seed=3, **options)


def epoch(of: ShardedLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in of]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 7))
def test_an_epoch_is_every_element_once_less_what_does_not_divide(n: int, world_size: int, batch: int) -> None:
    n = max(n, world_size)
    shares = [epoch(loader(n, batch, rank, world_size)) for rank in range(world_size)]
    seen = [x for share in shares for b in share for x in b]
    assert len(seen) == len(set(seen)) == n - n % world_size
    assert {len(share) for share in shares} == {len(loader(n, batch, 0, world_size))}


def test_epochs_differ_and_are_the_same_again() -> None:
    first, second = loader(32, 4), loader(32, 4)
    epochs = [epoch(first), epoch(first)]
    assert epochs[0] != epochs[1] and epochs == [epoch(second), epoch(second)]
    assert epoch(loader(8, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert epoch(loader(8, 3, shuffle=False, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("done", [0, 1, 7, 8, 9, 20])
def test_it_goes_on_where_it_was(done: int) -> None:
    whole = forever(loader(32, 4))
    expected = [next(whole)[0].tolist() for _ in range(30)]
    first, second = loader(32, 4), loader(32, 4)
    batches = forever(first)
    for _ in range(done):
        next(batches)
    second.load_state_dict(first.state_dict())
    batches = forever(second)
    assert [next(batches)[0].tolist() for _ in range(30 - done)] == expected[done:]


@given(st.integers(1, 6), st.integers(0, 20), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_a_step_is_the_same_elements_in_any_world(steps: int, done: int, old: int, new: int, rest: int) -> None:
    """Steps of 8 elements, in batches of 2: shared by 4 ranks, or read by one in four micro-batches. To an epoch's end.

    rest: what makes no whole step of an epoch is another matter, but it must not move those before it.
    """
    n, done = 8 * steps + rest, min(done, steps)

    def step(batches: list[Iterator]) -> set[int]:
        return {x for of in batches for _ in range(4 // len(batches)) for x in next(of)[0].tolist()}

    first = [loader(n, 2, rank, old) for rank in range(old)]
    before = [forever(of) for of in first]
    seen = [step(before) for _ in range(done)]
    whole = [forever(loader(n, 2))]
    assert seen == [step(whole) for _ in range(done)]
    second = [loader(n, 2, rank, new) for rank in range(new)]
    for of in second:
        of.load_state_dict(first[0].state_dict())
    after = [forever(of) for of in second]
    is_over = done == steps and rest < old  # what is left is not enough for the old world: its epoch ended
    if done < steps or (is_over and new == 1):
        expected = whole if not is_over else [forever(at_epoch(loader(n, 2), 1))]
        assert step(after) == step(expected)


def at_epoch(of: ShardedLoader, epoch: int) -> ShardedLoader:
    of.load_state_dict({"epoch": epoch, "samples_done": 0, "seed": 3})
    return of


def test_the_first_files_count_batches() -> None:
    one, other = loader(32, 4), loader(32, 4)
    one.load_state_dict({"epoch": 2, "batches_done": 3, "seed": 3})
    other.load_state_dict({"epoch": 2, "samples_done": 12, "seed": 3})
    assert epoch(one) == epoch(other) and len(epoch(one)) == 8


def test_too_little_data_is_refused() -> None:
    with pytest.raises(ValueError, match="2 elements for 3 ranks"):
        loader(2, 1, 0, 3)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        loader(2, 0)
    with pytest.raises(ValueError, match="no batch of 9"):
        next(forever(loader(8, 9, drop_last=True)))


def test_reading_leaves_torchs_random_numbers_alone() -> None:
    """Or a run that is resumed within an epoch, and so begins an iteration, would have other dropout."""
    before = torch.get_rng_state()
    assert len(epoch(loader(8, 2))) == 4 and torch.equal(torch.get_rng_state(), before)
